"""Arrivals: each kind of file, each mix against the numbers published for it, arrival processes,
requests made of them, and errors."""

import contextlib
import gzip
import json
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.api.errors import RequestError
from jaxserve.api.request import Request, Slo
from jaxserve.lab.simulate.arrival import BLOCK, LONG, Arrival, to_request, workload_summary
from jaxserve.lab.simulate.mixes import MIXES
from jaxserve.lab.simulate.workload import parse
from jaxserve.settings.schema import ConfigError
from tests.examples import examples

DATA = Path(os.environ.get("JAXSERVE_DATA") or Path(__file__).parents[3] / ".." / "shared" / "data")
MAX_LEN = 2**21


def real(name: str) -> str:
    if not (DATA / name).exists():
        pytest.skip(f"{DATA / name} is not here")
    return str(DATA / name)


def written(path: Path, text: str) -> str:
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


def row(timestamp: float, prompt: int, output: int, ids: list[int] | None = None) -> str:
    fields = dict(timestamp=timestamp, input_length=prompt, output_length=output)
    return json.dumps(fields if ids is None else fields | {"hash_ids": ids}) + "\n"


def plain(arrivals: list[Arrival]) -> list[tuple]:
    return [
        (a.time, a.prompt, a.output, a.kind, None if a.blocks is None else tuple(a.blocks), a.block)
        for a in arrivals
    ]


def shared(a: Request, b: Request) -> int:
    """Tokens with which both prompts begin."""
    length = min(len(a.prompt), len(b.prompt))
    differ = np.flatnonzero(a.prompt[:length] != b.prompt[:length])
    return int(differ[0]) if len(differ) else length


def ideal_hit(arrivals: list[Arrival]) -> float:
    """Share of all blocks that an earlier prompt had, as a prefix."""
    seen: set[int] = set()
    hits = total = 0
    for arrival in arrivals:
        ids = list(arrival.blocks)
        hits += next((place for place, value in enumerate(ids) if value not in seen), len(ids))
        total += len(ids)
        seen.update(ids)
    return hits / total


# --- files


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_a_mooncake_trace_is_read(tmp_path, name):
    text = (
        row(2000, 1000, 7, [40, 41])
        + "\n"
        + row(5000, 1025, 8, [40, 99, 2**40])
        + row(4500.5, 3, 9)
    )
    first, second, third = parse(written(tmp_path / name, text))
    assert (first.time, first.prompt, first.output, list(first.blocks)) == (0.0, 1000, 7, [0, 1])
    assert (second.time, second.prompt, second.output, second.blocks) == (
        pytest.approx(2.5005),
        3,
        9,
        None,
    )
    assert (third.time, third.prompt, list(third.blocks), third.block) == (
        3.0,
        1025,
        [0, 2, 3],
        BLOCK,
    )


def test_timestamps_in_seconds_and_blocks_of_another_size(tmp_path):
    path = written(tmp_path / "t.jsonl", row(0, 100, 1, [1, 2, 3]) + row(3, 100, 1, [1]))
    first, second = parse(f"{path}:unit=s,block=64")
    assert second.time == 3.0 and first.block == 64
    assert (list(first.blocks), list(second.blocks)) == ([0, 1], [0])
    assert shared(to_request(first, 0, MAX_LEN), to_request(second, 1, MAX_LEN)) == 64


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
def test_an_azure_trace_is_read(tmp_path, name):
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 23:59:59.7500000,374,44\n"
        "2023-11-17 00:00:01.2500000,396,109\n"
        "2023-11-17 00:00:02+00:00,5,6\n"
    )
    found = parse(written(tmp_path / name, text))
    assert plain(found) == [
        (0.0, 374, 44, "", None, BLOCK),
        (1.5, 396, 109, "", None, BLOCK),
        (2.25, 5, 6, "", None, BLOCK),
    ]


