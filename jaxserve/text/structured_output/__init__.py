"""Structured output: completions that obey a JSON schema, a regular expression, a grammar or a list
of choices.

A `Guided` is what a caller asks for. `Guides` compiles it for one tokenizer to a `Guide`, at the
door, on the caller's thread; each completion of the request follows the guide with a `Matcher` of
its own, which says before each token which ones may come. The library llguidance does both, in
native code that cannot be interrupted: what is seen to make it large, slow or deep is refused
before it is called (`spec`), its own limits bound much of the rest, and what comes through is
compiled in a process that may end first (`trial`).
"""

from jaxserve.text.structured_output.guides import Guide, Guides, Matcher
from jaxserve.text.structured_output.spec import KINDS, Guided

__all__ = ["KINDS", "Guide", "Guided", "Guides", "Matcher"]
