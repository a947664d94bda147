"""The shipped costs beside facts that can be checked by hand: data sheets, published tables, sums
on paper; and their fit."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

from experiments.medha.closed import prefill_flops
from jaxserve.checkpoint.model import ModelConfig
from jaxserve.checkpoint.specs import ExpertsSpec, LatentAttentionSpec, MlpSpec
from jaxserve.checkpoint.zoo import MODELS
from jaxserve.costs.coefficients import Costs
from jaxserve.costs.predictor import Predictor
from jaxserve.costs.profiles import FILE, costs, devices, profiles
from jaxserve.lanes.load import LaneLoad
from jaxserve.settings.schema import ConfigError, MeshConfig

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("JAXSERVE_DATA", ROOT.parent / "shared" / "data"))
ROWS = pytest.mark.parametrize(
    "row", profiles(), ids=lambda row: f"{row.device}-{row.model}-{row.tp}"
)
SMALL = MODELS["llama3-8b"]
LARGE = MODELS["llama3-70b"]
MILLION = 10**6


def time_to_first_token(shape: ModelConfig, mesh: MeshConfig, tokens: int, chunk: int) -> float:
    """On H100: the first stage's steps one after the other, then the last chunk through the other
    stages (Medha, Eq. 4)."""
    predictor = Predictor(costs("h100", shape, mesh.tp), mesh)
    last = predictor.prefill(tokens - chunk, tokens, chunk)
    hop = predictor.costs.hop + predictor.costs.hop_token * chunk
    return predictor.prefill(0, tokens, chunk) + (mesh.spp - 1) * (last + hop)


# --- the table


def test_each_device_has_both_models_at_four_degrees():
    found = [(row.device, row.model, row.tp) for row in profiles()]
    assert sorted(found) == sorted(
        (d, m, tp)
        for d in ("a100", "h100", "h200")
        for m in ("llama3-8b", "llama3-70b")
        for tp in (1, 2, 4, 8)
    )
    assert all(
        row.dtype == "bfloat16" and row.source and row.costs.layers == MODELS[row.model].layers
        for row in profiles()
    )


@pytest.mark.parametrize("name", sorted({row.model for row in profiles()}))
def test_weights_are_nearly_all_in_matrices(name):
    assert MODELS[name].weight_bytes() == pytest.approx(2 * MODELS[name].parameters, rel=1e-3)


@ROWS
def test_predictions_grow_with_tokens_and_with_context(row):
    c = row.costs
    tokens = [2**i for i in range(20)]
    for seconds in (
        c.linear,
        lambda n: c.attend_chunk(0, n),
        lambda n: c.attend_chunk(n, 512),
        lambda n: c.attend_decodes(8, n),
        lambda n: c.attend_decodes(n, 2**20),
        lambda n: Predictor(c, MeshConfig()).prefill(0, n, 2048),
    ):
        assert (np.diff([seconds(n) for n in tokens]) > 0).all()


def test_a_step_of_few_tokens_reads_few_experts():
    shape = MODELS["qwen3-30b-a3b"]
    found = costs("h100", shape, 1)
    everything = dataclasses.replace(found, active_experts=1.0)
    assert found.linear(1) < everything.linear(1) / 5
    assert found.linear(2**14) == everything.linear(2**14)
    read = 1 - (1 - 8 / 128) ** 16
    assert found.linear(16) == pytest.approx(
        found.linear_floor + read * found.expert_floor, rel=0.05
    )


def test_only_layers_that_attend_cost_more_with_context_and_states_cost_each_sequence_the_same():
    hybrid = MODELS["qwen3-next-80b-a3b"]
    attends = dataclasses.replace(hybrid, mixers=hybrid.mixers[3:4])
    found, whole = (costs("h100", model, 1) for model in (hybrid, attends))
    assert found.decode_kv == pytest.approx(whole.decode_kv / 4)
    assert found.pair == pytest.approx(whole.pair / 4)
    states = 2 * hybrid.state_bytes() / hybrid.layers / devices()["h100"].decode_bytes_per_s
    assert found.decode_seq == pytest.approx(whole.decode_seq / 4 + states)


DEEPSEEK_V3 = dataclasses.replace(
    SMALL,
    name="deepseek-v3",
    layers=61,
    d_model=7168,
    heads=128,
    kv_heads=1,
    head_dim=64,
    d_ff=18432,
    vocab=129280,
    mixers=(LatentAttentionSpec(q_rank=1536, kv_rank=512, plain=128, value=128, scale=0.1),),
    mlps=(*[MlpSpec()] * 3, *[ExpertsSpec(256, 8, 2048, shared=2048)] * 58),
)


def test_latents_cost_what_their_heads_multiply():
    """DeepSeek V3: a query head multiplies 576 numbers of a latent for its score and adds 512 of
    them, 2,176 FLOP; a latent takes 1,152 bytes on each rank, whatever their number."""
    assert DEEPSEEK_V3.parameters == pytest.approx(671e9, rel=0.01)
    assert DEEPSEEK_V3.kv_bytes_per_token() == 61 * 1152
    device = devices()["h100"]
    all_heads, eighth = (device.costs(DEEPSEEK_V3, tp) for tp in (1, 8))
    assert all_heads.pair == pytest.approx(128 * 2176 / device.attention_flops_per_s)
    assert eighth.pair == pytest.approx(all_heads.pair / 8)
    assert eighth.read == pytest.approx(1152 / device.read_bytes_per_s)
    # decodes: 128 heads of a rank take longer to multiply than the memory to read; 16 do not
    assert all_heads.decode_kv == pytest.approx(all_heads.pair)
    assert eighth.decode_kv == pytest.approx(1152 / device.decode_bytes_per_s)
    # lanes send queries of 576 numbers and get results of 512 with a log-sum-exp, in f32
    sent = 2 * (16 * 576 + 576) + 4 * 16 * 513
    assert eighth.kvp_token == pytest.approx(sent / device.node.bytes_per_s)


def test_a_decode_of_deepseek_v3_reads_the_weights_that_its_tokens_use():
    """By hand, for a rank of eight: 58 layers of 32 experts of 44 M weights, of which n tokens
    use 1 - (1 - 8/256)^n, beside what all tokens use."""
    device = devices()["h100"]
    found = device.costs(DEEPSEEK_V3, 8)
    experts = 2 * 58 * 32 * 3 * 7168 * 2048 / 61
    for tokens, used in ((1, 1 / 32), (16, 0.398), (64, 0.869)):
        assert 1 - (1 - found.active_experts) ** tokens == pytest.approx(used, abs=1e-3)
        read = found.linear_floor + used * experts / device.weight_bytes_per_s
        seconds = found.linear(tokens) - found.tp - found.tp_token * tokens
        assert seconds == pytest.approx(read, rel=0.05)


@ROWS
def test_errors_of_the_parts_are_small(row):
    limits = {"linear": 0.05, "prefill attention": 0.16, "decode attention": 0.18, "head": 0.13}
    for part, limit in limits.items():
        assert row.error[part] < limit and row.error[f"{part} held out"] < limit, part


@ROWS
def test_nothing_is_faster_than_the_data_sheet(row):
    device = devices()[row.device]
    shape = MODELS[row.model]
    heads, kv_heads = shape.rank_heads(row.tp)
    weights = shape.layer_weights(row.tp)
    assert row.costs.linear_floor > 2 * weights / device.memory_bytes_per_s
    assert row.costs.linear_token > 2 * weights / device.flops_per_s
    assert row.costs.pair > 4 * heads * 128 / device.flops_per_s
    assert row.costs.decode_kv > 4 * kv_heads * 128 / device.memory_bytes_per_s
    assert row.costs.head > 2 * shape.head_weights(row.tp) / device.memory_bytes_per_s


@pytest.mark.parametrize("device", list(devices()))
def test_what_a_device_reaches_of_its_data_sheet(device):
    row = devices()[device]
    assert 0.6 < row.product_flops_per_s / row.flops_per_s < 0.8
    assert 0.6 < row.attention_flops_per_s / row.flops_per_s < 0.7
    assert 0.75 < row.weight_bytes_per_s / row.memory_bytes_per_s < 0.85
    assert 0.75 < row.decode_bytes_per_s / row.memory_bytes_per_s < 0.95


# --- models that were not measured


@ROWS
def test_costs_computed_from_the_device_agree_with_those_of_the_model(row):
    computed = devices()[row.device].costs(MODELS[row.model], row.tp)
    for tokens in (1, 16, 64, 256, 1024, 4096, 16384, 32768):
        assert computed.linear(tokens) == pytest.approx(row.costs.linear(tokens), rel=0.1)
    for cached, new in ((0, 2048), (0, 16384), (2**20, 2048), (2**20, 64)):
        assert computed.attend_chunk(cached, new) == pytest.approx(
            row.costs.attend_chunk(cached, new), rel=0.16
        )
    for count, context in ((1, 2**17), (32, 2**17), (256, 2**17), (1, 2**20)):
        assert computed.attend_decodes(count, context) == pytest.approx(
            row.costs.attend_decodes(count, context), rel=0.16
        )


def test_a_measured_shape_gives_its_row_and_another_one_is_computed():
    row = next(
        row for row in profiles() if (row.device, row.model, row.tp) == ("h100", "llama3-70b", 4)
    )
    assert costs("h100", MODELS["llama3.1-70b"], 4) is row.costs
    qwen = MODELS["qwen3-32b"]
    assert costs("h100", qwen, 4) == devices()["h100"].costs(qwen, 4)
    # 3 ranks send as 4
    assert costs("h100", SMALL, 3).tp == pytest.approx(costs("h100", SMALL, 4).tp, rel=1e-4)


def test_sixteen_ranks_hold_a_kv_head_each():
    assert LARGE.rank_heads(16) == (4, 1) and LARGE.rank_heads(8) == (8, 1)


@pytest.mark.parametrize(
    ("device", "tp", "message"),
    [
        ("b200", 1, "device: 'b200' is not one of a100, h100, h200"),
        ("h100", 16, "mesh: tp=16: sums over more than 8 ranks were not measured on h100"),
        ("h100", 0, "mesh: tp=0 cannot split 32 heads"),
        ("h100", 64, "mesh: tp=64 cannot split 32 heads"),
    ],
)
def test_what_does_not_exist_is_named(device, tp, message):
    with pytest.raises(ConfigError, match=message):
        costs(device, SMALL, tp)


# --- published figures


@pytest.mark.parametrize(
    ("thousands", "seconds"),
    [(4, 0.28), (8, 0.57), (16, 1.29), (32, 3.22), (64, 9.05), (128, 29.20)],
)
def test_prefill_of_8b_on_one_a100_is_as_in_tetris_table_1(thousands, seconds):
    tokens = thousands * 1024
    assert Predictor(costs("a100", SMALL, 1), MeshConfig()).prefill(
        0, tokens, tokens
    ) == pytest.approx(seconds, rel=0.15)


def test_70b_prefills_a_million_tokens_on_128_h100_at_50_to_60_percent_of_the_peak():
    """Medha: causal FLOPs of a million tokens are 1.45e18, which 128 devices at 989e12 would do in
    11.4 s."""
    assert prefill_flops(LARGE, MILLION) == pytest.approx(1.45e18, rel=0.01)
    seconds = time_to_first_token(LARGE, MeshConfig(spp=16, tp=8), MILLION, 4096)
    assert 0.5 < 1.45e18 / 128 / 989e12 / seconds < 0.6


def test_8b_prefills_a_million_tokens_on_128_h100_in_less_than_15_seconds():
    """Medha, Fig. 8, measured; its ideal is 4 to 5 s."""
    assert 2.2 < time_to_first_token(SMALL, MeshConfig(spp=16, tp=8), MILLION, 4096) < 15


def test_chunks_of_32_tokens_cost_the_reading_of_the_weights_again_and_again():
    """31,250 reads of an eighth of 14 GB at 3.35 TB/s take 16 s at least, beside at least 35 s at
    peak FLOP/s."""
    mesh = MeshConfig(tp=8)
    fine, coarse = (time_to_first_token(SMALL, mesh, MILLION, chunk) for chunk in (32, 4096))
    assert coarse > 35 and fine - coarse > 16


def test_lanes_shorten_a_decode_by_the_share_of_attention():
    """Medha's 1.7x of four lanes at 4M tokens and 2.5x at 10M are attention shares of 55 % and 80
    %; 80 % gives -40 % for two lanes."""
    for share, lanes, faster in ((0.55, 4, 1.70), (0.8, 4, 2.5), (0.8, 2, 1 / 0.6)):
        made = Costs(layers=1, linear_floor=1 - share, decode_kv=share / MILLION)

        def seconds(lanes: int, made: Costs = made) -> float:
            return Predictor(made, MeshConfig(kvp=lanes)).stage(
                [LaneLoad(decodes=1, context=MILLION / lanes)] * lanes
            )

        assert seconds(1) / seconds(lanes) == pytest.approx(faster, rel=0.01)


def test_two_lanes_give_about_30_tokens_per_second_at_ten_million_tokens():
    """Medha: 8B, 4 stages of 8 H100 each per lane, 40 % less than with one lane."""

    def seconds(lanes: int) -> float:
        predictor = Predictor(costs("h100", SMALL, 8), MeshConfig(spp=4, kvp=lanes, tp=8))
        lane = LaneLoad(decodes=1, context=10 * MILLION / lanes, spread=int(lanes > 1), samples=1)
        return predictor.latency(predictor.stage([lane] * lanes), 1, samples=1)

    assert 1 / seconds(2) == pytest.approx(30, rel=0.1)
    assert seconds(2) / seconds(1) == pytest.approx(0.6, abs=0.06)


def test_what_one_dgx_h100_can_do_with_8b_is_as_in_medha_figure_2():
    """30 s to the first token: 9.3 devices for 1M tokens and about 36 for 2M. Memory: 4M tokens are
    524 GB of 680; 70B, 1M: 328 GB."""
    peak = devices()["h100"].flops_per_s
    assert prefill_flops(SMALL, MILLION) / peak / 30 == pytest.approx(9.3, abs=0.1)
    assert prefill_flops(SMALL, 2 * MILLION) / peak / 30 == pytest.approx(36, abs=0.5)
    free = 8 * devices()["h100"].memory_bytes - SMALL.weight_bytes()
    assert 4 * MILLION < free / SMALL.kv_bytes_per_token() < 6 * MILLION
    assert LARGE.kv_bytes_per_token() * MILLION == 327_680_000_000


# Seconds of NCCL's sum of 32 MiB over 2, 4 and 8 devices of one node, by Vidur's measurements
# (github.com/microsoft/vidur, data/profiling/network/*_dgx/all_reduce.csv, medians), which no
# coefficient is fitted to.
VIDUR_SUMS = {
    "a100": {2: 2.47e-4, 4: 3.19e-4, 8: 4.11e-4},
    "h100": {2: 1.36e-4, 4: 1.67e-4, 8: 1.96e-4},
}


@pytest.mark.parametrize("device", VIDUR_SUMS)
def test_sums_over_ranks_take_what_another_source_measured(device):
    """Twice as long, or half, would be sizes counted in another unit."""
    for ranks, seconds in VIDUR_SUMS[device].items():
        ratio = devices()[device].ranks[ranks](32 * 2**20) / seconds
        assert 0.7 < ratio < 1.05, (ranks, ratio)


def test_the_tables_of_sums_count_elements(tmp_path):
    """The size of a sum is that of its elements, of two bytes."""
    from experiments.profiles.aiconfigurator import ENGINES, NCCL, all_reduces

    folder = tmp_path / "aiconfigurator" / "h100_sxm"
    folder.mkdir(parents=True)
    sizes = {"num_gpus": [8, 8, 4], "message_size": [2**20, 2**24, 2**20]}
    nccl = {**sizes, "nccl_dtype": "half", "op_name": "all_reduce", "latency": [0.04, 0.2, 9.0]}
    own = {**sizes, "backend": "sglang_graph", "latency": [0.02, 0.3, 9.0]}
    sglang = f"comm__sglang__{ENGINES['h100']['sglang']}__custom_allreduce_perf"
    for name, table in ((f"comm__nccl__{NCCL['h100']}__nccl_perf", nccl), (sglang, own)):
        pandas.DataFrame(table).to_parquet(folder / f"{name}.parquet")
    size, seconds = all_reduces(tmp_path, "h100", 8)
    assert size.tolist() == [2 * 2**20, 2 * 2**24]
    assert seconds == pytest.approx([2e-5, 2e-4])


# --- the fit


def fit(*flags: str, **environ: str) -> subprocess.CompletedProcess:
    environment = {
        key: value for key, value in os.environ.items() if key != "JAXSERVE_DATA"
    } | environ
    command = [sys.executable, "-m", "experiments.profiles.fit", *flags]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_the_fit_says_what_is_missing(tmp_path):
    done = fit()
    assert done.returncode == 2 and "data: give the folder" in done.stderr
    done = fit(f"--data={tmp_path}")
    assert done.returncode == 2 and f"{tmp_path}" in done.stderr and "is missing" in done.stderr


def test_a_smooth_maximum_that_is_known_is_found():
    from experiments.profiles.least_squares import fit_smooth_max, held_out, smooth_max_form

    tokens = np.arange(1.0, 4096.0, 16)
    one = np.ones_like(tokens)
    none = np.zeros_like(tokens)
    x = np.stack([one, none, one, tokens], 1)
    truth = np.array([3e-4, 0, 1.5e-4, 2e-6])
    seconds = smooth_max_form(truth, x)
    assert fit_smooth_max(x, seconds)[[0, 2, 3]] == pytest.approx(truth[[0, 2, 3]], rel=1e-3)
    assert held_out(fit_smooth_max, smooth_max_form, x, seconds) < 1e-3


@pytest.mark.parametrize("power", (1.5, 3.0, math.inf))
def test_the_power_of_a_norm_that_is_known_has_the_least_error_held_out(power):
    from experiments.profiles.exponents import POWERS, errors
    from experiments.profiles.least_squares import smooth_max_form

    tokens = np.arange(1.0, 4096.0, 32)
    one = np.ones_like(tokens)
    x = np.stack([one, np.zeros_like(tokens), one, tokens], 1)
    seconds = smooth_max_form(np.array([3e-4, 0, 5e-5, 2e-7]), x, power)
    found = dict(zip(POWERS, errors(smooth_max_form, x, seconds)))
    assert min(found, key=found.get) == power and found[power] < 1e-3


@pytest.mark.skipif(
    not (DATA / "vidur").exists(),
    reason="the measurements are not here; JAXSERVE_DATA names their folder",
)
def test_the_fit_gives_the_shipped_table(tmp_path):
    done = fit(f"--data={DATA}", f"--out={tmp_path / 'profiles.json'}")
    assert done.returncode == 0, done.stderr
    found, shipped = (
        numbers(json.loads(path.read_text())) for path in (tmp_path / "profiles.json", FILE)
    )
    assert found == pytest.approx(shipped, rel=0.01)


def numbers(value: Any, at: str = "") -> dict[str, float]:
    """Every number of a table, by its place."""
    if isinstance(value, (dict, list)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {
            key: number
            for name, inner in items
            for key, number in numbers(inner, f"{at}/{name}").items()
        }
    return {at: value} if isinstance(value, (int, float)) else {}
