"""The kernels for CPUs beside each other, one call at a time: decode attention over pages of each
type, attention over latents beside XLA's, products with quantised weights beside those with f32,
and products of groups.

    python -m experiments.benchmarks.cpu_kernels --parts=pages,quantised --json=cpu_kernels.json

All that is compared takes turns, call by call, so that what others do on the machine happens to all
of it. Milliseconds are the best and the median of all calls, and the middle half of them; those of
CPU time, the median, are sturdier where others use the machine.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind

from experiments.script import command_line, keep
from jaxserve.cli.display import table
from jaxserve.kernels import ops
from jaxserve.kernels.kv_pages import KVPages, quantize
from jaxserve.kernels.quantised import Quantised
from jaxserve.observe.machine import described, machine
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.weights.quantised import Blocks, from_gguf, pack

OPTIONS = {
    "cpu_kernels": [
        Option("parts", str, "pages,latents,quantised,grouped", "what to measure"),
        Option("seconds", float, 4.0, "for which the calls of a row take turns", 0),
        Option("json", str, None, "file for all figures"),
    ]
}
KINDS = (Kind.Q8_0, Kind.Q4_1, Kind.Q4_K, Kind.Q6_K)
SIDE = 4096  # inputs and outputs of the measured matrix

Call = Callable[[], jax.Array]


def in_turns(calls: Mapping[str, Call], seconds: float) -> dict[str, np.ndarray]:
    """Makes all calls in turns for some seconds, after one of each that does not count. Returns the
    milliseconds of each call [calls, 2], and those of CPU time."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for call in calls.values():
        call().block_until_ready()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, call in calls.items():
            began = time.perf_counter(), time.process_time()
            call().block_until_ready()
            spent = time.perf_counter() - began[0], time.process_time() - began[1]
            times[name].append(spent)
    return {name: 1e3 * np.array(spent) for name, spent in times.items()}


