"""Families equal transformers: log-probabilities and greedy tokens of tiny random models, as
`tests.models.oracle` has them, through the paged engine."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.checkpoint.model_config import from_hf, to_hf
from jaxserve.checkpoint.model_paths import CheckpointError
from jaxserve.checkpoint.page_groups import page_windows
from jaxserve.weights.checkpoint import check, open_checkpoint
from jaxserve.weights.names import tensors_of
from tests.engine.harness import Runner, assert_empty, engine
from tests.models import oracle
from tests.models.oracle.cases import CASES, stacked

CHUNKS = ((1, 2, 3), (5, 11, 32))
# where sums in another order, as on other processors, differ by more than 1e-4: measured 1.3e-4
ROUNDING = {"gemma4-small": 2e-4}
TIE = 1e-4  # experts whose ranks are nearer may change places by rounding
ALL_AXES = "spp=2,kvp=2,tp=2"
MESHES = ("", "tp=2", "tp=4", "spp=2", "kvp=2", "kvp=2,tp=2", ALL_AXES)
# each on one device, or on the mesh that its special parts need: norms over all heads and experts
# over ranks; latents, states and layers of several sizes over lanes
DEFAULT = {
    "phi3": ("",),
    "phi3-short": ("",),
    "olmo2": ("tp=2",),
    "olmo3": ("",),
    "granite": ("",),
    "smollm3": ("",),
    "gemma2": ("",),
    "gemma3": ("",),
    "gemma4": ("kvp=2,tp=2",),
    "gemma4-small": ("tp=2",),
    "gemma4-experts": ("",),
    "glm4": ("",),
    "qwen3_moe": ("tp=2",),
    "gpt_oss": ("",),
    "glm4_moe": ("",),
    "minimax_m2": ("",),
    "deepseek_v2": ("",),
    "deepseek_v3": ("kvp=2,tp=2",),
    "qwen3_next": ("kvp=2,tp=2",),
    "qwen3_5": ("",),
}
STACKED = {"gemma4-experts"}  # experts of a layer are in two tensors, as hubs have them
# two key heads of states cannot be split
REFUSED = {(name, "tp=4") for name in ("qwen3_next", "qwen3_5", "qwen3_5_moe")}
# layers with an input of their own, and those that read the pages of others
REFUSED |= {("gemma4-small", mesh) for mesh in MESHES if "spp" in mesh or "kvp" in mesh}


def write_model(folder: Path, name: str) -> Path:
    case = CASES[name]
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(case.config))
    shapes = tensors_of(from_hf(case.config))
    if name in STACKED:
        shapes = stacked(shapes)
    tensors = case.weights(shapes)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    "name, mesh",
    [
        pytest.param(name, mesh, marks=[] if mesh in DEFAULT.get(name, ()) else pytest.mark.matrix)
        for name in CASES
        for mesh in MESHES
        if (name, mesh) not in REFUSED
    ],
)
def test_tokens_and_log_probabilities_are_those_of_transformers(name, mesh, tmp_path):
    assert_equals_transformers(name, mesh, tmp_path)


@pytest.mark.parametrize(
    "name, mesh",
    [
        ("gpt_oss", "kvp=2,tp=2"),
        *(
            pytest.param(*case, marks=pytest.mark.matrix)
            for case in (("qwen3_moe", ALL_AXES), ("glm4_moe", "kvp=4"), ("mixtral", "kvp=2"))
        ),
    ],
)
def test_experts_may_be_split_over_lanes(name, mesh, tmp_path):
    assert_equals_transformers(name, mesh, tmp_path, expert_parallel=True)


@pytest.mark.parametrize(
    "name, mesh",
    [
        ("glm4_moe", "kvp=2,tp=2"),
        *(
            pytest.param(*case, marks=pytest.mark.matrix)
            for case in (
                ("gemma2", ALL_AXES),
                ("deepseek_v3", "kvp=2,tp=2"),
                ("qwen3_next", "kvp=2"),
                ("gpt_oss", "kvp=4"),
            )
        ),
    ],
)
def test_mlps_and_what_experts_share_may_be_split_over_lanes(name, mesh, tmp_path):
    assert_equals_transformers(name, mesh, tmp_path, ffn_over_lanes=True)


@pytest.mark.matrix
@pytest.mark.parametrize("exchange", ["pass_q", "pass_kv", "visit"])
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "deepseek_v3"])
def test_soft_caps_sinks_and_latents_cross_lanes_by_every_exchange(name, exchange, tmp_path):
    decodes = "gather" if exchange == "pass_kv" else exchange
    assert_equals_transformers(name, "kvp=2", tmp_path, exchange=exchange, decode_exchange=decodes)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "fp8"])
def test_latents_come_back_from_host_memory(kind, tmp_path):
    real = engine(
        write_model(tmp_path / "model", "deepseek_v3"),
        "tp=2",
        chunk=32,
        seqs=2,
        pages=16,
        block=8,
        max_len=96,
        dtype="bfloat16" if kind == "bfloat16" else "float32",
        kv_cache_dtype="fp8" if kind == "fp8" else "auto",
        host_cache_gib=0.01,
    )
    runner = Runner(real)
    prompt = oracle.load("deepseek_v3").prompt
    asked = dict(max_tokens=8, ignore_eos=True)
    first = runner.submit(prompt, **asked)
    runner.run()
    for other in range(3):
        runner.submit([other + 3] * 60, max_tokens=1)
        runner.run()
    again = runner.submit(prompt, **asked)
    runner.run()
    assert runner.ids(again) == runner.ids(first)
    assert runner.completion(again).finished.usage.cached >= 40
    assert_empty(real)


def test_latents_outlast_a_restart_on_disk(tmp_path):
    folder = write_model(tmp_path / "model", "deepseek_v3")
    prompt = oracle.load("deepseek_v3").prompt
    found = []
    for _ in range(2):
        real = engine(
            folder,
            chunk=32,
            seqs=2,
            pages=16,
            block=8,
            max_len=96,
            host_cache_gib=0.01,
            disk_cache=f"{tmp_path / 'disk'}:0.05",
        )
        runner = Runner(real)
        id = runner.submit(prompt, max_tokens=8, ignore_eos=True)
        runner.run()
        found.append((runner.ids(id), runner.completion(id).finished.usage.cached))
        counts = real.worker.lower_tiers.counts()
        real.close()
    blocks = (len(prompt) - 1) // 8
    assert found == [(found[0][0], 0), (found[0][0], blocks * 8)]
    # a prompt that waits has its blocks brought to host memory, as far as there is time
    assert counts.host_reads + counts.disk_reads == blocks


def assert_equals_transformers(name: str, mesh: str, folder: Path, **settings) -> None:
    """Greedy tokens and log-probabilities are those of transformers: for a prompt in large chunks,
    in small and random ones beside another request, and after a prefix hit."""
    answer = oracle.load(name)
    prompt, tokens = answer.prompt, answer.tokens
    assert len(set(tokens)) > 5  # a model that repeats itself would hide faults
    print(f"{name}: smallest gap between ranks of experts {answer.gap:.1e}")
    assert answer.gap > TIE  # else equal tokens are luck
    length = len(prompt) + len(tokens)
    folder = write_model(folder / "model", name)
    groups = 1 + len(page_windows(open_checkpoint(str(folder)).config))
    real = engine(
        folder,
        mesh,
        chunk=32,
        seqs=2,
        pages=48 * groups,
        block=8,
        max_len=32 if length <= 32 else 80,
        placement="random" if "kvp" in mesh else "grow",
        **settings,
    )
    runner = Runner(real)
    asked = dict(max_tokens=len(tokens), ignore_eos=True)
    id = runner.submit(prompt, **asked, logprobs=oracle.BEST, prompt_logprobs=oracle.BEST)
    runner.run()
    got = runner.completion(id)
    assert got.ids == tokens
    rows = list(got.finished.prompt_logprobs[1:]) + got.logprobs
    assert len(rows) == len(answer.best)
    for row, best, values in zip(rows, answer.best, answer.logprobs):
        by_id = dict(row.top)
        some = [(by_id[token], value) for token, value in zip(best.tolist(), values)]
        np.testing.assert_allclose(*zip(*some), atol=ROUNDING.get(name, 1e-4))
    anew = dict(bypass_prefix_cache=True)
    for sizes in CHUNKS:
        whole = runner.submit(prompt, **asked, rest=anew)
        runner.submit(prompt[: len(prompt) // 2], **asked, rest=anew)
        runner.run(chunks=sizes, seed=sum(sizes))
        assert runner.ids(whole) == tokens
    again = runner.submit(prompt, **asked)
    runner.run()
    hit = runner.completion(again)
    reused = 0 if real.worker.plan.model.has_states else (len(prompt) - 1) // 8 * 8
    assert hit.ids == tokens and hit.finished.usage.cached == reused
    assert_empty(real)


@pytest.mark.parametrize("name", CASES)
def test_the_config_of_transformers_5_says_the_same_as_that_of_hubs(name):
    model = from_hf(CASES[name].config, name="mine")
    assert from_hf(oracle.load(name).config, name="mine") == model
    assert from_hf(to_hf(model)) == model


@pytest.mark.parametrize(
    "text, head", [("model.language_model.", ""), ("language_model.model.", "language_model.")]
)
def test_the_text_part_of_a_multimodal_checkpoint_is_read(text, head, tmp_path):
    folder = write_model(tmp_path / "text", "gemma3")
    wanted = open_checkpoint(folder)
    config = CASES["gemma3"].config
    own = {key: value for key, value in config.items() if key not in ("architectures", "dtype")}
    both = tmp_path / "both"
    both.mkdir()
    multimodal = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "dtype": "float32",
        "text_config": own,
        "vision_config": {"hidden_size": 32},
    }
    (both / "config.json").write_text(json.dumps(multimodal))
    tensors = {name.replace("model.", text, 1): wanted.read(name) for name in wanted.tensors()}
    towers = dict.fromkeys(("vision_tower.x", "model.visual.y"), np.zeros(3, np.float32))
    save_file(tensors | towers, both / "model.safetensors")
    found = open_checkpoint(both, None)
    assert found.config == from_hf(config, name="both")
    check(found, found.config)
    for name in wanted.tensors():
        np.testing.assert_array_equal(found.read(name), wanted.read(name))


def test_checkpoints_of_qwen_35_hold_the_experts_of_a_layer_in_one_tensor(tmp_path):
    wanted = open_checkpoint(write_model(tmp_path / "text", "qwen3_5_moe"))
    config = CASES["qwen3_5_moe"].config
    both = tmp_path / "both"
    both.mkdir()
    multimodal = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": {key: value for key, value in config.items() if key != "architectures"},
        "vision_config": {"depth": 2},
    }
    (both / "config.json").write_text(json.dumps(multimodal))
    tensors = {name: wanted.read(name) for name in wanted.tensors()}
    for layer in range(4):
        experts = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            np.stack([tensors.pop(f"{experts}{i}.{part}_proj.weight") for i in range(16)])
            for part in ("gate", "up", "down")
        )
        tensors[experts + "gate_up_proj"] = np.concatenate([gate, up], 1)
        tensors[experts + "down_proj"] = down
    renamed = {
        name.replace("model.", "model.language_model.", 1): value for name, value in tensors.items()
    }
    others = dict.fromkeys(("model.visual.x", "mtp.norm.weight"), np.zeros(3, np.float32))
    save_file(renamed | others, both / "model.safetensors")
    found = open_checkpoint(both)
    assert found.config == from_hf(config, name="both")
    check(found, found.config)
    for name in wanted.tensors():
        np.testing.assert_array_equal(found.read(name), wanted.read(name))


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3", {"hidden_activation": "gelu"}, "hidden_activation: 'gelu'"),
        ("gemma3", {"layer_types": ["full_attention"]}, "layer_types: must be sliding"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar: must be a positive"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers: must be 0 or 1"),
        ("olmo3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("olmo3", {"rope_parameters": {"full_attention": {}}}, "nor one for each kind"),
        ("glm4_moe", {"n_group": 5}, "n_group: 16 experts are not split into 5"),
        ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok: .* from 1 to 4"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit: 5.0"),
        ("qwen3_moe", {"mlp_only_layers": "1"}, "mlp_only_layers"),
        ("deepseek_v3", {"architectures": ["DeepseekV32ForCausalLM"]}, "an indexer chooses"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method: 'greedy'"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq: 2"),
        ("qwen3_next", {"layer_types": ["linear_attention"] * 4}, "layer with full_attention"),
        ("qwen3_5", {"layer_types": ["sliding_attention"] * 4}, "layer_types: must be linear"),
        ("qwen3_5", {"linear_num_value_heads": 5}, "5 is no multiple of 2 key heads"),
        ("qwen3_5", {"attn_output_gate": False}, "attn_output_gate: false"),
        ("gemma3", {"layer_types": ["linear_attention"] * 4}, "layer_types: must be sliding"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method: 'noaux_tc'"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob: True"),
        ("glm4", {"text_config": 1}, "text_config: must be an object"),
    ],
)
def test_what_changes_the_mathematics_is_refused_by_name(name, change, message):
    with pytest.raises(CheckpointError, match=message):
        from_hf(CASES[name].config | change)


def test_configs_that_leave_out_defaults_have_those_of_transformers():
    small = {"num_hidden_layers": 7, "hidden_size": 64, "intermediate_size": 128}
    model = from_hf({"architectures": ["Gemma3ForCausalLM"], **small})
    assert (model.heads, model.kv_heads, model.head_dim, model.tied) == (8, 4, 256, True)
    assert model.windows == (4096,) * 5 + (None, 4096)
    assert [rope.theta for rope in model.ropes] == [1e4] * 5 + [1e6, 1e4]
    assert model.mixer(0).scale == 1 / 16 and not model.mixer(0).softcap
    model = from_hf({"architectures": ["Gemma2ForCausalLM"], "vocab_size": 512, **small})
    assert model.mixer(0).softcap == 50 and model.multipliers.logits_softcap == 30
    assert model.windows == (4096, None, 4096, None, 4096, None, 4096)
