"""Tiny random models of families, and what transformers says about them: `oracle.json`.

    python3 -m venv V && V/bin/pip install torch==2.13.0 transformers==5.24.0
    V/bin/python tests/models/oracle.py

writes oracle.json (with eager attention in f32, and no cache: transformers chooses the
divisors of longrope by the longest position of a call). Weights are made here from a seed, by the
names of tensors, so that only configs, tokens and log-probabilities are stored.
"""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path

import numpy as np

FILE = Path(__file__).with_name("oracle.json")
NEW = 24  # tokens
BEST = 5  # log-probabilities of each position
COMMON = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
_PHI = COMMON | {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "original_max_position_embeddings": 32,
    "partial_rotary_factor": 0.75,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0, 1.1, 1.2, 1.4, 1.6, 2.0],
        "long_factor": [1.0, 1.5, 2.5, 4.0, 6.0, 8.0],
    },
}
# config.json as hubs hold it, and the length of the prompt
CASES = {
    "phi3": (_PHI | {"sliding_window": 40}, 48),
    "phi3, within the original length": (_PHI | {"sliding_window": None}, 8),
    "olmo2": (COMMON | {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}, 48),
    "granite, tied": (
        COMMON
        | {
            "architectures": ["GraniteForCausalLM"],
            "model_type": "granite",
            "tie_word_embeddings": True,
            "embedding_multiplier": 3.0,
            "logits_scaling": 1.7,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.4,
        },
        48,
    ),
    "gemma3, tied": (
        COMMON
        | {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "num_hidden_layers": 4,
            "head_dim": 32,
            "tie_word_embeddings": True,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 2,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        48,
    ),
}


def weights(config: dict, shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Makes random tensors, f32, with which every part matters: logits of a few units, norms that
    are not one. A tied embedding is small and the last norm large: else a token is followed by
    itself for ever."""
    tied = config["tie_word_embeddings"]
    stored_norm = 0 if config["model_type"].startswith("gemma") else 1  # stored less 1
    found = {}
    for name, shape in shapes.items():
        noise = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
        if name == "model.norm.weight":
            value = stored_norm + 0.2 * noise + 12 * tied
        elif "norm" in name:
            value = stored_norm + 0.2 * noise
        elif name == "model.embed_tokens.weight":
            value = noise * (0.03 if tied else 1.0)
        elif name == "lm_head.weight":
            value = 3 * noise / shape[-1] ** 0.5
        else:
            value = 1.2 * noise / shape[-1] ** 0.5
        found[name] = value.astype(np.float32)
    return found


def _answer(config: dict, length: int) -> dict:
    """Asks transformers for greedy tokens and the best log-probabilities of every position."""
    import torch
    import transformers

    decoder = getattr(transformers, config["architectures"][0])
    given = {k: v for k, v in config.items() if k not in ("architectures", "model_type")}
    wanted = decoder.config_class(**given)
    wanted._attn_implementation = "eager"
    model = decoder(wanted).eval()
    tied = config["tie_word_embeddings"]
    shapes = {
        name: tuple(value.shape)
        for name, value in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }
    tensors = {k: torch.from_numpy(v) for k, v in weights(config, shapes).items()}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected, (missing, unexpected)
    model.tie_weights()
    prompt = np.random.default_rng(0).integers(3, config["vocab_size"], length).tolist()
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(NEW):
            logits = model(torch.tensor([ids]), use_cache=False).logits[0].double()
            ids.append(int(logits[-1].argmax()))
        logits = model(torch.tensor([ids]), use_cache=False).logits[0].double()
    logprobs = torch.log_softmax(logits, -1)[:-1]
    best, tokens = logprobs.topk(BEST)
    new = ids[length:]
    margin = float((best[length - 1 :, 0] - best[length - 1 :, 1]).min())
    print(f"{len(set(new))} distinct tokens of {NEW}, smallest margin {margin:.3f}: {new}")
    saved = {**wanted.to_diff_dict(), "architectures": config["architectures"]}
    return {
        "config": saved,
        "prompt": prompt,
        "tokens": new,
        "best": tokens.tolist(),
        "logprobs": [[round(value, 6) for value in row] for row in best.tolist()],
    }


def main() -> None:
    answers = {}
    for name, (config, length) in CASES.items():
        print(name, end=": ")
        answers[name] = _answer(config, length)
    lines = (f"{json.dumps(name)}: {json.dumps(answer)}" for name, answer in answers.items())
    FILE.write_text("{" + ",\n".join(lines) + "}\n")


if __name__ == "__main__":
    sys.exit(main())
