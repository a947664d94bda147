"""PyTorch's attention in a process of its own, which shares the GPU but no allocator with JAX.
Nothing of the project is imported here.

The process reads lines of JSON: {"name", "backend", shapes} prepares a case, {"name", "count"}
launches it a number of times. It answers each with a line: {} or {"seconds"}, or {"error"}.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

BACKENDS = {"flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION"}


class TorchPeer:
    """The process, seen from outside; it starts when it is first asked. Errors: RuntimeError with
    what it says."""

    def __init__(self, python: str):
        self.python = python
        self._process: subprocess.Popen[str] | None = None

    def prepare(self, name: str, backend: str, **shape: Any) -> Any:
        """Launches of a case, for `timing.in_turns`. shape: B, T, S, N, K, H, causal."""
        self._ask(name=name, backend=backend, **shape)
        return lambda count: self._ask(name=name, count=count)["seconds"]

    def forget(self) -> None:
        """Frees all cases."""
        if self._process is not None:
            self._ask(forget=True)

    def _ask(self, **question: Any) -> dict[str, Any]:
        if self._process is None:
            self._process = subprocess.Popen(
                [self.python, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        answer = json.loads(line) if line else {"error": "the process of PyTorch ended"}
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer


def serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    ready: dict[str, Any] = {}
    for line in sys.stdin:
        question = json.loads(line)
        try:
            answer: dict[str, Any] = {}
            if question.pop("forget", False):
                ready.clear()
            elif "count" in question:
                answer["seconds"] = timed(ready[question["name"]], question["count"])
            else:
                name = question.pop("name")
                ready[name] = case(**question)
        except Exception as error:
            answer = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:240]}
        print(json.dumps(answer), file=answers, flush=True)


def case(backend: str, B: int, T: int, S: int, N: int, K: int, H: int, causal: bool) -> Any:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = (
        torch.randn(B, heads, length, H, device=device, dtype=torch.bfloat16)
        for heads, length in ((N, T), (K, S), (K, S))
    )

    def run() -> Any:
        with torch.no_grad(), sdpa_kernel([getattr(SDPBackend, BACKENDS[backend])]):
            return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=N != K)

    run()
    return run


def timed(run: Any, count: int) -> float:
    import torch

    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    began = time.perf_counter()
    for _ in range(count):
        run()
    wait()
    return time.perf_counter() - began


if __name__ == "__main__":
    serve()
