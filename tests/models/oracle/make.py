"""Asks transformers about the cases: see the package."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.models.oracle import BEST, Answer
from tests.models.oracle.cases import CASES, Case

NEW = 24  # tokens


def answer(case: Case) -> Answer:
    """Asks for greedy tokens and the best log-probabilities of every position, with eager attention
    in f32 and without a cache: transformers chooses the divisors of longrope by the longest
    position of a call."""
    with tempfile.TemporaryDirectory() as folder:
        model = load(case, Path(folder))
        saved = json.loads((Path(folder) / "config.json").read_text())
    prompt = np.random.default_rng(0).integers(3, case.config["vocab_size"], case.length).tolist()
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(NEW):
            logits = model(torch.tensor([ids]), use_cache=False).logits[0].double()
            ids.append(int(logits[-1].argmax()))
        logits = model(torch.tensor([ids]), use_cache=False).logits[0].double()
    logprobs = torch.log_softmax(logits, -1)[:-1]
    best, tokens = logprobs.topk(BEST)
    new = ids[case.length :]
    margin = float((best[case.length - 1 :, 0] - best[case.length - 1 :, 1]).min())
    print(f"{len(set(new))} distinct tokens of {NEW}, smallest margin {margin:.3f}: {new}")
    saved["architectures"] = case.config["architectures"]
    return Answer(
        saved, prompt, new, tokens.numpy().astype(np.uint16), best.numpy().astype(np.float32)
    )


def load(case: Case, folder: Path) -> torch.nn.Module:
    """Loads the case's weights as a folder of the tensors that a hub would hold."""
    decoder = getattr(transformers, case.config["architectures"][0])
    given = {k: v for k, v in case.config.items() if k not in ("architectures", "model_type")}
    decoder(decoder.config_class(**given)).save_pretrained(folder)
    file = folder / "model.safetensors"
    shapes = {name: tuple(value.shape) for name, value in load_file(file).items()}
    tensors = {k: torch.from_numpy(v) for k, v in case.weights(shapes).items()}
    save_file(tensors, file, {"format": "pt"})
    model, loading = decoder.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    assert not any(loading.values()), loading
    return model.eval()


def main() -> None:
    for name in sys.argv[1:] or CASES:
        print(name, end=": ", flush=True)
        answer(CASES[name]).save(name)


if __name__ == "__main__":
    main()