def test_a_lengths_file_is_drawn_evenly_and_arrives_at_qps(tmp_path):
    rows = "".join(f"{n},{n + 1},0,0\n" for n in range(1, 11)) + f"{LONG},5,0,0\n"
    path = written(
        tmp_path / "l.csv",
        "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n" + rows,
    )
    once = parse(path, qps=2.0, seed=3)
    assert sorted(a.prompt for a in once) == [*range(1, 11), LONG] and [a.prompt for a in once] != [
        *range(1, 11),
        LONG,
    ]
    assert {a.kind for a in once if a.prompt == LONG} == {"long"} and {
        a.kind for a in once if a.prompt < LONG
    } == {"short"}
    twice = parse(path, qps=2.0, requests=22, seed=3)
    assert sorted(a.prompt for a in twice) == sorted([*range(1, 11), LONG] * 2)
    assert all(a.output == (5 if a.prompt == LONG else a.prompt + 1) for a in twice)


def test_leval_gives_a_request_per_question(tmp_path):
    path = written(
        tmp_path / "l.csv",
        "task,doc,chars,words,n_questions,avg_question_words,avg_answer_words\nc,0,9,1000,3,20.0,0.2\n",
    )
    assert [(a.prompt, a.output) for a in parse(path, qps=1)] == [(1377, 1)] * 3


def test_a_recorded_trace_is_cut_then_stretched_to_qps(tmp_path):
    path = written(
        tmp_path / "t.jsonl", "".join(row(time, 1, 1) for time in (7000, 7000, 8000, 10000, 90000))
    )
    assert [a.time for a in parse(path, requests=4)] == [0, 0, 1, 3]
    assert [a.time for a in parse(path, requests=4, qps=0.5)] == pytest.approx([0, 0, 2, 6])
    assert len(parse(path, requests=99)) == 5
    assert workload_summary(parse(path, qps=7.5))["rate"] == pytest.approx(7.5)


REAL = [  # file, options, count, mean prompt and output, span: data/README 1.1
    ("mooncake/conversation_trace.jsonl.gz", "", 12031, 12035.1, 342.6, 3537),
    ("mooncake/synthetic_trace.jsonl.gz", "", 3993, 15325.5, 149.1, 1022),
    ("medha_mixed/session_trace_prefix-0.8.jsonl.gz", ":block=64", 901, None, None, 3447),
    ("azure/AzureLLMInferenceTrace_conv_2023.csv.gz", "", 19366, 1155, 211, 58 * 60),
    ("medha_mixed/merged_df_0_percent_long_context_mixed.csv.gz", "", 20000, 2332, 440, None),
    ("medha_mixed/merged_df_5_percent_long_context_mixed.csv.gz", "", 20500, None, None, None),
    ("lengths/sharegpt_8k_filtered_llama2tok.csv.gz", "", 30731, 2340, 439, None),
    ("lengths/sharegpt_V3_lens.csv.gz", "", 58000, 248, 325, None),
    ("lengths/arxiv_summarization_llama2tok.csv.gz", "", 28257, 2588, 291, None),
    ("lengths/bwb_llama2tok.csv.gz", "", 33768, 1067, 1613, None),
    ("lengths/leval_lengths.csv.gz", "", 2074, None, None, None),
]


@pytest.mark.parametrize(
    "name, options, count, prompt, output, span", REAL, ids=lambda value: str(value).split("/")[-1]
)
def test_real_files_have_the_stated_counts_and_means(name, options, count, prompt, output, span):
    found = workload_summary(parse(real(name) + options, qps=None if span else 1.0))
    assert found["count"] == count
    assert prompt is None or found["prompt"]["mean"] == pytest.approx(prompt, abs=0.6)
    assert output is None or found["output"]["mean"] == pytest.approx(output, abs=0.6)
    assert span is None or found["span"] == pytest.approx(span, rel=0.01)


