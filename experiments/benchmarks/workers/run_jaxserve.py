"""jaxserve: the engine as `jaxserve bench engine` measures it."""

import protocol

from jaxserve.commands.machine import machine
from jaxserve.commands.speed import Point, Runner
from jaxserve.config import EngineConfig
from jaxserve.engine.build import build
from jaxserve.options import make

SETTINGS = protocol.settings()
engine = build(
    make(
        EngineConfig,
        {
            "model": SETTINGS["model"],
            "dtype": SETTINGS["dtype"],
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
    lambda kind, size: runner.rate(Point(kind, size)),
    lambda prompt, tokens: runner.generate([prompt], tokens)[0],
)
