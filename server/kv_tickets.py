"""Tickets by which a router has one replica compute a prompt and another one decode it.

A router that knows nothing of us speaks vLLM's protocol: it asks a prefill replica with
`kv_transfer_params` `do_remote_decode`, and puts those of the answer, unread, into its request to a
decode replica, which fetches the prompt's KV (source: vLLM's NIXL connector, llm-d's sidecar). Ours
carry a ticket: where replicas are asked for the blocks, and a code over that by the cluster's
secret. A replica connects to no address that a replica of its own cluster has not written.
"""

from __future__ import annotations

import hmac
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxserve.api.errors import RequestError
from jaxserve.api.request import MAX_ID_CHARS, KvSource
from jaxserve.server.json_body import JsonObject
from jaxserve.transfer.protocol import join_address, split_address

FIELD = "kv_transfer_params"
MAX_CHARS = 1 << 16  # of the object as JSON
MAX_TEXT = 512  # characters of a field
OFFER = "do_remote_decode"
FETCH = "do_remote_prefill"
PURPOSE = b"jaxserve kv ticket 1"
ENGINE = re.compile(r"jaxserve-kv1:([0-9]{1,9}):([0-9a-f]{64})")
TEXTS = ("remote_engine_id", "remote_host")


@dataclass(frozen=True, slots=True)
class KvTicket:
    """Names the replica that has the KV of a prompt's first blocks.

    blocks: how many, of `block_size` tokens. code: over all of it, by the secret of the cluster.
    """

    host: str
    port: int
    blocks: int
    block_size: int
    code: str

    @property
    def source(self) -> KvSource:
        return KvSource(join_address(self.host, self.port), self.blocks, "", self.block_size)

    def written_with(self, secret: bytes) -> bool:
        """Returns whether a replica with this secret has written the ticket."""
        right = _code(secret, self.host, self.port, self.blocks, self.block_size)
        return hmac.compare_digest(right, self.code)


@dataclass(frozen=True, slots=True)
class KvTransfer:
    """Wishes of a router for a prompt's KV. offers: it is to wait for another replica. fetches: it
    is at another one, by `ticket`; None where a server of another kind has written that."""

    offers: bool = False
    fetches: bool = False
    ticket: KvTicket | None = None

    @classmethod
    def read(cls, params: JsonObject | None) -> KvTransfer | None:
        """Reads `kv_transfer_params`; None where they ask for nothing. Errors: RequestError that
        names the field."""
        if params is None:
            return None
        chars = len(json.dumps(params))
        if chars > MAX_CHARS:
            raise RequestError(FIELD, f"has {chars} characters of JSON; the limit is {MAX_CHARS}")
        offers = _flag(params, OFFER)
        fetches = _flag(params, FETCH)
        if offers and fetches:
            raise RequestError(f"{FIELD}.{FETCH}", f"cannot be true beside {OFFER}")
        if fetches:
            return cls(fetches=True, ticket=_read_ticket(params))
        return cls(offers=True) if offers else None

    @property
    def field(self) -> str:
        """The name of the field that asks for it."""
        return f"{FIELD}.{OFFER if self.offers else FETCH}"


def write_ticket(
    secret: bytes, address: str, blocks: int, block_size: int, request_id: str
) -> JsonObject:
    """Returns `kv_transfer_params` for the decode replica. address: host:port at which replicas are
    asked for blocks. request_id: of the prompt's request, for routers that want one."""
    host, port = split_address(address)
    code = _code(secret, host, port, blocks, block_size)
    return {
        OFFER: False,
        FETCH: True,
        "remote_engine_id": f"jaxserve-kv1:{block_size}:{code}",
        # the first and the last block: routers look only whether there are some
        "remote_block_ids": [0, blocks - 1],
        "remote_request_id": request_id,
        "remote_host": host,
        "remote_port": port,
    }


def ticket_fields(params: JsonObject | None, ticket: Mapping[str, Any] | None) -> JsonObject:
    """Returns the fields of an answer to a request with these `kv_transfer_params`: null says that
    no KV waits to be fetched."""
    return {} if params is None else {FIELD: ticket}


def _code(secret: bytes, host: str, port: int, blocks: int, block_size: int) -> str:
    fields = json.dumps([host, port, blocks, block_size]).encode()
    return hmac.digest(hmac.digest(secret, PURPOSE, "sha256"), fields, "sha256").hex()


def _flag(params: JsonObject, name: str) -> bool:
    value = params.get(name)
    if not isinstance(value, bool | None):
        raise RequestError(f"{FIELD}.{name}", "must be true, false or null")
    return bool(value)


def _read_ticket(params: JsonObject) -> KvTicket | None:
    """Reads where KV is to be fetched; None for what no replica of ours has written. Errors:
    RequestError for what is no ticket of any kind."""
    for name in TEXTS:
        _check_text(name, params.get(name), MAX_TEXT)
    if params.get("remote_request_id") is not None:
        _check_text("remote_request_id", params["remote_request_id"], MAX_ID_CHARS)
    port = params.get("remote_port")
    if type(port) is not int or not 0 < port < 1 << 16:
        raise RequestError(f"{FIELD}.remote_port", "must be an integer from 1 to 65535")
    blocks = params.get("remote_block_ids")
    if not isinstance(blocks, list):
        raise RequestError(f"{FIELD}.remote_block_ids", "must be a list")
    ours = ENGINE.fullmatch(params["remote_engine_id"])
    if ours is None or not _is_range(blocks):
        return None
    return KvTicket(params["remote_host"], port, blocks[1] + 1, int(ours[1]), ours[2])


def _check_text(name: str, value: Any, most: int) -> None:
    if not isinstance(value, str) or not 0 < len(value) <= most:
        raise RequestError(f"{FIELD}.{name}", f"must be a text of 1 to {most} characters")


def _is_range(blocks: list[Any]) -> bool:
    return len(blocks) == 2 and blocks[0] == 0 and type(blocks[1]) is int and blocks[1] >= 0
