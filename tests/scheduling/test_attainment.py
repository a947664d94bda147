"""Whether completions were in time, and their longest gaps, as their ends tell."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.api.attainment import Promise, all_in_time, in_time
from jaxserve.api.events import Finished
from jaxserve.api.request import Continuation, Request, Slo
from jaxserve.api.sampling import SamplingParams
from jaxserve.settings.schema import CacheConfig, SchedulerConfig
from tests.scheduling.fakes import Replica

PROMPT = np.arange(6, dtype=np.int32) + 6


def served(
    reads: list[float],
    *,
    slo: Slo,
    tbt: float | None = None,
    drafts: str = "none",
    stop: float | None = None,
    tokens: int | None = None,
    **request,
) -> Finished:
    """The end of a request that comes at clock second 0 and whose tokens are read at these. stop:
    when it is ended, with the reason 'stop'. tokens: how many it has then; default: one a read."""
    config = SchedulerConfig(max_seqs=4, chunk_tokens=16, drafts=drafts)
    replica = Replica(config, CacheConfig(block_size=4, pages=40))
    most = 100 if stop else tokens or len(reads)
    sampling = SamplingParams(max_tokens=most, ignore_eos=True)
    replica.scheduler.add(Request("r", PROMPT, sampling, slo=slo, **request))
    (sequence,) = replica.scheduler.sequences.values()
    sequence.tbt = tbt
    for second in reads:
        replica.start()
        replica.now = second
        replica.finish()
    if stop is not None:
        replica.hear(replica.scheduler.cancel("r", stop, "stop", 0))
    return replica.finished("r")[0]


@pytest.mark.parametrize(
    "reads, verdict",
    [
        ([1.0, 1.5, 2.0], True),  # exactly as promised
        ([0.1, 0.2, 1.1], True),  # one gap is long, the mean is not
        ([1.01, 1.1, 1.2], False),
        ([0.1, 0.7, 1.2], False),
        ([0.5], True),
        ([1.5], False),
    ],
)
def test_both_objectives_count(reads, verdict):
    assert served(reads, slo=Slo(ttft=1.0, tpot=0.5)).in_time is verdict


def test_sums_of_clock_seconds_that_are_off_by_rounding_are_in_time():
    at = [3e5 + 0.1 * number for number in range(1, 9)]
    assert (at[-1] - at[0]) / 7 > 0.1
    end = served(at, slo=Slo(ttft=0.1, tpot=0.1), arrival=3e5)
    assert end.in_time


def test_the_time_until_a_stop_string_is_found_does_not_count():
    assert served([0.5, 0.6], stop=50.0, slo=Slo(ttft=1.0, tpot=0.1)).in_time


def test_the_longest_gap_is_told_whatever_the_mean():
    end = served([0.5, 0.6, 3.6, 3.7], slo=Slo(ttft=1.0, tpot=9.0))
    assert end.in_time
    assert end.timing.longest_gap == pytest.approx(3.0)
    assert end.timing.slow_gaps == 0.0


@pytest.mark.parametrize("slow, verdict", [(0, True), (1, True), (2, False)])
def test_an_objective_on_gaps_is_kept_by_all_but_a_hundredth_of_them(slow, verdict):
    gaps = [0.1] * (120 - slow) + [0.9] * slow
    reads = np.cumsum([0.5, *gaps]).tolist()
    end = served(reads, slo=Slo(ttft=1.0, tpot=1.0), tbt=0.5)
    assert end.timing.slow_gaps == pytest.approx(slow / 120)
    assert end.in_time is verdict


def test_tokens_that_come_in_one_read_have_no_gap_between_them():
    config = SchedulerConfig(max_seqs=4, chunk_tokens=64, drafts="ngram", draft_tokens=3)
    replica = Replica(config, CacheConfig(block_size=4, pages=60))
    sampling = SamplingParams(max_tokens=30, ignore_eos=True)
    replica.scheduler.add(Request("r", PROMPT, sampling, slo=Slo(ttft=10, tpot=10)))
    (sequence,) = replica.scheduler.sequences.values()
    sequence.tbt = 0.5
    reads = 0
    while replica.scheduler.sequences:
        if replica.start() is not None:
            replica.now += 1.0
            before = len(sequence.output)
            replica.finish()
            reads += len(sequence.output) > before
    (end,) = replica.finished("r")
    assert reads < 30, "no proposed token was right"
    assert end.timing.slow_gaps == 1.0 and end.timing.longest_gap == 1.0
    assert not end.in_time, "every gap was longer than the objective"


def test_the_move_to_another_replica_is_a_gap_too():
    begun = Continuation({0: [8, 9]}, first_token=0.5, last_token=0.6)
    end = served([4.6, 4.7], slo=Slo(ttft=1.0, tpot=9.0), tbt=1.0, continuation=begun, tokens=4)
    assert end.timing.longest_gap == pytest.approx(4.0)
    assert end.timing.slow_gaps == 1 / 2
    assert not end.in_time


def test_a_promise_without_an_objective_on_gaps_takes_any_gaps():
    assert Promise(1.0, 0.1).kept(1.0, 0.1, slow_gaps=1.0)
    assert not Promise(1.0, 0.1, 0.5).kept(1.0, 0.1, slow_gaps=0.02)


def test_what_did_not_come_to_its_end_of_itself_is_not_in_time():
    assert [in_time(reason, True) for reason in ("stop", "length", "error", "deadline")] == [
        True,
        True,
        False,
        False,
    ]
    assert in_time("cancelled", True) is None
    assert in_time("cancelled", False) is False


def test_a_request_is_in_time_where_all_its_completions_are():
    assert all_in_time([True, True]) is True
    assert all_in_time([True, None]) is None
    assert all_in_time([True, None, False]) is False