def test_the_real_medha_file_has_its_long_requests():
    found = parse(real("medha_mixed/merged_df_5_percent_long_context_mixed.csv.gz"), qps=1.0)
    long = [a for a in found if a.kind == "long"]
    assert len(long) == 1000 and workload_summary(found)["long"] == pytest.approx(0.0488, abs=1e-4)
    assert np.percentile([a.prompt for a in long], (50, 90)) == pytest.approx(
        [400e3, 840e3], rel=0.01
    )
    assert np.percentile([a.output for a in long], (50, 90)) == pytest.approx([522, 792], rel=0.01)


@pytest.mark.parametrize("name, hit", [("conversation", 0.366), ("synthetic", 0.640)])
def test_real_traces_have_the_stated_ideal_hits(name, hit):
    assert ideal_hit(parse(real(f"mooncake/{name}_trace.jsonl.gz"))) == pytest.approx(
        hit, abs=0.001
    )


# --- mixes

MEANS = [  # mix, mean prompt and output of its requests that are not long: data/README 1.1, 1.3
    ("medha-0", 2332, 440),
    ("medha-1", 2332, 440),
    ("medha-5", 2332, 440),
    ("medha-10", 2332, 440),
    ("sharegpt", 248, 325),
    ("azure-conv", 1155, 211),
    ("mooncake-conversation", 12035, 343),
    ("mooncake-toolagent", 8596, 182),
    ("mooncake-synthetic", 15325, 149),
    ("tetris-short", 23600, None),
    ("tetris-medium", 32800, None),
    ("tetris-long", 50100, None),
]


@pytest.mark.parametrize("mix, prompt, output", MEANS)
def test_a_mix_has_the_published_means(mix, prompt, output):
    usual = workload_summary(
        [a for a in parse(f"poisson:mix={mix}", qps=1.0, requests=60_000) if a.kind != "long"]
    )
    assert usual["prompt"]["mean"] == pytest.approx(prompt, rel=0.05)
    assert output is None or usual["output"]["mean"] == pytest.approx(output, rel=0.06)


def test_every_mix_is_held_against_published_numbers():
    assert {mix for mix, *_ in MEANS} | {"mooncake-sessions"} == set(MIXES)


def test_sessions_have_the_published_shares_of_their_kinds():
    found = parse("poisson:mix=mooncake-sessions", qps=1.0, requests=20_000)
    kinds = Counter(arrival.kind for arrival in found)
    assert kinds["ephemeral"] / len(found) == pytest.approx(0.62, abs=0.02)
    assert kinds["context"] / len(found) == pytest.approx(0.08, abs=0.01)
    searches = [set(arrival.blocks) for arrival in found if arrival.kind == "ephemeral"]
    assert sum(map(len, searches)) == len(set.union(*searches))  # none recurs


@pytest.mark.parametrize(
    "percent, prompt, output",
    [
        (1, (400e3, 840e3), (522, 792)),
        (5, (400e3, 840e3), (522, 792)),
        (10, (388e3, 839e3), (517, 803)),
    ],
)
def test_medha_mixes_have_their_long_requests(percent, prompt, output):
    found = parse(f"poisson:mix=medha-{percent}", qps=1.0, requests=100_000)
    long = [a for a in found if a.kind == "long"]
    assert len(long) / len(found) == pytest.approx(percent / 100, rel=0.1)
    assert all(100e3 < a.prompt < 1e6 for a in long) and all(
        a.prompt <= 8192 for a in found if a.kind == "short"
    )
    assert np.percentile([a.prompt for a in long], (50, 90)) == pytest.approx(prompt, rel=0.06)
    assert np.percentile([a.output for a in long], (50, 90)) == pytest.approx(output, rel=0.06)


