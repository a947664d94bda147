"""The clients' environments: a folder each, made with uv or npm."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from experiments.benchmarks.install import InstallError, uv_program
from experiments.clients.catalogue import PROGRAMS, Client

DONE = "installed.json"  # the packages that were asked for, written when all of them are there


def installed(folder: Path, client: Client) -> bool:
    """Returns true if the client's environment holds what is asked for today."""
    file = folder / client.place / DONE
    return file.exists() and json.loads(file.read_text()) == list(client.packages)


def install(folder: Path, client: Client, python: str, seconds: float) -> None:
    """Makes the client's environment, from nothing. Errors: InstallError where it fails or
    takes longer than `seconds`."""
    place = folder / client.place
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    if client.node:
        commands = [["npm", "install", "--silent", "--no-fund", "--no-audit", *client.packages]]
    else:
        uv = uv_program(folder)
        pip = [uv, "pip", "install", "--quiet", "--python", "bin/python"]
        (place / "overrides.txt").write_text("\n".join(client.overrides))
        commands = [
            [uv, "venv", "--quiet", "--allow-existing", "--python", python, "."],
            [*pip, "--overrides", "overrides.txt", *client.packages],
        ]
    for command in commands:
        _run(command, place, seconds)
    (place / DONE).write_text(json.dumps(client.packages) + "\n")


def remove(folder: Path, client: Client) -> None:
    shutil.rmtree(folder / client.place, ignore_errors=True)


def command(folder: Path, client: Client) -> list[str]:
    """Returns the command that runs the client's program, in its folder. Node finds packages beside
    the file that imports them, so its program is copied there."""
    place = folder / client.place
    if not client.node:
        return [str(place / "bin" / "python"), str(PROGRAMS / client.program)]
    for name in (client.program, "check.mjs"):
        shutil.copy(PROGRAMS / name, place)
    return ["node", str(place / client.program)]


def _run(command: list[str], place: Path, seconds: float) -> None:
    try:
        done = subprocess.run(
            command,
            cwd=place,
            timeout=seconds,
            env=os.environ | {"UV_PYTHON_DOWNLOADS": "never"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InstallError(f"{command[0]}: {error}") from None
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise InstallError(f"{Path(command[0]).name} failed: {last}")
