"""Model shapes and the descriptions they come from."""

import dataclasses
import math

import numpy as np
import pytest

from jaxserve.checkpoint.gguf_config import ROPE_FREQS, from_gguf
from jaxserve.checkpoint.model import ModelConfig, layers_of
from jaxserve.checkpoint.model_config import from_hf, to_hf
from jaxserve.checkpoint.model_paths import CheckpointError
from jaxserve.checkpoint.rope import Rope, RopeScaling
from jaxserve.checkpoint.specs import AttentionSpec, NormSpec
from jaxserve.checkpoint.zoo import MODELS
from jaxserve.settings.schema import ConfigError

PUBLISHED = {
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "qwen2-0.5b": 494_032_768,
    "qwen2-1.5b": 1_543_714_304,
    "qwen2-7b": 7_615_616_512,
    "qwen2-72b": 72_706_203_648,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "phi4": 14_659_507_200,
    "olmo2-7b": 7_298_617_344,
    "olmo2-13b": 13_716_198_400,
    "granite3.1-8b": 8_170_848_256,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-next-80b-a3b": 79_674_391_296,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "eos_token_id": [2, 3],
    "bos_token_id": 1,
}
SMALL = ModelConfig(
    "mine",
    layers=2,
    d_model=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    d_ff=128,
    vocab=512,
    max_len=4096,
)
GGUF = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.embedding_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.feed_forward_length": 128,
    "llama.vocab_size": 512,
    "llama.context_length": 4096,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.eos_token_id": 2,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_named_shapes_have_the_published_number_of_parameters(name):
    assert MODELS[name].parameters == PUBLISHED[name]


@pytest.mark.parametrize("name", MODELS)
def test_a_named_shape_survives_config_json(name):
    assert MODELS[name].name == name
    assert from_hf(to_hf(MODELS[name])) == MODELS[name]


def test_llama31_8b_keeps_128_kib_of_kv_per_token_in_bf16():
    assert MODELS["llama3.1-8b"].kv_bytes_per_token(2) == 128 * 1024


def test_ranks_split_or_repeat_kv_heads():
    model = MODELS["llama3-8b"]
    assert [model.with_tp(tp).kv_heads for tp in (1, 2, 8, 16, 32)] == [8, 8, 8, 16, 32]
    assert MODELS["smollm2-135m"].with_tp(3) == MODELS["smollm2-135m"]


@pytest.mark.parametrize(
    "name, tp, works",
    [
        ("smollm2-135m", 2, "1, 3"),
        ("smollm2-135m", 9, "1, 3"),
        ("qwen2-0.5b", 4, "1, 2"),
        ("llama3-8b", 3, "1, 2, 4, 8, 16, 32"),
        ("llama3-8b", 64, "1, 2, 4, 8, 16, 32"),
    ],
)
def test_a_degree_that_cannot_work_is_refused_with_those_that_can(name, tp, works):
    with pytest.raises(ConfigError, match=f"tp={tp} cannot split.*these can: {works}$") as error:
        MODELS[name].with_tp(tp)
    assert error.value.field == "mesh"


def test_stages_take_contiguous_layers_of_nearly_equal_number():
    model = MODELS["smollm2-135m"]
    for spp in range(1, model.layers + 1):
        stages = layers_of(model, spp)
        assert [i for stage in stages for i in stage] == list(range(model.layers))
        assert max(map(len, stages)) - min(map(len, stages)) <= 1
    with pytest.raises(ConfigError, match="spp=31"):
        layers_of(model, 31)


def test_config_json_fields_are_read():
    model = from_hf(LLAMA, {"eos_token_id": [3, 4]}, name="mine")
    assert model == dataclasses.replace(
        SMALL, norms=NormSpec(eps=1e-6), eos_ids=(3, 4, 2), bos_id=1
    )
    assert from_hf(LLAMA | {"tie_word_embeddings": True, "head_dim": 32}).head_dim == 32
    assert from_hf({k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}).kv_heads == 4


