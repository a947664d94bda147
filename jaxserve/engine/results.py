"""What a step leaves on the devices and the host fetches: tokens, their log-probabilities, and
those of a prompt's own tokens."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from jaxserve.api.events import Logprobs
from jaxserve.engine.arrays import Arrays, ChunkSlice
from jaxserve.engine.stages import SCORES, HiddenStates, SampledTokens, Stages
from jaxserve.scheduling import Batch, Scheduler


@dataclasses.dataclass(frozen=True)
class PendingScore:
    """Log-probabilities of some prompt tokens, on their way: those after positions of a chunk."""

    chunk: int
    size: int
    lane: int
    arrays: tuple  # see step.score


@dataclasses.dataclass
class InFlightBatch:
    """A batch that was issued and not yet read."""

    batch: Batch
    arrays: Arrays
    done: jax.Array  # ready when the batch has left the last stage
    unsampled: HiddenStates | None  # what its tokens are still to be sampled from
    sampled: SampledTokens | None = None
    scores: list[PendingScore] = dataclasses.field(default_factory=list)
    issued: float = 0.0  # clock seconds


def issue_scores(
    stages: Stages, scheduler: Scheduler, batch: Batch, arrays: Arrays, hidden: HiddenStates
) -> list[PendingScore]:
    """Issues what sequences that want log-probabilities of their prompt need from this step."""
    out = []
    for chunk in np.flatnonzero(~batch.is_decode).tolist():
        request = scheduler.sequences[int(batch.seq[chunk])].request
        if request.sampling.prompt_logprobs is None:
            continue
        single = [ChunkSlice(chunk, 0, 1, int(batch.lane[chunk]), int(arrays.last[chunk]))]
        for piece in [piece for piece in arrays.pieces if piece.chunk == chunk] or single:
            first = int(batch.start[chunk]) + piece.offset + 1
            target = request.prompt[first : first + piece.size]
            for at in range(0, len(target), SCORES):
                some = target[at : at + SCORES]
                ints = np.zeros((2, stages.plan.mesh.kvp, SCORES), np.int32)
                ints[0, piece.lane, : len(some)] = piece.token + at + np.arange(len(some))
                ints[1, piece.lane, : len(some)] = some
                out.append(PendingScore(chunk, len(some), piece.lane, stages.score(hidden, *ints)))
    return out


def fetch_tokens(
    scheduler: Scheduler, flight: InFlightBatch
) -> tuple[np.ndarray, list[Logprobs | None] | None]:
    """Tokens [n] of the chunks that sampled one, and log-probabilities where they are wanted."""
    batch = flight.batch
    place = flight.arrays.sampled
    out = np.zeros(len(batch.slot), np.int32)
    if flight.sampled is None:
        return out, None
    rows = np.flatnonzero(batch.sample)
    out[rows] = np.asarray(flight.sampled.tokens)[batch.lane[rows], place[rows]]
    if not flight.sampled.logprobs:
        return out, None
    asked = [
        scheduler.sequences[number].request.sampling.logprobs for number in batch.seq[rows].tolist()
    ]
    if asked.count(None) == len(asked):  # only guided ones
        return out, None
    chosen, top, ids = map(np.asarray, flight.sampled.logprobs)
    logprobs: list[Logprobs | None] = [None] * len(batch.slot)
    for row, k in zip(rows.tolist(), asked):
        if k is not None:
            at = batch.lane[row], place[row]
            logprobs[row] = _logprobs(chosen[at], top[at], ids[at], k)
    return out, logprobs


def fetch_scores(scheduler: Scheduler, flight: InFlightBatch) -> dict[int, list[Logprobs]]:
    """Log-probabilities of prompts' tokens, by number of the sequence."""
    out: dict[int, list[Logprobs]] = {}
    for score in flight.scores:
        number = int(flight.batch.seq[score.chunk])
        sequence = scheduler.sequences.get(number)
        if sequence is not None:
            k = sequence.request.sampling.prompt_logprobs or 0
            parts = [np.asarray(part)[score.lane, : score.size] for part in score.arrays]
            out.setdefault(number, []).extend(
                _logprobs(chosen, top, ids, k) for chosen, top, ids in zip(*parts)
            )
    return out


def _logprobs(chosen: np.ndarray, top: np.ndarray, ids: np.ndarray, k: int) -> Logprobs:
    return Logprobs(float(chosen), tuple(zip(ids[:k].tolist(), top[:k].tolist())))