@pytest.mark.parametrize(
    "mix, requests, hit",
    [
        ("mooncake-conversation", 12031, 0.366),
        ("mooncake-toolagent", 23608, 0.59),
        ("mooncake-synthetic", 3993, 0.64),
    ],
)
def test_mooncake_mixes_share_prefixes_as_published(mix, requests, hit):
    hits = []
    for seed in range(3):
        found = parse(f"poisson:mix={mix}", qps=3.4, requests=requests, seed=seed)
        assert all(len(a.blocks) == -(-a.prompt // BLOCK) for a in found)
        hits.append(ideal_hit(found))
    assert np.mean(hits) == pytest.approx(hit, abs=0.02)


@pytest.mark.parametrize(
    "mix, low, high", [("short", 4e3, 95e3), ("medium", 8e3, 142e3), ("long", 16e3, 190e3)]
)
def test_tetris_mixes_keep_their_limits(mix, low, high):
    prompts = [a.prompt for a in parse(f"poisson:mix=tetris-{mix}", qps=1.0, requests=5000)]
    assert low <= min(prompts) < 1.3 * low and 0.9 * high < max(prompts) <= high


@pytest.mark.parametrize(
    "text, mean, low, high",
    [
        ("700", 700, 700, 700),
        ("constant:700", 700, 700, 700),
        ("uniform:10:30", 20, 10, 30),
        ("exponential:500", 500, 1, 10_000),
        ("lognormal:1000:0.5", 1000 * np.exp(0.125), 1, 30_000),
        ("lognormal:1000:2:500:1500", 920, 500, 1500),
    ],
)
def test_lengths_of_ones_own(text, mean, low, high):
    found = parse(f"poisson:mix=fixed,prompt={text},output=3", qps=1.0, requests=20_000)
    prompts = np.array([a.prompt for a in found])
    assert (
        prompts.mean() == pytest.approx(mean, rel=0.03)
        and low <= prompts.min()
        and prompts.max() <= high
    )
    assert {a.output for a in found} == {3} and {type(a.prompt) for a in found} == {int}


# --- times

FIXED = "mix=fixed,prompt=100,output=10"


def test_poisson_gaps_have_mean_and_variation_of_an_exponential():
    gaps = np.diff([a.time for a in parse(f"poisson:{FIXED}", qps=4.0, requests=50_000)])
    assert gaps.mean() == pytest.approx(
        0.25, rel=0.02
    ) and gaps.std() / gaps.mean() == pytest.approx(1.0, rel=0.03)
    assert np.corrcoef(gaps[1:], gaps[:-1])[0, 1] == pytest.approx(0, abs=0.02)


@pytest.mark.parametrize("burstiness", [0.25, 1, 4])
def test_gamma_gaps_vary_as_their_burstiness_says(burstiness):
    spec = f"gamma:{FIXED},burstiness={burstiness}"
    gaps = np.diff([a.time for a in parse(spec, qps=4.0, requests=50_000)])
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.03)


def test_constant_gaps_are_equal():
    times = [a.time for a in parse(f"constant:{FIXED}", qps=4.0, requests=5)]
    assert times == [0, 0.25, 0.5, 0.75, 1]


@pytest.mark.parametrize("spec", ["9:3", "3:9:2"])
def test_two_numbers_are_a_range(spec):
    with pytest.raises(ConfigError):
        parse(f"constant:prompt={spec},output=1", qps=1.0)
    lengths = {a.prompt for a in parse("constant:prompt=3:5,output=1", qps=1.0, requests=200)}
    assert lengths == {3, 4, 5}


def test_a_burst_is_a_square_wave_of_the_asked_mean():
    times = np.array(
        [
            a.time
            for a in parse(f"burst:{FIXED},period=20,factor=9,duty=0.2", qps=5.0, requests=50_000)
        ]
    )
    assert len(times) / times[-1] == pytest.approx(5.0, rel=0.02)
    high = times % 20 >= 16
    assert (high.mean() / 0.2) / ((1 - high.mean()) / 0.8) == pytest.approx(9, rel=0.05)
    per_second = np.bincount(times.astype(int))
    assert per_second.var() / per_second.mean() > 3  # 1 in a Poisson process


@pytest.mark.parametrize("duty, factor", [(0, 4), (1, 4), (0.5, 1)])
def test_a_burst_of_one_rate_is_poisson(duty, factor):
    flat = parse(f"poisson:{FIXED}", qps=2.0)
    burst = parse(f"burst:{FIXED},duty={duty},factor={factor}", qps=2.0)
    assert [a.time for a in burst] == pytest.approx([a.time for a in flat])


@pytest.mark.parametrize(
    "spec", ["poisson:mix=medha-5", "burst:mix=mooncake-toolagent", f"poisson:{FIXED}"]
)
def test_the_seed_decides_and_lengths_do_not_depend_on_the_rate(spec):
    first = parse(spec, qps=2.0, requests=300, seed=5)
    assert plain(first) == plain(parse(spec, qps=2.0, requests=300, seed=5))
    assert [a.time for a in first] != [a.time for a in parse(spec, qps=2.0, requests=300, seed=6)]
    faster = parse(spec, qps=8.0, requests=300, seed=5)
    assert [line[1:] for line in plain(first)] == [line[1:] for line in plain(faster)] and faster[
        -1
    ].time < first[-1].time


@settings(max_examples=examples(30), deadline=None)
@given(
    mix=st.sampled_from(sorted(MIXES)),
    shape=st.sampled_from(["poisson", "burst"]),
    requests=st.integers(1, 300),
    qps=st.floats(1e-3, 1e3),
    seed=st.integers(0, 2**32),
)
def test_any_mix_gives_sorted_arrivals_of_sound_lengths(mix, shape, requests, qps, seed):
    found = parse(f"{shape}:mix={mix}", qps=qps, requests=requests, seed=seed)
    times = [a.time for a in found]
    assert len(found) == requests and times == sorted(times) and times[0] >= 0
    for a in found:
        assert 1 <= a.prompt <= 10**6 and a.output >= 1
        assert a.blocks is None or len(a.blocks) == -(-a.prompt // BLOCK)


# --- requests


def test_a_request_is_greedy_and_of_exactly_the_output_length():
    request = to_request(Arrival(1.5, 10, 20), 7, MAX_LEN, Slo(ttft=2.0))
    assert (request.id, request.arrival, request.slo.ttft, len(request.prompt)) == (
        "7",
        1.5,
        2.0,
        10,
    )
    sampling = request.sampling
    assert sampling.greedy and sampling.ignore_eos and sampling.max_tokens == 20
    sampling.check()


def test_max_len_cuts_the_output_and_refuses_a_prompt_without_room():
    assert to_request(Arrival(0, 90, 20), 0, 100).sampling.max_tokens == 10
    assert to_request(Arrival(0, 99, 20), 0, 100).sampling.max_tokens == 1
    with pytest.raises(RequestError, match=r"prompt: has 100 tokens; .* the limit is 99"):
        to_request(Arrival(0, 100, 20), 0, 100)


def test_a_prompt_of_a_million_tokens_costs_no_memory():
    prompt = to_request(Arrival(0, 10**6, 1), 3, MAX_LEN).prompt
    base = prompt
    while isinstance(base.base, np.ndarray):
        base = base.base
    assert (
        len(prompt) == 10**6
        and prompt.dtype == np.int32
        and prompt.strides == (0,)
        and base.nbytes <= 8
    )


@given(
    st.lists(st.integers(0, 2**31 - 1), min_size=2, max_size=2, unique=True),
    st.lists(st.integers(0, 2**31 - 1), max_size=3),
)
def test_requests_share_no_prefix_unless_hash_ids_say_so(numbers, ids):
    a, b = (to_request(Arrival(0, 2000, 1), number, MAX_LEN) for number in numbers)
    c = to_request(Arrival(0, 2000, 1, blocks=tuple(ids)), numbers[0], MAX_LEN)
    assert shared(a, b) == 0 and shared(b, c) == 0
    assert shared(a, c) == (0 if ids else 2000)


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=6),
    st.lists(st.integers(0, 3), min_size=1, max_size=6),
    st.integers(1, 64),
    st.booleans(),
)
def test_equal_hash_ids_are_equal_tokens(left, right, block, array):
    a, b = (
        to_request(
            Arrival(
                0, len(ids) * block, 1, blocks=np.array(ids) if array else tuple(ids), block=block
            ),
            number,
            MAX_LEN,
        )
        for number, ids in enumerate((left, right))
    )
    equal = next(
        (place for place, (x, y) in enumerate(zip(left, right)) if x != y),
        min(len(left), len(right)),
    )
    assert shared(a, b) == equal * block


