"""Short stories with every chunk spelled out. A chunk is (sequence, start, length, kind)."""

from __future__ import annotations

import random

import numpy as np
import pytest

from jaxserve.api.errors import RequestError
from jaxserve.api.events import Accepted, Finished, Logprobs, Progress, Token
from jaxserve.costs.coefficients import Costs
from jaxserve.scheduling.batch_reader import StepResults
from jaxserve.settings.schema import CacheConfig, MeshConfig, SchedulerConfig
from tests.scheduling.fakes import EOS, Replica, chunks, expected

PROMPT = [1, 2, 3, 4, 6, 7, 8, 9, 10, 11]


def small(**fields) -> Replica:
    return Replica(
        SchedulerConfig(max_seqs=4, chunk_tokens=6), CacheConfig(block_size=4, pages=20), **fields
    )


def tight(pages: int, decode_reserve: float = 0.0, **fields) -> Replica:
    return Replica(
        SchedulerConfig(max_seqs=4, chunk_tokens=8, decode_reserve=decode_reserve),
        CacheConfig(block_size=4, pages=pages, prefix_caching=False),
        **fields,
    )


def test_a_prompt_is_prefilled_in_chunks_then_decoded():
    replica = small()
    replica.add(PROMPT, max_tokens=3, ignore_eos=True)
    assert chunks(replica.step()) == [(0, 0, 6, "prefill")]
    assert chunks(replica.step()) == [(0, 6, 4, "last")]
    assert chunks(replica.step()) == [(0, 10, 1, "decode")]
    assert chunks(replica.step()) == [(0, 11, 1, "decode")]
    assert replica.start() is None
    accepted, progress, *tokens, finished = replica.heard["r0"]
    assert (accepted, progress) == (
        Accepted(0, accepted.predicted_ttft),
        Progress(0, 6, 10, progress.ttft),
    )
    assert accepted.predicted_ttft == 0.0, "nothing was measured"
    # the four tokens left, at a nominal 0.1 ms each
    assert progress.ttft == pytest.approx(4e-4, rel=0.1)
    assert [type(token) for token in tokens] == [Token] * 3 and (
        finished.reason,
        finished.usage.completion,
    ) == ("length", 3)


def test_decodes_share_a_step_with_the_prefill_of_another():
    replica = small()
    replica.add(PROMPT[:4], max_tokens=9, ignore_eos=True)
    replica.add(PROMPT, max_tokens=9, ignore_eos=True)
    assert chunks(replica.step()) == [(0, 0, 4, "last")]
    # its first block is that of the other
    assert chunks(replica.step()) == [(0, 4, 1, "decode"), (1, 4, 6, "last")]
    assert chunks(replica.step()) == [(0, 5, 1, "decode"), (1, 10, 1, "decode")]


def test_several_prompts_share_a_step_in_whole_tiles_of_64_tokens():
    replica = Replica(
        SchedulerConfig(max_seqs=4, chunk_tokens=128), CacheConfig(block_size=16, pages=40)
    )
    for first, length in enumerate((40, 60, 70)):
        replica.add([first] * length, max_tokens=2, ignore_eos=True)
    assert chunks(replica.step()) == [(0, 0, 40, "last"), (1, 0, 60, "last")]
    assert chunks(replica.step()) == [
        (0, 40, 1, "decode"),
        (1, 60, 1, "decode"),
        (2, 0, 70, "last"),
    ]


def test_lanes_have_a_budget_each():
    replica = small(mesh=MeshConfig(kvp=2))
    for first in range(3):
        replica.add([first] * 6, max_tokens=2, ignore_eos=True)
    batch = replica.step()
    assert chunks(batch) == [(0, 0, 6, "last"), (1, 0, 6, "last")] and batch.lane.tolist() == [0, 1]


def test_the_next_step_starts_before_the_last_token_is_read():
    replica = small()
    replica.add(PROMPT[:4], max_tokens=4, ignore_eos=True)
    assert chunks(replica.start()) == [(0, 0, 4, "last")]
    assert [chunks(replica.start()) for _ in range(3)] == [
        [(0, position, 1, "decode")] for position in (4, 5, 6)
    ]
    assert replica.start() is None  # the fourth token is never fed
    replica.drain()
    replica.check_answers()


