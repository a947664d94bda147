"""Measurements of a layer on one rank, part by part, as matrices for the fits; which table
each part of each device comes from."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.profiles import aiconfigurator, vidur
from experiments.profiles.least_squares import (
    Fit,
    Form,
    fit_smooth_max,
    fit_total,
    held_out,
    mape,
    smooth_max_form,
    total,
)
from jaxserve.checkpoint.model import ModelConfig
from jaxserve.checkpoint.zoo import MODELS
from jaxserve.costs.profiles import elementwise_bytes
from jaxserve.lanes.work import ITEM

LLAMA = {
    "llama3-8b": MODELS["llama3-8b"],
    "llama3-70b": MODELS["llama3-70b"],
}
VIDUR = {"llama3-8b": "a100__Meta-Llama-3-8B__mlp", "llama3-70b": "a100__Meta-Llama-3-70B__mlp"}
VIDUR_H100 = {
    "h100__Llama-2-7b-hf__mlp": MODELS["llama2-7b"],
    "h100__Llama-2-70b-hf__mlp": MODELS["llama2-70b"],
}
ENGINES = {  # the tables that are fitted; the other engine's are the check
    "a100": {"context": "sglang", "generation": "vllm", "gemm": "sglang"},
    "h100": {"context": "sglang", "generation": "sglang", "gemm": "sglang"},
    "h200": {"context": "sglang", "generation": "sglang", "gemm": "sglang"},
}
OTHER = {"sglang": "vllm", "vllm": "sglang"}
LONG = 5e-4  # seconds of a kernel from which its error is also given apart
DEGREES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Part:
    """Inputs [points, coefficients] and seconds of what was measured, and the form that is fitted
    to it."""

    x: np.ndarray
    seconds: np.ndarray
    fit: Fit = fit_total
    form: Form = total

    def coefficients(self) -> np.ndarray:
        return self.fit(self.x, self.seconds)

    def held_out(self) -> float:
        return held_out(self.fit, self.form, self.x, self.seconds)

    def error(self, c: np.ndarray, above: float = 0.0) -> float:
        return mape(self.form(c, self.x), self.seconds, above)


@functools.cache
def products(data: Path, device: str, engine: str) -> aiconfigurator.Products:
    return aiconfigurator.Products(data, device, engine)


def four_products(
    data: Path, device: str, engine: str, shape: ModelConfig, tp: int
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and seconds of a layer's four products on one rank, from a table of products."""
    table, (heads, kv_heads) = products(data, device, engine), shape.rank_heads(tp)
    seconds = table((heads + 2 * kv_heads) * shape.head_dim, shape.d_model) + table(
        shape.d_model, heads * shape.head_dim
    )
    seconds += table(2 * shape.d_ff / tp, shape.d_model) + table(shape.d_model, shape.d_ff / tp)
    return table.m, seconds


@functools.cache
def elementwise(data: Path) -> np.ndarray:
    """Seconds once and per byte of H100's elementwise parts, fitted over both Llama-2 models and
    all degrees."""
    inputs = []
    seconds = []
    for name, shape in VIDUR_H100.items():
        for tp in DEGREES:
            tokens, time = vidur.linear(data, name, tp, vidur.ELEMENTWISE)
            inputs.append(
                np.stack([np.ones_like(tokens), tokens * elementwise_bytes(shape, tp)], 1)
            )
            seconds.append(time)
    return fit_total(np.concatenate(inputs), np.concatenate(seconds))