@given(st.integers(1, 5000), st.integers(0, 4))
def test_tokens_beyond_the_hash_ids_are_a_requests_own(length, known):
    ids = tuple(range(known))
    a, b = (to_request(Arrival(0, length, 1, blocks=ids), number, MAX_LEN) for number in (1, 2))
    assert len(a.prompt) == length and a.prompt.dtype == np.int32
    assert shared(a, b) == min(length, known * BLOCK)


# --- errors

LINE = row(0, 600, 5, [1, 2])
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
PAIR = "num_prefill_tokens,num_decode_tokens\n"


@pytest.mark.parametrize(
    "name, text, said",
    [
        ("t.jsonl", "", "t.jsonl is empty"),
        ("t.jsonl.gz", " \n", "t.jsonl.gz is empty"),
        ("t.jsonl", LINE + "nonsense\n", "t.jsonl:2: is not JSON"),
        ("t.jsonl", "[" * 100_000, "t.jsonl:1: is not JSON"),
        ("t.jsonl", LINE + "\n[1, 2]\n", "t.jsonl:3: must be an object with timestamp"),
        (
            "t.jsonl",
            '{"timestamps": 0, "input_length": 1, "output_length": 1}',
            "1: timestamp is missing; did you mean timestamps",
        ),
        (
            "t.jsonl",
            row(0, 1, 1).replace("input_length", "prompt"),
            "t.jsonl:1: input_length is missing",
        ),
        ("t.jsonl", row(-1, 1, 1), "t.jsonl:1: timestamp must be a number of at least 0, not -1"),
        ("t.jsonl", row(float("nan"), 1, 1), "timestamp must be a number of at least 0, not nan"),
        ("t.jsonl", row(True, 1, 1), "timestamp must be"),
        (
            "t.jsonl",
            row(0, -5, 1),
            "t.jsonl:1: input_length must be a whole number of tokens of at least 1, not -5",
        ),
        ("t.jsonl", row(0, 1.5, 1), "input_length must be a whole number .* not 1.5"),
        ("t.jsonl", row(0, 10**12, 1), "input_length must be a whole number"),
        (
            "t.jsonl",
            row(0, 1, 0),
            "output_length must be a whole number of tokens of at least 1, not 0",
        ),
        ("t.jsonl", row(0, 1, True), "output_length must be"),
        ("t.jsonl", row(0, 1, 1, ["a"]), "t.jsonl:1: hash_ids must be a list of whole numbers"),
        ("t.jsonl", row(0, 1, 1, 5), "hash_ids must be a list of whole numbers, not 5"),
        (
            "t.jsonl",
            row(0, 600, 1, [1]),
            "hash_ids must have 2 ids for 600 tokens in blocks of 512, not 1; give .*:block=N",
        ),
        ("a.csv", "", "a.csv is empty"),
        ("a.csv", AZURE, "a.csv has a header and no rows"),
        (
            "a.csv",
            "TIMESTAMP,ContextTokens,Generated_Tokens\n",
            "a.csv:1: column GeneratedTokens is missing; did you mean Generated_Tokens",
        ),
        (
            "a.csv",
            "x,y\n1,2\n",
            "a.csv:1: column TIMESTAMP is missing .known sets of columns: .*num_prefill_tokens",
        ),
        (
            "a.csv",
            AZURE + "2023-11-16 18:15:46.68,374,44\nnow,1,2\n",
            "a.csv:3: TIMESTAMP must be like 2023-11-16 .* not 'now'",
        ),
        ("a.csv", AZURE + "2023-13-16 18:15:46.68,374,44\n", "a.csv:2: TIMESTAMP must be like"),
        (
            "a.csv",
            AZURE + "2023-11-16 18:15:46.68,-374,44\n",
            "a.csv:2: ContextTokens must be .* of at least 1, not -374",
        ),
        (
            "a.csv",
            AZURE + "2023-11-16 18:15:46.68,374\n",
            "a.csv:2: GeneratedTokens must be .* not None",
        ),
        ("a.csv", PAIR + "1,x\n", "a.csv:2: num_decode_tokens must be .* not 'x'"),
        (
            "a.csv",
            "words,n_questions,avg_question_words,avg_answer_words\n5,1,-2,1\n",
            "a.csv:2: avg_question_words must be a number",
        ),
        (
            "a.csv",
            "words,n_questions,avg_question_words,avg_answer_words\n5,1e9,2,1\n",
            "a.csv:2: n_questions must be a number from 1",
        ),
    ],
)
def test_a_malformed_file_is_named_with_line_and_field(tmp_path, name, text, said):
    with pytest.raises(ConfigError, match=said) as caught:
        parse(written(tmp_path / name, text))
    assert caught.value.field == "workload"


