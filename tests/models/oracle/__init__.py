"""Tiny random models of families (`cases`), and what transformers says about them: a file NAME.npz
each, which `make` writes.

    python3 -m venv V && V/bin/pip install torch==2.13.0 transformers==5.24.0
    V/bin/python -m tests.models.oracle.make [NAME...]

Weights are made from a seed, by the names of tensors (`Case.weights`), so that only configs,
tokens and log-probabilities are stored.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent
BEST = 20  # log-probabilities of each position


@dataclass(frozen=True)
class Answer:
    """The answer of transformers. config: as it saves it. prompt, tokens: ids, and those that
    follow greedily. best, logprobs [positions, BEST]: ids and log-probabilities of what may follow
    each token but the last. gap: smallest distance between the ranks of an expert (or a group) that
    is chosen and one that is not, over all tokens and layers; infinite without experts."""

    config: dict[str, Any]
    prompt: list[int]
    tokens: list[int]
    best: np.ndarray
    logprobs: np.ndarray
    gap: float

    def save(self, name: str) -> None:
        np.savez_compressed(
            FOLDER / f"{name}.npz",
            config=json.dumps(self.config),
            prompt=self.prompt,
            tokens=self.tokens,
            best=self.best,
            logprobs=self.logprobs,
            gap=self.gap,
        )


def load(name: str) -> Answer:
    """Reads what transformers said about a case."""
    with np.load(FOLDER / f"{name}.npz") as file:
        return Answer(
            json.loads(str(file["config"])),
            file["prompt"].tolist(),
            file["tokens"].tolist(),
            file["best"],
            file["logprobs"],
            float(file["gap"]),
        )
