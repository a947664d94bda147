"""llama.cpp, by llama-cpp-python: one sequence at a time. Settings may have `lookup`: tokens that
its prompt lookup proposes."""

import time

import llama_cpp
import protocol
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding


class Speed:
    """Measures prompts and decodes of one sequence."""

    def __init__(self, settings: dict):
        self._settings = settings
        self._dice = protocol.random.Random(0)
        lookup = settings.get("lookup")
        self._llama = llama_cpp.Llama(
            settings["model"],
            n_ctx=settings["longest"],
            n_batch=settings["chunk_tokens"],
            n_threads=settings["threads"],
            n_threads_batch=settings["threads"],
            draft_model=LlamaPromptLookupDecoding(num_pred_tokens=lookup) if lookup else None,
            logits_all=bool(lookup),
            verbose=False,
        )

    def rate(self, kind: str, size: int) -> float:
        """Tokens per second, once."""
        if kind == "prefill":
            return size / self._seconds(size, 0)[0]
        if size > 1:
            raise ValueError("one sequence decodes at a time")
        steps = self._settings["steps"]
        return steps / self._seconds(self._settings["context"], steps)[1]

    def generate(self, prompt: list[int], tokens: int) -> list[int]:
        """Greedy ids after a prompt."""
        self._llama.reset()
        found = self._llama.generate(prompt, temp=0.0)
        return [id for id, _ in zip(found, range(tokens))]

    def complete(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        """Greedy ids after each prompt, one after the other."""
        return [self.generate(prompt, tokens) for prompt in prompts]

    def _seconds(self, prompt: int, steps: int) -> tuple[float, float]:
        """Seconds of a prompt, and of some tokens after it."""
        vocab = self._settings["vocab"]
        [ids] = protocol.random_prompts(1, prompt + steps, vocab, self._dice)
        self._llama.reset()
        began = time.perf_counter()
        self._llama.eval(ids[:prompt])
        middle = time.perf_counter()
        for id in ids[prompt:]:
            self._llama.eval([id])
        return middle - began, time.perf_counter() - middle


if __name__ == "__main__":
    speed = Speed(protocol.settings())
    protocol.answer(
        {"llama-cpp-python": llama_cpp.__version__},
        speed.rate,
        speed.generate,
        complete=speed.complete,
    )
