"""Which prompts share a step, and how much of its time each gets.

A step takes a millisecond per token and stage, chunks are adaptive and in rows of four tokens.
Those who come first are served first. A request is given a second to its first token, or three
times its prefill alone; its decodes may take a second per token, unless said otherwise, and a
prompt of several steps makes none longer than a quarter of one.
"""

from __future__ import annotations

import pytest

from jaxserve.costs.coefficients import Costs
from jaxserve.scheduling import Batch
from jaxserve.settings.schema import CacheConfig, MeshConfig, SchedulerConfig
from tests.scheduling.fakes import Replica

TOKEN = Costs(layers=1, linear_token=0.001)


def made(kvp: int = 1, spp: int = 1, **fields) -> Replica:
    config = SchedulerConfig(
        **{
            "chunking": "adaptive",
            "max_seqs": 256,
            "chunk_tokens": 4096,
            "min_chunk": 4,
            "tpot": 1.0,
            "ttft": 1.0,
            "step_time": 0.25,
            "sharing": 1.0,
            **fields,
        }
    )
    replica = Replica(
        config,
        CacheConfig(block_size=16, pages=20_000, prefix_caching=False),
        MeshConfig(spp, kvp),
        max_len=100_000,
        costs=TOKEN,
    )
    return replica


def ask(replica: Replica, *prompts: int, output: int = 1) -> None:
    for prompt in prompts:
        replica.add([prompt % 12] * prompt, max_tokens=output, ignore_eos=True)


def decoding(replica: Replica, count: int, output: int = 900) -> Replica:
    """Makes a step with decodes of sequences 0 to `count` - 1."""
    ask(replica, *[1] * count, output=output)
    while replica.scheduler.load().queued_prefill_tokens:
        replica.step()
    return replica


def step(replica: Replica) -> Batch:
    """Makes a step that takes as long as was predicted."""
    batch = replica.step()
    replica.now += batch.seconds
    return batch


def shares(batch: Batch) -> dict[int, int]:
    """Tokens of each sequence that is prefilled."""
    return {
        seq: length
        for seq, length, feed in zip(
            batch.seq.tolist(), batch.length.tolist(), batch.is_decode.tolist()
        )
        if not feed
    }


# --- how long a step takes


def test_a_prompt_of_several_steps_makes_none_longer_than_step_time_though_the_decodes_could_wait():
    """In a quarter of a second: ten decodes, and of the prompt 240 tokens a step, until the rest
    fits."""
    replica = decoding(made(), 10)
    ask(replica, 2000)
    for _ in range(4):
        batch = replica.step()
        assert (
            shares(batch) == {10: 240}
            and batch.seconds == pytest.approx(0.25)
            and batch.is_decode.sum() == 10
        )


def test_the_last_step_of_a_prompt_of_several_is_no_longer_than_the_others():
    replica = decoding(made(), 10)
    ask(replica, 1000)
    assert [shares(replica.step()) for _ in range(5)] == [
        {10: length} for length in (240, 240, 240, 240, 40)
    ]


def test_short_prompts_fill_a_step_as_long_as_the_decodes_may_wait():
    """Ten decodes and eleven prompts of 88 tokens take all of the second but the hundredths by
    which decodes are kept ahead; the twelfth comes in the next step."""
    replica = decoding(made(), 10)
    ask(replica, *[88] * 12)
    batch = replica.step()
    assert shares(batch) == dict.fromkeys(range(10, 21), 88)
    assert batch.seconds == pytest.approx(0.978)
    assert shares(replica.step()) == {21: 88}


def test_the_step_of_a_long_prompt_is_filled_by_short_ones_and_not_by_the_long_one():
    """The short ones have waited for a fifth of their time, and take what the decodes leave. Where
    they take less than the long prompt may, it has the rest."""
    replica = decoding(made(), 10)
    ask(replica, 2000, *[90] * 6)
    replica.now += 0.2
    batch = replica.step()
    assert shares(batch) == dict.fromkeys(range(11, 17), 90) and batch.seconds == pytest.approx(
        0.55
    )
    ask(replica, 90)
    replica.now += 0.2
    # whole rows of the 150 tokens that are left of a quarter of a second
    assert shares(replica.step()) == {17: 90, 10: 148}