def layer(data: Path, device: str, model: str, tp: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and seconds of all linear parts. A100: Vidur. H100, H200: products of the table, the
    rest as `elementwise`."""
    if device == "a100":
        return vidur.linear(data, VIDUR[model], tp)
    shape = LLAMA[model]
    tokens, seconds = four_products(data, device, ENGINES[device]["gemm"], shape, tp)
    once, byte = elementwise(data)
    return tokens, seconds + once + byte * tokens * elementwise_bytes(shape, tp)


def linear(data: Path, device: str, model: str, tp: int) -> Part:
    """Coefficients: floor, base, token; and one that is always 0, to fill the first half."""
    tokens, seconds = layer(data, device, model, tp)
    one = np.ones_like(tokens)
    none = np.zeros_like(tokens)
    return Part(np.stack([one, none, one, tokens], 1), seconds, fit_smooth_max, smooth_max_form)


def device_linear(data: Path, device: str) -> Part:
    """Returns products of all models and degrees. Coefficients: floor, seconds per byte of weights,
    two that are 0; base, seconds per byte of weights, per FLOP, per byte moved."""
    inputs = []
    times = []
    for model, shape in LLAMA.items():
        for tp in DEGREES:
            tokens, seconds = layer(data, device, model, tp)
            one = np.ones_like(tokens)
            none = np.zeros_like(tokens)
            weights = shape.layer_weights(tp)
            inputs.append(
                np.stack(
                    [
                        one,
                        ITEM * weights * one,
                        none,
                        none,
                        one,
                        ITEM * weights * one,
                        2 * weights * tokens,
                        elementwise_bytes(shape, tp) * tokens,
                    ],
                    1,
                )
            )
            times.append(seconds)
    return Part(np.concatenate(inputs), np.concatenate(times), fit_smooth_max, smooth_max_form)


def prefill(data: Path, device: str, model: str, tp: int, engine: str | None = None) -> Part:
    """Coefficients: once, per new token, per pair. One kernel for a batch of prompts."""
    heads, kv_heads = LLAMA[model].rank_heads(tp)
    count, tokens, seconds = aiconfigurator.attention(
        data, device, engine or ENGINES[device]["context"], "context", heads, kv_heads
    )
    return Part(np.stack([np.ones_like(count), count * tokens, count * tokens**2 / 2], 1), seconds)


def decode(data: Path, device: str, model: str, tp: int, engine: str | None = None) -> Part:
    """Coefficients: once, per sequence, per token of context."""
    heads, kv_heads = LLAMA[model].rank_heads(tp)
    count, tokens, seconds = aiconfigurator.attention(
        data, device, engine or ENGINES[device]["generation"], "generation", heads, kv_heads
    )
    return Part(np.stack([np.ones_like(count), count, count * tokens], 1), seconds)


def device_attention(data: Path, device: str) -> tuple[Part, Part]:
    """Returns attention of all models and degrees. Prefill: once, per FLOP of a tile of one token,
    per FLOP. Decode: once, per kv head, per byte of KV."""
    found = []
    for part, scales in (
        (prefill, lambda heads, kv_heads: (1, 4 * heads * 128, 4 * heads * 128)),
        (decode, lambda heads, kv_heads: (1, kv_heads, 2 * ITEM * kv_heads * 128)),
    ):
        parts = [
            (part(data, device, model, tp), scales(*LLAMA[model].rank_heads(tp)))
            for model in LLAMA
            for tp in DEGREES
        ]
        found.append(
            Part(
                np.concatenate([p.x * scale for p, scale in parts]),
                np.concatenate([p.seconds for p, _ in parts]),
            )
        )
    return found[0], found[1]


def head(data: Path, device: str, model: str, tp: int) -> Part:
    """The product with the vocabulary, of up to 256 tokens. Coefficients: once, per token."""
    shape = LLAMA[model]
    table = products(data, device, ENGINES[device]["gemm"])
    seconds = table(shape.vocab / tp, shape.d_model)
    few = table.m <= 256
    return Part(np.stack([np.ones(few.sum()), table.m[few]], 1), seconds[few])


def message(size: np.ndarray, seconds: np.ndarray) -> Part:
    """Coefficients: once, per byte."""
    return Part(np.stack([np.ones_like(size), size], 1), seconds)


def ranks(data: Path, device: str, degree: int) -> Part:
    """A sum of an activation over ranks: of 4 KB (one token) to 1 GB."""
    size, seconds = aiconfigurator.all_reduces(data, device, degree)
    return message(size[size >= 4096], seconds[size >= 4096])


def node(data: Path, device: str) -> Part:
    """A message to another node. H200: as H100. A100: Vidur's table of 200 Gbit/s adapters, less
    what a launch takes there."""
    if device == "a100":
        size, seconds = vidur.sends_hdr(data)
        first = np.median(vidur.sends(data, "a100")[1][:4])
        seconds = seconds - np.median(seconds[size == 0]) + first
        return message(size[size > 0], seconds[size > 0])
    return message(*vidur.sends(data, "h100"))
