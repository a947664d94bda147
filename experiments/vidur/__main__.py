"""`jaxserve simulate` beside vidur 0.0.26, as a table of times to first tokens.

python -m experiments.vidur --install

Llama-3 8B on 16 A100s, tp=8,spp=2: the same requests, deadlines, pages and costs in both, steps of
50 ms, no shared steps. Vidur runs in an environment of its own. Its schedulers run as shipped, and
with what the table names replaced by what jaxserve does.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

from experiments.benchmarks.install import InstallError, make_environment, working_python
from experiments.script import command_line, keep
from experiments.vidur.comparison import (
    PEERS,
    PERCENTILES,
    Comparison,
    Load,
    Peer,
    VidurError,
    job_of,
    run_vidur,
    simulated,
)
from jaxserve.cli.display import table
from jaxserve.folders import cache_folder
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.settings.schema import ConfigError

VIDUR = "vidur==0.0.26"
SCHEDULERS = tuple(dict.fromkeys(peer.scheduler for peer in PEERS))

OPTIONS = {
    "what is compared": [
        Option("loads", str, "medha-1@1.25,medha-10@0.75", "mixes of lengths, as MIX@QPS,MIX@QPS"),
        Option("only", str, ",".join(SCHEDULERS), "policies, as NAME,NAME"),
        Option("requests", int, 500, "requests of each load", 2),
        Option("seed", int, 0, "of arrivals and lengths", 0),
        Option("json", str, None, "file for all figures, every request's too"),
    ],
    "environment": [
        Option("install", bool, False, f"make {VIDUR}'s environment (1.3 GB) if it is missing"),
        Option("folder", str, None, "folder of the environment; default: vidur in the cache"),
        Option("python", str, "python3.11", "the Python of the environment, 3.10 to 3.12"),
        Option("patience", float, 3600.0, "seconds for one run of vidur", 1),
    ],
}


def run(values: dict[str, Any]) -> int:
    loads = [Load.parse(text) for text in values["loads"].replace(" ", "").split(",") if text]
    peers = chosen(values["only"])
    python = environment(values)
    rows = []
    kept = []
    failed = []
    for load in loads:
        arrivals = load.arrivals(values["requests"], values["seed"])
        for peer in peers:
            records = simulated(peer.baseline, arrivals)
            job = job_of(peer, arrivals, records)
            try:
                firsts = run_vidur(python, job, values["patience"])
            except VidurError as error:
                failed.append(f"{load}, {peer.policy}, {peer.difference}: {error}")
                continue
            came = np.array([record.arrival for record in records])
            ours = np.array([record.first for record in records]) - came
            found = Comparison(ours, np.array(firsts) - came)
            rows.append(row(load, peer, found))
            kept.append(figures(load, peer, found))
            print("  ".join(rows[-1]), file=sys.stderr, flush=True)
    print(f"{VIDUR}; {values['requests']} requests, seed {values['seed']}; TTFT in s: ours/vidur's")
    percents = [text for percent in PERCENTILES for text in (f"P{percent}", "ratio")]
    print(table(["load", "policy", "vidur", *percents, "correlation"], rows))
    keep(values, comparisons=kept)
    for told in failed:
        print(told, file=sys.stderr)
    return int(bool(failed))


def chosen(only: str) -> list[Peer]:
    """The rows of these policies. Errors: ConfigError."""
    names = [name for name in only.replace(" ", "").split(",") if name]
    if unknown := set(names) - set(SCHEDULERS):
        known = ", ".join(SCHEDULERS)
        raise ConfigError("only", f"{', '.join(sorted(unknown))}: known are {known}")
    return [peer for peer in PEERS if peer.scheduler in names]


def environment(values: dict[str, Any]) -> str:
    """The Python of vidur's environment, which is made where that is asked for. Errors:
    InstallError."""
    folder = Path(values["folder"] or cache_folder() / "vidur").expanduser().resolve()
    done = folder / "installed"
    if not done.exists():
        if not values["install"]:
            raise InstallError(f"{VIDUR} is not in {folder} (--install)")
        shutil.rmtree(folder, ignore_errors=True)
        make_environment(folder, working_python(values["python"]), [VIDUR])
        done.write_text(VIDUR + "\n")
    return str(folder / "bin" / "python")


def row(load: Load, peer: Peer, found: Comparison) -> list[str]:
    """A line of the table."""
    columns = zip(*(found.percentiles[name] for name in ("ours", "vidur", "ratio")))
    cells = [
        text
        for ours, vidur, ratio in columns
        for text in (f"{ours:.2f}/{vidur:.2f}", f"{ratio:.3f}")
    ]
    return [str(load), peer.policy, peer.difference, *cells, f"{found.correlation:.5f}"]


def figures(load: Load, peer: Peer, found: Comparison) -> dict[str, Any]:
    """All that is known of a line, for --json; times in seconds."""
    return {
        "mix": load.mix,
        "qps": load.qps,
        "policy": peer.policy,
        "baseline": peer.baseline,
        "vidur": peer.difference,
        "at": PERCENTILES,
        **found.percentiles,
        "correlation": found.correlation,
        "ttft": {"ours": found.ours.tolist(), "vidur": found.vidur.tolist()},
    }


COMMAND = Command(OPTIONS, run, __doc__.partition("\n")[2])


if __name__ == "__main__":
    sys.exit(
        command_line(
            "vidur",
            "jaxserve simulate beside vidur",
            COMMAND,
            sys.argv[1:],
            InstallError,
            VidurError,
        )
    )