@pytest.mark.parametrize(
    "spec, said",
    [
        (
            "",
            "'' is neither a generator .poisson, gamma, constant, burst, loogle, scbench, "
            "sharegpt-o3. nor a file",
        ),
        ("poison:mix=medha-5", "did you mean poisson"),
        ("poisson", "lengths are needed"),
        ("poisson:mix=medha5", "unknown mix 'medha5'.*did you mean medha-5"),
        (
            "poisson:mx=medha-5",
            "unknown option 'mx'; known are mix, prompt, output, prefix, groups; did you mean mix",
        ),
        ("poisson:period=3,mix=medha-5", "unknown option 'period'"),
        ("poisson:mix", "'mix' is not mix=VALUE"),
        ("poisson:mix=fixed,mix=fixed", "is not mix=VALUE, given once"),
        (
            "poisson:mix=medha-5,prompt=3",
            "mix=medha-5 sets the lengths; prompt goes with mix=fixed only",
        ),
        ("poisson:mix=fixed,prompt=3", "lengths are needed"),
        ("poisson:prompt=3,output=1,groups=2", "groups goes with prefix only"),
        ("poisson:mix=medha-5,prefix=9", "prefix goes with mix=fixed only"),
        ("poisson:prompt=x3,output=1", "prompt must be a number from 1 .* not 'x3'"),
        ("poisson:prompt=0,output=1", "prompt must be a number from 1"),
        ("poisson:prompt=nan,output=1", "prompt: unknown distribution 'nan'"),
        (
            "poisson:prompt=lognormall:3:1,output=1",
            "unknown distribution 'lognormall'.*did you mean lognormal",
        ),
        ("poisson:prompt=lognormal:3,output=1", "prompt: lognormal takes 2 or 4 numbers, not 1"),
        ("poisson:prompt=lognormal:3:1:2,output=1", "lognormal takes 2 or 4 numbers, not 3"),
        ("poisson:prompt=lognormal:3:0,output=1", "prompt must be a number from 1e-06"),
        ("poisson:prompt=lognormal:30:1:20:10,output=1", "prompt: 20 to 10 is no range"),
        (
            "poisson:prompt=lognormal:3:0.1:1000:2000,output=1",
            "prompt: almost nothing of lognormal:3:0.1 lies between 1000 and 2000",
        ),
        ("poisson:prompt=3,output=uniform:5:4", "output: 5 to 4 is no range"),
        (f"burst:{FIXED},factor=0.5", "factor must be a number of at least 1, not '0.5'"),
        (f"burst:{FIXED},duty=2", "duty must be a number from 0 to 1"),
        (f"burst:{FIXED},period=0", "period must be a number"),
    ],
)
def test_a_malformed_spec_says_what_was_expected(spec, said):
    with pytest.raises(ConfigError, match=said):
        parse(spec, qps=1.0)


