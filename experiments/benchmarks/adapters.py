"""Adapters (LoRA) beside none: tokens per second of requests that each have their own adapter, with
fewer places on the devices than adapters.

    python -m experiments.benchmarks.adapters --json=adapters.json

The same requests are served in turns by an engine without places for adapters, by one with places
whose requests have none, and by one whose requests have adapters: each another one, and by a skewed
choice, where a few are asked for often. The verdict fails where an adapter changes no answer, where
adapters were not brought to the devices again and again, or where places that are not used cost
speed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from experiments.benchmarks.sharing import send
from experiments.script import command_line, exit_code, keep
from jaxserve.checkpoint.model import ModelConfig
from jaxserve.cli.display import table
from jaxserve.engine.build import build
from jaxserve.engine.engine import Engine
from jaxserve.observe.machine import described, machine
from jaxserve.progress import progress_bar
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option, make
from jaxserve.settings.schema import EngineConfig
from jaxserve.weights import open_checkpoint
from jaxserve.weights.adapters import FILE, module_shapes

NONE, UNUSED, EACH, SKEWED = "no places", "places, no adapters", "one each", "skewed"
LEAST = 0.9  # of the speed without places, that places without adapters must leave
SKEW = 1.1  # exponent of the skewed choice
OPTIONS = {
    "adapters": [
        Option("model", str, "smollm2-135m", "a model as of `jaxserve serve`"),
        Option("adapters", int, 64, "adapters that are loaded", 2, 4096),
        Option("places", int, 8, "adapters on the devices at once", 1, 256),
        Option("rank", int, 16, "of the adapters", 1, 512),
        Option("dtype", str, "float32", "of weights, which are not quantised"),
        Option("prompt", int, 64, "tokens of each prompt", 1),
        Option("tokens", int, 32, "tokens of each answer", 1),
        Option("rounds", int, 5, "rounds, after one that does not count", 1),
        Option("json", str, None, "file for all figures"),
    ]
}


@dataclasses.dataclass
class Figures:
    """Measurements by what is served: seconds of each round, the answers of the last one, and how
    often adapters were brought to the devices in all rounds."""

    seconds: dict[str, list[float]]
    answers: dict[str, list[list[int]]]
    loads: dict[str, int]

    def shares(self, name: str) -> list[float]:
        """Speed over that without places, round by round, ascending."""
        pairs = zip(self.seconds[NONE], self.seconds[name])
        return sorted(before / after for before, after in pairs)


def run(values: dict[str, Any]) -> int:
    random = np.random.default_rng(0)
    count = values["adapters"]
    model = open_checkpoint(values["model"]).config
    prompts = random.integers(3, model.vocab, (count, values["prompt"]))
    weights = np.arange(1, count + 1) ** -SKEW
    choices = {
        NONE: [""] * count,
        UNUSED: [""] * count,
        EACH: [f"a{i}" for i in random.permutation(count)],
        SKEWED: [f"a{i}" for i in random.choice(count, count, p=weights / weights.sum())],
    }
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        engines = {
            name: stack.enter_context(_serving(values, Path(folder), model, bool(places)))
            for name, places in (("plain", 0), ("adapters", values["places"]))
        }
        serving = {name: engines["plain" if name == NONE else "adapters"] for name in choices}
        figures = measured(serving, prompts, choices, values["tokens"], values["rounds"])
    print(described(machine()))
    print(shown(figures, count * values["tokens"]))
    faults = verdict(figures, values["places"])
    keep(values, seconds=figures.seconds, loads=figures.loads, faults=faults)
    return exit_code(faults)


@contextlib.contextmanager
def _serving(values: dict[str, Any], folder: Path, model: ModelConfig, places: bool):
    """Gives a running engine, with all adapters loaded where it has places."""
    settings = {
        "model": values["model"],
        "dtype": values["dtype"],
        "quantization": "none",
        "max_seqs": values["places"],
        "max_model_len": values["prompt"] + values["tokens"] + 1,
        "prefix_caching": False,
    }
    if places:
        settings |= {
            "max_loras": values["places"],
            "max_lora_rank": values["rank"],
            "max_cpu_loras": values["adapters"],
            "lora_root": str(folder),
        }
    engine = build(make(EngineConfig, settings))
    try:
        engine.start()
        for i in range(values["adapters"] if places else 0):
            write_adapter(folder / f"a{i}", model, values["rank"], i)
            engine.adapters.load(f"a{i}", f"a{i}")
        yield engine
    finally:
        engine.close()


def write_adapter(folder: Path, model: ModelConfig, rank: int, seed: int) -> None:
    """Writes an adapter of all modules that can have one, with random factors."""
    folder.mkdir()
    random = np.random.default_rng(seed)
    factors = {}
    for module, (outputs, inputs) in module_shapes(dataclasses.replace(model, gguf=False)).items():
        for end, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            values = random.normal(size=shape) * 0.02
            factors[f"base_model.model.{module}.lora_{end}.weight"] = values.astype(np.float32)
    save_file(factors, folder / FILE)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def measured(
    serving: dict[str, Engine],
    prompts: np.ndarray,
    choices: dict[str, list[str]],
    tokens: int,
    rounds: int,
) -> Figures:
    """Serves the same prompts [n, tokens] in turns; round 0 warms up."""
    figures = Figures({name: [] for name in serving}, {}, {})
    names = list(serving)
    with progress_bar("rounds", (rounds + 1) * len(names), True) as step:
        for number in range(rounds + 1):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                engine = serving[name]
                before = engine.scheduler.slots.adapters.loaded
                seconds, answers = answer(engine, prompts, choices[name], tokens)
                loads = engine.scheduler.slots.adapters.loaded - before
                if number:
                    figures.seconds[name].append(seconds)
                    figures.answers[name] = answers
                    figures.loads[name] = figures.loads.get(name, 0) + loads
                step()
    return figures


def answer(
    engine: Engine, prompts: np.ndarray, adapters: Sequence[str], tokens: int
) -> tuple[float, list[list[int]]]:
    """Has all prompts answered at once; returns the seconds, and the ids of each answer."""
    begun = time.perf_counter()
    sent = []
    for number, (prompt, name) in enumerate(zip(prompts, adapters)):
        identity = engine.adapters.by_name[name].identity if name else ""
        sent.append(send(engine, f"{begun}-{number}", prompt, tokens, adapter=identity))
    answers = [heard.wait().ids for heard in sent]
    return time.perf_counter() - begun, answers


def shown(figures: Figures, tokens: int) -> str:
    """A table of tokens per second, and of the share of the speed without places."""
    rows = []
    for name, seconds in figures.seconds.items():
        shares = figures.shares(name)
        share = f"{statistics.median(shares):.2f} ({shares[0]:.2f} to {shares[-1]:.2f})"
        rate = f"{tokens / statistics.median(seconds):.0f}"
        rows.append([name, rate, share, str(figures.loads[name])])
    return table(["", "tokens/s", "of no places", "brought to the devices"], rows)


def verdict(figures: Figures, places: int) -> list[str]:
    """Returns what is wrong."""
    faults = []
    for name in (EACH, SKEWED):
        same = sum(a == b for a, b in zip(figures.answers[name], figures.answers[NONE]))
        if same * 2 > len(figures.answers[name]):
            faults.append(f"{name}: {same} answers are those without an adapter")
        if figures.loads[name] <= places:
            faults.append(f"{name}: adapters were not brought to the devices again")
    share = statistics.median(figures.shares(UNUSED))
    if share < LEAST:
        faults.append(f"{UNUSED}: {share:.2f} of the speed without places")
    if figures.answers[UNUSED] != figures.answers[NONE]:
        faults.append("places that are not used change answers")
    return faults


COMMAND = Command(OPTIONS, run, __doc__.partition("\n")[2])

if __name__ == "__main__":
    sys.exit(command_line("adapters", "adapters beside none", COMMAND, sys.argv[1:]))
