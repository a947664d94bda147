"""The command line of an experiment: help, flags, and mistakes as one line on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxserve.observe.machine import machine
from jaxserve.settings.flags import Command, UsageError, help_of, parse
from jaxserve.settings.schema import ConfigError

INSTALL = "pip install -e '.[experiments]'"


def keep(values: Mapping[str, Any], **figures: Any) -> None:
    """Writes the figures to the file of --json, if there is one, with the machine and the settings
    that they are of."""
    if values["json"]:
        Path(values["json"]).write_text(
            json.dumps({"machine": machine(), "settings": values, **figures}, indent=1) + "\n"
        )


def numbers(text: str) -> list[int]:
    """Parses a flag's N,N."""
    return [int(number) for number in text.split(",")]


def exit_code(faults: Sequence[str]) -> int:
    """Returns 0 where a verdict has no faults; else 1, with each of them on stderr."""
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


def command_line(
    name: str, summary: str, command: Command, arguments: Sequence[str], *errors: type[Exception]
) -> int:
    """Runs the command; returns the exit code, 2 for a mistake. errors: what else than a wrong flag
    or setting counts as one."""
    if any(argument in ("-h", "-help", "--help") for argument in arguments):
        print(help_of(name, summary, command))
        return 0
    try:
        return command.run(parse(command, arguments))
    except (UsageError, ConfigError, *errors) as error:
        print(f"{name}: {error}", file=sys.stderr)
    except ModuleNotFoundError as error:
        print(f"{name}: needs {error.name}: {INSTALL}", file=sys.stderr)
    return 2