@pytest.mark.parametrize(
    "settings, said",
    [
        (dict(), "qps: is missing: poisson has no times of its own"),
        (dict(qps=0.0), "qps: must be above 0, not 0"),
        (dict(qps=-1.0), "qps: must be"),
        (dict(qps=float("nan")), "qps: must be"),
        (dict(qps=float("inf")), "qps: must be"),
        (dict(qps=1.0, requests=0), "requests: must be at least 1"),
        (dict(qps=1.0, seed=-1), "seed: must not be below 0"),
    ],
)
def test_settings_are_checked(settings, said):
    with pytest.raises(ConfigError, match=said):
        parse(f"poisson:{FIXED}", **settings)


def test_files_that_cannot_be_read(tmp_path):
    good = written(tmp_path / "trace.jsonl", LINE)
    with pytest.raises(
        ConfigError, match=r"there is no file .*trase.jsonl; did you mean trace.jsonl"
    ):
        parse(str(tmp_path / "trase.jsonl"))
    (tmp_path / "bad.jsonl.gz").write_bytes(b"not gzip")
    (tmp_path / "short.jsonl.gz").write_bytes(gzip.compress(LINE.encode() * 50)[:-12])
    (tmp_path / "latin.jsonl").write_bytes(b"\xff\xfe\xfd")
    (tmp_path / "folder.csv").mkdir()
    for name in ("bad.jsonl.gz", "short.jsonl.gz", "latin.jsonl", "folder.csv"):
        with pytest.raises(ConfigError, match=f"{name} cannot be read"):
            parse(str(tmp_path / name))
    for options, said in (
        ("unit=h", "unit must be ms or s"),
        ("block=0", "block must be"),
        ("blok=4", "did you mean block"),
    ):
        with pytest.raises(ConfigError, match=said):
            parse(f"{good}:{options}")


