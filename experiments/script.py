"""The command line of an experiment: help, flags, and mistakes as one line on stderr."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jaxserve.config import ConfigError
from jaxserve.flags import Command, UsageError, help_of, parse


def command_line(name: str, summary: str, command: Command, arguments: Sequence[str], *errors: type[Exception]) -> int:
    """Runs the command; returns the exit code, 2 for a mistake. errors: what else than a wrong flag or setting counts as one."""
    if any(argument in ("-h", "-help", "--help") for argument in arguments):
        print(help_of(name, summary, command))
        return 0
    try:
        return command.run(parse(command, arguments))
    except (UsageError, ConfigError, *errors) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
