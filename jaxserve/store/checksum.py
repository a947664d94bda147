"""crc32c (Castagnoli, RFC 3720) of blocks, by the library of google-crc32c.

The function of the Python package holds the interpreter's lock while it computes, so that a thread
that checks blocks would stop the thread that issues steps. Its C library, which the package brings
along, is therefore called through ctypes, which releases the lock. Where that cannot be found,
large buffers are taken in parts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import google_crc32c
import numpy as np

Buffer = bytes | bytearray | memoryview | np.ndarray
PART_BYTES = 1 << 18  # that are taken at a time where the interpreter's lock is held
SMALL_BYTES = 1 << 14  # below this, computing takes less time than giving the lock away


def flat_bytes(data: Buffer) -> np.ndarray:
    """Views a contiguous buffer of any type as uint8 [bytes], without a copy.

    Errors: ValueError where it is not contiguous."""
    if not isinstance(data, np.ndarray):
        return np.frombuffer(data, np.uint8)
    if not data.flags.c_contiguous:
        raise ValueError("a block's bytes must be contiguous")
    return data.reshape(-1).view(np.uint8)


def crc32c(data: Buffer, crc: int = 0) -> int:
    """Returns the checksum of a contiguous buffer. crc: that of the bytes before it."""
    if isinstance(data, bytes):
        return google_crc32c.extend(crc, data)
    flat = flat_bytes(data)
    return _extend(crc, flat) if flat.size else crc


def block_checksum(key: bytes, payload: Buffer) -> int:
    """Returns the checksum of a block, which covers its key, so that the right bytes under another
    block's key do not pass."""
    return crc32c(payload, crc32c(key))


def _in_parts(crc: int, flat: np.ndarray) -> int:
    for begin in range(0, flat.size, PART_BYTES):
        crc = google_crc32c.extend(crc, flat[begin : begin + PART_BYTES])
    return crc


def library() -> Callable[[int, int, int], int] | None:
    """Loads `crc32c_extend` (crc, address, bytes) of the C library that google-crc32c is linked to;
    None where the package has none."""
    try:
        from google_crc32c import _crc32c

        function = ctypes.CDLL(_crc32c.__file__).crc32c_extend
    except (ImportError, OSError, AttributeError):
        return None
    function.restype = ctypes.c_uint32
    function.argtypes = (ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t)
    return function


def _without_the_lock(
    c_extend: Callable[[int, int, int], int],
) -> Callable[[int, np.ndarray], int]:
    def extend(crc: int, flat: np.ndarray) -> int:
        if flat.size < SMALL_BYTES:
            return google_crc32c.extend(crc, flat)
        return c_extend(crc, flat.__array_interface__["data"][0], flat.size)

    return extend


def choose() -> Callable[[int, np.ndarray], int]:
    """Chooses the C library where its results are those of the package."""
    extend = library()
    if extend is None:
        return _in_parts
    sample = np.frombuffer(bytes(range(256)), np.uint8)
    agrees = extend(7, sample.ctypes.data, sample.size) == google_crc32c.extend(7, sample)
    return _without_the_lock(extend) if agrees else _in_parts


_extend = choose()
