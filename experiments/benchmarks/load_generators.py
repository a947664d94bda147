"""`jaxserve bench serve` beside `vllm bench serve` and GuideLLM: one server, driven by each in
turn, and the ratios of what they print.

    python -m experiments.clients --install --only=guidellm,vllm-bench
    python -m experiments.benchmarks.load_generators

Each has the environment that `experiments.clients` makes. The order changes from round to round,
and a ratio is of one round, so that what else the machine does hits all alike; the table has the
median of the rounds, and the least and the most. Where the machine is busy, `--step=0.2` shows
whether all measure the same: the times of that server are known.

All send prompts and outputs of one length, in a closed loop, or at equal gaps; the server keeps no
prefixes.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.benchmarks.model_files import folder_of
from experiments.clients.catalogue import CHAT, CLIENTS, PROGRAMS
from experiments.clients.served import ServerError, model_name, serving
from experiments.script import command_line, keep
from jaxserve.cli.display import table
from jaxserve.folders import cache_folder
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.settings.schema import ConfigError
from tests.server.conftest import started
from tests.server.fakes import FakeReplica

SECONDS = 900  # for one run of a generator
OURS = "jaxserve"
OPTIONS = {
    "measurement": [
        Option("generators", str, "jaxserve,vllm-bench,guidellm", "as NAME,NAME"),
        Option("rounds", int, 5, "each with all generators", 1),
        Option("requests", int, 16, "of each run", 2),
        Option("prompt", int, 128, "tokens of a prompt", 8),
        Option("output", int, 32, "tokens of an output", 2),
        Option("concurrency", int, 2, "requests at once, in the closed loop", 1),
        Option("qps", float, None, "instead: requests per second, at equal gaps", 0.001),
        Option("url", str, None, "a server that runs already; default: SmolLM2-135M is served"),
        Option(
            "step",
            float,
            None,
            "instead: our server with a stand-in for a replica, whose steps take this many seconds "
            "and give each request a token, whatever else the machine does",
            0.001,
        ),
        Option("folder", str, None, "of the environments; default: clients in the cache folder"),
        Option("json", str, None, "file for all figures"),
    ]
}
Figures = dict[str, float]  # latencies in milliseconds


@dataclass(frozen=True)
class Task:
    """Task of a generator in a round."""

    url: str
    model: str
    tokenizer: str
    round: int
    values: Mapping[str, Any]
    environments: Path
    scratch: Path

    def python(self, client: str) -> Path:
        """The interpreter of a client's environment. Errors: ConfigError without one."""
        (place,) = (each.place for each in CLIENTS if each.name == client)
        python = self.environments / place / "bin" / "python"
        if not python.exists():
            raise ConfigError(
                "generators", f"{client}: {python} is not there; see experiments.clients --install"
            )
        return python


# --- generators


def ours(task: Task) -> Figures:
    values = task.values
    out = task.scratch / "ours.jsonl"
    pace = (
        [f"--concurrency={values['concurrency']}"]
        if values["qps"] is None
        else [f"--qps={values['qps']}", "--arrivals=constant"]
    )
    _run(
        [
            *(sys.executable, "-m", "jaxserve", "bench", "serve"),
            f"--url={task.url}",
            f"--requests={values['requests']}",
            f"--prompt={values['prompt']}",
            f"--output={values['output']}",
            f"--seed={task.round}",
            f"--json={out}",
            *pace,
        ],
        os.environ,
    )
    found = json.loads(out.read_text())["figures"]
    _all_done(OURS, found["done"], values)
    return {
        **{
            f"{name} {point}": found[name][point] * 1e3
            for name in ("ttft", "tpot", "itl", "e2e")
            for point in ("mean", "p50", "p90")
        },
        "output tok/s": found["output_tokens_per_s"],
        "req/s": found["requests_per_s"],
    }


def vllm(task: Task) -> Figures:
    values = task.values
    pace = (
        [f"--max-concurrency={values['concurrency']}"]
        if values["qps"] is None
        else [f"--request-rate={values['qps']}", "--burstiness=1e9"]  # gaps hardly vary
    )
    _run(
        [
            *(str(task.python("vllm-bench")), str(PROGRAMS / "vllm_command.py"), "bench", "serve"),
            *("--backend=openai", "--endpoint=/v1/completions", f"--base-url={task.url}"),
            *(f"--model={task.model}", f"--tokenizer={task.tokenizer}", "--dataset-name=random"),
            f"--random-input-len={values['prompt']}",
            f"--random-output-len={values['output']}",
            f"--num-prompts={values['requests']}",
            f"--seed={task.round}",
            *("--ignore-eos", "--save-result", f"--result-dir={task.scratch}"),
            "--result-filename=vllm.json",
            *("--percentile-metrics=ttft,tpot,itl,e2el", "--metric-percentiles=90"),
            *pace,
        ],
        _others(),
    )
    found = json.loads((task.scratch / "vllm.json").read_text())
    _all_done("vllm-bench", found["completed"], values)
    return {
        **{
            f"{name} {point}": found[f"{prefix}_{name}{'l' * (name == 'e2e')}_ms"]
            for name in ("ttft", "tpot", "itl", "e2e")
            for point, prefix in (("mean", "mean"), ("p50", "median"), ("p90", "p90"))
        },
        "output tok/s": found["output_throughput"],
        "req/s": found["request_throughput"],
    }


