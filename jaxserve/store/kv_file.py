"""Blocks of KV as a file: safetensors with the tokens that the blocks are of.

Tensors: `tokens` int32 [tokens], those of the prompt from its beginning to the last block; `blocks`
uint8 [blocks, bytes], the last ones of these, in the order of the prompt; `checksums` uint32
[blocks], each over a block's key and bytes; `facts` uint8, JSON: format, block_size, fingerprint
and dtype of the cache. Keys are not in the file: who reads it makes them of the tokens, so that
blocks of other weights, types or tokens do not pass.
"""

from __future__ import annotations

import dataclasses
import json
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors import numpy as tensors

from jaxserve.api.errors import RequestError

FORMAT = 1
FIELD = "file"
DTYPES = {"tokens": np.int32, "blocks": np.uint8, "checksums": np.uint32, "facts": np.uint8}


class KvFacts(NamedTuple):
    """The cache that blocks are of: tokens of a block, and what its keys cover besides tokens."""

    block_size: int
    fingerprint: str
    dtype: str


@dataclasses.dataclass(frozen=True)
class KvFile:
    """The content of a file; see the module. Errors: RequestError where the parts do not fit."""

    facts: KvFacts
    tokens: np.ndarray
    blocks: np.ndarray
    checksums: np.ndarray

    def __post_init__(self) -> None:
        shapes = self.tokens.ndim, self.blocks.ndim, self.checksums.ndim
        if shapes != (1, 2, 1):
            raise RequestError(FIELD, f"has tensors of {shapes} axes, not 1, 2 and 1")
        count = len(self.blocks)
        last, rest = divmod(len(self.tokens), max(self.facts.block_size, 1))
        if rest or not 0 < count <= last or len(self.checksums) != count:
            raise RequestError(
                FIELD,
                f"has {count} blocks of {self.facts.block_size} tokens, {len(self.checksums)} "
                f"checksums and {len(self.tokens)} tokens",
            )

    @property
    def first(self) -> int:
        """Number of its first block in the prompt."""
        return len(self.tokens) // self.facts.block_size - len(self.blocks)

    def content(self) -> bytes:
        """Returns the bytes of the file."""
        facts = json.dumps({"format": FORMAT, **self.facts._asdict()}).encode()
        return tensors.save(
            {
                "tokens": np.ascontiguousarray(self.tokens, np.int32),
                "blocks": np.ascontiguousarray(self.blocks),
                "checksums": np.ascontiguousarray(self.checksums, np.uint32),
                "facts": np.frombuffer(facts, np.uint8),
            }
        )


def read_kv_file(content: bytes) -> KvFile:
    """Reads a file. Errors: RequestError where it is none of this version."""
    try:
        given = tensors.load(content)
    except (SafetensorError, ValueError, KeyError) as error:
        raise RequestError(FIELD, f"is no safetensors file: {error}") from None
    if {name: array.dtype for name, array in given.items()} != DTYPES:
        found = ", ".join(f"{name} {array.dtype}" for name, array in given.items())
        raise RequestError(FIELD, f"has other tensors than blocks of KV: {found:.200}")
    try:
        facts = json.loads(given["facts"].tobytes())
        version = facts.pop("format")
        known = KvFacts(int(facts["block_size"]), str(facts["fingerprint"]), str(facts["dtype"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RequestError(FIELD, f"has no facts about its blocks: {error!r:.200}") from None
    if version != FORMAT:
        raise RequestError(FIELD, f"is of format {version!r:.80}; {FORMAT} is known")
    return KvFile(known, given["tokens"], given["blocks"], given["checksums"])
