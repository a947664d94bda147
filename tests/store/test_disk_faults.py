"""What goes wrong with disks, for real: killed writers, flipped bits, torn records, full disks,
read-only ones, errors of the device, a second process. No wrong byte, no exception."""

import contextlib
import errno
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.settings.schema import ConfigError
from jaxserve.store.disk import DiskBlocks
from jaxserve.store.record import SECTOR, record_bytes
from tests.examples import examples
from tests.store.fakes import descriptors_of, key_of
from tests.store.test_disk import got, opened, put

# examples use one folder, and each leaves it as it was
shared_folder = settings(
    deadline=None,
    max_examples=examples(200),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def kill_writers(folder: Path, kills: int, seed: int) -> list[dict[str, int]]:
    command = [sys.executable, "-m", "tests.store.killed_writers", str(folder), str(kills)]
    done = subprocess.run([*command, str(seed)], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check_kills(rounds: list[dict[str, int]]) -> None:
    assert sum(found["wrong"] for found in rounds) == 0
    assert sum(found["right"] for found in rounds) > 5 * len(rounds)
    torn = [found["torn"] for found in rounds]
    assert max(torn) <= 3, "no more than the writers' threads were writing"


def test_after_ten_kills_of_writers_every_block_is_right_or_missed(tmp_path):
    check_kills(kill_writers(tmp_path, 10, 1))


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(100, 105))
def test_after_fifty_kills_of_writers_every_block_is_right_or_missed(tmp_path, seed):
    check_kills(kill_writers(tmp_path, 10, seed))


def flip(file: Path, bit: int) -> None:
    with open(file, "r+b") as blocks:
        blocks.seek(bit // 8)
        byte = blocks.read(1)[0]
        blocks.seek(bit // 8)
        blocks.write(bytes([byte ^ 1 << bit % 8]))
        blocks.flush()
        os.fsync(blocks.fileno())


@pytest.mark.parametrize("block", [5000, 8192])
@shared_folder
@given(st.data())
def test_any_flipped_bit_is_a_miss(tmp_path, block, data):
    part = data.draw(st.sampled_from(["header", "payload"]))
    first, size = (0, SECTOR) if part == "header" else (SECTOR, block)
    bit = 8 * first + data.draw(st.integers(0, 8 * size - 1))
    with opened(tmp_path, records=1, block=block) as store:
        assert put(store, 0) and got(store, 0)
        flip(tmp_path / "blocks", bit)
        assert not got(store, 0)
        assert store.counts().damaged == 1
        assert put(store, 0) and got(store, 0), "the next put mends it"
    flip(tmp_path / "blocks", bit)
    with opened(tmp_path, records=1, block=block) as store:
        assert not got(store, 0)
        assert part == "payload" or not store.counts().damaged, "a header is checked at start"


@shared_folder
@given(st.integers(0, record_bytes(8192)), st.integers(0, record_bytes(8192)), st.booleans())
def test_a_record_written_in_part_over_another_is_a_miss(tmp_path, begin, end, restart):
    with opened(tmp_path, records=1, block=8192) as store:
        put(store, 1)
        put(store, 2)
        after = (tmp_path / "blocks").read_bytes()
    with opened(tmp_path, records=1, block=8192) as store:
        put(store, 3)
        before = (tmp_path / "blocks").read_bytes()
        torn = before[:begin] + after[begin:end] + before[max(begin, end) :]
        if restart:
            store.close()
        (tmp_path / "blocks").write_bytes(torn)
        if not restart:
            assert got(store, 3) == (torn == before)
    with opened(tmp_path, records=1, block=8192) as store:
        assert got(store, 3) == (torn == before)
        assert got(store, 2) == (torn == after)


def test_a_block_in_another_ones_place_is_a_miss(tmp_path):
    size = record_bytes(5000)
    with opened(tmp_path, records=2) as store:
        put(store, 0)
        put(store, 1)
        whole = (tmp_path / "blocks").read_bytes()
        (tmp_path / "blocks").write_bytes(whole[size:] + whole[:size])
        assert not got(store, 0) and not got(store, 1)
    (tmp_path / "blocks").write_bytes(whole[size:] + whole[:size])
    with opened(tmp_path, records=2) as store:
        assert not store.keys()


@given(junk=st.binary(max_size=3000))
@shared_folder
def test_a_file_of_anything_is_an_empty_store(tmp_path, junk):
    (tmp_path / "blocks").write_bytes(junk * 10)
    with opened(tmp_path) as store:
        assert not store.keys()
        assert put(store, 0) and got(store, 0)


@contextlib.contextmanager
def mounted(folder: Path, options: str):
    """A file system of memory at a folder. Skips where this user may not mount."""
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def warnings(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_full_disk_is_logged_once_and_holds_what_it_can(tmp_path, caplog):
    with mounted(tmp_path, "size=1m,mode=0700"), opened(tmp_path, records=1000) as store:
        for number in range(300):
            assert put(store, number) and got(store, number)
        full = [text for text in warnings(caplog) if os.strerror(errno.ENOSPC) in text]
        assert len(full) == 1 and str(tmp_path) in full[0]
        assert 20 < store.counts().blocks < 100
        (tmp_path / "blocks").stat()


def test_a_disk_without_room_for_one_block_takes_none(tmp_path, caplog):
    with mounted(tmp_path, "size=1m,mode=0700"):
        (tmp_path / "other").write_bytes(bytes((1 << 20) - 3 * SECTOR))
        with opened(tmp_path, records=1000) as store:
            for number in range(20):
                assert not put(store, number) and not got(store, number)
            assert store.counts().refused == 20
            full = [text for text in warnings(caplog) if os.strerror(errno.ENOSPC) in text]
            assert len(full) == 1
            (tmp_path / "other").unlink()
            assert put(store, 1) and got(store, 1), "it is used once there is room"


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
from pathlib import Path
from tests.store.test_disk import got, opened, put
with opened(Path(sys.argv[1]), records=1000) as store:
    print(all(put(store, number) and got(store, number) for number in range(200)))
    print(store.counts().blocks)
"""


def test_files_that_may_not_grow_are_as_full_as_a_disk(tmp_path):
    command = [sys.executable, "-c", LIMITED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    whole, blocks = done.stdout.split()
    assert whole == "True" and 20 < int(blocks) < 100
    assert done.stderr.count(os.strerror(errno.EFBIG)) == 1


def test_a_read_only_folder_is_logged_and_everything_misses(tmp_path, caplog):
    with mounted(tmp_path, "size=1m,mode=0700,ro"):
        with opened(tmp_path) as store:
            assert not put(store, 0) and not got(store, 0)
            assert not store.keys() and key_of(0) not in store
            store.discard(key_of(0))
        assert [os.strerror(errno.EROFS) in text for text in warnings(caplog)] == [True]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to every folder")
def test_a_folder_without_write_permission_is_logged_and_everything_misses(tmp_path, caplog):
    tmp_path.chmod(0o500)
    with opened(tmp_path) as store:
        assert not put(store, 0) and not got(store, 0)
    tmp_path.chmod(0o700)
    assert [os.strerror(errno.EACCES) in text for text in warnings(caplog)] == [True]


@contextlib.contextmanager
def replaced(folder: Path, path: str, flags: int):
    """Lets the file of the store in a folder be another one for a while, whose errors are the
    kernel's."""
    (file,) = descriptors_of(folder / "blocks")
    kept = os.dup(file)
    other = os.open(path, flags)
    os.dup2(other, file)
    os.close(other)
    try:
        yield
    finally:
        os.dup2(kept, file)
        os.close(kept)


def test_errors_of_reading_are_misses_and_logged_once(tmp_path, caplog):
    with opened(tmp_path) as store:
        for number in range(4):
            put(store, number)
        with replaced(tmp_path, "/proc/self/mem", os.O_RDONLY):  # EIO at its first page
            assert not any(got(store, number) for number in range(4))
        assert store.counts().misses == 4
        assert put(store, 0) and got(store, 0)
    assert len([text for text in warnings(caplog) if os.strerror(errno.EIO) in text]) == 1


def test_errors_of_writing_are_refusals_and_logged_once(tmp_path, caplog):
    with opened(tmp_path) as store:
        put(store, 0)
        with replaced(tmp_path, "/dev/full", os.O_RDWR):
            assert not any(put(store, number) for number in range(1, 4))
        assert got(store, 0) and not got(store, 1)
        assert put(store, 1) and got(store, 1)
    assert len([text for text in warnings(caplog) if os.strerror(errno.ENOSPC) in text]) == 1


def test_a_file_cut_short_under_a_running_store(tmp_path):
    with opened(tmp_path) as store:
        for number in range(8):
            put(store, number)
        os.truncate(tmp_path / "blocks", 3 * record_bytes(5000))
        assert [got(store, number) for number in range(8)] == [True] * 3 + [False] * 5
        for number in range(8):
            assert put(store, number) and got(store, number)


def test_a_file_system_without_direct_io_is_used_by_way_of_the_page_cache(
    tmp_path, caplog, monkeypatch
):
    opens = os.open

    def refuse(path, flags, *mode, **fields):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return opens(path, flags, *mode, **fields)

    monkeypatch.setattr(os, "open", refuse)
    with opened(tmp_path) as store:
        assert put(store, 0) and got(store, 0)
    assert ["refuses direct I/O" in text for text in warnings(caplog)] == [True]


HOLDER = """
import sys
from pathlib import Path
from tests.store.test_disk import opened, put
with opened(Path(sys.argv[1])) as store:
    put(store, 0)
    print("open", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_on_a_folder_is_refused_until_the_first_has_ended(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout.readline() == b"open\n"
        with pytest.raises(ConfigError, match=rf"disk_cache: .* in use by process {holder.pid};"):
            DiskBlocks(tmp_path, 1 << 20, 5000)
    finally:
        holder.kill()
        holder.communicate(timeout=20)
    with opened(tmp_path) as store:
        assert got(store, 0)
        with pytest.raises(ConfigError, match=f"process {os.getpid()};"):
            DiskBlocks(tmp_path, 1 << 20, 5000)
