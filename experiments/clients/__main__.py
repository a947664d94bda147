"""Clients that others wrote against a jaxserve server, as a table of what passes and what fails.

python -m experiments.clients --install --only=openai,litellm
"""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from experiments.benchmarks.install import InstallError, working_python
from experiments.benchmarks.model_files import folder_of
from experiments.clients import environments
from experiments.clients.catalogue import CHAT, CLIENTS, Client
from experiments.clients.outcomes import (
    Outcome,
    expected_failures,
    judged,
    keep,
    kept,
    shown,
    summary,
)
from experiments.clients.served import ServerError, Servers, address, model_name, version
from experiments.script import command_line
from jaxserve.folders import cache_folder
from jaxserve.observe.machine import machine
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.settings.schema import ConfigError

NAMES = [client.name for client in CLIENTS]
RESULTS = Path(__file__).parent / "results"
HEAD = """\
# Clients against jaxserve

Made by `python -m experiments.clients`. Each row is one client, load generator or test suite that
others wrote, in an environment of its own; `expected.yaml` says why a call is expected to fail.
"""

OPTIONS = {
    "what is run": [
        Option("only", str, ",".join(NAMES), "clients, as NAME,NAME"),
        Option("url", str, None, "a server that runs already; default: one is started"),
        Option("out", str, str(RESULTS), "folder of the results; '' keeps none"),
    ],
    "environments": [
        Option("install", bool, False, "make the environments that are missing or out of date"),
        Option("again", bool, False, "with --install: make all of them again"),
        Option("remove", bool, False, "remove each environment after its client has run"),
        Option(
            "folder",
            str,
            None,
            "folder of the environments; default: clients in the cache folder",
        ),
        Option("python", str, "python3.12", "the Python of the environments"),
        Option("patience", float, 600.0, "seconds for making one environment", 1),
    ],
}


def run(values: dict[str, Any]) -> int:
    """Runs the chosen clients; returns 1 where something failed that is not expected to."""
    clients = chosen(values["only"])
    folder = Path(values["folder"] or cache_folder() / "clients").expanduser().resolve()
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    outcomes = []
    with contextlib.closing(Servers(values["url"], logs)) as servers:
        for number, client in enumerate(clients):
            outcome = _outcome(client, values, folder, servers)
            outcomes.append(outcome)
            _tell(f"{client.name}: {outcome.missing or f'{outcome.passed} of {outcome.calls}'}")
            if values["out"] and not outcome.missing:
                keep(outcome, Path(values["out"]))
            later = [other.place for other in clients[number + 1 :]]
            if values["remove"] and client.place not in later:
                environments.remove(folder, client)
    print(shown(outcomes))
    if values["out"]:
        everything = kept(Path(values["out"]), NAMES)
        Path(values["out"], "summary.md").write_text(summary(everything, HEAD))
    return int(any(outcome.failed for outcome in outcomes))


def chosen(only: str) -> list[Client]:
    """The clients of these names, those of one server beside each other. Errors: ConfigError."""
    names = [name for name in only.replace(" ", "").split(",") if name]
    if unknown := set(names) - set(NAMES):
        raise ConfigError("only", f"{', '.join(sorted(unknown))}: known are {', '.join(NAMES)}")
    found = [client for client in CLIENTS if client.name in names]
    return sorted(found, key=lambda client: (client.model, client.flags))


def _outcome(client: Client, values: dict[str, Any], folder: Path, servers: Servers) -> Outcome:
    """Installs the client, if it may, and runs it."""
    told = {"date": datetime.date.today().isoformat(), "server": _served(values["url"])}
    try:
        stale = values["again"] or not environments.installed(folder, client)
        if values["install"] and stale:
            _tell(f"{client.name}: installing {', '.join(client.packages)}")
            python = working_python(values["python"])
            environments.install(folder, client, python, values["patience"])
        elif stale:
            raise InstallError("not installed (--install)")
    except InstallError as error:
        return Outcome(client.name, missing=str(error), **told)
    url = servers.url(client.model, client.flags)
    with tempfile.TemporaryDirectory() as place:
        results = Path(place, "results")
        results.touch()
        ended = _run(client, folder, url, results)
        lines = results.read_text().splitlines()
    return judged(client.name, lines, ended, expected_failures(client.name), **told)


def _served(url: str | None) -> str:
    """Describes what is served: this checkout's version and commit, or the version that a given
    server states."""
    if url:
        return version(address(url))
    about = machine()
    return f"{about['jaxserve']} {about['git']}".strip()


def _run(client: Client, folder: Path, url: str, results: Path) -> str:
    """Runs the client's program; returns why it did not come to its end, '' where it did."""
    log = folder / "logs" / f"{client.name}.log"
    environment = {
        "CHECK_URL": url,
        "CHECK_MODEL": model_name(url),
        "CHECK_RESULTS": str(results),
        "CHECK_TOKENIZER": str(folder_of(CHAT, cache_folder() / "side_by_side")),
        "OPENAI_API_KEY": "none",
        "DO_NOT_TRACK": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            environments.command(folder, client),
            cwd=folder / client.place,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
            | environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(client.seconds)
        except subprocess.TimeoutExpired:
            return f"not done after {client.seconds} s; see {log}"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it started and left
            process.wait()
    return f"exit code {code}; see {log}" if code else ""


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


COMMAND = Command(OPTIONS, run, __doc__.partition("\n")[2])


if __name__ == "__main__":
    sys.exit(
        command_line(
            "clients",
            "clients that others wrote against a jaxserve server",
            COMMAND,
            sys.argv[1:],
            InstallError,
            ServerError,
        )
    )
