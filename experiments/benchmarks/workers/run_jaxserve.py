"""jaxserve: the engine as `jaxserve bench engine` measures it."""

import protocol

from jaxserve.engine.build import build
from jaxserve.lab.cli.bench.speed import Runner, SpeedPoint
from jaxserve.observe.machine import machine
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
        },
    ),
    progress=False,
    warm_up=False,
)
runner = Runner(engine)
versions = {name: machine()[name] for name in ("jaxserve", "git", "jax", "jaxlib", "python")}
protocol.answer(
    versions,
    lambda kind, size: runner.rate(SpeedPoint(kind, size)),
    lambda prompt, tokens: runner.generate([prompt], tokens)[0],
)