def test_tokens_after_the_end_are_dropped_and_pages_kept_until_they_are_out_of_flight():
    replica = small()
    tokens, _ = expected(
        PROMPT[:4],
        0,
        replica.requests[replica.add(PROMPT[:4], max_tokens=9, ignore_eos=True)].sampling,
    )
    replica.scheduler.cancel("r0", 0.0)
    replica.add(PROMPT[:4], "stops", max_tokens=9, ignore_eos=True, stop_token_ids=[tokens[0]])
    for _ in range(3):
        replica.start()
    replica.finish()
    assert replica.finished("stops")[0].reason == "stop" and replica.tokens("stops") == tokens[:1]
    assert replica.cache.counts()[2] == 2 and replica.scheduler.slots.running == 1
    assert replica.finish() == []
    assert replica.cache.counts()[2] == 2
    assert replica.finish() == []
    replica.check_empty()


def test_completions_wait_for_the_first_ones_prefill_and_share_its_blocks():
    replica = small()
    replica.add(PROMPT, n=3, max_tokens=2, ignore_eos=True)
    replica.add([9] * 3, max_tokens=2, ignore_eos=True)
    assert chunks(replica.step()) == [(0, 0, 6, "prefill")]
    assert chunks(replica.step()) == [(0, 6, 4, "last")]
    batch = replica.step()
    assert chunks(batch) == [(0, 10, 1, "decode"), (1, 8, 2, "last")]
    replica.drain()
    replica.check_answers()
    assert [end.usage.cached for end in replica.finished("r0")] == [0, 8, 8]


def test_completions_go_on_without_the_first_one():
    replica = small()
    replica.add(PROMPT, n=3, max_tokens=3, ignore_eos=True)
    replica.step()
    replica.hear(replica.scheduler.cancel("r0", 1.0, index=0))
    assert chunks(replica.step()) == [(1, 4, 6, "last")]
    replica.drain()
    replica.check_answers()
    assert [end.reason for end in replica.finished("r0")] == ["cancelled", "length", "length"]


def test_a_hit_never_covers_the_whole_prompt():
    replica = small()
    replica.add(PROMPT[:8], max_tokens=1)
    replica.drain()
    replica.add(PROMPT[:8], max_tokens=1)
    assert chunks(replica.step()) == [(1, 4, 4, "last")]
    assert replica.finished("r1")[0].usage.cached == 4


def test_generated_tokens_are_found_by_the_next_turn():
    replica = small()
    replica.add(PROMPT, max_tokens=7, ignore_eos=True)
    replica.drain()
    replica.add(PROMPT + replica.tokens("r0") + [3], max_tokens=1)
    assert chunks(replica.step()) == [(1, 16, 2, "last")]


def test_another_salt_a_bypass_and_prompt_logprobs_read_no_cached_blocks():
    replica = small()
    replica.add(PROMPT[:6], max_tokens=1)
    replica.drain()
    for fields in ({"salt": "other"}, {"bypass": True}, {"prompt_logprobs": 0}):
        id = replica.add(PROMPT[:6], max_tokens=1, **fields)
        replica.drain()
        assert replica.finished(id)[0].usage.cached == 0
    id = replica.add(PROMPT[:6], max_tokens=1, salt="other")
    replica.drain()
    assert replica.finished(id)[0].usage.cached == 4


def test_a_decode_without_a_page_makes_the_youngest_prefill_wait_again():
    replica = Replica(
        SchedulerConfig(max_seqs=4, chunk_tokens=2, decode_reserve=0),
        CacheConfig(block_size=4, pages=8, prefix_caching=False),
    )
    replica.add(PROMPT[:2], max_tokens=20, ignore_eos=True)
    replica.add(PROMPT * 2, max_tokens=1)
    assert chunks(replica.step()) == [(0, 0, 2, "last")]
    for position in range(2, 10):
        assert chunks(replica.step()) == [
            (0, position, 1, "decode"),
            (1, 2 * position - 4, 2, "prefill"),
        ]
    for position in range(10, 16):  # the last free page is the decode's, until it takes it
        assert chunks(replica.step()) == [(0, position, 1, "decode")]
    assert (replica.scheduler.slots.running, replica.scheduler.slots.waiting) == (2, 0)
    assert chunks(replica.step()) == [(0, 16, 1, "decode")]
    assert (replica.scheduler.slots.running, replica.scheduler.slots.waiting) == (1, 1)
    replica.drain()
    replica.check_answers()


def test_a_prompt_waits_until_there_are_pages_for_all_of_it():
    replica = tight(5)
    replica.add(PROMPT[:4], max_tokens=12, ignore_eos=True)
    replica.add(PROMPT + PROMPT[:2], max_tokens=1)
    replica.add(PROMPT[:3], max_tokens=1)  # it would fit, but shall not overtake
    replica.step()
    for position in range(4, 15):
        assert chunks(replica.step()) == [(0, position, 1, "decode")]
    assert chunks(replica.step()) == [(1, 0, 8, "prefill")]
    replica.drain()
    replica.check_answers()


