"""The LRU cache beside live replays, and the table of load generators."""

import json

from experiments.benchmarks.load_generators import OURS, chosen, shown
from experiments.mooncake.live_replay import Line, lines, lru_hit_rate
from jaxserve.lab.research.load import Load


def test_the_lru_cache_hits_leading_blocks_that_are_still_there():
    first = Line((1, 2, 3), 12, 1)
    follow = Line((1, 2, 3, 4), 16, 1)
    other = Line((8, 9), 8, 1)
    assert lru_hit_rate([first, follow, other], 4, 100) == 12 / 36
    assert lru_hit_rate([first, first], 4, 100) == 8 / 24  # the last token is always computed
    assert lru_hit_rate([first, other, first], 4, 4) == 8 / 32  # the last block was lost first
    assert lru_hit_rate([first, other, first], 4, 2) == 0
    assert lru_hit_rate([first, Line((7,), 2, 4 * 50), first], 4, 20) == 0  # outputs take pages


def test_a_trace_is_scaled_as_the_load_generator_scales_it(tmp_path):
    file = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 5, "input_length": 700, "output_length": 90, "hash_ids": [0, 1]},
        {"timestamp": 0, "input_length": 512, "output_length": 3, "hash_ids": [0]},
        {"timestamp": 9, "input_length": 1025, "output_length": 600, "hash_ids": [0, 1, 2]},
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    for page in (1, 8, 16, 100, 512):
        made = Load(workload=str(file), length_scale=page / 512, requests=3).schedule()
        found = list(lines(file, 3, page))
        assert [(each.prompt, each.output) for each in made] == [
            (each.prompt, each.output) for each in found
        ]
        assert [len(each.ids) for each in found] == [len(each.blocks) for each in made]


def test_ratios_are_of_rounds():
    rounds = [{OURS: {"ttft p50": 10.0}, "guidellm": {"ttft p50": each}} for each in (8, 10, 20)]
    row = shown(rounds, chosen("jaxserve,guidellm")).splitlines()[-1].split()
    assert row == ["ttft", "p50", "10.00", "10.00", "1.000", "0.50", "-", "1.25"]
