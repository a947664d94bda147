"""The command line: `jaxserve COMMAND [flags]`. Each command is a file in `cli`; its flags are
made from the config classes."""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import logging
import os
import sys
from collections.abc import Sequence

import jaxserve
from jaxserve.api.errors import RequestError
from jaxserve.cli.engine_flags import engine_config
from jaxserve.group.member import this_member
from jaxserve.server import logs
from jaxserve.settings.flags import Command, UsageError, help_of, parse
from jaxserve.settings.schema import ConfigError
from jaxserve.settings.sources import printed

COMMANDS = {  # name -> module of jaxserve, summary
    "serve": ("cli.serve", "serve a model over gRPC and the OpenAI protocol"),
    "chat": ("cli.chat", "a conversation in the terminal"),
    "complete": ("cli.complete", "one text goes on"),
    "generate": ("cli.generate", "complete prompts in this process"),
    "demo": ("lab.cli.demo", "serve a small model on a mesh of twelve CPU devices and talk to it"),
    "launch": ("cli.launch", "run a command as a group of processes, on this host or on several"),
    "conductor": ("cli.conductor", "serve with the replicas of a cluster, without devices"),
    "cluster": ("cli.cluster", "replicas and a conductor as processes of this machine"),
    "fetch": ("cli.fetch", "download a model into the cache folder"),
    "doctor": (
        "cli.doctor.command",
        "look whether serving with these flags would work here, and how fast",
    ),
    "keys": ("cli.keys", "make and forget the API keys of a server"),
    "kv": ("cli.kv", "find, keep and copy cached blocks of prompts, also as files"),
    "profile": (
        "lab.cli.profile_steps",
        "measure what steps cost here, for the scheduler's predictions",
    ),
    "simulate": (
        "lab.cli.simulate",
        "how a model on a number of GPUs would serve a workload, simulated",
    ),
    "plan": ("lab.cli.plan", "which mesh of a number of GPUs serves a workload best, simulated"),
    "bench engine": (
        "lab.cli.bench.engine",
        "measure prefill, decode and the host's work, without a server",
    ),
    "bench serve": ("lab.cli.bench.serve", "measure a server under load"),
    "bench sweep": ("lab.cli.bench.sweep", "measure and simulate replicas of many settings"),
    "bench scaling": (
        "lab.cli.bench.scaling",
        "measure and simulate a prompt on ever more devices",
    ),
    "soak": ("lab.cli.soak", "everything at once for hours, and what is left afterwards"),
}
USAGE = 2  # exit code of a command line or a setting at fault
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    try:
        return _main(list(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt:
        print(file=sys.stderr)
        # the process is ours, and threads that compile would hold it for minutes
        if arguments is None:
            sys.stdout.flush()
            os._exit(INTERRUPTED)
        return INTERRUPTED
    except BrokenPipeError:  # `| head` has enough
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("help", "-h", "-help", "--help"):
        return _page(arguments[1:])
    if arguments[0] == "--version":
        print(f"jaxserve {jaxserve.__version__}")
        return 0
    name, flags = _named(arguments)
    if name not in COMMANDS:
        similar = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean {similar[0]!r}?" if similar else "see jaxserve --help"
        return _fail("", f"{name!r} is not a command; {hint}")
    command = load(name)
    if any(argument in ("-h", "-help", "--help") for argument in flags):
        print(help_of(f"jaxserve {name}", COMMANDS[name][1], command))
        return 0
    return _run(name, command, flags)


def load(name: str) -> Command:
    """Imports a command; others, and what they import, are left alone."""
    return importlib.import_module(f"jaxserve.{COMMANDS[name][0]}").COMMAND


def overview() -> str:
    """Returns the help page of jaxserve itself."""
    lines = [f"  {name:14}{summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join(
        [
            f"jaxserve {jaxserve.__version__}: exact serving of language models in JAX",
            "",
            "usage: jaxserve COMMAND [flags]",
            "",
            *lines,
            "",
            "`jaxserve COMMAND --help` tells a command's flags.",
        ]
    )


def _run(name: str, command: Command, arguments: Sequence[str]) -> int:
    handler = logging.StreamHandler()
    handler.setFormatter(logs.TextFormatter())
    logging.basicConfig(handlers=[handler])
    origins: dict[str, str] = {}
    try:
        values = parse(command, arguments)
        origins = values.origins
        if values.get("print_config"):
            print(printed(command.options, values, origins))
            return 0
        member = this_member()
        if member is not None and not member.leads and "mesh" in command.options:
            from jaxserve.engine.worker_process import work

            open_port = None
            if command.worker_port is not None:
                open_port = functools.partial(command.worker_port, values, member)
            work(engine_config(values), member, open_port)
        return command.run(values)
    except UsageError as error:
        return _fail(name, str(error))
    except (ConfigError, RequestError) as error:
        return _fail(name, _place(error.field, command, origins) + str(error))


def _place(field: str, command: Command, origins: dict[str, str]) -> str:
    """Returns the prefix of the setting at fault: '--' for a flag, else where it is from."""
    if field not in command.options:
        return ""
    origin = origins.get(field, "--")
    return "--" if origin.startswith("--") else f"{origin}: "


def _named(arguments: list[str]) -> tuple[str, list[str]]:
    """('bench serve', flags): commands have one word or two."""
    two = " ".join(arguments[:2])
    return (two, arguments[2:]) if two in COMMANDS else (arguments[0], arguments[1:])


def _page(arguments: list[str]) -> int:
    name = " ".join(arguments)
    if name in COMMANDS:
        print(help_of(f"jaxserve {name}", COMMANDS[name][1], load(name)))
    else:
        print(overview())
    return 0


def _fail(name: str, message: str) -> int:
    """Prints a mistake on stderr, one line; returns the exit code."""
    print(f"jaxserve{f' {name}' if name else ''}: {message}", file=sys.stderr)
    return USAGE


if __name__ == "__main__":
    sys.exit(main())
