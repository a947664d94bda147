"""`kv_transfer_params`: what a router between a prefill and a decode replica passes from one to the
other (llm-d's sidecar, vLLM's connectors).

The prefill leg asks `do_remote_decode` and is answered with an object that only this kind of server
understands; the router hands it unread to the decode leg. This is the one place where disaggregated
prefill meets the OpenAI protocol.
"""

from __future__ import annotations

import json
from typing import Any

from jaxserve.api.errors import RequestError
from jaxserve.server.json_body import JsonObject

FIELD = "kv_transfer_params"
MAX_CHARS = 1 << 16  # of the object as JSON
REMOTE = {"do_remote_decode": "remote decode", "do_remote_prefill": "remote prefill"}


def check(params: JsonObject | None) -> None:
    """Refuses an object that is too large, or that asks for what this replica cannot do. Errors:
    RequestError."""
    if params is None:
        return
    chars = len(json.dumps(params))
    if chars > MAX_CHARS:
        raise RequestError(FIELD, f"has {chars} characters of JSON; the limit is {MAX_CHARS}")
    for name, what in REMOTE.items():
        if params.get(name):
            raise RequestError(
                f"{FIELD}.{name}", f"{what} is not supported by this replica", "FAILED_PRECONDITION"
            )


def answer(params: JsonObject | None) -> dict[str, Any]:
    """Fields of a response to a request that had these: null says that no KV waits to be
    fetched."""
    return {} if params is None else {FIELD: None}
