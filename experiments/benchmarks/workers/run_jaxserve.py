"""jaxserve: the engine as `jaxserve bench engine` measures it. Settings may have `engine`: further
settings, or others in place of these."""

import protocol

from jaxserve.engine.build import build
from jaxserve.lab.cli.bench.speed import Runner, SpeedPoint
from jaxserve.observe.machine import machine
from jaxserve.scheduling.events import DraftsChecked
from jaxserve.settings.options import make
from jaxserve.settings.schema import EngineConfig

SETTINGS = protocol.settings()
engine = build(
    make(
        EngineConfig,
        {
            "model": SETTINGS["model"],
            "dtype": SETTINGS["dtype"],
            "quantization": SETTINGS.get("quantization", "auto"),
            "max_model_len": SETTINGS["longest"],
            "max_seqs": SETTINGS["most_sequences"],
            "chunk_tokens": SETTINGS["chunk_tokens"],
            "prefix_caching": False,
            **SETTINGS.get("engine", {}),
        },
    ),
    progress=False,
    warm_up=False,
)
runner = Runner(engine)
checked: list[bool] = []
engine.bus.subscribe(DraftsChecked, lambda event: checked.extend(event.right.tolist()))


def counted() -> dict[str, float]:
    """Counts the proposed tokens that were checked, and those that were right."""
    return {"checked": len(checked), "right": sum(checked)}


versions = {name: machine()[name] for name in ("jaxserve", "git", "jax", "jaxlib", "python")}
protocol.answer(
    versions,
    lambda kind, size: runner.rate(SpeedPoint(kind, size)),
    lambda prompt, tokens: runner.generate([prompt], tokens)[0],
    complete=runner.generate,
    counts=counted,
)
