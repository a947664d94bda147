"""Predictions of one long request alone, in closed form: meshes of H100 nodes of 8,
no scheduler, no queue."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxserve.checkpoint.model import ModelConfig
from jaxserve.costs.predictor import Predictor
from jaxserve.costs.profiles import devices
from jaxserve.lab.simulate.run import System, shape_of
from jaxserve.lanes.groups import ChunkPlace
from jaxserve.lanes.load import LaneLoad
from jaxserve.lanes.work import ITEM
from jaxserve.scheduling.budget import StepBudget
from jaxserve.settings.schema import MeshConfig

POINTS = 400  # of the context at which steps of a prefill are looked at


def prefill_flops(model: ModelConfig, tokens: float) -> float:
    """FLOP of all layers for a prompt, attention counted as causal."""
    pairs = tokens / 2 * tokens
    return model.layers * (
        2 * model.layer_weights() * tokens + 4 * model.heads * model.head_dim * pairs
    )


@dataclass(frozen=True)
class Node:
    """A model on a mesh, and what steps of one request take there."""

    model: str
    mesh: MeshConfig
    device: str = "h100"

    @property
    def shape(self) -> ModelConfig:
        return shape_of(self.model)

    @property
    def system(self) -> System:
        return System(self.shape, self.device, self.mesh)

    @property
    def predictor(self) -> Predictor:
        return Predictor(self.system.costs, self.mesh)

    def holds(self, tokens: int) -> bool:
        """Returns true if the KV of `tokens` tokens fits beside the weights."""
        return tokens <= self.system.kv_tokens() * self.mesh.kvp

    def _decodes(self, contexts: Sequence[int], spread: bool) -> list[LaneLoad]:
        count = len(contexts)
        lanes = self.mesh.kvp
        held = np.ones((count, lanes), int)
        home = np.arange(count) % lanes
        size = np.full(count, lanes if spread else 1)
        return self.predictor.lane_costs.decodes(np.array(contexts, int), home, size, held)

    def token(self, context: int) -> float:
        """Seconds per token of one request that decodes alone, its KV over all lanes."""
        lanes = self._decodes([context], spread=self.mesh.kvp > 1)
        return self.predictor.latency(self.predictor.stage(lanes), 1, samples=1)

    def paces(self, tokens: int, chunk: int, decodes: Sequence[int] = ()) -> np.ndarray:
        """Seconds in one stage of the steps of a prefill, at POINTS of them, with short decodes of
        these contexts beside it."""
        predictor = self.predictor
        steps = -(-tokens // chunk)
        held = [1] * self.mesh.kvp if self.mesh.kvp > 1 else None
        lanes = self._decodes(decodes, spread=False)
        starts = np.unique(np.linspace(0, steps - 1, min(POINTS, steps)).astype(int)) * chunk
        step = StepBudget(predictor, lanes, chunk, 1, math.inf, math.inf)
        return np.array(
            [
                step.seconds_with(ChunkPlace(0, held), start, min(chunk, tokens - start))
                for start in starts.tolist()
            ]
        )

    def first_token(self, tokens: int, chunk: int, decodes: Sequence[int] = ()) -> float:
        """Seconds of a prefill: all its steps through the first stage, the last one through the
        others too (Medha, Eq. 4)."""
        paces = self.paces(tokens, chunk, decodes)
        steps = -(-tokens // chunk)
        predictor = self.predictor
        return (
            steps * float(paces.mean())
            + predictor.latency(float(paces[-1]), chunk, samples=0)
            - float(paces[-1])
        )

    def mfu(self, tokens: int, chunk: int) -> float:
        """Model FLOP (causal attention) per second of a prefill, as a share of the peak of all
        devices."""
        flops = prefill_flops(self.shape, tokens)
        return flops / (
            self.first_token(tokens, chunk) * self.mesh.devices * devices()[self.device].flops_per_s
        )

    def mbu(self, context: int) -> float:
        """Bytes that a decode must read (the weights on every lane, the KV once) per second, as a
        share of the peak of all devices."""
        weights = ITEM * (
            self.shape.layers * self.shape.layer_weights() + self.shape.head_weights()
        )
        read = self.mesh.kvp * weights + context * self.shape.kv_bytes_per_token()
        peak = self.mesh.devices * devices()[self.device].memory_bytes_per_s
        return read / (self.token(context) * peak)
