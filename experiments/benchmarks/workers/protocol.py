"""Protocol of every engine's worker: one JSON object a line, questions on standard input, answers
on standard output.

settings   first argument: model (folder or file), dtype, threads, vocab, context, steps,
           chunk_tokens, most_sequences, longest, and quantization if it is not auto
first      {"versions": {...}} when the model is loaded
measure    {"kind": "prefill" | "decode", "size": N, "seconds": S}: {"rates": [...]} tokens/s,
           repeated for this many seconds
generate   {"kind": "generate", "prompt": [...], "tokens": N}: {"ids": [...]}, greedy, or null where
           the engine cannot tell
time       {"kind": "time", "sequences": N, "prompt": N, "tokens": N, "seed": N}: {"seconds": S}
           until random prompts of this seed have ended, of engines that offer it
complete   {"kind": "complete", "prompts": [[...], ...], "tokens": N}: {"seconds": S, "ids": [[...],
           ...]} of greedy answers at the same time, of engines that offer it; jaxserve also says
           `checked` and `right`, proposed tokens so far
errors     {"error": "..."}

Only the standard library is used: each worker runs in the environment of its engine. Whatever
libraries print goes to standard error.
"""

from __future__ import annotations

import functools
import json
import os
import random
import sys
import time
import traceback
from collections.abc import Callable


def settings() -> dict:
    return json.loads(sys.argv[1])


def random_prompts(sequences: int, tokens: int, vocab: int, dice: random.Random) -> list[list[int]]:
    """Ids that no prefix cache has seen, none of them special."""
    return [[dice.randrange(vocab // 2, vocab) for _ in range(tokens)] for _ in range(sequences)]


def answer(
    versions: dict[str, str],
    rate: Callable[[str, int], float],
    generate: Callable[[list[int], int], list[int] | None],
    seconds: Callable[[int, int, int, random.Random], float] | None = None,
    complete: Callable[[list[list[int]], int], list[list[int]]] | None = None,
    counts: Callable[[], dict[str, float]] = dict,
) -> None:
    """Answers questions until standard input ends. rate: tokens per second of a point, measured
    once. seconds: of a number of sequences, tokens of each prompt, and tokens of each answer.
    complete: greedy ids behind some prompts. counts: of what has happened so far."""
    _say({"versions": versions})
    for line in sys.stdin:
        question = json.loads(line)
        try:
            if question["kind"] == "generate":
                _say({"ids": generate(question["prompt"], question["tokens"])})
            elif question["kind"] == "complete" and complete is not None:
                began = time.perf_counter()
                ids = complete(question["prompts"], question["tokens"])
                _say({"seconds": time.perf_counter() - began, "ids": ids, **counts()})
            elif question["kind"] == "time" and seconds is not None:
                extent = (question[name] for name in ("sequences", "prompt", "tokens"))
                _say({"seconds": seconds(*extent, random.Random(question["seed"]))})
            else:
                _say(
                    {
                        "rates": _repeat(
                            functools.partial(rate, question["kind"], question["size"]),
                            question["seconds"],
                        )
                    }
                )
        except Exception as error:
            traceback.print_exc()
            _say({"error": f"{type(error).__name__}: {error}"})


def _repeat(rate: Callable[[], float], seconds: float) -> list[float]:
    began = time.perf_counter()
    rates: list[float] = []
    while not rates or time.perf_counter() - began < seconds:
        rates.append(rate())
    return rates


_out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


def _say(message: dict) -> None:
    print(json.dumps(message), file=_out, flush=True)
