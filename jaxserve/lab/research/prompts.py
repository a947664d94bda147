"""The token ids of prompts: made from arrivals by a seed, or of recorded conversations."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.lab.research.load import Load
from jaxserve.lab.simulate.arrival import Arrival
from jaxserve.settings.schema import ConfigError

SHORTEST = 4  # tokens of a prompt and of an answer that are taken from conversations
SPEAKERS = ("human", "user"), ("gpt", "assistant", "chatgpt", "bing", "bard")
BLOCKS, OWN = 0, 1  # streams of random numbers
Seed = tuple[int, ...]
Encode = Callable[[str], Awaitable[list[int]]]  # the token ids of a text
Conversation = tuple[str, str]  # what was asked, and the answer


def prompt_ids(arrival: Arrival, number: int, vocab: int, seed: Seed = (0,)) -> np.ndarray:
    """The token ids of a prompt, int32 [arrival.prompt]: equal hash ids are equal tokens in all
    prompts of a seed; all other tokens are random and differ by `number`."""
    parts = [
        _random((*seed, BLOCKS, int(block)), vocab, arrival.block)
        for block in (() if arrival.blocks is None else arrival.blocks)
    ]
    unshared = _random((*seed, OWN, number), vocab, arrival.prompt)
    shared = np.concatenate([unshared[:0], *parts])[: arrival.prompt]
    return np.concatenate([shared, unshared[len(shared) :]])


def _random(seed: Seed, vocab: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab, count, np.int32)


async def requests_of(
    load: Load, seed: Seed, vocab: int, longest: int | None, encode: Encode
) -> tuple[list[Arrival], list[np.ndarray]]:
    """The requests of a load by time, and their prompts. seed: of the prompts' tokens. longest:
    tokens of a sequence; None where it is not known. Errors: ConfigError."""
    load.check()
    if load.conversations:
        pairs = await conversations(load.workload, encode, load.requests, longest, load.seed)
        return load.timed([arrival for arrival, _ in pairs]), [prompt for _, prompt in pairs]
    arrivals = load.schedule()
    for number, each in enumerate(arrivals):
        if longest is not None and each.prompt + each.output > longest:
            raise ConfigError(
                "workload" if load.workload else "prompt",
                f"request {number} has {each.prompt} + {each.output} tokens; the model's limit is "
                f"{longest} (length_scale makes all shorter)",
            )
    return arrivals, [prompt_ids(each, number, vocab, seed) for number, each in enumerate(arrivals)]


def warm_up_of(
    arrivals: Sequence[Arrival], count: int, vocab: int, seed: Seed
) -> tuple[list[Arrival], list[np.ndarray]]:
    """Requests as long as the first ones, which share no tokens with any of them."""
    unshared = [Arrival(0.0, each.prompt, each.output) for each in arrivals[:count]]
    return unshared, [
        prompt_ids(each, len(arrivals) + number, vocab, seed)
        for number, each in enumerate(unshared)
    ]


async def conversations(
    file: str, encode: Encode, count: int, longest: int | None, seed: int
) -> list[tuple[Arrival, np.ndarray]]:
    """Draws conversations from a file in ShareGPT's form, as arrivals at 0 and their prompts.

    A prompt is what was asked first; an output has as many tokens as the answer had. Those of
    fewer than SHORTEST tokens are left out, and those that with their answer exceed `longest`.
    Errors: ConfigError.
    """
    read = _read(file)
    order = np.random.default_rng((seed, 0)).permutation(len(read))
    pairs = []
    for place in order:
        prompt, answer = [await encode(text) for text in read[place]]
        fits = longest is None or len(prompt) + len(answer) <= longest
        if fits and min(len(prompt), len(answer)) >= SHORTEST:
            pairs.append((Arrival(0.0, len(prompt), len(answer)), np.array(prompt, np.int32)))
        if len(pairs) == count:
            return pairs
    raise ConfigError(
        "requests",
        f"{count}: {file} has {len(pairs)} conversations of at least {SHORTEST} tokens a side that "
        f"fit the model",
    )


def _read(file: str) -> list[Conversation]:
    try:
        rows = json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("workload", f"{file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError("workload", f"{file}: is not JSON: {error}") from None
    pairs = []
    if isinstance(rows, list):
        pairs = [pair for row in rows if (pair := _first_turns(row))]
    if not pairs:
        raise ConfigError(
            "workload",
            f"{file}: must be a list of objects with conversations, each a list of from and value, "
            "some of which begin with human and gpt",
        )
    return pairs


def _first_turns(row: Any) -> Conversation | None:
    """Returns the first question and its answer; None without such a pair."""
    turns = isinstance(row, dict) and row.get("conversations", row.get("conversation"))
    if not isinstance(turns, list) or len(turns) < 2:
        return None
    texts = []
    for turn, names in zip(turns, SPEAKERS):
        if not isinstance(turn, dict) or turn.get("from") not in names:
            return None
        if not isinstance(turn.get("value"), str):
            return None
        texts.append(turn["value"])
    return texts[0], texts[1]