def test_a_prompt_waits_where_its_answer_would_take_the_pages_of_a_decode():
    """Pages are kept: 4 tokens and 8 more take three pages of four, and the other would need as
    many."""
    replica = tight(4, decode_reserve=1.0)
    replica.add(PROMPT[:4], max_tokens=9, ignore_eos=True)
    replica.add(PROMPT[:3], max_tokens=9, ignore_eos=True)
    replica.step()
    for position in range(4, 12):
        assert chunks(replica.step()) == [(0, position, 1, "decode")]
    assert chunks(replica.step()) == [(1, 0, 3, "last")]
    replica.drain()
    replica.check_answers()
    assert replica.scheduler.slots.preemptions == 0


@pytest.mark.parametrize("share, preempted", [(1.0, False), (0.0, True)])
def test_decodes_are_preempted_by_choice_only(share, preempted):
    """Forty completions of equal length, four at once, in pages for two to three of them."""
    replica = tight(24, decode_reserve=share)
    for number in range(40):
        replica.add(PROMPT[: 3 + number % 5], max_tokens=32, ignore_eos=True)
    replica.drain()
    replica.check_answers()
    assert (replica.scheduler.slots.preemptions > 0) == preempted


def uneven(seed: int, **fields) -> Replica:
    """Completions of 4 tokens or, a quarter of them, of 80, run to their end in 24 pages."""
    dice = random.Random(seed)
    replica = Replica(
        SchedulerConfig(max_seqs=4, chunk_tokens=128, **fields),
        CacheConfig(block_size=4, pages=24, prefix_caching=False),
    )
    for number in range(60):
        length = dice.choice([4, 4, 4, 80])
        replica.add(PROMPT[: 3 + number % 5], max_tokens=length, ignore_eos=True)
    replica.drain()
    replica.check_answers()
    return replica


@pytest.mark.parametrize(("seed", "by_mean"), [(0, 6), (1, 11), (2, 11)])
def test_no_decode_is_preempted_where_pages_are_kept_for_all_that_is_put_out(seed, by_mean):
    """By their mean length alone sequences are preempted here, as often as docs/overload.md says
    (Medha 4.2)."""
    assert uneven(seed, decode_reserve=1.0).scheduler.slots.preemptions == 0
    assert uneven(seed).scheduler.slots.preemptions == by_mean


def test_a_prompt_admitted_in_the_same_step_leaves_pages_for_the_answer_of_the_first_one():
    """Alone the first may put out what it likes; its answer counts for those behind it at once."""
    replica = Replica(
        SchedulerConfig(max_seqs=4, chunk_tokens=128, decode_reserve=1.0),
        CacheConfig(block_size=4, pages=4, prefix_caching=False),
    )
    for first in (1, 2):
        replica.add([first] * 4, max_tokens=9, ignore_eos=True)
    assert chunks(replica.step()) == [(0, 0, 4, "last")]
    replica.drain()
    replica.check_answers()
    assert replica.scheduler.slots.preemptions == 0


def test_a_spread_prompt_is_pending_work_of_all_its_lanes():
    """Prompts that come later get homes on lanes that compute no part of it, as long as these have
    less to do (Medha 4.3)."""
    config = SchedulerConfig(
        chunking="adaptive",
        policy="slack",
        max_seqs=64,
        chunk_tokens=256,
        min_chunk=16,
        step_time=0.25,
        ttft=2.0,
        ttft_stretch=3.0,
        tpot=1.0,
    )
    cache = CacheConfig(block_size=16, pages=400, prefix_caching=False, lane_tokens=4096)
    costs = Costs(layers=1, linear_token=0.001)
    replica = Replica(config, cache, MeshConfig(kvp=4), max_len=100_000, costs=costs)
    replica.add([1] * 8000, max_tokens=1, ignore_eos=True)
    batch = replica.step()
    while batch.group_size.max() == 1:
        replica.now += batch.seconds
        batch = replica.step()
    assert batch.lane.tolist() == [0] and batch.group_size.tolist() == [2]
    replica.add([2] * 600, max_tokens=1, ignore_eos=True)
    replica.add([3] * 600, max_tokens=1, ignore_eos=True)
    for number in range(5):
        replica.add([4 + number] * 40, max_tokens=1, ignore_eos=True)
    homes = {}
    for _ in range(5):
        batch = replica.step()
        assert 0 in batch.seq, "the spread prompt goes on"
        homes |= zip(batch.seq.tolist(), batch.lane.tolist())
    assert sorted(homes) == list(range(8))
    assert homes.pop(0) == 0 and set(homes.values()) == {2, 3}
    replica.drain()
    replica.check_answers()


