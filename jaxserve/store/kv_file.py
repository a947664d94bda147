"""Blocks of KV as a file: safetensors with the tokens that the blocks are of.

Tensors: `tokens` int32 [tokens], those of the prompt from its beginning to the last block; `blocks`
uint8 [blocks, bytes], the last ones of these, in the order of the prompt; `checksums` uint32
[blocks], each over a block's key and bytes; `facts` uint8, JSON: format, block_size, fingerprint,
dtype and layout of the cache. Keys are not in the file: who reads it makes them of the tokens, so
that blocks of other weights, types or tokens do not pass.

Where windows see pages beside the blocks (`checkpoint.page_groups`), there are also `pages` uint8
[pages, bytes], `places` int32 [pages, 2], block of the prompt and page group of each, and their
checksums behind those of the blocks.
"""

from __future__ import annotations

import dataclasses
import json
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors import numpy as tensors

from jaxserve.api.errors import RequestError
from jaxserve.cache.prefix_match import BlockPage

FORMAT = 1
FIELD = "file"
MOST_GROUPS = 2**16 - 1  # page groups behind the first that keys can name
DTYPES = {"tokens": np.int32, "blocks": np.uint8, "checksums": np.uint32, "facts": np.uint8}
OF_PAGES = {"pages": np.uint8, "places": np.int32}


class KvFacts(NamedTuple):
    """The cache that blocks are of: tokens of a block, and what its keys cover besides tokens."""

    block_size: int
    fingerprint: str
    dtype: str
    layout: str = ""


@dataclasses.dataclass(frozen=True)
class KvFile:
    """The content of a file; see the module. Errors: RequestError where the parts do not fit."""

    facts: KvFacts
    tokens: np.ndarray
    blocks: np.ndarray
    checksums: np.ndarray
    pages: np.ndarray = dataclasses.field(default_factory=lambda: np.empty((0, 0), np.uint8))
    places: np.ndarray = dataclasses.field(default_factory=lambda: np.empty((0, 2), np.int32))

    def __post_init__(self) -> None:
        shapes = self.tokens.ndim, self.blocks.ndim, self.checksums.ndim
        if shapes != (1, 2, 1):
            raise RequestError(FIELD, f"has tensors of {shapes} axes, not 1, 2 and 1")
        count = len(self.blocks)
        last, rest = divmod(len(self.tokens), max(self.facts.block_size, 1))
        self._check_pages(last)
        if rest or not 0 < count <= last or len(self.checksums) != count + len(self.pages):
            raise RequestError(
                FIELD,
                f"has {count} blocks of {self.facts.block_size} tokens, {len(self.checksums)} "
                f"checksums and {len(self.tokens)} tokens",
            )

    def _check_pages(self, blocks: int) -> None:
        """Checks the places of pages beside the blocks. Errors: RequestError."""
        count = len(self.pages)
        if self.places.shape != (count, 2) or self.pages.ndim != 2:
            raise RequestError(FIELD, f"has places {self.places.shape} of {count} pages")
        if not count:
            return
        if self.pages.shape[1] != self.blocks.shape[1]:
            raise RequestError(FIELD, "has pages of another size than its blocks")
        low, high = self.places.min(0), self.places.max(0)
        if (low < (0, 1)).any() or (high > (blocks - 1, MOST_GROUPS)).any():
            raise RequestError(FIELD, f"has places {low.tolist()} to {high.tolist()} of pages")

    @property
    def rows(self) -> np.ndarray:
        """All of its blocks and pages, uint8 [checksums, bytes]."""
        return np.concatenate([self.blocks, self.pages]) if len(self.pages) else self.blocks

    def parts(self) -> list[BlockPage]:
        """Returns whose bytes the rows are."""
        blocks = range(self.first, self.first + len(self.blocks))
        return [*map(BlockPage, blocks), *(BlockPage(*place) for place in self.places.tolist())]

    @property
    def first(self) -> int:
        """Number of its first block in the prompt."""
        return len(self.tokens) // self.facts.block_size - len(self.blocks)

    def content(self) -> bytes:
        """Returns the bytes of the file."""
        facts = json.dumps({"format": FORMAT, **self.facts._asdict()}).encode()
        named = {
            "tokens": np.ascontiguousarray(self.tokens, np.int32),
            "blocks": np.ascontiguousarray(self.blocks),
            "checksums": np.ascontiguousarray(self.checksums, np.uint32),
            "facts": np.frombuffer(facts, np.uint8),
        }
        if len(self.pages):
            named["pages"] = np.ascontiguousarray(self.pages)
            named["places"] = np.ascontiguousarray(self.places, np.int32)
        return tensors.save(named)


def read_kv_file(content: bytes) -> KvFile:
    """Reads a file. Errors: RequestError where it is none of this version."""
    try:
        given = tensors.load(content)
    except (SafetensorError, ValueError, KeyError) as error:
        raise RequestError(FIELD, f"is no safetensors file: {error}") from None
    dtypes = {name: array.dtype for name, array in given.items()}
    if dtypes not in (DTYPES, DTYPES | OF_PAGES):
        found = ", ".join(f"{name} {array.dtype}" for name, array in given.items())
        raise RequestError(FIELD, f"has other tensors than blocks of KV: {found:.200}")
    try:
        facts = json.loads(given["facts"].tobytes())
        version = facts.pop("format")
        known = KvFacts(
            int(facts["block_size"]),
            str(facts["fingerprint"]),
            str(facts["dtype"]),
            str(facts.get("layout", "")),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RequestError(FIELD, f"has no facts about its blocks: {error!r:.200}") from None
    if version != FORMAT:
        raise RequestError(FIELD, f"is of format {version!r:.80}; {FORMAT} is known")
    pages = {name: given[name] for name in OF_PAGES if name in given}
    return KvFile(known, given["tokens"], given["blocks"], given["checksums"], **pages)