def guidellm(task: Task) -> Figures:
    """Its `inter_token_latency` is the mean of an answer after its first token: our TPOT."""
    values = task.values
    profile = (
        f"kind=concurrent,streams={values['concurrency']}"
        if values["qps"] is None
        else f"kind=constant,rate={values['qps']}"
    )
    report = task.scratch / "guidellm.json"
    _run(
        [
            *(str(task.python("guidellm").with_name("guidellm")), "run", "--backend"),
            f"kind=openai_http,target={task.url},model={task.model},request_format=/v1/completions",
            *("--profile", profile, "--constraint"),
            f"kind=max_requests,count={values['requests']}",
            "--data",
            f"kind=synthetic_text,prompt_tokens={values['prompt']},"
            f"output_tokens={values['output']}",
            *("--tokenizer", f"kind=huggingface_auto,model={task.tokenizer}"),
            *("--seed", f"kind=static,value={task.round}"),
            *("--output", f"kind=json,path={report}", "--disable-console"),
        ],
        _others(),
    )
    found = json.loads(report.read_text())["benchmarks"][0]["metrics"]
    _all_done("guidellm", found["request_totals"]["successful"], values)
    names = {
        "ttft": ("time_to_first_token_ms", 1),
        "tpot": ("inter_token_latency_ms", 1),
        "e2e": ("request_latency", 1e3),
    }
    return {
        **{
            f"{name} {point}": _point(found[field]["successful"], point) * factor
            for name, (field, factor) in names.items()
            for point in ("mean", "p50", "p90")
        },
        "output tok/s": found["output_tokens_per_second"]["successful"]["mean"],
        "req/s": found["requests_per_second"]["successful"]["mean"],
    }


def _point(spread: Mapping[str, Any], point: str) -> float:
    return spread["mean"] if point == "mean" else spread["percentiles"][point]


GENERATORS: dict[str, Callable[[Task], Figures]] = {
    OURS: ours,
    "vllm-bench": vllm,
    "guidellm": guidellm,
}


def _run(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Runs a generator. Errors: ServerError with the end of what it said."""
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        raise ServerError(f"{command[0]}: not done after {SECONDS} s") from None
    if done.returncode:
        raise ServerError(f"{' '.join(command)[:200]}: {(done.stderr or done.stdout)[-2000:]}")


def _others() -> dict[str, str]:
    told = {"OPENAI_API_KEY": "none", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | told


def _all_done(name: str, done: int, values: Mapping[str, Any]) -> None:
    if done != values["requests"]:
        raise ServerError(f"{name}: {done} of {values['requests']} requests were answered")


# --- rounds


def run(values: dict[str, Any]) -> int:
    names = chosen(values["generators"])
    folder = Path(values["folder"] or cache_folder() / "clients").expanduser().resolve()
    rounds: list[dict[str, Figures]] = []
    with _server(values, folder) as url, tempfile.TemporaryDirectory() as scratch:
        tokenizer = str(folder_of(CHAT, cache_folder() / "side_by_side"))
        for number in range(values["rounds"]):
            task = Task(url, model_name(url), tokenizer, number, values, folder, Path(scratch))
            turn = number % len(names)
            order = names[turn:] + names[:turn]
            found = {name: GENERATORS[name](task) for name in order}
            rounds.append(found)
            print(f"round {number + 1}: {', '.join(order)}", file=sys.stderr, flush=True)
    print(shown(rounds, names))
    keep(values, rounds=rounds)
    return 0


def chosen(text: str) -> list[str]:
    """Parses names of generators. Errors: ConfigError."""
    names = [name for name in text.replace(" ", "").split(",") if name]
    if OURS not in names or not set(names) <= set(GENERATORS):
        raise ConfigError("generators", f"{text!r}: {OURS}, and of {', '.join(GENERATORS)}")
    return list(dict.fromkeys(names))


@contextlib.contextmanager
def _server(values: Mapping[str, Any], folder: Path) -> Iterator[str]:
    if values["url"]:
        yield values["url"].rstrip("/").removesuffix("/v1")
        return
    if values["step"]:
        with contextlib.ExitStack() as stack:
            yield started(stack, FakeReplica(step_seconds=values["step"])).server.url
        return
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    flags = ("--admission=queue", "--max_model_len=1024", "--noprefix_caching")
    with serving(CHAT, flags, logs) as url:
        yield url


def shown(rounds: Sequence[Mapping[str, Figures]], names: Sequence[str]) -> str:
    """The medians of all figures, and of the ratios ours / theirs with their least and most."""
    others = [name for name in names if name != OURS]
    rows = []
    for figure in rounds[0][OURS]:
        row = [figure, f"{statistics.median(each[OURS][figure] for each in rounds):.2f}"]
        for other in others:
            row += _compared(rounds, figure, other)
        rows.append(row)
    heads = [head for other in others for head in (other, "ours / it", "least - most")]
    return table(["latencies in ms", OURS, *heads], rows)


def _compared(rounds: Sequence[Mapping[str, Figures]], figure: str, other: str) -> list[str]:
    if figure not in rounds[0][other]:
        return ["-", "-", "-"]
    theirs = statistics.median(each[other][figure] for each in rounds)
    ratios = [each[OURS][figure] / each[other][figure] for each in rounds]
    return [
        f"{theirs:.2f}",
        f"{statistics.median(ratios):.3f}",
        f"{min(ratios):.2f} - {max(ratios):.2f}",
    ]


COMMAND = Command(OPTIONS, run, __doc__.partition("\n")[2])


if __name__ == "__main__":
    sys.exit(
        command_line(
            "load_generators",
            "three load generators on one server",
            COMMAND,
            sys.argv[1:],
            ServerError,
        )
    )
