"""Structured output: completions that obey a JSON schema, a regular expression, a grammar or a list
of choices.

A `Guided` is what a caller asks for. `Guides` compiles it for one tokenizer to a `Guide` when the
request comes, on a thread of its own; each completion of the request has a `Matcher` of its own,
which says before each token which ones are allowed. The library llguidance does both, in native
code that cannot be interrupted: what is recognised as large, slow or deep is refused before the
library is called (`spec`), its own limits bound most of the rest, and what remains is compiled in a
process that can be killed (`sandbox`).
"""

from jaxserve.text.structured_output.guides import Guide, Guides, Matcher
from jaxserve.text.structured_output.spec import KINDS, Guided

__all__ = ["KINDS", "Guide", "Guided", "Guides", "Matcher"]
