"""Adapters as PEFT saves them, of random factors, and checkpoints that have them merged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

FILE = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


def write_adapter(
    folder: Path,
    base: Path,
    ends: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj"),
    *,
    rank: int = 4,
    alpha: float = 8,
    seed: int = 0,
    **config: Any,
) -> Path:
    """Writes an adapter of all modules of a base model whose names end so. config: further fields
    of its config."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(seed)
    factors = {}
    ranks = config.get("rank_pattern", {})
    for name, weight in sorted(load_file(base / "model.safetensors").items()):
        module = name.removesuffix(".weight")
        if not (module.endswith(ends) and name.endswith(".weight")):
            continue
        own = next((r for end, r in ranks.items() if module.endswith(end)), rank)
        outputs, inputs = weight.shape
        stem = f"base_model.model.{module}"
        factors[f"{stem}.lora_A.weight"] = _normal(random, own, inputs, inputs**-0.5)
        factors[f"{stem}.lora_B.weight"] = _normal(random, outputs, own, weight.std() / 2)
    assert factors, f"no module ends in {ends}"
    save_file(factors, folder / FILE)
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "target_modules": list(ends),
        "r": rank,
        "lora_alpha": alpha,
        "bias": "none",
        **config,
    }
    (folder / CONFIG).write_text(json.dumps(fields))
    return folder


def _normal(random: np.random.Generator, rows: int, columns: int, scale: float) -> np.ndarray:
    return (random.normal(size=(rows, columns)) * scale).astype(np.float32)


def merge(folder: Path, base: Path, adapter: Path) -> Path:
    """Writes a checkpoint: a base model with the changes of an adapter added to its weights."""
    shutil.copytree(base, folder)
    weights = dict(load_file(base / "model.safetensors"))
    factors = load_file(adapter / FILE)
    config = json.loads((adapter / CONFIG).read_text())
    for name, a in factors.items():
        if ".lora_A." in name:
            stem = name.removesuffix(".lora_A.weight")
            b = factors[f"{stem}.lora_B.weight"]
            rank, alpha = a.shape[0], config["lora_alpha"]
            for end, value in config.get("alpha_pattern", {}).items():
                alpha = value if stem.endswith(end) else alpha
            scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
            weights[f"{stem.removeprefix('base_model.model.')}.weight"] += scale * (b @ a)
    save_file(weights, folder / "model.safetensors")
    return folder
