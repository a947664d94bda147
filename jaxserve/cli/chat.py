"""`jaxserve chat`: a conversation in the terminal, with a model of this machine or of a server."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from jaxserve.api.errors import RequestError
from jaxserve.cli.engine_flags import engine_groups
from jaxserve.cli.openai_client import ANSWER, CLIENT, OpenAIClient, answer_fields, client_of
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.settings.schema.engine import SERVED

ABOUT = """\
Without --url a server is started for as long as the conversation lasts. Ctrl-C stops an answer;
where none is being written it ends the conversation, as Ctrl-D and /quit do. From a pipe each line
is a message, and only answers are written.

  jaxserve chat
  jaxserve chat meta-llama/Llama-3.1-8B-Instruct --system='Answer in one sentence.'
  jaxserve chat --url=http://gpu-host:8000
"""
CHAT = [
    Option("system", str, None, "instructions to the model before the conversation"),
    Option("stats", bool, True, "tell tokens and speed after each answer, on a terminal"),
]
HELP = """\
/clear         forget the conversation
/system TEXT   tell the model something before it, and forget it
/quit          end (Ctrl-D too); Ctrl-C stops an answer"""
PROMPT = ">>> "
FAINT, PLAIN = "\x1b[2m", "\x1b[0m"


class Conversation:
    """The conversation so far, and the commands that may be typed. terminal: whether a person
    reads along."""

    def __init__(self, client: OpenAIClient, values: Mapping[str, Any], terminal: bool):
        self._client = client
        self._given = answer_fields(values)
        self._terminal = terminal
        self._stats = terminal and values["stats"]
        self._begin(values["system"])

    def _begin(self, system: str | None) -> None:
        self._system = system
        self.messages = [] if not system else [{"role": "system", "content": system}]

    def take(self, line: str) -> bool:
        """Answers a line, or does what it commands; False where it ends the conversation."""
        command, _, argument = line.strip().partition(" ")
        match command:
            case "":
                pass
            case "/quit" | "/exit" | "/bye":
                return False
            case "/clear":
                self._begin(self._system)
            case "/system":
                self._begin(argument.strip() or None)
            case "/help":
                print(HELP)
            case _ if command.startswith("/") and self._terminal:
                print(f"{command} is not a command\n{HELP}")
            case _:
                self._answer(line)
        return True

    def _answer(self, line: str) -> None:
        self.messages.append({"role": "user", "content": line})
        answer = ""
        try:
            with contextlib.closing(self._client.chat(self.messages, self._given)) as pieces:
                for piece in pieces:
                    self._show(piece.text, piece.reasoning)
                    answer += "" if piece.reasoning else piece.text
        except KeyboardInterrupt:
            if not self._terminal:
                raise
        except RequestError as error:
            self._failed(error)
            return
        print(flush=True)
        self.messages.append({"role": "assistant", "content": answer})
        if self._stats:
            print(f"{FAINT}{self._client.answered}{PLAIN}", flush=True)

    def _show(self, text: str, reasoning: bool) -> None:
        if not reasoning:
            print(text, end="", flush=True)
        elif self._terminal:
            print(f"{FAINT}{text}{PLAIN}", end="", flush=True)

    def _failed(self, error: RequestError) -> None:
        """Takes the message back that got no answer. Errors: the error, without a terminal."""
        self.messages.pop()
        if not self._terminal:
            raise error
        hint = " (/clear forgets the conversation)" if len(self.messages) > 1 else ""
        print(f"\n{error}{hint}", flush=True)


def run(values: dict[str, Any]) -> int:
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    with client_of(values) as client:
        conversation = Conversation(client, values, terminal)
        if terminal:
            print(f"{client.model}; /help tells what may be typed", flush=True)
        for line in _typed() if terminal else sys.stdin:
            if not conversation.take(line.rstrip("\n")):
                break
    return 0


def _typed() -> Iterator[str]:
    """Lines that are typed, until Ctrl-D or Ctrl-C."""
    with contextlib.suppress(ImportError):  # not everywhere
        importlib.import_module("readline")  # makes `input` edit lines, and know those before
    while True:
        try:
            yield input(PROMPT)
        except (EOFError, KeyboardInterrupt):
            print()
            return


COMMAND = Command(
    {"server": CLIENT, "conversation": [*CHAT, *ANSWER], **engine_groups(**SERVED)},
    run,
    ABOUT,
    argument="[MODEL]",
)
