"""Block keys: hashes chained over all tokens before, so that equal keys mean equal prefixes
(mooncake.md K1).

The root of a chain covers what else makes KV differ: model, dtype, block size and the tenant's
salt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

HASH_BYTES = 16
PART_BYTES = 2  # before the hash: which part of what a block's tokens leave behind the key is of
KEY_BYTES = PART_BYTES + HASH_BYTES
FIRST_PART = bytes(PART_BYTES)  # pages of the first page group
STATE_PART = 256  # of the first page of a checkpoint of states; lower ones are of page groups


class CacheIdentity(NamedTuple):
    """The model that computes a cache's blocks: its fingerprint, and the types of its numbers.
    layout: which layers the bytes of a block are of, where that is not all of the model's in their
    order (see `checkpoint.page_groups.page_layout`). Blocks of others have other keys."""

    fingerprint: str = ""
    dtype: str = ""
    layout: str = ""


def root_key(identity: CacheIdentity, block_size: int, salt: str) -> bytes:
    """The key before a sequence's first block."""
    layout = (identity.layout,) if identity.layout else ()
    facts = (identity.fingerprint, identity.dtype, block_size, salt, *layout)
    return _key(repr(facts).encode("utf-8", "surrogatepass"))


def block_key(parent: bytes, tokens: np.ndarray) -> bytes:
    """The key of the block with these tokens [block_size] after the block with key `parent`."""
    return _key(parent + tokens.astype("<i4", copy=False).tobytes())


def _key(data: bytes) -> bytes:
    return FIRST_PART + blake2b(data, digest_size=HASH_BYTES).digest()


def group_key(key: bytes, group: int) -> bytes:
    """Returns the key of a block's page in a page group; in the first one, the block's own."""
    return group.to_bytes(PART_BYTES, "big") + key[PART_BYTES:]


def state_keys(key: bytes, pages: int) -> Iterator[bytes]:
    """Yields the keys of the pages of a checkpoint: of the states after the block with this key."""
    for part in range(STATE_PART, STATE_PART + pages):
        yield part.to_bytes(PART_BYTES, "big") + key[PART_BYTES:]


def is_block(key: bytes) -> bool:
    """Returns True for the key of a block, False for one of `group_key` or `state_keys`."""
    return key.startswith(FIRST_PART)


class BlockHashes:
    """The keys of one sequence's blocks, each computed when it is first asked for.

    `tokens(a, b)` gives the sequence's tokens [b - a] int32. salt: the one that `root` covers.
    """

    def __init__(
        self,
        root: bytes,
        block_size: int,
        tokens: Callable[[int, int], np.ndarray],
        salt: str = "",
    ):
        self.salt = salt
        self._tokens = tokens
        self._block_size = block_size
        self._keys = [root]

    def __getitem__(self, block: int) -> bytes:
        keys = self._keys
        while len(keys) < block + 2:
            first = (len(keys) - 1) * self._block_size
            tokens = self._tokens(first, first + self._block_size)
            keys.append(block_key(keys[-1], tokens))
        return keys[block + 1]

    def keys(self, first: int, last: int) -> Iterator[bytes]:
        """Yields the keys of the blocks `first` to before `last`, each computed when it is asked
        for."""
        computed = self._keys[first + 1 : last + 1]
        yield from computed
        for block in range(first + len(computed), last):
            yield self[block]

    def tokens(self, first: int, last: int) -> np.ndarray:
        """The tokens of the blocks `first` to before `last`, which are full; int32."""
        return self._tokens(first * self._block_size, last * self._block_size)

    def resized(self, root: bytes, block_size: int) -> BlockHashes:
        """The keys of the same tokens in blocks of another size, from the root for that size."""
        return BlockHashes(root, block_size, self._tokens, self.salt)

    def copy_from(self, other: BlockHashes, blocks: int) -> None:
        """Copies the keys of the first blocks, which are equal in both sequences."""
        self._keys = other._keys[: blocks + 1]
