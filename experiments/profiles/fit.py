"""Fits the costs of steps to public measurements and writes the table that jaxserve ships.

    python -m experiments.profiles.fit --data=../shared/data --out=jaxserve/costs/profiles.json

Needs numpy, scipy, pandas and pyarrow. It prints the errors: of the points that were fitted, of
points that were held out (five folds), and of another source that measured the same.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from experiments.gpu_targets.sheets import TARGETS
from experiments.profiles import aiconfigurator, llmservingsim, parts, served, vidur
from experiments.profiles.parts import DEGREES, ENGINES, LLAMA, LONG, OTHER, VIDUR
from experiments.script import command_line
from jaxserve.costs import profiles
from jaxserve.costs.coefficients import Costs
from jaxserve.costs.profiles import Device
from jaxserve.lanes.rates import Link
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.settings.schema import ConfigError

OPTIONS = {
    "files": [
        Option("data", str, None, "folder of the measurements; default: JAXSERVE_DATA"),
        Option("out", str, str(profiles.FILE), "the table that is written; '' for none"),
    ],
}

DEVICES = ("a100", "h100", "h200")  # SXM
# Not fitted: engines with CUDA graphs and a scheduler that runs ahead spend 0.1 to 0.5 ms of a step
# outside its kernels. Vidur's
# old_cpu_overheads have 1 to 8 ms, of a vLLM of 2023 that had neither; with these two, served
# tokens agree as `served` prints.
LAUNCH = 2e-4  # seconds of a step in one stage
SAMPLE = 1e-4  # seconds of a step's sampling
TINY = 1e-14  # seconds that are left out of the table: solvers may leave them of zero
NONE = 1e15  # bytes/s that stand for a part that takes no time
NODE = {
    "a100": "vidur/a100__old_p2p_inter_node (bytes/s), a100_dgx__send_recv (seconds): two DGX "
    "A100, 200 Gbit/s each",
    "h100": "vidur/h100_dgx__send_recv: two DGX H100, 400 Gbit/s each",
    "h200": "vidur/h100_dgx__send_recv, for H200 was not measured",
}


def fit_device(data: Path, device: str, mix: float) -> Device:
    """Fits a device over all profiled models and degrees."""
    linear, (prefill, decode), node = (
        parts.device_linear(data, device),
        parts.device_attention(data, device),
        parts.node(data, device),
    )
    c, p, d, n = (part.coefficients() for part in (linear, prefill, decode, node))
    ranks = {degree: parts.ranks(data, device, degree) for degree in DEGREES if degree > 1}
    links = {degree: part.coefficients() for degree, part in ranks.items()}
    errors = {
        "linear": linear.error(c),
        "linear held out": linear.held_out(),
        "prefill attention": prefill.error(p),
        "prefill attention held out": prefill.held_out(),
        "decode attention": decode.error(d),
        "decode attention held out": decode.held_out(),
        "node": node.error(n),
        **{f"{degree} ranks": part.error(links[degree]) for degree, part in ranks.items()},
    }
    sheet = TARGETS[device]
    return Device(
        device,
        sheet.memory,
        sheet.bandwidth,
        sheet.flops,
        LAUNCH,
        SAMPLE,
        floor_seconds=c[0],
        weight_bytes_per_s=_rate(c[1]),
        base_seconds=c[4],
        base_bytes_per_s=_rate(c[5]),
        product_flops_per_s=_rate(c[6]),
        elementwise_bytes_per_s=_rate(c[7]),
        chunk_seconds=p[0],
        attention_flops_per_s=_rate(p[2]),
        attention_tile=p[1] / p[2],
        read_bytes_per_s=_rate(d[2]),
        decode_seconds=d[0],
        decode_kv_head_seconds=d[1],
        decode_bytes_per_s=_rate(d[2]),
        mixed=mix,
        ranks={degree: Link(link[0], _rate(link[1])) for degree, link in links.items()},
        node=Link(n[0], _rate(n[1])),
        source=_sources(device, "both Llama 3 models, tp 1 to 8"),
        error=errors,
    )


def fit_profile(data: Path, device: Device, model: str, tp: int) -> tuple[Costs, dict[str, float]]:
    """A model on a device at one degree: its costs, and their errors."""
    name = device.device
    shape = LLAMA[model]
    found = {
        "linear": parts.linear(data, name, model, tp),
        "prefill attention": parts.prefill(data, name, model, tp),
        "decode attention": parts.decode(data, name, model, tp),
        "head": parts.head(data, name, model, tp),
    }
    c = {part: measured.coefficients() for part, measured in found.items()}
    linear, prefill, decode, head = c.values()
    costs = dataclasses.replace(
        device.messages(shape, tp),
        launch=LAUNCH,
        linear_floor=linear[0],
        linear_base=linear[2],
        linear_token=linear[3],
        chunk=prefill[0],
        chunk_token=prefill[1],
        pair=prefill[2],
        read=decode[2],
        decode=decode[0],
        decode_seq=decode[1],
        decode_kv=decode[2],
        mixed=device.mixed,
        head=SAMPLE + head[0],
        head_token=head[1],
    )
    errors: dict[str, float] = {}
    for part, measured in found.items():
        errors |= {part: measured.error(c[part]), f"{part} held out": measured.held_out()}
        if "attention" in part:
            errors[f"{part}, long"] = measured.error(c[part], LONG)
    kinds = {"prefill attention": parts.prefill, "decode attention": parts.decode}
    for part, kind in kinds.items():
        engine = OTHER[ENGINES[name]["context" if kind is parts.prefill else "generation"]]
        errors[f"{part} of {engine}"] = kind(data, name, model, tp, engine).error(c[part])
    if tp > 1:
        errors["comm"] = device.error[f"{tp} ranks"]
    computed = device.costs(shape, tp)
    errors["linear computed from the device"] = found["linear"].error(
        np.array([computed.linear_floor, 0, computed.linear_base, computed.linear_token])
    )
    return costs, {key: value for key, value in errors.items() if not np.isnan(value)}


def checks(data: Path, device: dict[str, Device], rows: list[tuple]) -> list[str]:
    """Lines about sources that no coefficient was fitted to."""
    lines = ["products of a layer, aiconfigurator over Vidur (median, mean relative error):"]
    for name, shapes in (
        ("a100", {VIDUR[model]: LLAMA[model] for model in LLAMA}),
        ("h100", parts.VIDUR_H100),
    ):
        for file, shape in shapes.items():
            ratios = []
            for tp in DEGREES:
                m, seconds = parts.four_products(data, name, ENGINES[name]["gemm"], shape, tp)
                tokens, time = vidur.linear(data, file, tp, vidur.PRODUCTS)
                inside = m <= tokens.max()
                ratios.append(seconds[inside] / np.interp(m[inside], tokens, time))
            ratio = np.concatenate(ratios)
            lines.append(f"  {file:32s} {np.median(ratio):.2f} {np.abs(ratio - 1).mean():.3f}")
    lines.append("chunk of Llama 70B after a prefix, predicted over measured (median, points):")
    for source, name, tp, measured in (
        ("Vidur's kernel of 2023", "a100", 2, vidur.chunks(data)),
        ("LLMServingSim's", "h100", 4, llmservingsim.chunks(data)),
    ):
        costs = next(row[3] for row in rows if row[:3] == (name, "llama3-70b", tp))
        cached, new, seconds = measured
        ratio = np.array([costs.attend_chunk(*point) for point in zip(cached, new)]) / seconds
        for low, high in ((32, 128), (129, 512), (513, 4096)):
            for after, kept in (
                ("none", cached == 0),
                ("up to 2 chunks", (cached > 0) & (cached <= 2 * new)),
                ("more", cached > 2 * new),
            ):
                kept = kept & (new >= low) & (new <= high)
                if kept.any():
                    lines.append(
                        f"  {source}, {name}, {low} to {high} tokens, prefix {after}: "
                        f"{np.median(ratio[kept]):.2f} ({kept.sum()})"
                    )
    for name in ("a100", "h100"):
        for degree, link in device[name].ranks.items():
            size, time = vidur.all_reduces(data, name, degree)
            big = size >= 2**20
            over = np.array([link(n) for n in size[big]]) / time[big]
            lines.append(
                f"sum over {degree} ranks of {name}, from 1 MB, over Vidur's: {np.median(over):.2f}"
            )
    return lines


def run(values: dict[str, Any]) -> int:
    folder = values["data"] or os.environ.get("JAXSERVE_DATA")
    if not folder:
        raise ConfigError("data", "give the folder of the measurements, or set JAXSERVE_DATA")
    data = Path(folder).expanduser()
    mix, *mix_errors = llmservingsim.fit_mixed(llmservingsim.batches(data))
    device = {name: fit_device(data, name, mix) for name in DEVICES}
    rows = [
        (name, model, tp, *fit_profile(data, device[name], model, tp))
        for name in DEVICES
        for model in LLAMA
        for tp in DEGREES
    ]
    _show(device, rows)
    print(
        "",
        "mixed {}: mean relative error {:.3f}, without it {:.3f}".format(mix, *mix_errors),
        *checks(data, device, rows),
        sep="\n",
    )
    if values["out"]:
        Path(values["out"]).write_text(written(device, rows))
    if not values["out"] or Path(values["out"]).resolve() == profiles.FILE.resolve():
        print(
            "",
            "time per output token, predicted with this table over measured:",
            *served.summary(served.compared(data)),
            sep="\n",
        )
    return 0


def written(device: dict[str, Device], rows: list[tuple]) -> str:
    """The table as JSON, numbers of five digits."""
    table = {
        "about": "Seconds, bytes and FLOP of one rank; fields as in profiles.Device and "
        "predictor.Costs; by experiments.profiles.fit.",
        "devices": [dataclasses.asdict(device[name]) for name in device],
        "profiles": [
            {
                "device": name,
                "model": model,
                "dtype": "bfloat16",
                "tp": tp,
                "source": _sources(name, f"{model}, tp {tp}"),
                "error": errors,
                "costs": _counting(costs),
            }
            for name, model, tp, costs, errors in rows
        ],
    }
    return json.dumps(_rounded(table), indent=1) + "\n"


def _counting(costs: Costs) -> dict[str, Any]:
    """Returns the fields of `Costs` that are not their defaults."""
    usual = dataclasses.asdict(Costs(layers=0))
    return {
        key: value
        for key, value in dataclasses.asdict(costs).items()
        if value != usual[key] and abs(value) > TINY
    }


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(inner) for inner in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _rate(seconds: float) -> float:
    return min(1 / seconds, NONE) if seconds > 0 else NONE


def _sources(device: str, what: str) -> tuple[str, ...]:
    engines = ENGINES[device]
    folder = f"aiconfigurator/{device}_sxm"
    context, generation, gemm = (
        aiconfigurator.file(device, engines[kind], table)
        for kind, table in (
            ("context", "context_attention"),
            ("generation", "generation_attention"),
            ("gemm", "gemm"),
        )
    )
    linear = (
        ["vidur/a100__Meta-Llama-3-*__mlp: all linear parts of a layer"]
        if device == "a100"
        else [
            f"{folder}/{gemm}: the four products of a layer, timed in captured CUDA graphs",
            "vidur/h100__Llama-2-*__mlp: its elementwise parts, by their bytes",
        ]
    )
    return (
        what,
        *linear,
        f"{folder}/{context}: prefill attention",
        f"{folder}/{generation}: decode attention",
        f"{folder}/{gemm}: product with the vocabulary",
        f"{folder}/comm: sums over ranks, the faster of NCCL {aiconfigurator.NCCL[device]} and "
        "SGLang's kernel",
        NODE[device],
        "launch and sample are set, not fitted",
    )


def _show(device: dict[str, Device], rows: list[tuple]) -> None:
    columns = {
        "linear": "linear",
        "prefill attention": "prefill",
        "decode attention": "decode",
        "head": "head",
        "comm": "comm",
    }
    print(
        "mean relative error in percent: fitted / held out; long: kernels of 0.5 ms or more; "
        "other: the other engine's kernel;",
        "device: linear parts computed from the device's row",
        sep="\n",
    )
    others = ("long pre", "long dec", "other pre", "other dec", "device")
    print(
        " " * 20
        + "".join(f"{name:>13s}" for name in columns.values())
        + "".join(f"{name:>10s}" for name in others)
    )
    for name, model, tp, _, errors in rows:
        cells = [
            f"{_percent(errors, key)}/{_percent(errors, key + ' held out')}" for key in columns
        ]
        more = [_percent(errors, f"{part} attention, long") for part in ("prefill", "decode")]
        more += [
            _percent(errors, next(key for key in errors if key.startswith(f"{part} attention of ")))
            for part in ("prefill", "decode")
        ]
        more.append(_percent(errors, "linear computed from the device"))
        print(
            f"{name} {model:11s} {tp}".ljust(20)
            + "".join(f"{cell:>13s}" for cell in cells)
            + "".join(f"{cell:>10s}" for cell in more)
        )
    for row in device.values():
        print(
            f"\n{row.device}: "
            + ", ".join(f"{key} {100 * value:.1f}" for key, value in row.error.items())
        )


def _percent(errors: dict[str, float], key: str) -> str:
    return f"{100 * errors[key]:.1f}" if key in errors else "-"


COMMAND = Command(OPTIONS, run, __doc__.partition("\n")[2])


if __name__ == "__main__":
    sys.exit(
        command_line(
            "fit",
            "costs of steps, fitted to public measurements",
            COMMAND,
            sys.argv[1:],
            FileNotFoundError,
        )
    )