def test_a_preempted_decode_prefills_what_it_has_said_and_goes_on():
    replica = tight(4)
    replica.add(PROMPT[:4], max_tokens=9, ignore_eos=True)
    replica.add(PROMPT[:3], max_tokens=9, ignore_eos=True)
    replica.step()
    seen = [chunks(replica.step()) for _ in range(4)]
    assert seen[0] == [(0, 4, 1, "decode"), (1, 0, 3, "last")]
    assert seen[3] == [(0, 7, 1, "decode"), (1, 5, 1, "decode")]
    assert [chunks(replica.step()) for _ in range(4)] == [
        [(0, position, 1, "decode")] for position in (8, 9, 10, 11)
    ]
    assert chunks(replica.step()) == [(1, 0, 7, "last")] and len(replica.tokens("r1")) == 5
    replica.drain()
    replica.check_answers()


def test_of_two_decodes_that_need_a_page_the_younger_leaves_and_asks_for_none():
    replica = Replica(
        SchedulerConfig(max_seqs=4, chunk_tokens=128, decode_reserve=0.0),
        CacheConfig(block_size=4, pages=4, prefix_caching=False),
    )
    for first in (1, 2):
        replica.add([first] * 4, max_tokens=9, ignore_eos=True)
    for _ in range(5):
        batch = replica.step()
    assert chunks(batch) == [(0, 7, 1, "decode"), (1, 7, 1, "decode")]
    assert chunks(replica.step()) == [(0, 8, 1, "decode")]
    replica.drain()
    replica.check_answers()


def test_a_cached_prefix_is_no_room_for_the_request_that_wants_it():
    replica = Replica(
        SchedulerConfig(max_seqs=4, chunk_tokens=8), CacheConfig(block_size=4, pages=4)
    )
    replica.add(PROMPT[:8], max_tokens=1)
    replica.drain()
    replica.add([9] * 5, max_tokens=4, ignore_eos=True)
    replica.add(PROMPT[:9], max_tokens=1)
    assert chunks(replica.step()) == [(1, 0, 5, "last")]
    assert [chunks(replica.step()) for _ in range(3)] == [
        [(1, position, 1, "decode")] for position in (5, 6, 7)
    ]
    assert chunks(replica.step()) == [(2, 8, 1, "last")]


def test_stages_get_a_share_of_the_decodes_each_and_none_is_fed_a_token_on_its_way():
    replica = Replica(SchedulerConfig(max_seqs=8, chunk_tokens=64), mesh=MeshConfig(spp=4))
    for first in range(8):
        replica.add([first], max_tokens=20, ignore_eos=True)
    replica.step()
    while replica.scheduler.slots.waiting:
        replica.step()
    last = {}
    sizes = []
    for _ in range(12):
        batch = replica.start()
        for seq in batch.seq.tolist():
            assert batch.number - last.get(seq, -9) >= 4
            last[seq] = batch.number
        sizes.append(len(batch.seq))
        if len(replica.flight) > 4:
            replica.finish()
    assert sizes == [2] * 12
    replica.drain(4)
    replica.check_answers()


