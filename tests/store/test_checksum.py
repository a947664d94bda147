"""Checksums of blocks: the values of the standard, every kind of buffer, no copy, no lock."""

import threading
import time
import tracemalloc

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.store import checksum
from jaxserve.store.checksum import block_checksum, crc32c
from tests.waiting import tried


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (b"123456789", 0xE3069283),
        (b"", 0),
    ],
)
def test_the_values_of_rfc_3720(data, value):
    assert crc32c(data) == value
    assert crc32c(np.frombuffer(data, np.uint8)) == value
    assert crc32c(bytearray(data)) == value


@given(st.binary(max_size=5000), st.integers(0, 5000))
def test_parts_give_what_the_whole_gives(data, cut):
    assert crc32c(data[cut:], crc32c(data[:cut])) == google_crc32c.value(data)
    flat = np.frombuffer(data, np.uint8)
    assert crc32c(flat[cut:], crc32c(flat[:cut])) == google_crc32c.value(data)


def test_arrays_of_any_type_and_shape_are_taken_as_they_lie():
    array = np.random.default_rng(0).normal(size=(3, 4, 5)).astype(np.float32)
    assert crc32c(array) == crc32c(array.tobytes())
    assert crc32c(memoryview(array)) == crc32c(array.tobytes())
    with pytest.raises(ValueError, match="contiguous"):
        crc32c(array[:, ::2])


def test_without_the_c_library_large_buffers_are_taken_in_parts(monkeypatch):
    data = np.random.default_rng(0).integers(0, 256, 3 * checksum.PART_BYTES + 5, np.uint8)
    monkeypatch.setattr(checksum, "library", lambda: None)
    assert checksum.choose()(7, data) == google_crc32c.extend(7, data)


def test_the_same_bytes_under_another_key_have_another_checksum():
    payload = np.zeros(4096, np.uint8)
    assert block_checksum(b"one", payload) != block_checksum(b"two", payload)


def test_an_array_is_not_copied():
    data = np.zeros(16 << 20, np.uint8)
    tracemalloc.start()
    try:
        crc32c(data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@tried(3)
def test_other_threads_run_meanwhile():
    assert checksum.library() is not None, "the wheel of google-crc32c has its C library"
    data = np.zeros(256 << 20, np.uint8)
    moments = []
    done = threading.Event()

    def tick():
        while not done.is_set():
            moments.append(time.perf_counter())
            time.sleep(0.0005)

    thread = threading.Thread(target=tick)
    thread.start()
    began = time.perf_counter()
    crc32c(data)
    ended = time.perf_counter()
    done.set()
    thread.join()
    assert sum(began < moment < ended for moment in moments) >= 3
