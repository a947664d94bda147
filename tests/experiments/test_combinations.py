"""The table of settings that go together: what it has is what there is, and what it says is so."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from experiments.documentation.combinations import FEATURES, page, refusal, settings_of
from jaxserve import LLM, SamplingParams
from jaxserve.settings.options import options_of
from jaxserve.settings.schema import EngineConfig

PROMPT = np.random.default_rng(0).integers(3, 500, 200).tolist()
SMALL = dict(
    model="random:tiny",
    dtype="float32",
    max_model_len=512,
    pages=64,
    chunk_tokens=64,
    min_chunk=32,
    max_seqs=2,
    progress=False,
)
HERE = {name: one for name, one in FEATURES.items() if one.processes == 1 and name != "--kv_store"}


@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_alone_is_taken(name):
    assert refusal(FEATURES[name]) == ""


@pytest.mark.parametrize("setting", ["placement", "exchange", "decode_exchange", "planner", "role"])
def test_every_choice_has_a_row(setting):
    option = options_of(EngineConfig)[setting]
    kinds = lambda values: {re.sub(r"\d+$", "N", value) for value in values} - {option.default}
    rows = [one.sets[setting] for one in FEATURES.values() if setting in one.sets]
    assert kinds(rows) == kinds(option.choices)


@pytest.mark.parametrize(
    "one, other, said",
    [
        ("--planner=cdsp", "--exchange=gather", ""),
        ("--noprefix_caching", "--disk_cache", "--host_cache_gib: has no effect without prefix"),
        ("launch --processes=2", "--host_cache_gib", ""),
        ("launch --processes=2", "--kv_store", "--kv_store: is for a replica in one"),
        ("--mesh=tp=2", "--kv_cache_dtype=fp8", ""),
        ("--exchange=auto", "--exchange=alg1", None),
    ],
)
def test_a_pair_is_taken_or_refused_with_the_reason(one, other, said):
    found = refusal(FEATURES[one], FEATURES[other])
    assert found == said if not said else found.startswith(said)


def test_meshes_are_multiplied():
    both = settings_of(FEATURES["--mesh=tp=2"], FEATURES["--exchange=pass_q"])
    assert both == {"mesh": "spp=1,kvp=2,tp=2", "exchange": "pass_q"}


def test_the_page_has_a_row_for_every_feature_and_a_reason_for_every_letter():
    text = page()
    rows = re.findall(r"^ ?\d+ ((?:launch )?--\S+) *(.*)$", text.split("```")[1], re.MULTILINE)
    assert [name for name, _ in rows] == list(FEATURES)
    assert all(len(cells.split()) == place for place, (_, cells) in enumerate(rows))
    used = {cell for _, cells in rows for cell in cells.split()} - {"+", "."}
    assert used == set(re.findall(r"^\| (\w) \| --", text, re.MULTILINE))


@pytest.mark.matrix
@pytest.mark.parametrize("name", HERE)
def test_pairs_that_are_taken_give_the_same_tokens(name, tmp_path):
    later = itertools.dropwhile(lambda other: other != name, HERE)
    expected = generated({})
    for other in later:
        features = (HERE[name], HERE[other])
        if refusal(*features) == "":
            settings = {"profile": "none", **(settings_of(*features) or {})}
            chosen = settings.get("exchange") in ("auto", "alg1", "alg5")
            if chosen or "planner" in settings:
                settings["profile"] = "auto"
            if "host_cache_gib" in settings:
                settings["host_cache_gib"] = 0.01
            if "disk_cache" in settings:
                settings["disk_cache"] = f"{tmp_path / other}:0.01"
            assert generated(settings) == expected, (name, other)


def generated(settings: dict) -> list[int]:
    """Greedy tokens of a small model, of a prompt that several lanes share where they can."""
    with LLM(**SMALL, **settings) as llm:
        (completion,) = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=8))
        return list(completion.ids)
