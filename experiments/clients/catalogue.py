"""The clients: what each one's environment holds, and the program that makes its calls."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"
CHAT = "smollm2-135m"  # a model whose texts are text
TINY = "random:tiny"  # for what asks much and reads no text


@dataclass(frozen=True)
class Client:
    """One row of the table.

    program: a file of `programs`, for Python (.py) or Node (.mjs).
    packages: what its environment holds, as the registry's client takes it.
    model: the model of the server that it calls.
    seconds: how long all of its calls may take together.
    """

    name: str
    program: str
    packages: tuple[str, ...]
    model: str = CHAT
    seconds: int = 900

    @property
    def node(self) -> bool:
        return self.program.endswith(".mjs")


CLIENTS = (
    Client("openai", "run_openai.py", ("openai", "pydantic")),
    Client("openai-node", "run_openai.mjs", ("openai", "zod")),
    Client("litellm", "run_litellm.py", ("litellm", "mcp")),
    Client("anthropic", "run_anthropic.py", ("anthropic",)),
)
