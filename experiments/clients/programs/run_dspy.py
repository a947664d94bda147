"""DSPy: its language models by chats, responses and completions. Its adapters ask for forms that a
small model does not write."""

from __future__ import annotations

import asyncio

import dspy
from check import BASE, KEY, MODEL, call, main

lm = dspy.LM(
    f"openai/{MODEL}", api_base=BASE, api_key=KEY, temperature=0, max_tokens=64, cache=False
)
dspy.configure(lm=lm)
QUESTION = "What is the capital of France?"


@call
def plain() -> None:
    assert lm(QUESTION)[0]
    assert lm(messages=[{"role": "user", "content": QUESTION}], n=2, temperature=1.0)[1]


@call
def usage_is_tracked() -> None:
    with dspy.track_usage() as tracker:
        assert lm(QUESTION)[0]
    (counts,) = tracker.get_total_tokens().values()
    assert 0 < counts["completion_tokens"] <= 64


@call
async def async_calls() -> None:
    made = await asyncio.gather(*(lm.acall(QUESTION) for _ in range(3)))
    assert len({str(texts[0]) for texts in made}) == 1


@call
def responses() -> None:
    by_responses = dspy.LM(
        f"openai/{MODEL}",
        model_type="responses",
        api_base=BASE,
        api_key=KEY,
        temperature=0,
        max_tokens=32,
        cache=False,
    )
    assert by_responses(QUESTION)[0]


@call
def text_completion() -> None:
    by_text = dspy.LM(
        f"text-completion-openai/{MODEL}",
        model_type="text",
        api_base=BASE,
        api_key=KEY,
        temperature=0,
        max_tokens=16,
        cache=False,
    )
    assert by_text(QUESTION)[0]


main("dspy")
