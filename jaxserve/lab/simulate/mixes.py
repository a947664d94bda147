"""Draws lengths of prompts and outputs from distributions, or from mixes calibrated to public
traces, with the prefixes that their prompts share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from jaxserve.lab.simulate.arrival import BLOCK, MOST_TOKENS, Arrival
from jaxserve.lab.simulate.spec import did_you_mean, fault, to_number

Lengths = Callable[[np.random.Generator, int], np.ndarray]


# --- distributions

# at which empirical distributions are given
QUANTILES = (0, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1)


def curve(*quantiles: int) -> Lengths:
    """Draws lengths whose quantiles at QUANTILES are these, geometric between them."""
    logs = np.log(quantiles)
    return lambda rng, count: np.exp(np.interp(rng.random(count), QUANTILES, logs))


def constant(value: float) -> Lengths:
    return lambda rng, count: np.full(count, value)


def uniform(low: float, high: float) -> Lengths:
    return lambda rng, count: rng.integers(int(low), int(high), count, endpoint=True)


def exponential(mean: float) -> Lengths:
    return lambda rng, count: rng.exponential(mean, count)


def lognormal(median: float, sigma: float, low: float = 1, high: float = MOST_TOKENS) -> Lengths:
    """Draws from a lognormal distribution cut off at low and high, through its inverse. Errors:
    ValueError where nothing lies between them."""
    normal = NormalDist(math.log(median), sigma)
    first = normal.cdf(math.log(low))
    last = normal.cdf(math.log(high))
    if last - first < 1e-9:
        raise ValueError(
            f"almost nothing of lognormal:{median:g}:{sigma:g} lies between {low:g} and {high:g}"
        )
    inverse = lambda share: normal.inv_cdf(
        min(max(first + (last - first) * share, 1e-15), 1 - 1e-15)
    )
    return lambda rng, count: np.clip(
        np.exp([inverse(share) for share in rng.random(count)]), low, high
    )


# --- mixes

# requests from one turn of a conversation to its next, Mooncake conversation
FOLLOW_UP_LAG = curve(5, 99, 141, 229, 422, 901, 1660, 2129, 5104, 10514)
# prompts on either side of the lag, of which the longest possible is continued
FOLLOW_UP_WINDOW = 32


@dataclass(frozen=True)
class MixPart:
    """One class of requests in a mix. All its prompts begin with the same `system` blocks; a share
    of `follows` continues another of its prompts, `lag` prompts of the class before it."""

    prompt: Lengths
    output: Lengths
    kind: str = ""
    share: float = 1.0
    system: int = 0
    follows: float = 0.0
    lag: Lengths = FOLLOW_UP_LAG


# Quantiles at QUANTILES, measured in the files that data/README 1.1 names.
SHORT = (
    curve(2, 29, 73, 574, 1712, 3730, 5683, 6559, 7435, 8032),
    curve(2, 43, 85, 229, 415, 629, 836, 923, 997, 1024),
)
LARGE = (
    curve(100628, 130608, 161871, 260355, 400446, 628526, 839720, 910611, 955280, 996935),
    curve(61, 137, 191, 341, 522, 672, 792, 882, 1060, 1578),
)
CHAT = (
    curve(891, 901, 964, 2306, 6909, 15367, 27367, 39550, 85400, 126195),
    curve(1, 10, 24, 156, 350, 472, 597, 698, 1119, 2000),
)


def _medha(percent: float) -> tuple[MixPart, ...]:
    return (
        MixPart(*SHORT, kind="short", share=1 - percent / 100),
        MixPart(*LARGE, kind="long", share=percent / 100),
    )


def _tetris(mu: float, low: float, high: float) -> tuple[MixPart, ...]:
    """A trace of Tetris. Only min, max and mean are published: sigma 0.8, data/README 1.3; outputs
    are not: those of CHAT."""
    return (MixPart(prompt=lognormal(math.exp(mu), 0.8, low, high), output=CHAT[1]),)


MIXES: dict[str, tuple[MixPart, ...]] = {
    "medha-0": (MixPart(*SHORT, kind="short"),),
    "medha-1": _medha(1),
    "medha-5": _medha(5),
    "medha-10": _medha(10),
    "sharegpt": (
        MixPart(
            prompt=curve(1, 7, 9, 16, 36, 150, 759, 1426, 2863, 3973),
            output=curve(1, 21, 42, 135, 283, 448, 682, 843, 999, 2384),
        ),
    ),
    "azure-conv": (
        MixPart(
            prompt=curve(2, 181, 207, 396, 1020, 1189, 2734, 4083, 4142, 14050),
            output=curve(7, 41, 54, 85, 129, 395, 424, 451, 601, 1000),
        ),
    ),
    "mooncake-conversation": (MixPart(*CHAT, system=1, follows=0.44),),
    "mooncake-toolagent": (  # tools as in the slice that 1.3 describes, shares fitted to Table 3
        MixPart(
            *CHAT,
            kind="chat",
            share=0.49,
            system=1,
            follows=0.58,
            lag=curve(5, 69, 99, 160, 295, 631, 1162, 1490, 3573, 7360),
        ),
        MixPart(
            curve(6150, 6168, 6169, 6175, 6400, 7094, 7677, 7751, 8180, 9000),
            curve(3, 3, 3, 3, 3, 28, 35, 45, 60, 80),
            "tool",
            0.35,
            12,
        ),
        MixPart(
            curve(2960, 3015, 3030, 3125, 3142, 3161, 3260, 3359, 3472, 3700),
            curve(16, 16, 18, 20, 21, 23, 24, 24, 24, 30),
            "agent",
            0.16,
            5,
        ),
    ),
    # ShareGPT, L-Eval and LooGLE: short ones, and questions about shared documents
    "mooncake-synthetic": (
        MixPart(
            curve(13, 17, 20, 27, 51, 201, 686, 1023, 1383, 1491),
            curve(1, 10, 28, 114, 253, 389, 584, 715, 788, 842),
            kind="chat",
            share=0.32,
        ),
        MixPart(
            curve(1509, 2832, 3840, 11100, 17866, 31718, 42427, 53980, 66765, 191378),
            curve(1, 2, 3, 7, 25, 122, 278, 348, 503, 893),
            kind="document",
            share=0.68,
            follows=0.9,
            lag=curve(1, 12, 23, 82, 262, 650, 1170, 1560, 2350, 3050),
        ),
    ),
    # Kimi's sessions: searches that never recur, conversations, and contexts that come back after
    # long pauses. Only the shares of the first and the last are published (Mooncake, 7.3.4).
    "mooncake-sessions": (
        MixPart(*SHORT, kind="ephemeral", share=0.62),
        MixPart(*CHAT, kind="normal", share=0.30, system=1, follows=0.85),
        MixPart(
            curve(24000, 28000, 32000, 44000, 64000, 84000, 100000, 110000, 124000, 131072),
            CHAT[1],
            kind="context",
            share=0.08,
            follows=0.98,
            lag=curve(1, 20, 40, 100, 200, 400, 600, 800, 1000, 1200),
        ),
    ),
    "tetris-short": _tetris(9.8126, 4e3, 95e3),
    "tetris-medium": _tetris(10.0656, 8e3, 142e3),
    "tetris-long": _tetris(10.4282, 16e3, 190e3),
}

FIXED = "fixed"
OPTIONS = ("mix", "prompt", "output", "prefix", "groups")


def drawn(options: dict[str, str], count: int, seed: int) -> list[Arrival]:
    """Draws arrivals, all at 0, of the mix or the lengths that the options name. Errors:
    ConfigError."""
    parts = _parts(options)
    rng = np.random.default_rng((seed, 0))
    which = rng.choice(len(parts), count, p=[part.share for part in parts])
    lengths = np.empty((2, count), np.int64)
    for index, part in enumerate(parts):
        mine = which == index
        lengths[:, mine] = [
            np.clip(np.rint(draw(rng, int(mine.sum()))), 1, MOST_TOKENS)
            for draw in (part.prompt, part.output)
        ]
    if "prefix" in options:
        return _prefixed(options, lengths, rng)
    prompts, outputs = lengths.tolist()
    blocks: Sequence[np.ndarray | None] = [None] * count
    if any(part.system or part.follows for part in parts):
        blocks = _blocks(parts, which.tolist(), prompts, rng)
    return [
        Arrival(0.0, *fields)
        for fields in zip(prompts, outputs, (parts[index].kind for index in which), blocks)
    ]


def _prefixed(
    options: dict[str, str], lengths: np.ndarray, rng: np.random.Generator
) -> list[Arrival]:
    """Arrivals whose prompts begin with the prefix of their group, and have `lengths` (prompt,
    output) [2, count] beside it."""
    prefix, groups = (
        int(to_number(name, options.get(name, "1"), 1, MOST_TOKENS))
        for name in ("prefix", "groups")
    )
    prompts, outputs = lengths.tolist()
    drawn = rng.integers(0, groups, len(prompts)).tolist()
    return [
        Arrival(0.0, prefix + prompt, output, blocks=(group,), block=prefix)
        for prompt, output, group in zip(prompts, outputs, drawn)
    ]


def _parts(options: dict[str, str]) -> tuple[MixPart, ...]:
    mix = options.get("mix", FIXED)
    names = [name for name in OPTIONS[1:] if name in options]
    if mix != FIXED and mix not in MIXES:
        fault(
            f"unknown mix {mix!r}; known are "
            f"{', '.join((*MIXES, FIXED))}{did_you_mean(mix, (*MIXES, FIXED))}"
        )
    if mix != FIXED and names:
        fault(f"mix={mix} sets the lengths; {names[0]} goes with mix={FIXED} only")
    if mix == FIXED and not {"prompt", "output"} <= options.keys():
        fault("lengths are needed: mix=NAME, or prompt=LENGTHS and output=LENGTHS")
    if "groups" in options and "prefix" not in options:
        fault("groups goes with prefix only")
    if mix != FIXED:
        return MIXES[mix]
    return (MixPart(_lengths("prompt", options["prompt"]), _lengths("output", options["output"])),)


# distributions, with the least and the most numbers that each takes
LENGTHS: dict[str, tuple[Callable[..., Lengths], int, int]] = {
    "constant": (constant, 1, 1),
    "uniform": (uniform, 2, 2),
    "exponential": (exponential, 1, 1),
    "lognormal": (lognormal, 2, 4),
}


def _lengths(name: str, text: str) -> Lengths:
    form, *words = text.split(":")
    if not form.isalpha():
        form, words = "uniform" if words else "constant", [form, *words]
    if form not in LENGTHS:
        fault(
            f"{name}: unknown distribution {form!r}; known are a number, "
            f"{', '.join(LENGTHS)}{did_you_mean(form, LENGTHS)}"
        )
    make, lower, upper = LENGTHS[form]
    if not lower <= len(words) <= upper or len(words) == 3:
        fault(
            f"{name}: {form} takes {lower if lower == upper else f'{lower} or {upper}'} numbers, "
            f"not {len(words)}"
        )
    sigma = 1 if form == "lognormal" else None
    values = [
        to_number(name, word, 1e-6 if place == sigma else 1, MOST_TOKENS)
        for place, word in enumerate(words)
    ]
    if (
        form in ("uniform", "lognormal")
        and values[-2:] != sorted(values[-2:])
        and len(words) == upper
    ):
        fault(f"{name}: {values[-2]:g} to {values[-1]:g} is no range")
    try:
        return make(*values)
    except ValueError as error:
        fault(f"{name}: {error}")


def _blocks(
    parts: Sequence[MixPart], which: list[int], prompts: list[int], rng: np.random.Generator
) -> list[np.ndarray]:
    """Hash ids of each prompt: those of its part's system prompt or of the earlier prompt that it
    continues, then new ones."""
    ends = np.cumsum([part.system for part in parts]).tolist()
    system = [np.arange(end - part.system, end, dtype=np.int32) for part, end in zip(parts, ends)]
    lags = [part.lag(rng, len(prompts)) for part in parts]
    follows = rng.random(len(prompts))
    earlier: list[list[int]] = [[] for _ in parts]
    continued: set[int] = set()
    blocks: list[np.ndarray] = []
    fresh = ends[-1]
    for number, (index, prompt) in enumerate(zip(which, prompts)):
        part = parts[index]
        head = system[index]
        if follows[number] < part.follows:
            place = len(earlier[index]) - round(lags[index][number])
            around = earlier[index][
                max(place - FOLLOW_UP_WINDOW, 0) : max(place + FOLLOW_UP_WINDOW, 0)
            ]
            possible = [
                other for other in around if prompts[other] <= prompt and other not in continued
            ]
            if possible:
                parent = max(possible, key=prompts.__getitem__)
                continued.add(parent)
                head = blocks[parent][: max(prompts[parent] // BLOCK, part.system)]
        head = head[: -(-prompt // BLOCK)]
        new = -(-prompt // BLOCK) - len(head)
        blocks.append(np.concatenate([head, np.arange(fresh, fresh + new, dtype=np.int32)]))
        earlier[index].append(number)
        fresh += new
    return blocks
