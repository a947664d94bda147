"""jaxserve as Tunix's rollout engine. Needs google-tunix 0.1.7, beside jaxserve's own requirements,
in the environment of JAXSERVE_TUNIX_PYTHON (or in this one)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.checkpoint.model_config import from_hf
from jaxserve.integrations.tunix_weights import hugging_face_arrays
from jaxserve.weights.names import tensors_of
from tests.text.vocabulary import tokenizer

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("JAXSERVE_TUNIX_PYTHON", sys.executable)
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,  # Tunix 0.1.7 has no other, whatever its config says
    "tie_word_embeddings": False,
    "vocab_size": 512,
    "torch_dtype": "float32",
}
# of Tunix's loader: an embedding as it is, a projection with its heads apart
MAPPING = {
    r"model\.embed\.weight": ("embedder.input_embedding", None),
    r"model\.layers\.([0-9]+)\.q\.weight": (r"layers.\1.attn.q.w", ((1, 0), (6, 2, 4))),
}


def test_parameters_get_back_their_names_and_shapes():
    random = np.random.default_rng(0)
    embed, q = random.normal(size=(5, 6)), random.normal(size=(8, 6))
    layer = {"attn": {"q": {"w": q.T.reshape(6, 2, 4)}}}
    params = {"embedder": {"input_embedding": embed}, "layers": {0: layer}}
    shapes = {"model.embed.weight": (5, 6), "model.layers.0.q.weight": (8, 6)}
    found = hugging_face_arrays(params, MAPPING, shapes)
    assert (found["model.embed.weight"] == embed).all()
    assert (found["model.layers.0.q.weight"] == q).all()
    with pytest.raises(ValueError, match=r"have no layers\.1\.attn"):
        hugging_face_arrays(params, MAPPING, {"model.layers.1.q.weight": (8, 6)})
    with pytest.raises(ValueError, match="does not know lm_head"):
        hugging_face_arrays(params, MAPPING, {"lm_head.weight": (5, 6)})


def test_a_rollout_follows_its_trainer(tmp_path):
    code = "import tunix.rl.rollout.base_rollout, tunix.models.qwen3.params"
    if subprocess.run([PYTHON, "-c", code], capture_output=True, timeout=120).returncode:
        pytest.skip(f"{PYTHON} has no Tunix (google-tunix 0.1.7): set JAXSERVE_TUNIX_PYTHON")
    text = tokenizer()
    vocab = text.vocab
    config = CONFIG | {"vocab_size": vocab, "eos_token_id": 2, "bos_token_id": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    text.save(tmp_path)
    random = np.random.default_rng(0)
    tensors = {
        name: (random.normal(size=shape) * (0.2 if len(shape) > 1 else 0.1) + (len(shape) == 1))
        for name, shape in tensors_of(from_hf(config)).items()
    }
    save_file(
        {name: value.astype(np.float32) for name, value in tensors.items()},
        tmp_path / "model.safetensors",
    )
    ran = subprocess.run(
        [PYTHON, str(ROOT / "tests/integrations/tunix_run.py"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0 and ran.stdout.endswith("the same\n"), ran.stderr[-3000:]
