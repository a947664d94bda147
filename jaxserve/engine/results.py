"""Results that the host asks of a step, and how it reads them: tokens, their log-probabilities,
those of a prompt's own tokens, and embeddings."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from jaxserve.api.batch import Batch
from jaxserve.api.events import Logprobs
from jaxserve.engine.command import SCORES, StepResult
from jaxserve.engine.step_rows import ChunkSlice, StepArrays
from jaxserve.scheduling import Scheduler
from jaxserve.scheduling.batch_reader import StepResults


@dataclasses.dataclass(frozen=True)
class PendingScore:
    """Log-probabilities of some prompt tokens that a step computes: of `size` tokens of a chunk,
    on this lane."""

    chunk: int
    size: int
    lane: int


@dataclasses.dataclass(frozen=True)
class PendingEmbedding:
    """The embedding of a prompt whose last chunk a step computes: where it is in the result."""

    chunk: int
    entry: int
    lane: int
    place: int


@dataclasses.dataclass
class InFlightBatch:
    """A batch that was issued and not yet read. issued: clock second. sample_later: its tokens are
    still to be sampled, once their masks are known. seconds: predicted, of all that was issued
    since the batch before it was. mixed: whether it shared its time with a batch that ran
    within it, or it within one."""

    batch: Batch
    arrays: StepArrays
    scores: list[PendingScore]
    embeddings: list[PendingEmbedding] = dataclasses.field(default_factory=list)
    sample_later: bool = False
    issued: float = 0.0
    seconds: float = 0.0
    mixed: bool = False


class StepOutcome(NamedTuple):
    """Results of a batch that was in flight. read_at: clock seconds."""

    flight: InFlightBatch
    read_at: float
    results: StepResults


def results_of(scheduler: Scheduler, flight: InFlightBatch, result: StepResult) -> StepResults:
    """Sorts the result of a batch by its chunks."""
    number = flight.batch.number
    assert result.number == number, f"step {result.number} came for {number}"
    tokens, logprobs = _tokens(scheduler, flight, result)
    scores = _scores(scheduler, flight, result)
    embeddings = {
        int(flight.batch.seq[one.chunk]): result.pooled[one.entry][one.lane, one.place].copy()
        for one in flight.embeddings
    }
    return StepResults(tokens, logprobs, scores, embeddings)


def score_rows(
    scheduler: Scheduler, batch: Batch, arrays: StepArrays, lanes: int
) -> tuple[np.ndarray, list[PendingScore]]:
    """Lists the log-probabilities of prompts' tokens that this step should leave: for the command,
    ints [k, 2, lanes, SCORES] (tokens of the step, and ids), and whose they are."""
    rows: list[np.ndarray] = []
    pending = []
    for chunk in np.flatnonzero(batch.is_chunk).tolist():
        request = scheduler.sequences[int(batch.seq[chunk])].request
        if request.sampling.prompt_logprobs is None:
            continue
        for piece in _slices_of(batch, arrays, chunk):
            first = int(batch.start[chunk]) + piece.offset + 1
            targets = request.prompt[first : first + piece.size]
            for at in range(0, len(targets), SCORES):
                some = targets[at : at + SCORES]
                ints = np.zeros((2, lanes, SCORES), np.int32)
                ints[0, piece.lane, : len(some)] = piece.token + at + np.arange(len(some))
                ints[1, piece.lane, : len(some)] = some
                rows.append(ints)
                pending.append(PendingScore(chunk, len(some), piece.lane))
    return np.array(rows, np.int32).reshape(-1, 2, lanes, SCORES), pending


def pool_rows(
    scheduler: Scheduler, batch: Batch, arrays: StepArrays, lanes: int
) -> tuple[np.ndarray, list[PendingEmbedding]]:
    """Lists the embeddings that this step should leave, of prompts that end in it: for the command,
    tokens of the step [k, lanes, SCORES], and whose they are."""
    pending = []
    tokens = []
    count = [0] * lanes
    for chunk in np.flatnonzero(batch.is_chunk).tolist():
        request = scheduler.sequences[int(batch.seq[chunk])].request
        if not request.embed or batch.start[chunk] + batch.length[chunk] < len(request.prompt):
            continue
        lane = max(_slices_of(batch, arrays, chunk), key=lambda piece: piece.offset).lane
        entry, place = divmod(count[lane], SCORES)
        pending.append(PendingEmbedding(chunk, entry, lane, place))
        tokens.append(int(arrays.last[chunk]))
        count[lane] += 1
    rows = np.full((-(-max(count) // SCORES), lanes, SCORES), -1, np.int32)
    for one, token in zip(pending, tokens):
        rows[one.entry, one.lane, one.place] = token
    return rows, pending


def _slices_of(batch: Batch, arrays: StepArrays, chunk: int) -> list[ChunkSlice]:
    """Lists the slices of a chunk; a chunk of one token is one."""
    single = ChunkSlice(chunk, 0, 1, int(batch.lane[chunk]), -1, int(arrays.last[chunk]))
    return [piece for piece in arrays.slices if piece.chunk == chunk] or [single]


def _tokens(
    scheduler: Scheduler, flight: InFlightBatch, result: StepResult
) -> tuple[np.ndarray, list[Logprobs | None] | None]:
    """Tokens [n] of the chunks that sampled one, and log-probabilities where they are wanted."""
    batch = flight.batch
    place = flight.arrays.sampled
    out = np.zeros(len(batch.slot), np.int32)
    if result.tokens is None:
        return out, None
    rows = np.flatnonzero(batch.sample)
    out[rows] = result.tokens[batch.lane[rows], place[rows]]
    if not result.logprobs:
        return out, None
    asked = [
        scheduler.sequences[number].request.sampling.logprobs for number in batch.seq[rows].tolist()
    ]
    if asked.count(None) == len(asked):  # only guided ones
        return out, None
    chosen, top, ids = result.logprobs
    logprobs: list[Logprobs | None] = [None] * len(batch.slot)
    for row, k in zip(rows.tolist(), asked):
        if k is not None:
            at = batch.lane[row], place[row]
            logprobs[row] = _logprobs(chosen[at], top[at], ids[at], k)
    return out, logprobs


def _scores(
    scheduler: Scheduler, flight: InFlightBatch, result: StepResult
) -> dict[int, list[Logprobs]]:
    """Log-probabilities of prompts' tokens, by number of the sequence."""
    out: dict[int, list[Logprobs]] = {}
    for score, arrays in zip(flight.scores, result.scores):
        number = int(flight.batch.seq[score.chunk])
        sequence = scheduler.sequences.get(number)
        if sequence is not None:
            k = sequence.request.sampling.prompt_logprobs or 0
            parts = [part[score.lane, : score.size] for part in arrays]
            values = [_logprobs(chosen, top, ids, k) for chosen, top, ids in zip(*parts)]
            out.setdefault(number, []).extend(values)
    return out


def _logprobs(chosen: np.ndarray, top: np.ndarray, ids: np.ndarray, k: int) -> Logprobs:
    return Logprobs(float(chosen), tuple(zip(ids[:k].tolist(), top[:k].tolist())))
