"""Time to the first token of short prompts that come in the middle of a long step, with steps in
groups of layers and with whole ones.

    python -m experiments.benchmarks.interrupted_steps --groups=1,5,15 --json=interrupted_steps.json

A replica computes a prompt in one chunk; a short prompt with an objective comes when a
part of the predicted time of that step is over. In each round all numbers of groups take turns.
Beside the short prompt's time to its first token: that of the long prompt with and without a short
one, which are what groups and an interruption cost. The verdict: with more than one group most
rounds interrupted a step, with one none did, and tokens are the same with all numbers."""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.benchmarks.asked import Asked
from experiments.script import command_line, exit_code, keep, numbers
from jaxserve.api.request import Slo
from jaxserve.cli.display import table
from jaxserve.costs.coefficients import Costs
from jaxserve.engine.build import make_engine, open_executor
from jaxserve.engine.sizing import for_this_machine
from jaxserve.observe.machine import described, machine
from jaxserve.scheduling.assembly import ReplicaProfile
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.settings.schema import CacheConfig, EngineConfig, ModelSource, SchedulerConfig

OPTIONS = {
    "interrupted_steps": [
        Option("model", str, "smollm2-135m", "model: a fetched name, a folder or a .gguf file"),
        Option("groups", str, "1,5,15", "groups of layers to compare, as N,N"),
        Option("tokens", int, 2048, "of the long prompt, which is one chunk", 64),
        Option("short", int, 32, "tokens of the short prompt", 1),
        Option("after", float, 0.2, "share of the long step that is over when it comes", 0.0, 1.0),
        Option("ttft", float, 0.5, "its objective, as a share of the predicted long step", 0.0),
        Option("rounds", int, 5, "of all numbers of groups", 1),
        Option("json", str, None, "file for all figures"),
    ]
}
WAIT_SECONDS = 300.0
TOKENS = 2  # of each answer
PATIENT = Slo(ttft=WAIT_SECONDS, tpot=WAIT_SECONDS)
FIGURES = ("alone", "long", "short")


class Replica:
    """A replica whose steps run in groups of layers."""

    def __init__(self, values: dict[str, Any], groups: int, stack: contextlib.ExitStack):
        length = values["tokens"] + 64
        config = EngineConfig(
            ModelSource(model=values["model"], dtype="float32", max_model_len=length),
            cache=CacheConfig(pages=256, prefix_caching=False),
            scheduler=SchedulerConfig(policy="edf", max_seqs=2, chunk_tokens=values["tokens"]),
            layer_groups=groups,
        )
        self._values = values
        self._config = for_this_machine(config)
        self._worker, self._model = open_executor(self._config, progress=False, warm_up=False)
        self.engine = make_engine(self._config, self._worker, self._model)
        stack.callback(lambda: self.engine.close())
        self.engine.start()

    def learn(self, long: np.ndarray, short: np.ndarray) -> None:
        """Has the replica expect steps to take, by their tokens, what the long prompt takes
        alone."""
        for prompt in (short, long, long):
            seconds = self._ask(prompt, PATIENT).ttft(WAIT_SECONDS)
        self.engine.close()
        layers = self._worker.plan.model.layers
        costs = Costs(layers=layers, linear_token=seconds / len(long) / layers)
        profile = ReplicaProfile(costs, {})
        self.engine = make_engine(self._config, self._worker, self._model, profile)
        self.engine.start()

    def _ask(self, prompt: np.ndarray, slo: Slo) -> Asked:
        return Asked(self.engine, prompt, TOKENS, f"{time.perf_counter()}", slo)

    def measure(self, long: np.ndarray, short: np.ndarray) -> tuple[dict[str, float], Any]:
        """Seconds to first tokens, see FIGURES, and how often the step was interrupted; and all
        tokens."""
        values = self._values
        scheduler = self.engine.scheduler
        alone = self._ask(long, PATIENT)
        figures = {"alone": alone.ttft(WAIT_SECONDS)}
        step = scheduler.times.seconds(0, len(long))
        before = scheduler.interruptions
        first = self._ask(long, PATIENT)
        time.sleep(values["after"] * figures["alone"])
        slo = Slo(ttft=values["ttft"] * step, tpot=WAIT_SECONDS)
        second = self._ask(short, slo)
        figures |= {
            "long": first.ttft(WAIT_SECONDS),
            "short": second.ttft(WAIT_SECONDS),
            "predicted": step,
        }
        figures["interruptions"] = scheduler.interruptions - before
        return figures, (alone.tokens, first.tokens, second.tokens)


def measure(values: dict[str, Any]) -> tuple[dict[int, list[dict[str, float]]], bool]:
    """Figures of all rounds by number of groups, and whether all had the same tokens."""
    all_groups = numbers(values["groups"])
    rng = np.random.default_rng(0)
    found: dict[int, list[dict[str, float]]] = {number: [] for number in all_groups}
    same = True
    with contextlib.ExitStack() as stack:
        replicas = {number: Replica(values, number, stack) for number in all_groups}
        for turn in range(values["rounds"] + 1):
            long, short = (
                rng.integers(20, 500, values[name]).astype(np.int32) for name in ("tokens", "short")
            )
            all_tokens = []
            for number, replica in replicas.items():
                if not turn:
                    replica.learn(long, short)
                figures, tokens = replica.measure(long, short)
                all_tokens.append(tokens)
                if turn:  # what is first used is slow
                    found[number].append(figures)
            same = same and all(tokens == all_tokens[0] for tokens in all_tokens)
    return found, same


def run(values: dict[str, Any]) -> int:
    print(described(machine()))
    found, same = measure(values)
    rows = []
    for number, rounds in found.items():
        cells = [_spread([1e3 * figures[name] for figures in rounds]) for name in FIGURES]
        count = sum(figures["interruptions"] > 0 for figures in rounds)
        rows.append((str(number), *cells, f"{count} of {len(rounds)}"))
    head = ("groups", "long alone (ms)", "long with a short (ms)", "short (ms)", "interrupted")
    print(table(head, rows))
    keep(values, groups=found)
    return _verdict(found, same)


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f})"


def _verdict(found: dict[int, list[dict[str, float]]], same: bool) -> int:
    """Returns 0 where the figures mean what they should; else 1, and says why not."""
    faults = [] if same else ["tokens differ between numbers of groups"]
    for number, rounds in found.items():
        count = sum(figures["interruptions"] > 0 for figures in rounds)
        if number == 1 and count:
            faults.append(f"{count} whole steps were interrupted")
        if number > 1 and 2 * count <= len(rounds):
            faults.append(
                f"only {count} of {len(rounds)} steps in {number} groups were interrupted"
            )
    return exit_code(faults)


if __name__ == "__main__":
    sys.exit(
        command_line(
            "python -m experiments.benchmarks.interrupted_steps",
            "first tokens of short prompts that come in the middle of a long step",
            Command(OPTIONS, run),
            sys.argv[1:],
        )
    )