@pytest.mark.parametrize(
    "given, expected",
    [
        ({"rope_theta": 5e5}, Rope(5e5)),
        (
            {"rope_scaling": {"type": "linear", "factor": 4.0}},
            Rope(1e4, RopeScaling("linear", 4.0)),
        ),
        ({"rope_scaling": {"rope_type": "default"}}, Rope(1e4)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 2e4}}, Rope(2e4)),
        (
            {
                "rope_theta": 5e5,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                },
            },
            MODELS["llama3.1-8b"].ropes[0],
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e6,
                    "factor": 4.0,
                    "original_max_position_embeddings": 1024,
                    "mscale": 0.7,
                    "mscale_all_dim": 1.0,
                    "beta_fast": 16,
                    "truncate": False,
                }
            },
            Rope(
                1e6,
                RopeScaling(
                    "yarn",
                    4.0,
                    1024,
                    beta_fast=16.0,
                    mscale=0.7,
                    mscale_all_dim=1.0,
                    truncate=False,
                ),
            ),
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "attention_factor": 1.1}},
            Rope(1e4, RopeScaling("yarn", 2.0, 4096, attention_factor=1.1)),
        ),
    ],
)
def test_rope_scaling_is_read_in_old_and_new_form(given, expected):
    model = from_hf(LLAMA | given)
    assert model.ropes == (expected,)


def test_yarn_may_state_the_length_before_scaling():
    assert (
        from_hf(
            LLAMA
            | {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 4096,
                }
            }
        ).max_len
        == 16384
    )
    assert (
        from_hf(
            LLAMA
            | {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 1024,
                }
            }
        ).max_len
        == 4096
    )


def test_families_differ_in_biases_norms_and_windows():
    def read(architecture, **more):
        return from_hf(LLAMA | {"architectures": [architecture], "head_dim": 16} | more)

    assert not read("LlamaForCausalLM", sliding_window=64).has_windows
    assert read("MistralForCausalLM").windows == (4096,)  # what transformers assumes
    assert not read("MistralForCausalLM", sliding_window=None).has_windows
    assert read("Qwen2ForCausalLM").mixers == (AttentionSpec(qkv_bias=True),)
    assert read("Qwen3ForCausalLM").mixers == (AttentionSpec(qk_norm="head"),)
    assert not read("Qwen2ForCausalLM", sliding_window=64, use_sliding_window=False).has_windows
    assert not read("Qwen2ForCausalLM", sliding_window=None, use_sliding_window=True).has_windows
    assert read("Phi3ForCausalLM", sliding_window=64).windows == (64,)
    assert not read("Phi3ForCausalLM", sliding_window=2**20).has_windows  # longer than any sequence
    partly = read(
        "Qwen2ForCausalLM", sliding_window=64, use_sliding_window=True, max_window_layers=1
    )
    assert partly.windows == (None, 64)
    typed = read(
        "Qwen3ForCausalLM",
        sliding_window=64,
        use_sliding_window=True,
        layer_types=["sliding_attention", "full_attention"],
    )
    assert typed.windows == (64, None)
    assert from_hf(to_hf(dataclasses.replace(partly))) == partly


@pytest.mark.parametrize(
    "change, message",
    [
        ({"architectures": ["PhiForCausalLM"]}, "architecture 'PhiForCausalLM' is not supported"),
        (
            {"architectures": None, "auto_map": {"AutoModelForCausalLM": "modeling_evil.Model"}},
            "auto_map is never run",
        ),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: must be a whole number"),
        ({"num_hidden_layers": 2**30}, "num_hidden_layers"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"vocab_size": True}, "vocab_size"),
        ({"vocab_size": None}, "vocab_size: is missing"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"num_attention_heads": 3}, "not a multiple of"),
        ({"head_dim": 15}, "is odd"),
        ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "'ntk' is not one of"),
        ({"rope_scaling": {"type": "linear"}}, "factor: is missing"),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8,
                }
            },
            "not below high_freq_factor",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "not one set of parameters",
        ),
    ],
)
def test_what_the_decoder_lacks_is_refused_by_name(change, message):
    with pytest.raises(CheckpointError, match=message):
        from_hf(LLAMA | change)


