"""Blocks in host memory: found only whole, under their own key."""

import resource
import subprocess
import sys
import threading

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.settings.schema import ConfigError
from jaxserve.store.host_memory import HostBlocks

KEY = bytes(range(16))


def filled(block_bytes: int = 5000, slots: int = 3) -> HostBlocks:
    blocks = HostBlocks(slots, block_bytes)
    for slot in range(slots):
        blocks.view(slot)[:] = np.random.default_rng(slot).integers(0, 256, block_bytes, np.uint8)
        blocks.seal(slot, KEY)
    return blocks


def test_what_was_sealed_is_verified_under_its_key_alone():
    blocks = filled()
    assert blocks.verify(1, KEY)
    assert not blocks.verify(1, KEY[::-1])


def test_a_slot_without_a_block_is_never_verified():
    blocks = HostBlocks(2, 100)
    assert not blocks.verify(0, KEY)
    blocks.seal(0, KEY)
    blocks.clear(0)
    assert not blocks.verify(0, KEY)


@given(st.integers(0, 8 * 5000 - 1))
def test_any_flipped_bit_is_noticed_and_leaves_other_slots_alone(bit):
    blocks = filled()
    blocks.view(1)[bit // 8] ^= 1 << bit % 8
    assert [blocks.verify(slot, KEY) for slot in range(3)] == [True, False, True]


def test_slots_begin_on_pages_and_do_not_overlap():
    blocks = HostBlocks(4, 5000)
    for slot in range(4):
        assert blocks.view(slot).shape == (5000,)
        assert blocks.view(slot).ctypes.data % 4096 == 0
        blocks.view(slot)[:] = slot
    assert all((blocks.view(slot) == slot).all() for slot in range(4))
    assert blocks.memory.size == 4 * blocks.stride


@pytest.mark.parametrize("slot", [-1, 3])
def test_slots_that_are_not_there_are_refused(slot):
    blocks = filled()
    for use in (blocks.view, blocks.clear):
        with pytest.raises(IndexError, match=f"slot {slot}: there are 3"):
            use(slot)
    for check in (blocks.seal, blocks.verify):
        with pytest.raises(IndexError, match=f"slot {slot}: there are 3"):
            check(slot, KEY)


def test_memory_is_taken_when_it_is_used():
    process = psutil.Process()
    before = process.memory_info().rss
    blocks = HostBlocks(1024, 1 << 20)
    assert process.memory_info().rss - before < 64 << 20
    blocks.view(1000)[:] = 1
    assert 0 < process.memory_info().rss - before < 64 << 20


def test_memory_that_the_system_has_not_is_a_mistake_in_the_settings():
    limit = (
        "import resource\n"
        f"resource.setrlimit(resource.RLIMIT_AS, ({8 << 30}, {resource.RLIM_INFINITY}))\n"
        "from jaxserve.store.host_memory import HostBlocks\n"
        "from jaxserve.settings.schema import ConfigError\n"
        "try:\n"
        "    HostBlocks(16, 1 << 30)\n"
        "except ConfigError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", limit], capture_output=True, text=True)
    assert done.stdout.startswith("host_cache_gib: 16.00 GiB of host memory cannot be reserved")
    with pytest.raises(ConfigError):
        HostBlocks(1 << 40, 1 << 40)


def test_a_block_has_at_least_one_byte():
    for slots, block_bytes in ((0, 10), (10, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            HostBlocks(slots, block_bytes)


def test_threads_seal_and_verify_different_slots_at_once():
    blocks = HostBlocks(8, 1 << 18)
    wrong = []

    def use(slot: int) -> None:
        for turn in range(20):
            blocks.view(slot)[:] = turn + slot
            blocks.seal(slot, KEY)
            if not blocks.verify(slot, KEY):
                wrong.append((slot, turn))

    threads = [threading.Thread(target=use, args=(slot,)) for slot in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
