"""The version of the weights that answers were computed with, as the OpenAI protocol has room for
it."""

from __future__ import annotations

from collections.abc import Iterable

from jaxserve.api.events import Finished
from jaxserve.server.json_body import JsonObject
from jaxserve.text.output import Completion


def version_field(ended: Iterable[Finished | Completion]) -> JsonObject:
    """Returns `system_fingerprint`: the version of the weights; where prompts of one call began
    before and after an update, all versions, apart by commas. Nothing where none is known."""
    versions = dict.fromkeys(one.weight_version for one in ended if one.weight_version)
    return {"system_fingerprint": ",".join(versions)} if versions else {}
