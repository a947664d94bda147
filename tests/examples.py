"""How many examples Hypothesis tries of each property: some by default, many in `.ci/matrix`."""

import os

SHARE = float(os.environ.get("TEST_EXAMPLES", "0.1"))  # of the numbers that tests ask for


def examples(most: int) -> int:
    """The number of examples in place of `most`."""
    return max(1, round(most * SHARE))
