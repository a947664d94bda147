"""Sampling parameters of sequences, as the host sends them to the devices.

Five variants of the sampling program are compiled: `greedy` (argmax), `drawn` (by temperature,
top_k, top_p and min_p), `full` (any parameters), `logprobs` (as full, with log-probabilities), and
`guided` (as logprobs, with a mask of the tokens that may be sampled).
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxserve.api.sampling import MAX_LOGIT_BIAS, MAX_STOP_IDS, SamplingParams

VARIANTS = ("greedy", "drawn", "full", "logprobs", "guided")  # each does what those before it do
SCORED = VARIANTS[3:]  # those that tell log-probabilities
STOPS = MAX_STOP_IDS + 32  # ids that min_tokens holds back: stop ids and end ids
HISTORY = 1024  # ids of a prompt noted by one launch
FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
INTS = ("top_k", "seed", "first_end")  # first_end: position from which a sequence may end


@dataclasses.dataclass(frozen=True, eq=False)
class SamplingAdmission:
    """Part of a slot's sampling state that one launch sets. Ids out of range are ignored; padding
    is -1."""

    lane: np.ndarray  # [] the slot's lane
    slot: np.ndarray  # []
    fresh: np.ndarray  # [] bool: forget what the slot held; False only adds to prompt and output
    floats: np.ndarray  # [6]
    ints: np.ndarray  # [3]
    stops: np.ndarray  # [STOPS]
    bias: np.ndarray  # [MAX_LOGIT_BIAS]
    bias_ids: np.ndarray  # [MAX_LOGIT_BIAS]
    prompt: np.ndarray  # [HISTORY] ids
    output: np.ndarray  # [HISTORY] ids


def admissions(
    params: SamplingParams,
    lane: int,
    slot: int,
    prompt: np.ndarray,
    output: list[int],
    seed: int,
    end_ids: tuple[int, ...],
) -> list[SamplingAdmission]:
    """The launches that set a slot's state. Only a sequence with penalties has its history
    noted."""
    floats = np.array([getattr(params, name) for name in FLOATS], np.float32)
    ints = np.array([max(0, params.top_k), seed, len(prompt) + params.min_tokens], np.int64).astype(
        np.int32
    )
    held_back = params.stop_token_ids + (() if params.ignore_eos else end_ids)
    bias_ids = [token for token, _ in params.logit_bias]
    penalised = (
        params.repetition_penalty != 1
        or params.presence_penalty != 0
        or params.frequency_penalty != 0
    )
    seen = [prompt, np.asarray(output, np.int32)] if penalised else [prompt[:0], prompt[:0]]
    launches = max(1, *(-(-len(ids) // HISTORY) for ids in seen))
    bias = [value for _, value in params.logit_bias]
    common = (
        floats,
        ints,
        _pad(held_back, STOPS),
        _pad(bias, MAX_LOGIT_BIAS, np.float32),
        _pad(bias_ids, MAX_LOGIT_BIAS),
    )
    part = lambda ids, i: _pad(ids[i * HISTORY : (i + 1) * HISTORY], HISTORY)
    place = np.array(lane, np.int32), np.array(slot, np.int32)
    return [
        SamplingAdmission(*place, np.array(i == 0), *common, part(seen[0], i), part(seen[1], i))
        for i in range(launches)
    ]


def blank_admission() -> SamplingAdmission:
    """Makes an admission with the shapes of all."""
    return admissions(SamplingParams(), 0, 0, np.zeros(0, np.int32), [], 0, ())[0]


def fold_seed(seed: int, index: int) -> int:
    """31 bits from a 64-bit seed and the number of the completion."""
    return int(np.random.SeedSequence(seed % 2**64, spawn_key=(index,)).generate_state(1)[0] >> 1)


def mask_words(vocab: int) -> int:
    """Number of words of a mask of `vocab` ids."""
    return -(-vocab // 32)


def _pad(values, size: int, dtype=np.int32) -> np.ndarray:
    out = np.full(size, -1 if dtype == np.int32 else 0, dtype)
    out[: len(values)] = values[:size]
    return out
