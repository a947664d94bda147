"""Compares measured seconds with the ideal: those of a step that reads its weights and KV once and
does nothing but its products, at the rates of the device."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from experiments.benchmarks.gpu.worker import Row, Run
from experiments.benchmarks.gpu_programs import Needs
from experiments.gpu_targets.sheets import TARGETS, Rates


def rates(run: Run) -> dict[str, Rates]:
    """Returns the rates of this device by their source: its data sheet, if it is known, and the
    ceilings, if they were measured before."""
    found: dict[str, Rates] = {}
    kind = jax.devices()[0].device_kind
    if sheet := next((target for target in TARGETS.values() if target.kind == kind), None):
        found["data sheet"] = sheet
    memory = run.best("ceilings", "GB/s")
    products = run.best("ceilings", "TF/s")
    if memory and products:
        found["ceilings"] = Rates(memory * 1e9, products * 1e12)
    return found


def beside_ideal(run: Run, steps: Sequence[Needs], seconds: float) -> Row:
    """Columns of what took `seconds`: its rates on each device, and for each kind of rates the
    ideal time and its share of the time taken. steps: that are run one after the other."""
    row: Row = {
        "TF/s": sum(step.flops for step in steps) / seconds / 1e12,
        "GB/s": sum(step.weights + step.kv for step in steps) / seconds / 1e9,
    }
    for name, each in rates(run).items():
        ideal = sum(step.seconds(each) for step in steps)
        row |= {f"ideal ms by {name}": ideal * 1e3, f"share of {name}": ideal / seconds}
    return row
