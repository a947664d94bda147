"""Each process of a replica keeps its parts of the blocks that leave the devices; they come back
where all processes have theirs, and change no token."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.groups import led
from tests.engine.harness import Runner, assert_empty
from tests.engine.harness import shared as shared_engine
from tests.engine.test_tiers import LENGTHS, ask, prompts
from tests.waiting import eventually

TINY = "random:tiny"
# pages for few prompts at a time, host memory for all
SMALL = dict(chunk_tokens=32, max_seqs=4, pages=40, max_model_len=512, host_cache_gib=0.02)
# harms a worker does itself, each when a file of its name appears in a folder; then that is removed
SABOTAGE = """
import gc, os, pathlib, threading, time
from jaxserve.store.host_memory import HostBlocks

def flip():
    for blocks in [each for each in gc.get_objects() if isinstance(each, HostBlocks)]:
        for slot in range(0, blocks.slots, 2):
            blocks.view(slot)[blocks.block_bytes // 2] ^= 4

def fill_disk():
    links = [link for link in pathlib.Path("/proc/self/fd").iterdir() if link.exists()]
    files = [int(link.name) for link in links if link.resolve().name == "blocks"]
    full = os.open("/dev/full", os.O_RDWR)
    for file in files:
        os.dup2(full, file)

def harm():
    while True:
        for run in (flip, fill_disk):
            told = pathlib.Path({folder!r}) / run.__name__
            if told.exists():
                run()
                told.unlink()
        time.sleep(0.01)

threading.Thread(target=harm, daemon=True).start()
"""


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return ask(shared_engine(), prompts())


def settled(real) -> None:
    """Waits until every process has stored what left its devices."""
    eventually(lambda: real.worker.lower_tiers.settled)


def harm(folder: Path, what: str) -> None:
    """Has a worker do harm, see SABOTAGE."""
    (folder / what).touch()
    eventually(lambda: not (folder / what).exists())


def cached(real, expected) -> int:
    """Asks all prompts at once; the tokens must be right. Returns how many of their blocks were not
    computed."""
    runner = Runner(real)
    ids = [runner.submit(prompt, max_tokens=6) for prompt in prompts()]
    runner.run()
    assert [runner.ids(id) for id in ids] == expected
    return sum(runner.completion(id).finished.usage.cached for id in ids) // 16


BLOCKS = sum((length - 1) // 16 for length in LENGTHS)


def test_what_one_process_lost_or_could_not_keep_is_computed(tmp_path, expected, monkeypatch):
    harms = tmp_path / "harms"
    harms.mkdir()
    disk = f"{tmp_path / 'kv'}:0.1"
    code = SABOTAGE.replace("{folder!r}", repr(str(harms)))
    fields = {**SMALL, "host_cache_gib": 0.00015, "disk_cache": disk}
    with led(monkeypatch, TINY, "spp=2", 2, {1: code}, **fields) as (real, _):
        tiers = real.worker.lower_tiers
        assert ask(real, prompts()) == expected
        settled(real)
        assert cached(real, expected) == BLOCKS
        assert tiers.counts().host_reads and tiers.counts().disk_reads and not tiers.counts().wrong
        assert ask(real, prompts()) == expected
        settled(real)
        harm(harms, "flip")
        assert ask(real, prompts()[4:5]) == expected[4:5]  # its blocks are in host memory
        assert tiers.counts().wrong
        settled(real)
        harm(harms, "fill_disk")
        assert ask(real, prompts()) == expected
        assert_empty(real)
    assert {folder.name for folder in (tmp_path / "kv").iterdir()} == {"worker-0", "worker-1"}


@pytest.mark.matrix
@pytest.mark.parametrize(
    "mesh, processes, fields",
    [
        pytest.param("spp=2", 2, {}, id="a stage each"),
        pytest.param("kvp=2", 2, dict(lane_tokens=64, pages=30), id="a lane each"),
        pytest.param("spp=2,kvp=2,tp=2", 4, dict(pages=30), id="a lane of a stage each"),
        pytest.param("tp=4", 1, {}, id="more ranks than heads"),
        pytest.param("spp=2", 2, dict(kv_cache_dtype="fp8"), id="fp8"),
    ],
)
def test_blocks_come_back_to_all_processes(mesh, processes, fields, expected, monkeypatch):
    with led(monkeypatch, TINY, mesh, processes, **{**SMALL, **fields}) as (real, _):
        first = ask(real, prompts())
        if "kv_cache_dtype" not in fields:
            assert first == expected
        settled(real)
        assert cached(real, first)
        counts = real.worker.lower_tiers.counts()
        assert counts.host_reads > 20 and not counts.wrong
        assert_empty(real)
