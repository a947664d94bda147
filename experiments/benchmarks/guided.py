"""Measures the cost of guides: milliseconds per output token with and without one, on one engine,
in alternating rounds.

    python -m experiments.benchmarks.guided --json=guided.json

Both kinds of request have the same prompts, sampling and number of tokens. The guides never end: a
list of objects with names, numbers and choices, and a text of plain letters. CPU time is that of
the whole process, prefill included: it tells more where others use the machine.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from experiments.script import command_line, keep
from jaxserve.api.sampling import SamplingParams
from jaxserve.cli.display import table
from jaxserve.llm import LLM
from jaxserve.observe.machine import described, machine
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.text.structured_output import Guided

OPTIONS = {
    "guided": [
        Option("model", str, "smollm2-135m", "model: a fetched name, a folder or a .gguf file"),
        Option("tokens", int, 32, "output tokens of each request", 8),
        Option("rounds", int, 15, "rounds, each with and without guides", 3),
        Option("json", str, None, "file for all figures"),
    ]
}
CONCURRENCIES = (1, 8)
TEMPERATURES = (0.0, 1.0)
ROW = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name", "age", "role"],
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "role": {"enum": ["admin", "user", "guest"]},
    },
}
GUIDES = {
    "schema": Guided("json_schema", json.dumps({"type": "array", "minItems": 1000, "items": ROW})),
    "regex": Guided("regex", "([A-Za-z]{1,12}[ ,.]){10000}"),
}
PROMPT = "Write a list of people who work here, as JSON, with a name, an age and a role each."


def per_token(
    llm: LLM, tokens: int, concurrency: int, temperature: float, guided: Guided | None
) -> tuple[float, float]:
    """Mean milliseconds from token to token of a number of requests at once, and milliseconds of
    CPU time for each token."""
    sampling = [
        SamplingParams.make(temperature=temperature, max_tokens=tokens, ignore_eos=True, seed=seed)
        for seed in range(concurrency)
    ]
    cpu = time.process_time()
    done = llm.generate(
        [f"{number}. {PROMPT}" for number in range(concurrency)], sampling, guided=guided
    )
    cpu = time.process_time() - cpu
    assert all(len(completion.ids) == tokens for completion in done), "a guide has ended"
    return statistics.mean(
        1e3 * completion.timing.tpot(tokens) for completion in done
    ), 1e3 * cpu / tokens / concurrency


def measured(
    llm: LLM, values: dict[str, Any], concurrency: int, temperature: float, name: str
) -> dict[str, Any]:
    """Both kinds, which goes first changing from round to round; the first round of each is not
    counted."""
    found: dict[str, list[tuple[float, float]]] = {"plain": [], name: []}
    for number in range(values["rounds"] + 1):
        for kind in (list(found), list(reversed(found)))[number % 2]:
            found[kind].append(
                per_token(llm, values["tokens"], concurrency, temperature, GUIDES.get(kind))
            )
    point: dict[str, Any] = {"guide": name, "concurrency": concurrency, "temperature": temperature}
    for column, unit in enumerate(("ms", "cpu_ms")):
        plain, guided = (
            [figures[column] for figures in found[kind][1:]] for kind in ("plain", name)
        )
        quarters = statistics.quantiles([b / a for a, b in zip(plain, guided)], n=4)
        point[unit] = {
            "plain": statistics.median(plain),
            "guided": statistics.median(guided),
            "ratio": quarters,
        }
    return point


def shown(results: Sequence[dict[str, Any]]) -> str:
    ratio = lambda part: (
        f"{part['ratio'][1]:.3f} ({part['ratio'][0]:.3f} to {part['ratio'][2]:.3f})"
    )
    rows = [
        [
            r["guide"],
            str(r["concurrency"]),
            f"{r['temperature']:g}",
            f"{r['ms']['plain']:.2f}",
            f"{r['ms']['guided']:.2f}",
            ratio(r["ms"]),
            f"{r['cpu_ms']['plain']:.2f}",
            f"{r['cpu_ms']['guided']:.2f}",
            ratio(r["cpu_ms"]),
        ]
        for r in results
    ]
    return table(
        [
            "guide",
            "at once",
            "temperature",
            "ms/token",
            "guided",
            "ratio of rounds: median (quartiles)",
            "CPU ms/token",
            "guided",
            "ratio",
        ],
        rows,
    )


def run(values: dict[str, Any]) -> int:
    with LLM(
        values["model"],
        max_seqs=8,
        max_model_len=2048,
        pages=1024,
        prefix_caching=False,
        progress=sys.stderr.isatty(),
    ) as llm:
        points = itertools.product(CONCURRENCIES, TEMPERATURES, GUIDES)
        results = [measured(llm, values, *point) for point in points]
    print(described(machine()))
    print(
        f"{values['model']}: {values['tokens']} output tokens a request, {values['rounds']} "
        "rounds\n"
    )
    print(shown(results))
    keep(values, results=results)
    return 0


COMMAND = Command(OPTIONS, run, __doc__.partition("\n")[2])

if __name__ == "__main__":
    sys.exit(command_line("guided", "what guides cost per token", COMMAND, sys.argv[1:]))