def test_where_all_tokens_are_on_their_way_a_batch_waits_for_those_of_one_batch():
    """Five decodes on four stages, two at most in a batch. The first does not take the second with
    it, though there is room: it would wait for a token that leaves the stages a batch later."""
    config = SchedulerConfig(max_seqs=8, chunking="static", chunk_tokens=128)
    replica = Replica(config, CacheConfig(block_size=16, pages=100), MeshConfig(spp=4))
    for first, length in enumerate((128, 64, 64, 64, 64)):
        replica.add([first] * length, max_tokens=9, ignore_eos=True)
    prompts = [replica.start().seq.tolist() for _ in range(3)]
    decodes = [replica.start().seq.tolist() for _ in range(3)]
    assert prompts == decodes == [[0], [1, 2], [3, 4]]
    replica.drain(4)
    replica.check_answers()


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_chunks_of_a_prompt_follow_each_other_through_the_stages_without_gaps(stages):
    replica = Replica(
        SchedulerConfig(max_seqs=4, chunk_tokens=8),
        CacheConfig(block_size=4, pages=200),
        MeshConfig(spp=stages),
    )
    replica.add([1], "short", max_tokens=30, ignore_eos=True)
    replica.step()
    replica.add([2] * 512, "long", max_tokens=1)
    # a batch takes one slot per stage; it enters when what it feeds has left
    stage_free = 0
    left = {}
    fed = 0
    for number in range(64):
        batch = replica.start()
        assert chunks(batch)[-1] == (1, 8 * number, 8, "last" if number == 63 else "prefill")
        enters = max(
            [stage_free]
            + [
                left.get(seq, 0)
                for seq, feed in zip(batch.seq.tolist(), batch.is_decode.tolist())
                if feed
            ]
        )
        stage_free = enters + 1
        fed = fed + int(batch.is_decode.sum())
        left |= dict.fromkeys(batch.seq.tolist(), enters + stages)
        while len(replica.flight) >= stages:
            replica.finish()
    assert left[1] == 64 + stages - 1
    assert fed == min(29, 64 // stages)  # the decode ran beside it


def test_min_tokens_holds_back_the_end_and_ignore_eos_only_end_tokens():
    replica = small()
    for seed in range(40):
        stops = [7] * (seed % 3 == 0)
        replica.add(
            [seed % 12, seed // 12],
            max_tokens=20,
            min_tokens=seed % 7,
            ignore_eos=bool(seed % 2),
            stop_token_ids=stops,
        )
        replica.drain()
    replica.check_answers()
    reasons = [replica.finished(id)[0].reason for id in replica.requests]
    assert reasons.count("stop") > 10 and reasons.count("length") > 3
    assert any(EOS in replica.tokens(id) for id in replica.requests)


def test_a_deadline_ends_a_request_that_waits_and_one_that_runs():
    replica = Replica(SchedulerConfig(max_seqs=1))
    for id, deadline in (("runs", 5.0), ("waits", 3.0), ("has time", 50.0)):
        replica.add(PROMPT, id, deadline=deadline, max_tokens=30, ignore_eos=True)
    replica.step()
    assert replica.scheduler.expire(2.9) == []
    replica.hear(replica.scheduler.expire(3.0))
    assert [end.reason for end in replica.finished("waits")] == [
        "deadline"
    ] and not replica.finished("runs")
    replica.hear(replica.scheduler.expire(6.0))
    end = replica.finished("runs")[0]
    assert end.reason == "deadline" and end.timing.total == 6.0 and end.usage.completion == 1
    replica.drain()
    assert replica.finished("has time")[0].reason == "length"


def test_what_cannot_be_served_is_refused_at_the_door_and_leaves_nothing():
    replica = Replica(
        SchedulerConfig(max_seqs=1, max_queue=2),
        CacheConfig(block_size=4, pages=4),
        MeshConfig(kvp=2),
        max_len=100,
    )
    with pytest.raises(RequestError, match="needs 9 pages, the cache has 8"):
        replica.add([1] * 30, max_tokens=4)
    replica.add([1] * 30, "a", max_tokens=3)
    with pytest.raises(RequestError, match="in use") as error:
        replica.add([1], "a")
    assert error.value.status == "ALREADY_EXISTS"
    replica.add([1], "b", max_tokens=1)
    with pytest.raises(RequestError) as error:
        replica.add([1], "c", max_tokens=1)
    assert error.value.status == "RESOURCE_EXHAUSTED"
    with pytest.raises(RequestError) as error:
        replica.scheduler.cancel("c", 0.0)
    assert error.value.status == "NOT_FOUND"
    replica.drain()
    replica.check_answers()
    replica.add([1], "a", max_tokens=1)  # an id is free again after its end


def test_a_request_may_fail_with_an_error_of_its_own():
    replica = small()
    replica.add(PROMPT, max_tokens=4)
    error = RequestError("", "the model gave NaN", "INTERNAL")
    ((_, event),) = replica.scheduler.cancel("r0", 1.0, "error", error=error)
    assert isinstance(event, Finished) and event.error is error and event.timing.total == 1.0


def test_batches_finish_in_the_order_they_started():
    replica = small()
    replica.add(PROMPT, max_tokens=4)
    replica.start()
    second = replica.start()
    with pytest.raises(ValueError, match="not the oldest"):
        replica.scheduler.finish(second, StepResults(np.zeros(1, int)), 0.0)


def test_logprobs_reach_the_tokens_and_prompt_logprobs_the_end():
    replica = small()
    replica.add(PROMPT, max_tokens=1, prompt_logprobs=0, logprobs=0)
    say = lambda batch: [
        Logprobs(-float(batch.start[0] + 1 + i)) for i in range(int(batch.length[0]))
    ]
    for _ in range(2):
        batch = replica.start()
        events = replica.scheduler.finish(
            batch, StepResults(np.array([5]), [Logprobs(-99.0)], {0: say(batch)}), 1.0
        )
    (_, token), (_, end) = events
    assert token.logprobs == Logprobs(-99.0)
    assert end.prompt_logprobs == (None, *(Logprobs(-float(i)) for i in range(1, 10)))
