"""Headers of blocks on disk: one sector before each that names the block.

A record is that sector and the block's bytes. The sector has a checksum of its own, over all of its
4096 bytes, and says for which place in the file and which layout of blocks it was written, so that
what is left of an older file, or lies in the wrong place, is no record.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from jaxserve.store.checksum import crc32c

SECTOR = 4096  # direct I/O is in multiples of it, on every common device and file system
MAX_KEY_BYTES = 512
_MAGIC = b"jaxkv001"
_KEEP = 1
# magic, layout, record's number, sequence, expiry, checksum of the block, flags, bytes of the key
_FIELDS = struct.Struct("<8s16sQQdIHH")
_OWN_CHECKSUM = struct.Struct("<I")  # in the last bytes of the sector


def record_bytes(block_bytes: int) -> int:
    """Returns the size of a record: a sector, and a block in whole sectors."""
    return SECTOR + -(-block_bytes // SECTOR) * SECTOR


class RecordHeader(NamedTuple):
    """key: of the block. record: its number in the file. sequence: counts the records
    written, so that of two with one key the later is known. expires: unix seconds, 0 for never.
    keep: whether the block is among the last to be evicted. checksum: over key and bytes."""

    key: bytes
    record: int
    sequence: int
    expires: float
    keep: bool
    checksum: int


class RecordFormat:
    """Headers of blocks of one size and identity; those of others are not understood.

    identity: what else makes the bytes mean something, such as a hash of model and layout."""

    def __init__(self, block_bytes: int, identity: bytes):
        text = struct.pack("<Q", block_bytes) + identity
        self._layout = blake2b(text, digest_size=16).digest()

    def pack(self, header: RecordHeader) -> bytes:
        """Returns the sector [SECTOR]."""
        fields = _FIELDS.pack(
            _MAGIC,
            self._layout,
            header.record,
            header.sequence,
            header.expires,
            header.checksum,
            _KEEP if header.keep else 0,
            len(header.key),
        )
        text = (fields + header.key).ljust(SECTOR - _OWN_CHECKSUM.size, b"\0")
        return text + _OWN_CHECKSUM.pack(crc32c(text))

    def parse(self, sector: np.ndarray, record: int) -> RecordHeader | None:
        """Returns the header in the sector [SECTOR] that a record begins with; None where it is
        not whole, or was written for another record or layout."""
        magic, layout, place, sequence, expires, checksum, flags, size = _FIELDS.unpack_from(
            sector.data
        )
        if (magic, layout, place) != (_MAGIC, self._layout, record) or size > MAX_KEY_BYTES:
            return None
        end = SECTOR - _OWN_CHECKSUM.size
        if _OWN_CHECKSUM.unpack_from(sector.data, end)[0] != crc32c(sector[:end]):
            return None
        key = sector[_FIELDS.size : _FIELDS.size + size].tobytes()
        return RecordHeader(key, place, sequence, expires, bool(flags & _KEEP), checksum)
