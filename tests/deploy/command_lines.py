"""The command lines that the deploy kit starts, as what starts them would: the kubelet, Docker,
srun, mpirun, systemd."""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DEPLOY = Path(__file__).parents[2] / "docs" / "deploy"
SETTINGS = "/etc/jaxserve/settings"
MODEL_FLAGS = ["--model=ORGANISATION/MODEL", "--mesh=spp=2,tp=8", "--insecure"]
# stands for srun and mpirun: tells the command that it was given, and what it passes on
LAUNCHER = """#!/usr/bin/env python3
import json, os, sys
names = ("JAXSERVE_CACHE", "HF_HOME")
print(json.dumps([sys.argv[1:], {name: os.environ[name] for name in names}]))
"""


@dataclass
class CommandLine:
    """arguments: behind `jaxserve`. files: texts by the paths where the command finds them.
    folders: those that it may write to. grace: seconds from SIGTERM to SIGKILL."""

    arguments: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    folders: list[str] = field(default_factory=list)
    grace: float = 0.0


def _dockerfile() -> str:
    """An instruction a line."""
    return (DEPLOY / "docker" / "Dockerfile").read_text().replace("\\\n", " ")


def health_check() -> list[str]:
    """The command by which Docker asks whether the image's server lives."""
    (command,) = re.findall(r"^HEALTHCHECK .* CMD (\[.*\])$", _dockerfile(), re.M)
    return json.loads(command)


def of_image() -> CommandLine:
    """ENTRYPOINT and CMD of the image, with a key, which it does not start without."""
    text = _dockerfile()
    entry, command = (
        json.loads(re.findall(rf"^{name} (\[.*\])$", text, re.M)[-1])
        for name in ("ENTRYPOINT", "CMD")
    )
    assert entry == ["jaxserve"]
    (variables,) = re.findall(r"^ENV (.*)$", text, re.M)
    environment = dict(word.split("=", 1) for word in shlex.split(variables))
    return CommandLine(command, {**environment, "JAXSERVE_API_KEY": "0" * 32}, {}, ["/cache"])


def of_pods(objects: list[dict[str, Any]], image: CommandLine) -> list[CommandLine]:
    """Returns the command lines of rendered containers: ENTRYPOINT's arguments are theirs, and the
    image's variables, over which go their own."""
    (settings,) = (found["data"] for found in objects if found["kind"] == "ConfigMap")
    files = {f"{SETTINGS}/{name}": text for name, text in settings.items()}
    lines = []
    for found in objects:
        spec = found.get("spec", {})
        group = spec.get("leaderWorkerTemplate", {})
        templates = [spec.get("template"), group.get("leaderTemplate"), group.get("workerTemplate")]
        for template in filter(None, templates):
            (container,) = template["spec"]["containers"]
            own = {variable["name"]: _value(variable) for variable in container["env"]}
            environment = {**image.environment, **own}
            del environment["JAXSERVE_API_KEY"]
            arguments = [_expanded(argument, environment) for argument in container["args"]]
            grace = float(template["spec"]["terminationGracePeriodSeconds"])
            mounts = container["volumeMounts"]
            folders = [mount["mountPath"] for mount in mounts if not mount.get("readOnly")]
            lines.append(CommandLine(arguments, environment, files, folders, grace))
    return lines


def _value(variable: dict[str, Any]) -> str:
    if "value" in variable:
        return variable["value"]
    return "10.0.0.1" if "fieldRef" in variable["valueFrom"] else "secret" * 4


def _expanded(argument: str, environment: dict[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda match: environment[match[1]], argument)


def of_unit() -> CommandLine:
    unit = configparser.RawConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    text = (DEPLOY / "systemd" / "jaxserve.service").read_text()
    unit.read_string(text)
    program, *arguments = shlex.split(unit["Service"]["ExecStart"])
    assert Path(program).name == "jaxserve"
    return CommandLine(
        arguments,
        dict(re.findall(r"^Environment=(\w+)=(.*)$", text, re.M)),
        {"/etc/jaxserve/server.yaml": "model: smollm2-135m\n"},
        ["/var/cache/jaxserve", "/var/lib/jaxserve"],
        float(unit["Service"]["TimeoutStopSec"]),
    )


def of_script(script: str, launcher: str, folder: Path, *arguments: str) -> CommandLine:
    """Returns what a script has its launcher start, where that only tells; folder: for the
    launcher."""
    stand_in = folder / launcher
    stand_in.write_text(LAUNCHER)
    stand_in.chmod(0o755)
    done = subprocess.run(
        ["bash", str(DEPLOY / script), *arguments, *MODEL_FLAGS],
        env={"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "HOME": str(folder)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=30,
        check=True,
    )
    given, environment = json.loads(done.stdout.splitlines()[-1])
    return CommandLine(given[given.index("jaxserve") + 1 :], environment)
