from __future__ import annotations

import threading
from collections.abc import Iterable

import msgpack
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.cache.block_events import Medium, StoredBlocks
from jaxserve.observe import kv_events
from jaxserve.observe.kv_events import KvEvent, KvEventLog, block_hash
from tests.examples import examples
from tests.observe.kv_schema import DECODER, BlockRemoved, Index
from tests.replica.holders import HOLDERS, Heard

SIZE = 2


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def stored(*numbers: int, parent: int | None = None, **rest) -> StoredBlocks:
    """Blocks whose tokens are their number, SIZE times."""
    tokens = np.repeat(np.asarray(numbers, np.int32), SIZE)
    before = None if parent is None else key(parent)
    return StoredBlocks([key(number) for number in numbers], parent=before, tokens=tokens, **rest)


def decoded(batch: list[KvEvent]) -> list:
    return DECODER.decode(msgpack.packb([0.0, batch, 0])).events


def taken(log: KvEventLog) -> list:
    return [event for batch in log.take() for event in decoded(batch)]


def apply(index: Index, events: Iterable) -> Index:
    for event in events:
        index.apply(event)
    return index


def test_hashes_are_the_signed_last_64_bits_of_a_key():
    assert block_hash(b"x" * 8 + b"\xff" * 8) == -1
    assert block_hash(b"\xff" * 8 + bytes(7) + b"\x05") == 5


def test_stored_blocks_carry_all_that_a_router_hashes():
    log = KvEventLog(SIZE)
    log.stored(stored(1, 2, salt="tenant"))
    log.stored(stored(3, parent=2, salt="tenant"))
    first, second = taken(log)
    assert (first.block_hashes, first.parent_block_hash) == ([1, 2], None)
    assert (first.token_ids, first.block_size, first.medium) == ([1, 1, 2, 2], SIZE, "GPU")
    assert first.extra_keys == [("tenant",), None]  # with the first block of a prompt only
    assert (second.parent_block_hash, second.extra_keys) == (2, [None])
    assert not taken(log)


def test_blocks_evicted_one_by_one_are_one_event():
    log = KvEventLog(SIZE)
    log.stored(stored(1, 2, 3))
    for number in (3, 2):
        log.removed([key(number)], Medium.DEVICE)
    log.removed([key(1)], Medium.HOST)
    events = taken(log)[1:]
    assert [event.block_hashes for event in events] == [[3, 2], [1]]
    assert [event.medium for event in events] == ["GPU", "CPU"]


def test_a_block_goes_through_the_tiers():
    log = KvEventLog(SIZE)
    log.stored(stored(1))
    log.stored(StoredBlocks([key(1)], Medium.HOST))
    log.removed([key(1)], Medium.DEVICE)
    log.stored(StoredBlocks([key(1)], Medium.DISK))
    log.removed([key(1)], Medium.HOST)
    index = apply(Index(), taken(log))
    assert (index.blocks("GPU"), index.blocks("CPU"), index.blocks("STORAGE")) == (
        set(),
        set(),
        {1},
    )
    log.removed([key(1)], Medium.DISK)
    log.stored(StoredBlocks([key(1)], Medium.HOST))  # of unknown tokens: nobody could use it
    assert [type(event) for event in taken(log)] == [BlockRemoved]


def test_a_cleared_medium_is_all_cleared_only_where_nothing_is_left():
    log = KvEventLog(SIZE)
    log.stored(stored(1, 2))
    log.stored(StoredBlocks([key(1)], Medium.HOST))
    log.cleared(Medium.DEVICE)
    events = taken(log)
    assert isinstance(events[-1], BlockRemoved) and sorted(events[-1].block_hashes) == [1, 2]
    assert apply(Index(), events).blocks("CPU") == {1}
    log.cleared(Medium.HOST)
    assert [type(event).__name__ for event in taken(log)] == ["AllBlocksCleared"]


def test_large_changes_go_out_in_batches_of_bounded_size(monkeypatch):
    monkeypatch.setattr(kv_events, "MAX_BATCH", 8)
    log = KvEventLog(SIZE)
    for number in range(40):
        log.stored(stored(number))
    assert max(len(batch) for batch in log.take()) == 4