def figures(part: str, times: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """Rows of the report, of what took turns; ratios are to the first of it, call by call."""
    first = next(iter(times.values()))
    return [
        {
            "part": part,
            "name": name,
            "calls": len(spent),
            "best": spent[:, 0].min(),
            "quartiles": np.percentile(spent[:, 0], (25, 50, 75)).tolist(),
            "cpu": float(np.median(spent[:, 1])),
            "ratio_best": spent[:, 0].min() / first[:, 0].min(),
            "ratio_quartiles": np.percentile(spent[:, 0] / first[:, 0], (25, 50, 75)).tolist(),
            "ratio_cpu": float(np.median(spent[:, 1]) / np.median(first[:, 1])),
        }
        for name, spent in times.items()
    ]


def pools_of(kv: jax.Array) -> dict[str, KVPages]:
    """Pages of each type, with the same numbers."""
    return {
        "float32": KVPages(kv),
        "bfloat16": KVPages(kv.astype(jnp.bfloat16)),
        "float8_e4m3fn": quantize(kv),
    }


def one_sequence(entries: int, dice: np.random.Generator) -> tuple[jax.Array, ...]:
    """Page table, slot and entries of one sequence on permuted pages."""
    order = np.stack([dice.permutation(entries)[None], np.arange(entries)[None]])
    return (
        jnp.asarray(order, jnp.int32),
        jnp.zeros(1, jnp.int32),
        jnp.full(1, entries, jnp.int32),
    )


def pages(seconds: float) -> list[dict[str, Any]]:
    """Decode of one sequence of 8,192 tokens, 8 kv heads of 128 with 4 query heads each."""
    kv_heads, per_kv_head, tokens, head_dim, entries = 8, 4, 16, 128, 512
    dice = np.random.default_rng(0)
    kv = jnp.asarray(dice.standard_normal((entries, kv_heads, 2, tokens, head_dim)), jnp.float32)
    q = jnp.asarray(dice.standard_normal((1, 1, kv_heads, per_kv_head, head_dim)), jnp.float32)
    rest = one_sequence(entries, dice)
    last = jnp.full((1, 1), entries * tokens - 1, jnp.int32)
    attend = jax.jit(lambda *arguments: ops.attend(*arguments, scale=head_dim**-0.5)[0])
    calls = {
        name: lambda pool=pool: attend(q, last, pool, *rest) for name, pool in pools_of(kv).items()
    }
    return figures("decode over 8,192 keys", in_turns(calls, seconds))


def latents(seconds: float) -> list[dict[str, Any]]:
    """Latent attention of one sequence of 8,192 tokens, with 16 query heads as DeepSeek V2 Lite has
    and with the 128 of V3: XLA's, ours over pages of each type, and a sum over the latents, which
    reads them and does nothing else."""
    rows = []
    for heads, tokens in ((16, 1), (128, 1), (16, 512)):
        part = f"{heads} heads, {tokens} queries over 8,192 latents"
        rows += figures(part, in_turns(_latent_calls(heads, tokens), seconds))
    return rows


def _latent_calls(heads: int, queries: int) -> dict[str, Call]:
    entries, tokens, key_dim, value_dim = 512, 16, 576, 512
    dice = np.random.default_rng(0)
    kv = jnp.asarray(dice.standard_normal((entries, 1, 1, tokens, key_dim)), jnp.float32)
    q = jnp.asarray(dice.standard_normal((1, queries, 1, heads, key_dim)), jnp.float32)
    rest = one_sequence(entries, dice)
    end = entries * tokens
    positions = jnp.arange(end - queries, end, dtype=jnp.int32)[None]

    def attention(name: str, pool: KVPages) -> Call:
        attend = functools.partial(
            ops.attend, scale=key_dim**-0.5, value_dim=value_dim, implementation=name
        )
        compiled = jax.jit(lambda *arguments: attend(*arguments)[0])
        return lambda: compiled(q, positions, pool, *rest)

    pools = pools_of(kv)
    calls = {"XLA, float32": attention("xla", pools["float32"])}
    calls |= {f"ours, {name}": attention("cpu", pool) for name, pool in pools.items()}
    read = jax.jit(jnp.sum)
    return calls | {"a sum over the latents, float32": lambda: read(kv)}


def quantised(seconds: float) -> list[dict[str, Any]]:
    """Products with a matrix of 4096 x 4096 in f32 and quantised, beside reading its bytes."""
    dice = np.random.default_rng(0)
    plain = jnp.asarray(dice.standard_normal((SIDE, SIDE)), jnp.float32)
    kept = {kind.name: random_matrix(kind, SIDE, dice) for kind in KINDS}
    linear = jax.jit(ops.linear)
    total = jax.jit(jnp.sum)
    rows = []
    for count in (1, 4, 8, 256):
        x = jnp.asarray(dice.standard_normal((count, SIDE)), jnp.float32)
        calls = {"float32": lambda x=x: linear(x, plain)}
        calls |= {name: lambda x=x, w=w: linear(x, w) for name, w in kept.items()}
        rows += figures(f"product of {count} rows", in_turns(calls, seconds))
    read = {"float32": lambda: total(plain)}
    read |= {name: lambda w=w: total(w.codes) for name, w in kept.items()}
    return rows + figures("sum of the codes", in_turns(read, seconds))


def grouped(seconds: float) -> list[dict[str, Any]]:
    """Products of 1 to 8 tokens with 4 of 64 experts of 1024 x 512 each, beside one of as many
    bytes as the experts in use have."""
    experts, active, inputs, outputs = 64, 4, 1024, 512
    dice = np.random.default_rng(0)
    w = jnp.asarray(dice.standard_normal((experts, inputs, outputs)), jnp.float32)
    kept = [random_matrix(Kind.Q8_0, inputs, dice, outputs) for _ in range(experts)]
    quantised_w = jax.tree.map(lambda *x: jnp.stack(x), *kept)
    ours = jax.jit(ops.grouped)
    xla = jax.jit(jax.lax.ragged_dot)
    total = jax.jit(jnp.sum)
    rows = []
    for tokens in (1, 2, 4, 8):
        chosen = [dice.permutation(experts)[:active] for _ in range(tokens)]
        counts = jnp.asarray(np.bincount(np.concatenate(chosen), minlength=experts), jnp.int32)
        x = jnp.asarray(dice.standard_normal((tokens * active, inputs)), jnp.float32)
        used = w[: int((counts > 0).sum())].copy()
        calls = {
            "float32": lambda x=x, counts=counts: ours(x, w, counts),
            "Q8_0": lambda x=x, counts=counts: ours(x, quantised_w, counts),
            "sum of as many bytes": lambda used=used: total(used),
            "jax.lax.ragged_dot": lambda x=x, counts=counts: xla(x, w, counts),
        }
        rows += figures(f"experts of {tokens} tokens", in_turns(calls, seconds))
    return rows


def random_matrix(
    kind: Kind, inputs: int, dice: np.random.Generator, outputs: int = SIDE
) -> Quantised:
    """A matrix of random codes, with scales that are numbers."""
    block, size = GGML_QUANT_SIZES[kind]
    raw = dice.integers(0, 256, (outputs, inputs // block * size), np.uint8)
    blocks = from_gguf(raw, kind)
    halves = [field.name for field in dataclasses.fields(blocks) if _is_half(blocks, field.name)]
    ones = {name: np.full_like(getattr(blocks, name), 0.01) for name in halves}
    return jax.tree.map(jnp.asarray, pack(dataclasses.replace(blocks, **ones)))


def _is_half(blocks: Blocks, name: str) -> bool:
    return getattr(getattr(blocks, name), "dtype", None) == np.float16


PARTS: dict[str, Callable[[float], list[dict[str, Any]]]] = {
    "pages": pages,
    "latents": latents,
    "quantised": quantised,
    "grouped": grouped,
}


def run(values: dict[str, Any]) -> int:
    print(described(machine()), f"load {os.getloadavg()[0]:.1f}")
    rows = [row for part in values["parts"].split(",") for row in PARTS[part](values["seconds"])]
    print(report(rows))
    keep(values, load=os.getloadavg(), rows=rows)
    return 0


def report(rows: list[dict[str, Any]]) -> str:
    """Makes a table of all rows."""
    head = ["what", "", "calls", "best ms", "median (middle half)", "CPU ms", "ratio of best"]
    head += ["of medians (middle half)", "of CPU"]
    lines = [
        [
            row["part"],
            row["name"],
            str(row["calls"]),
            f"{row['best']:.2f}",
            "{1:.2f} ({0:.2f} to {2:.2f})".format(*row["quartiles"]),
            f"{row['cpu']:.2f}",
            f"{row['ratio_best']:.2f}",
            "{1:.2f} ({0:.2f} to {2:.2f})".format(*row["ratio_quartiles"]),
            f"{row['ratio_cpu']:.2f}",
        ]
        for row in rows
    ]
    return table(head, lines)


COMMAND = Command(OPTIONS, run, __doc__.partition("\n")[2])

if __name__ == "__main__":
    summary = "the kernels for CPUs, call by call in turns"
    sys.exit(command_line("cpu_kernels", summary, COMMAND, sys.argv[1:]))
