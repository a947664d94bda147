"""transformers: one forward pass for prefill, a plain loop of forward passes for decode. Runs in
its own environment, OpenMP bound."""

import random
import time

import protocol
import torch
import transformers

SETTINGS = protocol.settings()
DICE = random.Random(0)
torch.set_num_threads(SETTINGS["threads"])
model = transformers.AutoModelForCausalLM.from_pretrained(
    SETTINGS["model"],
    dtype=getattr(torch, SETTINGS["dtype"]),
    attn_implementation="sdpa",
    local_files_only=True,
).eval()


def step(ids: torch.Tensor, cache: object = None) -> tuple[torch.Tensor, object]:
    """ids [B, T] -> greedy next ids [B, 1] and the cache."""
    out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values


@torch.inference_mode()
def rate(kind: str, size: int) -> float:
    if kind == "prefill":
        prompt = torch.tensor(protocol.random_prompts(1, size, SETTINGS["vocab"], DICE))
        began = time.perf_counter()
        step(prompt)[0].tolist()
        return size / (time.perf_counter() - began)
    ids, cache = step(
        torch.tensor(protocol.random_prompts(size, SETTINGS["context"], SETTINGS["vocab"], DICE))
    )
    began = time.perf_counter()
    for _ in range(SETTINGS["steps"]):
        ids, cache = step(ids, cache)
    ids.tolist()
    return size * SETTINGS["steps"] / (time.perf_counter() - began)


@torch.inference_mode()
def generate(prompt: list[int], tokens: int) -> list[int]:
    ids, cache = step(torch.tensor([prompt]))
    out = ids[0].tolist()
    while len(out) < tokens:
        ids, cache = step(ids, cache)
        out += ids[0].tolist()
    return out


protocol.answer(
    {"transformers": transformers.__version__, "torch": torch.__version__}, rate, generate
)
