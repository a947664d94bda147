"""Everything that needs a GPU, measured by one command in under nine minutes on a machine that has
little but JAX.

    python -m experiments.benchmarks.h200 --json=h200.json

The machine's ceilings, and correctness: every kernel against attention computed in f64 on fresh
random inputs. Then attention beside its peers, the whole engine with random weights beside what is
ideal and beside vLLM, what CUDA graphs cost, and memory. Each section is a process of its own with
a budget of seconds (`PLAN`, in a run of 500), more where vLLM or a second GPU is missing; time that
one leaves goes to those after it. A case that fails, hangs or takes its process along is a row that
says so; the others go on without it. The file is written after each case. `--rehearse` does all of
it with tiny shapes on a CPU, kernels in the interpreter.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.benchmarks.engines import why_absent
from experiments.benchmarks.gpu.worker import SECTIONS
from experiments.script import command_line
from jaxserve.cli.display import table
from jaxserve.observe.machine import described, machine
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.settings.schema import ConfigError

ROOT = Path(__file__).parents[2]
TUNED = ROOT / "kernels" / "mosaic" / "tuned.json"
TWO_CPU_DEVICES = "--xla_force_host_platform_device_count=2"  # for rehearsals; GPUs stay as many
OPTIONS = {
    "h200": [
        Option("json", str, "h200.json", "file for all figures"),
        Option("rehearse", bool, False, "tiny shapes on the CPU, kernels in the interpreter"),
        Option("only", str, "", f"sections, comma-separated: {', '.join(SECTIONS)}"),
        Option("seconds", float, 500.0, "for everything", 10.0),
        Option(
            "keep_tiles",
            bool,
            False,
            "write the fastest block shapes where the kernels look for them",
        ),
        Option("seed", int, None, "of all random inputs; default: a fresh one", 0),
        Option("most", int, 1000, "most cases of each section", 1),
        Option(
            "torch_python", str, sys.executable, "python that has PyTorch, where it is another one"
        ),
        Option("vllm_python", str, sys.executable, "python that has vLLM, where it is another one"),
        Option(
            "inject",
            str,
            "",
            "a deliberate fault, raise:SECTION, crash:SECTION or hang:SECTION, "
            "to see that the other sections go on",
        ),
    ]
}


@dataclasses.dataclass(frozen=True)
class Section:
    """seconds: its budget; case: after which a case counts as hung; memory: the share of the device
    that JAX takes at once."""

    title: str
    seconds: float
    case: float = 60.0
    memory: float = 0.85
    flags: str = ""


PLAN = {
    "environment": Section("environment", 8),
    "ceilings": Section("ceilings of this machine", 12, 40),
    "kernels": Section("kernels against f64: largest error of out and of lse", 30, 45),
    "prefill": Section("attention, prefill of one prompt", 25, memory=0.6),
    "chunks": Section("attention, chunks of a prompt after many cached tokens", 15, memory=0.6),
    "decode": Section("attention, decode: batch x context", 20, memory=0.6),
    "served": Section("requests, Llama 3 8B in bf16, random weights", 60, 120, 0.92),
    "engine": Section("steps of that model, beside what is ideal", 85, 120, 0.92),
    "graphs": Section("decode steps by CUDA graphs, with arrays that move", 35, 90, 0.92),
    "engine_1m": Section("steps with KV of 8 bits, to a million tokens", 40, 90, 0.94),
    "engine_10m": Section("steps of two layers, to ten million tokens", 15, 90, 0.94),
    "tp": Section("steps of that model on several GPUs", 30, 90, flags=TWO_CPU_DEVICES),
    "vllm": Section("the same requests by vLLM", 95, 140),
    "tiles": Section("attention, block shapes", 20, 90),
    "pools": Section("donated pools, and copies to the host", 10),
}
INTERPRETED = 4.0  # times as long may a case take in a rehearsal
GRACE = 30.0  # seconds past its time in which a process may start or end
OUT_OF_TIME = "skipped: out of time"
ABSENT = 2.0  # seconds for a section that will only say why it has nothing to measure


class Report:
    """Findings so far, kept in a file."""

    def __init__(self, file: Path, **header: Any):
        self.file = file
        self.found: dict[str, Any] = {
            **header,
            "sections": {name: {"status": "left out", "rows": []} for name in PLAN},
        }

    def section(self, name: str) -> dict[str, Any]:
        return self.found["sections"][name]

    def rows(self) -> dict[str, list[dict[str, Any]]]:
        return {name: section["rows"] for name, section in self.found["sections"].items()}

    def keep(self) -> None:
        """Whole or not at all. NaN is no JSON: it becomes text."""
        part = self.file.with_name(self.file.name + ".part")
        part.write_text(json.dumps(_plain(self.found), indent=1, allow_nan=False) + "\n")
        part.replace(self.file)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class Child:
    """A process that works on a section, and its answers so far."""

    def __init__(
        self,
        name: str,
        values: dict[str, Any],
        skip: list[str],
        until: float,
        report: Report,
        folder: Path,
    ):
        self.file = folder / f"{name}.rows"
        self.log = folder / f"{name}.log"
        self.file.write_text("")
        self.name = name
        self.began = time.time()
        self.case = ""
        self.seen = 0
        run = {
            "section": name,
            "rehearse": values["rehearse"],
            "seed": report.found["seed"],
            "until": until,
            "folder": str(folder),
            "torch_python": values["torch_python"],
            "vllm_python": values["vllm_python"],
            "found": report.rows(),
        }
        task = folder / f"{name}.task"
        task.write_text(
            json.dumps(
                {
                    "run": run,
                    "rows": str(self.file),
                    "skip": skip,
                    "most": values["most"],
                    "inject": values["inject"],
                }
            )
        )
        self.process = subprocess.Popen(
            [sys.executable, "-m", "experiments.benchmarks.gpu.worker", str(task)],
            cwd=ROOT,
            env=_environment(PLAN[name], values["rehearse"]),
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def heard(self) -> list[dict[str, Any]]:
        """New whole lines."""
        lines = self.file.read_text().split("\n")[:-1]
        new = lines[self.seen :]
        self.seen = len(lines)
        return [json.loads(line) for line in new]

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def last_words(self) -> str:
        lines = [
            line.strip()
            for line in self.log.read_text(errors="replace").splitlines()
            if line.strip()
        ]
        return " | ".join(lines[-3:])[-400:]


def _environment(section: Section, rehearse: bool) -> dict[str, str]:
    flags = " ".join(filter(None, [os.environ.get("XLA_FLAGS", ""), section.flags]))
    more = {
        "XLA_FLAGS": flags,
        "XLA_PYTHON_CLIENT_MEM_FRACTION": str(section.memory),
        "PYTHONUNBUFFERED": "1",
    }
    return os.environ | more | ({"JAX_PLATFORMS": "cpu"} if rehearse else {})


def measure(name: str, values: dict[str, Any], until: float, report: Report, folder: Path) -> None:
    """A section, in as many processes as cases break."""
    section = PLAN[name]
    into = report.section(name)
    began = time.time()
    if began > until:
        into["status"] = OUT_OF_TIME
        return
    if values["rehearse"]:
        section = dataclasses.replace(section, case=section.case * INTERPRETED)
    skip = list[str]()
    into["status"] = "running"
    while True:
        child = Child(name, values, skip, until, report, folder)
        fault = follow(child, section, until, into, skip, report)
        if not fault:
            break
        row = {"case": child.case or "(start)", "status": "failed", "why": fault}
        into["rows"].append(row)
        report.keep()
        _say(f"  {row['case']}: {fault}")
        if not child.case or time.time() > until:
            break
    bad = sum(row["status"] in ("failed", "wrong") for row in into["rows"])
    into["status"] = f"{bad} failed" if bad else "ok"
    into["seconds"] = round(time.time() - began, 1)
    report.keep()


def follow(
    child: Child,
    section: Section,
    until: float,
    into: dict[str, Any],
    skip: list[str],
    report: Report,
) -> str:
    """Takes in rows until the process ends; returns why it broke at child.case, '' where it did
    not."""
    while True:
        ended = child.process.poll() is not None
        for line in child.heard():
            if "begin" in line:
                child.case = line["begin"]
                child.began = time.time()
                skip.append(child.case)
            else:
                into["rows"] += line["rows"]
                child.case = ""
                child.began = time.time()
                report.keep()
        now = time.time()
        if ended:
            code = child.process.returncode
            child.kill()  # what it started, and left
            if code == 0:
                return ""
            return f"the process ended with {code}: {child.last_words()}"
        late = until + section.case / 2 if child.case else max(until, child.began) + GRACE
        if now - child.began > section.case or now > late:
            child.kill()
            return f"stopped after {now - child.began:.0f} s: {child.last_words()}"
        time.sleep(0.05)


def shown(report: Report) -> str:
    """All sections as tables; lists of details are in the file only."""
    parts = []
    for name, section in report.found["sections"].items():
        head = f"{PLAN[name].title} [{name}: {section['status']}" + (
            f", {section['seconds']:.0f} s]" if "seconds" in section else "]"
        )
        parts.append("\n".join([head, *map(_table, _alike(section["rows"]))]))
    return "\n\n".join(parts)


def _columns(row: dict[str, Any]) -> list[str]:
    return [
        key
        for key, value in row.items()
        if not isinstance(value, list) and key not in ("case", "status", "why")
    ]


def _alike(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Stretches of rows that have half of their columns in common."""
    out: list[list[dict[str, Any]]] = []
    known: set[str] = set()
    for row in rows:
        mine = set(_columns(row))
        if not out or (known and 2 * len(mine & known) < len(mine)):
            out.append([])
            known = set()
        out[-1].append(row)
        known |= mine
    return out