@pytest.mark.parametrize(
    "named",
    [
        {"architectures": ["LlamaModel"]},
        {"architectures": ["SomeForClassification", "LlamaForCausalLM"]},
        {"architectures": None, "model_type": "llama"},
        {"architectures": [], "model_type": "llama"},
    ],
)
def test_a_family_is_known_by_its_body_among_others_and_by_its_type(named):
    assert from_hf(LLAMA | named) == from_hf(LLAMA)


def test_gguf_fields_are_read():
    model = from_gguf(
        GGUF | {"llama.rope.freq_base": 1e5, "tokenizer.ggml.eot_token_id": 5}, (), name="mine"
    )
    wanted = dataclasses.replace(SMALL, ropes=(Rope(1e5),), tied=True, eos_ids=(2, 5))
    assert dataclasses.replace(model, gguf=False) == wanted
    assert not from_gguf(GGUF, ("output.weight",)).tied
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 1024}
    scaled = {f"llama.rope.scaling.{key}": value for key, value in scaling.items()}
    found = from_gguf(GGUF | scaled, ()).ropes[0].frequencies(16, 4096)
    wanted = Rope(scaling=RopeScaling("yarn", 4.0, 1024)).frequencies(16, 4096)
    np.testing.assert_array_equal(found[0], wanted[0])
    assert found[1] == pytest.approx(wanted[1])
    qwen = {
        key.replace("llama", "qwen2"): "qwen2" if value == "llama" else value
        for key, value in GGUF.items()
    }
    assert from_gguf(qwen, ()).mixer(0).qkv_bias


def test_llama3_scaling_is_found_in_the_frequency_factors_of_a_gguf():
    def factors(model):
        rope = model.ropes[0]
        for i in range(0, model.head_dim, 2):  # as llama.cpp's converter computes them
            wave = 2 * math.pi * rope.theta ** (i / model.head_dim)
            smooth = (8192 / wave - 1) / (4 - 1)
            factor = rope.scaling.factor
            yield (
                1.0
                if wave < 8192 / 4
                else factor
                if wave > 8192 / 1
                else 1 / ((1 - smooth) / factor + smooth)
            )

    for name in ("llama3.1-8b", "llama3.2-1b"):
        model = MODELS[name]
        fields = GGUF | {
            "llama.rope.freq_base": model.ropes[0].theta,
            "llama.attention.key_length": model.head_dim,
            "llama.attention.value_length": model.head_dim,
        }
        found = from_gguf(fields, (), factors={ROPE_FREQS: list(factors(model))})
        assert found.ropes == model.ropes
        with pytest.raises(CheckpointError, match="rope_freqs"):
            from_gguf(fields, (), factors={ROPE_FREQS: [2.0] * (model.head_dim // 2)})


@pytest.mark.parametrize(
    "change, message",
    [
        ({"general.architecture": "mamba"}, "'mamba' is not one of llama, qwen2, qwen3"),
        ({"llama.expert_count": 8, "llama.expert_used_count": 9}, "llama.expert_used_count: must"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count: 0.5 is not supported"),
        ({"llama.attention.value_length": 8}, "value_length: 8 differs from the head size 16"),
        ({"llama.rope.dimension_sections": np.array([8, 4, 4, 0])}, "rope.dimension_sections: .*8"),
        ({"llama.attention.head_count_kv": np.array([2, 1])}, "head_count_kv: must be a whole"),
        ({"llama.nextn_predict_layers": 2}, "nextn_predict_layers: must be .* from 0 to 1"),
        ({"llama.block_count": None}, "block_count: is missing"),
        ({"llama.rope.scaling.type": "longrope"}, "'longrope' is not one of"),
    ],
)
def test_gguf_models_that_the_decoder_lacks_are_refused(change, message):
    with pytest.raises(CheckpointError, match=message):
        from_gguf(GGUF | change, ())
