"""Asks PEFT about adapters of a tiny random model: writes `peft.npz`, the log-probabilities of
random tokens with each adapter.

    python3 -m venv V && V/bin/pip install torch==2.13.0 transformers==5.24.0 peft==0.21.2
    V/bin/python -m tests.models.oracle.peft

Weights and factors are made from seeds, so that they are not stored.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from tests.engine.adapters import write_adapter
from tests.models.oracle import FOLDER
from tests.models.oracle.cases import CASES

BASE = "granite"
FILE = FOLDER / "peft.npz"
TOKENS = 48
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapters(folder: Path, base: Path) -> dict[str, Path]:
    """Writes three adapters of different modules, ranks and factors."""
    some = dict(rank_pattern={"down_proj": 5}, alpha_pattern={"v_proj": 3})
    few = ("q_proj", "v_proj", "down_proj")
    return {
        "all": write_adapter(folder / "all", base, PROJECTIONS, rank=8, alpha=4, seed=1),
        "few": write_adapter(folder / "few", base, few, rank=2, seed=2, use_rslora=True, **some),
        "one": write_adapter(folder / "one", base, ("up_proj",), rank=3, seed=3),
    }


def main() -> None:
    import torch
    from peft import PeftModel

    from tests.models.oracle.make import load

    answers = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        load(CASES[BASE], folder / "base")
        adapters = write_adapters(folder, folder / "base")
        for seed, (name, path) in enumerate(adapters.items()):
            model = PeftModel.from_pretrained(load(CASES[BASE], folder / "base"), path).eval()
            vocab = CASES[BASE].config["vocab_size"]
            ids = np.random.default_rng(seed).integers(3, vocab, TOKENS)
            with torch.no_grad():
                logits = model(torch.tensor(ids[None]), use_cache=False).logits[0].double()
            chosen = torch.log_softmax(logits, -1)[range(TOKENS - 1), ids[1:]]
            answers[f"{name}_ids"] = ids.astype(np.int32)
            answers[f"{name}_logprobs"] = chosen.numpy().astype(np.float32)
    np.savez_compressed(FILE, **answers)


if __name__ == "__main__":
    main()