def _table(rows: list[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(column for row in rows for column in _columns(row)))
    told = any(row["status"] != "ok" for row in rows)
    lines = [
        [row["case"], *(_cell(row.get(column)) for column in columns)] + [_fault(row)] * told
        for row in rows
    ]
    return table(["case", *columns] + ["remark"] * told, lines)


def _fault(row: dict[str, Any]) -> str:
    if row["status"] == "ok":
        return ""
    why = row.get("why", "")
    return f"{row['status']}: {why[:90]}" if why else row["status"]


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return f"{_cell(value['median'])} ({_cell(value['low'])} to {_cell(value['high'])})"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "" if value is None else str(value)


def best_tiles(report: Report) -> dict[str, list[dict[str, Any]]]:
    """Returns rows of `kernels/mosaic/tuned.json`: for each number of query rows that was measured
    the block shape that is fastest over all cases, in the geometric mean; `slower`: how much it is
    than the best of a case, at most."""
    told = {
        row["case"]: row["value"] for row in report.section("environment")["rows"] if "value" in row
    }
    cases: dict[tuple[Any, ...], list[dict[str, float]]] = {}
    shapes: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in report.section("tiles")["rows"]:
        if row["status"] == "ok":
            key = tuple(row["shape"][0].items())
            times = {name: spread["median"] for name, spread in row["every"][0].items()}
            cases.setdefault(key, []).append(
                {name: time / min(times.values()) for name, time in times.items()}
            )
            shapes[key] = row["tiles"][0]
    found = []
    for key, ratios in cases.items():
        common = set.intersection(*map(set, ratios))
        best = min(
            sorted(common), key=lambda name: math.prod(one[name] for one in ratios), default=None
        )
        if best is not None:
            tiles = {name: value for name, value in shapes[key][best].items() if name != "blocks"}
            per_core = shapes[key][best]["blocks"] // shapes[key]["default"]["blocks"]
            found.append(
                {
                    **dict(key),
                    **tiles,
                    "blocks_per_core": per_core,
                    "slower": max(one[best] for one in ratios),
                }
            )
    return {told.get("device", "unknown"): found}


def keep_tiles(report: Report) -> None:
    """Replaces what the kernels know of this kind of device by what was found."""
    known = json.loads(TUNED.read_text()) | {
        kind: rows for kind, rows in report.found["tiles"].items() if rows
    }
    TUNED.write_text(json.dumps(known, indent=1) + "\n")


def absent(values: dict[str, Any]) -> list[str]:
    """Returns the sections that have nothing to measure here."""
    found = []
    gpus = [*Path("/dev").glob("nvidia[0-9]*")]
    if len(gpus) < 2 and not values["rehearse"]:
        found.append("tp")
    if why_absent(values["vllm_python"], "vllm"):
        found.append("vllm")
    return found


def run(values: dict[str, Any]) -> int:
    only = [name for name in values["only"].split(",") if name] or list(PLAN)
    if unknown := [name for name in only if name not in PLAN]:
        raise ConfigError("only", f"{unknown[0]!r} is not one of {', '.join(PLAN)}")
    began = time.time()
    seed = secrets.randbelow(2**31) if values["seed"] is None else values["seed"]
    when = time.strftime("%Y-%m-%d %H:%M:%S")
    report = Report(
        Path(values["json"]), machine=machine(), began=when, seed=seed, rehearse=values["rehearse"]
    )
    report.keep()
    _say(described(report.found["machine"]) + f"; seed {seed}")
    chosen = [name for name in PLAN if name in only]
    end = began + values["seconds"]
    due = began
    budgets = {name: PLAN[name].seconds for name in chosen}
    budgets |= {name: ABSENT for name in absent(values) if name in chosen}
    total = sum(budgets.values())
    with tempfile.TemporaryDirectory(prefix="h200-") as folder:
        for name in chosen:
            # budgets fill the time that there is
            due += budgets[name] * values["seconds"] / total
            _say(f"{name}: until second {min(due, end) - began:.0f}")
            try:
                measure(name, values, min(due, end), report, Path(folder))
            except Exception as error:  # a fault of this program itself
                report.section(name)["status"] = f"failed: {type(error).__name__}: {error}"
            _say(f"{name}: {report.section(name)['status']}, second {time.time() - began:.0f}")
    report.found["tiles"] = best_tiles(report)
    if values["keep_tiles"]:
        keep_tiles(report)
    report.found["seconds"] = round(time.time() - began, 1)
    report.keep()
    print(f"\n{shown(report)}\n\n{report.found['seconds']:.0f} s; all figures in {report.file}")
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    return command_line(
        "h200",
        "kernels and engine on a GPU: correctness, ceilings, speed",
        Command(OPTIONS, run),
        given,
    )


if __name__ == "__main__":
    sys.exit(main())