def test_what_overflows_is_resent_in_full(caplog):
    log = KvEventLog(SIZE, max_waiting=8)
    index = Index()
    log.stored(stored(1, 2))
    apply(index, taken(log))
    log.removed([key(2)], Medium.DEVICE)
    for number in range(10, 20):
        log.stored(stored(number, number + 100))
    log.stored(StoredBlocks([key(11)], Medium.HOST))
    events = taken(log)
    assert type(events[0]).__name__ == "AllBlocksCleared" and log.overflows == 1
    assert "fell behind" in caplog.text
    apply(index, events)
    assert index.blocks() == {1, *range(10, 20), *range(110, 120)}
    assert index.blocks("CPU") == {11}
    log.stored(stored(5))
    assert apply(index, taken(log)).blocks() >= {5} and log.overflows == 1


def test_a_parent_is_resent_before_its_children_whichever_was_stored_last():
    log = KvEventLog(SIZE)
    log.stored(stored(1, 2, 3))
    log.removed([key(1)], Medium.DEVICE)
    log.stored(stored(1))
    log.stored(stored(4, parent=2))
    list(log.take())
    log.lose()
    index = apply(Index(), taken(log))
    assert index.blocks() == {1, 2, 3, 4}
    assert index.tokens[3] == (1, 1, 2, 2, 3, 3) and index.tokens[4] == (1, 1, 2, 2, 4, 4)


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["store", "remove", "clear", "copy", "take"]),
        st.integers(0, 9),
        st.sampled_from(list(Medium)),
    ),
    max_size=60,
)


@given(OPERATIONS, st.integers(1, 12))
@settings(max_examples=examples(200), deadline=None)
def test_a_router_ends_up_with_what_is_there_however_often_the_log_overflows(operations, room):
    log = KvEventLog(SIZE, max_waiting=room)
    index = Index()
    truth: dict[Medium, set[int]] = {medium: set() for medium in Medium}
    for what, number, medium in operations:
        somewhere = any(number in on for on in truth.values())
        if what == "store":
            log.stored(stored(number))
            truth[Medium.DEVICE].add(number)
        elif what == "copy" and somewhere:
            log.stored(StoredBlocks([key(number)], medium))
            truth[medium].add(number)
        elif what == "remove":
            log.removed([key(number)], medium)
            truth[medium].discard(number)
        elif what == "clear":
            log.cleared(medium)
            truth[medium].clear()
        elif what == "take":
            apply(index, taken(log))
    apply(index, taken(log))
    for medium, name in kv_events.MEDIA.items():
        assert index.blocks(name) == truth[medium]


def test_a_reader_on_another_thread_loses_nothing_while_the_log_overflows():
    log = KvEventLog(SIZE, max_waiting=50)
    index = Index()
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            log.changed.wait(0.001)
            apply(index, taken(log))

    reader = threading.Thread(target=read)
    reader.start()
    there: set[int] = set()
    for number in range(3000):
        block = number * 7919 % 200
        if block in there:
            there.discard(block)
            log.removed([key(block)], Medium.DEVICE)
        else:
            there.add(block)
            log.stored(stored(block))
    done.set()
    reader.join(10)
    assert not reader.is_alive()
    assert apply(index, taken(log)).blocks() == there


def test_the_events_of_a_replica_have_the_tokens_of_its_prompts():
    holder = HOLDERS["virtual"]()
    replica = holder.replica
    replica.start()
    size = replica.info.block_size
    log = KvEventLog(size)
    replica.post(lambda: replica.block_events.subscribe(log))
    request = holder.request("one", prompt=3 * size + 1, tokens=size)
    heard = Heard()
    replica.submit(request, heard)
    holder.wait_ended(heard)
    index = apply(Index(), taken(log))
    longest = max(index.tokens.values(), key=len)
    prompt = tuple(request.prompt.tolist())
    assert len(index.blocks()) == 4 and longest[: 3 * size + 1] == prompt
    replica.close()