def test_without_decodes_no_step_takes_longer_than_step_time():
    replica = made()
    ask(replica, *[90] * 4)
    assert [shares(replica.step()) for _ in range(2)] == [{0: 90, 1: 90, 2: 68}, {2: 22, 3: 90}]


@pytest.mark.parametrize("stages", [1, 2])
def test_each_stage_has_its_part_of_the_time(stages):
    replica = decoding(made(spp=stages), 1)
    ask(replica, 1000)
    batch = replica.step()
    assert 0.25 / stages - 0.005 < batch.seconds <= 0.25 / stages


@pytest.mark.parametrize("step_time", [0.01, 0.25])
def test_where_decodes_alone_take_longer_than_they_may_prompts_get_a_quarter_of_their_time(
    step_time,
):
    """100 decodes take 0.1 s and may take 0.05: 24 or 28 tokens, in whole rows, of the long prompt
    beside them, which none stops."""
    replica = decoding(made(tpot=0.05, step_time=step_time, chunk_tokens=128), 100)
    ask(replica, 600)
    batches = [step(replica) for _ in range(25)]
    taken = [shares(batch)[100] for batch in batches[:-1]]
    assert set(taken) <= {24, 28} and sum(taken) / len(taken) == pytest.approx(25, abs=1)
    assert replica.tokens("r100") and all(batch.is_decode.sum() == 100 for batch in batches)


def test_where_decodes_alone_take_longer_than_they_may_short_prompts_get_a_quarter_of_their_time():
    replica = decoding(made(tpot=0.05), 100)
    ask(replica, *[10] * 5)
    taken = [sum(shares(step(replica)).values()) for _ in range(2)]
    assert taken[0] in (20, 24) and sum(taken) == pytest.approx(48, abs=4)


# --- guests of a long prompt


@pytest.mark.parametrize("guest, rides", [(248, True), (252, False)])
def test_on_its_lane_a_long_prompt_has_guests_of_at_most_an_eighth_of_its_work(guest, rides):
    replica = decoding(made(), 1)
    ask(replica, 2000, guest)
    replica.now += 0.9
    assert (2 in shares(replica.step())) == rides


def test_the_less_is_left_of_a_long_prompt_the_shorter_are_its_guests():
    """After 896 of 2000 tokens, an eighth of what is left is 138."""
    for guest, rides in ((136, True), (140, False)):
        replica = decoding(made(step_time=0.9), 1)
        ask(replica, 2000)
        assert shares(replica.step()) == {1: 896}
        ask(replica, guest)
        replica.now += 0.9
        assert (2 in shares(replica.step())) == rides


@pytest.mark.parametrize("ramp", [1 / 32, 1.0])
@pytest.mark.parametrize("pressing", [0.5, 0.75, 1.0, 9.0])
def test_guests_have_a_share_of_the_time_that_grows_as_theirs_runs_out(pressing, ramp):
    """The step has 0.99 s. The work of a guest takes a hundredth of the second that each is given;
    one that has used up the ramp's part of it gets all that guests may have, which is a half."""
    replica = decoding(made(sharing=0.5, sharing_ramp=ramp), 10)
    now = replica.now
    replica.now -= pressing * ramp - 0.01
    ask(replica, 2000, *[10] * 60)
    replica.now = now
    tokens = sum(length for number, length in shares(replica.step()).items() if number > 10)
    assert 490 * min(1, pressing) - 8 < tokens <= 495 * min(1, pressing)


def test_on_another_lane_any_prompt_runs_beside_a_long_one():
    """Each in its own quarter of a second."""
    replica = made(kvp=2)
    ask(replica, 2000, 1900)
    batch = replica.step()
    assert shares(batch) == {0: 248, 1: 248} and sorted(batch.lane.tolist()) == [0, 1]


@pytest.mark.parametrize(
    "ahead, lanes", [(5, 1), (64, 1), (65, 1), (200, 1), (5, 2), (64, 2), (65, 2), (200, 2)]
)
def test_a_short_prompt_rides_along_however_many_long_ones_wait_before_it(ahead, lanes):
    replica = made(kvp=lanes)
    ask(replica, *[1000] * ahead, 20)
    replica.now += 0.5
    assert shares(replica.step())[ahead] == 20
