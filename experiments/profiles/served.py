"""The composed model beside measured servers: time per output token of bf16 models that other
engines served (aiconfigurator's points)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from experiments.profiles import aiconfigurator
from jaxserve.checkpoint.zoo import MODELS
from jaxserve.costs.predictor import Predictor
from jaxserve.costs.profiles import costs
from jaxserve.lanes.load import LaneLoad
from jaxserve.settings.schema import MeshConfig

SHAPES = {
    "Llama-3.1-8B-Instruct": MODELS["llama3.1-8b"],
    "Qwen3-32B": MODELS["qwen3-32b"],
}


def tokens(predictor: Predictor, isl: int, osl: int, count: int) -> tuple[float, float]:
    """Seconds of a decode step of `count` requests halfway through their outputs, and of one whole
    prompt."""
    decode = predictor.stage(
        [LaneLoad(decodes=count, context=count * (isl + osl / 2), samples=count)]
    )
    return decode, predictor.prefill(0, isl, isl)


def compared(data: Path) -> list[dict]:
    """Per measured point: device, model, engine and tp; requests at once; seconds per output token.

    While one of `count` requests decodes, the others are prefilled once each: a token takes a
    decode step and (count - 1) / osl prompts.
    """
    found = []
    for row in aiconfigurator.served(data).itertuples():
        model = row.model_path.split("/")[1]
        count = int(row.batch_size)
        isl = int(row.isl)
        osl = int(row.osl)
        tp = int(row.tp_size)
        if model not in SHAPES:
            continue
        device = row.system.removesuffix("_sxm")
        decode, prompt = tokens(
            Predictor(costs(device, SHAPES[model], tp), MeshConfig()), isl, osl, count
        )
        found.append(
            {
                "key": (device, model, row.backend, tp),
                "count": count,
                "isl": isl,
                "osl": osl,
                "measured": row.silicon_tpot_ms * 1e-3,
                "alone": decode,
                "predicted": decode + prompt * (count - 1) / osl,
            }
        )
    return found


def summary(points: list[dict]) -> list[str]:
    """A line for each device, model, engine and tp, and one for all with sums over ranks."""
    lines = []
    for key in sorted({point["key"] for point in points}):
        mine = [point for point in points if point["key"] == key]
        measured, predicted, alone = (
            np.array([point[name] for point in mine]) for name in ("measured", "predicted", "alone")
        )
        error = np.abs(predicted / measured - 1).mean()
        lines.append(
            f"  {' '.join(map(str, key)):42s} {len(mine):3d} points, median "
            f"{np.median(predicted / measured):.2f}, mean relative error {100 * error:4.1f} %, "
            f"median without prompts {np.median(alone / measured):.2f}"
        )
    errors = [
        abs(point["predicted"] / point["measured"] - 1) for point in points if point["key"][3] > 1
    ]
    lines.append(
        f"  tp above 1: {len(errors)} points, mean relative error {100 * np.mean(errors):.1f} %"
    )
    return lines