def test_arrivals_of_one_moment_have_no_rate_to_stretch(tmp_path):
    path = written(tmp_path / "t.jsonl", LINE * 3)
    assert workload_summary(parse(path))["rate"] == 0
    with pytest.raises(ConfigError, match="first 3 arrivals come at one moment"):
        parse(path, qps=1.0)


def _refused(path: Path, text: str) -> None:
    """Reads a file: it is read, or refused with a ConfigError."""
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with contextlib.suppress(ConfigError):
        parse(str(path), qps=1.0)


@pytest.mark.parametrize("name, head", [("t.jsonl", LINE), ("a.csv", AZURE), ("l.csv", PAIR)])
def test_no_text_is_answered_with_another_error(tmp_path, name, head):
    values = st.one_of(
        st.none(),
        st.integers(-5, 10**6),
        st.floats(),
        st.text(max_size=5),
        st.lists(st.integers(), max_size=3),
    )
    lines = st.one_of(
        st.text(max_size=40),
        st.fixed_dictionaries(
            dict.fromkeys(("timestamp", "input_length", "output_length", "hash_ids"), values)
        ).map(json.dumps),
        st.lists(values.map(str), max_size=4).map(",".join),
    )
    settings(max_examples=examples(60), deadline=None)(
        given(lines)(lambda line: _refused(tmp_path / name, head + line))
    )()


# --- summary


def test_a_summary_of_a_few_arrivals():
    said = workload_summary(
        [Arrival(2.0, 100, 1), Arrival(3.0, LONG, 3), Arrival(6.0, 200, 5), Arrival(6.0, 300, 7)]
    )
    assert (said["count"], said["span"], said["rate"], said["long"], said["long_limit"]) == (
        4,
        4.0,
        0.75,
        0.25,
        LONG,
    )
    assert said["output"] == dict(
        mean=4.0, p50=4.0, p90=pytest.approx(6.4), p99=pytest.approx(6.94), max=7
    )
    assert said["prompt"]["max"] == LONG
    assert json.loads(json.dumps(said)) == said


def test_a_summary_of_nothing():
    assert workload_summary([])["count"] == 0
