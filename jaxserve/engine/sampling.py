"""Samples tokens on the device, each by the parameters of its sequence.

`SamplingState` is a set of device tables with one row per slot, written once when a sequence gets
its slot (`sampling_rows`); a step sends only which tokens to sample for which slots. A sampled
token depends only on its sequence's logits, parameters, seed and position, never on the rest of the
batch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxserve.api.sampling import MAX_LOGPROBS
from jaxserve.engine import draft_checks
from jaxserve.engine.sampling_rows import FLOATS, INTS, STOPS, SamplingAdmission
from jaxserve.sharding.mesh import KVP, TP

BROKEN = -1  # in place of a token whose logits were not finite
THRESHOLD_BITS = 31  # of numbers >= 0
PASS_BITS = 3  # of a threshold: seven sums a pass
GROUP = 128  # ids whose maxima are sorted before they are
LEAST = 1e-6  # temperatures below count as 0; repetition penalties below are raised to it
_STATE = ["floats", "ints", "stops", "bias", "prompt", "output"]
Leaf = Any  # an array, or its PartitionSpec or shape

jax.tree_util.register_dataclass(
    SamplingAdmission,
    data_fields=[field.name for field in dataclasses.fields(SamplingAdmission)],
    meta_fields=[],
)


@functools.partial(jax.tree_util.register_dataclass, data_fields=_STATE, meta_fields=[])
@dataclasses.dataclass(frozen=True)
class SamplingState:
    """Sampling parameters and token counts per lane and slot; `bias`, `prompt` and `output` are
    split over ranks by vocabulary."""

    floats: Leaf  # [lanes, slots, 6] f32
    ints: Leaf  # [lanes, slots, 3] i32
    stops: Leaf  # [lanes, slots, STOPS] i32, ids; the vocabulary size where unused
    bias: Leaf  # [lanes, slots, V] f32
    prompt: Leaf  # [lanes, slots, V] bool: whether the id is in the prompt
    output: Leaf  # [lanes, slots, V] i32: how often the id is in the output


STATE_AXES = SamplingState(*[("lanes", None, None)] * 3, *[("lanes", None, "vocab")] * 3)


def empty_state(lanes: int, slots: int, vocab: int) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Shape and dtype of each field of `SamplingState`."""
    f32 = np.dtype(np.float32)
    i32 = np.dtype(np.int32)
    table = (lanes, slots, vocab)
    return {
        "floats": ((lanes, slots, len(FLOATS)), f32),
        "ints": ((lanes, slots, len(INTS)), i32),
        "stops": ((lanes, slots, STOPS), i32),
        "bias": (table, f32),
        "prompt": (table, np.dtype(bool)),
        "output": (table, i32),
    }


# --- on the device, inside shard_map: one lane, one rank


def admit(state: SamplingState, new: SamplingAdmission) -> SamplingState:
    """Writes the rows of a slot on its lane; other lanes stay as they are."""
    on_this_lane = new.lane == lax.axis_index(KVP)
    slot = jnp.where(on_this_lane, new.slot, 2**30)
    reset = jnp.where(on_this_lane & new.fresh, new.slot, 2**30)
    put = lambda table, value: table.at[0, reset].set(value, mode="drop")
    local = functools.partial(_local, size=state.bias.shape[2])
    return SamplingState(
        put(state.floats, new.floats),
        put(state.ints, new.ints),
        put(state.stops, new.stops),
        put(state.bias, 0.0).at[0, reset, local(new.bias_ids)].set(new.bias, mode="drop"),
        put(state.prompt, False).at[0, slot, local(new.prompt)].set(True, mode="drop"),
        put(state.output, 0).at[0, slot, local(new.output)].add(1, mode="drop"),
    )


def _local(ids: jax.Array | np.ndarray, size: int) -> jax.Array:
    """Converts ids to indices into this rank's part of the vocabulary; out of range for others."""
    mine = ids - lax.axis_index(TP) * size
    return jnp.where((ids >= 0) & (mine >= 0) & (mine < size), mine, 2**30)


def greedy(logits: jax.Array, vocab: int) -> jax.Array:
    """Argmax of logits [S, V / tp] over all ranks -> ids [S]; the lowest id of equals, as on one
    device. BROKEN where the maximum is not finite."""
    size = logits.shape[1]
    ids = lax.axis_index(TP) * size + jnp.arange(size, dtype=jnp.int32)
    if vocab != size * lax.axis_size(TP):
        logits = jnp.where(ids < vocab, logits, -jnp.inf)
    best, value = _greatest(logits)
    if lax.axis_size(TP) == 1:
        return jnp.where(jnp.isfinite(value), best, BROKEN)
    top = lax.pmax(value, TP)
    mine = jnp.where(value == top, ids[best], jnp.iinfo(jnp.int32).max)
    return lax.pmin(jnp.where((value < jnp.inf) & (top > -jnp.inf), mine, BROKEN), TP)


def _greatest(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Index [S] and value [S] of each row's maximum, or of its first NaN."""
    best = jnp.argmax(logits, -1).astype(jnp.int32)
    return best, jnp.take_along_axis(logits, best[:, None], 1)[:, 0]


def sample(
    logits: jax.Array,
    slot: jax.Array,
    position: jax.Array,
    state: SamplingState,
    vocab: int,
    mask: jax.Array | None = None,
    expected: jax.Array | None = None,
) -> tuple[jax.Array, SamplingState]:
    """Samples ids [S] by the parameters of their slots, and counts them in the state.

    logits [S, V / tp]. slot [S]: out of range for padding. position [S]: of the token to sample.
    mask [S, mask_words(V)]: bits of the allowed ids, in words of 32; None: all are allowed.
    expected [S]: see `draft_checks`; None where no tokens are proposed.
    """
    size = logits.shape[1]
    row = jnp.minimum(slot, state.floats.shape[1] - 1)
    count = state.output[0, row]
    if expected is not None:
        count = draft_checks.count_proposed(count, slot, expected, _local(expected, size))
    logits = _penalise(logits, state.prompt[0, row], count, state.floats[0, row])
    logits += state.bias[0, row]
    barred = jax.vmap(
        lambda ids: jnp.zeros(size, bool).at[_local(ids, size)].set(True, mode="drop")
    )(state.stops[0, row])
    held_back = position < state.ints[0, row, 2]
    logits = jnp.where(barred & held_back[:, None], -jnp.inf, logits)
    token = draw(logits, slot, position, state, vocab, mask)
    if expected is not None:
        slot = jnp.where(draft_checks.counted(slot, token, expected), slot, 2**30)
    return token, dataclasses.replace(
        state, output=state.output.at[0, slot, _local(token, size)].add(1, mode="drop")
    )


def draw(
    logits: jax.Array,
    slot: jax.Array,
    position: jax.Array,
    state: SamplingState,
    vocab: int,
    mask: jax.Array | None = None,
) -> jax.Array:
    """Samples ids [S] as `sample` does, without penalties, biases and ids that are held back. Needs
    none of the tables [slots, V] of the state, which are ten times what a token's logits are."""
    ranks = lax.axis_size(TP)
    row = jnp.minimum(slot, state.floats.shape[1] - 1)
    floats = state.floats[0, row]
    ints = state.ints[0, row]
    if ranks > 1:
        logits, (floats, ints, position, mask) = _deal(logits, (floats, ints, position, mask))
    if mask is not None:
        logits = jnp.where(_bits(mask)[:, : logits.shape[1]], logits, -jnp.inf)
    token = choose(logits, floats, ints, position, vocab)
    return _regather(token, len(slot)) if ranks > 1 else token


def _penalise(
    logits: jax.Array, prompt: jax.Array, count: jax.Array, floats: jax.Array
) -> jax.Array:
    """Applies repetition (Keskar et al., 2019), presence and frequency (OpenAI) penalties to logits
    [S, V]. prompt [S, V]: whether an id is in the prompt. count [S, V]: how often it is in the
    output."""
    repetition = jnp.maximum(floats[:, 3:4], LEAST)
    presence = floats[:, 4:5]
    frequency = floats[:, 5:6]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(prompt | (count > 0), repeated, logits)
    return logits - presence * (count > 0) - frequency * count


def _bits(words: jax.Array) -> jax.Array:
    """Unpacks bits [S, W] int32 -> [S, 32 W] bool, the lowest bit of a word first."""
    return (
        ((words[:, :, None] >> jnp.arange(32, dtype=jnp.int32)) & 1)
        .reshape(len(words), -1)
        .astype(bool)
    )


def _deal(logits, others):
    """Exchanges all rows of a part of the vocabulary, which each rank has, for a part of the rows
    over the whole vocabulary (all-to-all); returns them and the same rows of `others`."""
    ranks = lax.axis_size(TP)
    rows = len(logits)
    pad = -rows % ranks
    grow = lambda x: jnp.pad(x, ((0, pad),) + ((0, 0),) * (x.ndim - 1))
    share = (rows + pad) // ranks
    mine = lambda x: lax.dynamic_slice_in_dim(grow(x), lax.axis_index(TP) * share, share)
    # [ranks, share, V / tp], by part of the vocabulary
    whole = lax.all_to_all(grow(logits).reshape(ranks, share, -1), TP, 0, 0)
    return whole.transpose(1, 0, 2).reshape(share, -1), jax.tree.map(mine, others)


def _regather(tokens: jax.Array, rows: int) -> jax.Array:
    """Gathers each rank's tokens on every rank; by a sum, whose result is known to shard_map to be
    equal on all ranks."""
    share = len(tokens)
    spread = jnp.zeros(share * lax.axis_size(TP), tokens.dtype)
    return lax.psum(
        lax.dynamic_update_slice_in_dim(spread, tokens, lax.axis_index(TP) * share, 0), TP
    )[:rows]


def choose(
    logits: jax.Array, floats: jax.Array, ints: jax.Array, position: jax.Array, vocab: int
) -> jax.Array:
    """Samples ids [S] from logits [S, V] by each row's temperature, top_k, top_p, min_p and seed.
    Ties at a threshold are all kept. BROKEN where the maximum logit is not finite."""
    ids = jnp.arange(logits.shape[1], dtype=jnp.int32)
    logits = jnp.where(ids < vocab, logits, -jnp.inf)
    temperature = floats[:, 0]
    best, top = _greatest(logits)
    token = _if_any(
        temperature >= LEAST,
        lambda best: jnp.where(
            temperature < LEAST, best, _random(logits, top, floats, ints, position, ids)
        ),
        best,
    )
    return jnp.where(jnp.isfinite(top), token, BROKEN)


def _if_any(rows: jax.Array, change: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Changes x where any of `rows` [S] is true; `change` gives x itself where none is. On GPUs it
    is always called: a branch that the device chooses waits for the host, outside of the step's
    CUDA graph."""
    branch = lambda x: lax.cond(jnp.any(rows), change, lambda x: x, x)
    return lax.platform_dependent(x, cpu=branch, default=change)


def _random(logits, top, floats, ints, position, ids) -> jax.Array:
    """Samples ids [S] by the Gumbel-max trick; for rows with a temperature."""
    temperature = floats[:, 0]
    top_p = floats[:, 1]
    min_p = floats[:, 2]
    # subtract the maximum first, so that nothing overflows
    scaled = (logits - top[:, None]) / jnp.maximum(temperature, LEAST)[:, None]
    scaled = _if_any(ints[:, 0] > 0, lambda x: _keep_top_k(x, ints[:, 0]), scaled)
    scaled = _if_any(top_p < 1, lambda x: _keep_top_p(x, top_p), scaled)
    scaled = jnp.where(scaled >= jnp.log(min_p)[:, None], scaled, -jnp.inf)
    return jnp.argmax(scaled + _gumbel(ints[:, 1], position, ids), -1).astype(jnp.int32)


def _gumbel(seed: jax.Array, position: jax.Array, ids: jax.Array) -> jax.Array:
    """Gumbel noise [S, V], a function of seed, position and token id only (threefry), and so equal
    on every mesh and in every batch."""

    def row(seed, position):
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)
        return jax.random.gumbel(key, ids.shape, jnp.float32)

    return jax.vmap(row)(seed, position)


def _keep_top_k(x: jax.Array, k: jax.Array) -> jax.Array:
    """x [S, V] <= 0 with -inf outside each row's k largest; k <= 0: all."""
    k = jnp.where(k <= 0, x.shape[1], jnp.minimum(k, x.shape[1]))
    return _above(x, jnp.int32(1), k)


def _keep_top_p(x: jax.Array, top_p: jax.Array) -> jax.Array:
    """x [S, V] <= 0 with -inf outside each row's nucleus of probability top_p (Holtzman et al.,
    2020); top_p >= 1: all."""
    weights = jnp.exp(x)
    goal = jnp.where(top_p >= 1, jnp.inf, top_p * weights.sum(-1))
    return _above(x, weights, goal)


def _above(x: jax.Array, weights: jax.Array, goal: jax.Array) -> jax.Array:
    """x [S, V] <= 0 with -inf below each row's highest threshold at which the weights of what is
    kept, each >= 0, add up to its goal [S]; all is kept where no threshold does.

    Finds the bits of the threshold from the top, some in each pass over x, with no sort: on CPUs
    one, for sums take longer than reading; elsewhere `PASS_BITS`, as many as a GPU adds up in a
    launch, and without a loop, which would not be part of the step's CUDA graph.
    """
    # the bits of numbers >= 0 are ordered as the numbers are
    bits = lax.bitcast_convert_type(-x + 0.0, jnp.int32)
    found = lax.platform_dependent(
        bits,
        cpu=lambda bits: _bit_by_bit(bits, weights, goal),
        default=lambda bits: _several_bits(bits, weights, goal),
    )
    return jnp.where(bits <= found[:, None], x, -jnp.inf)


# Jitted so that they are traced once for each shape, not in each branch of each program, which took
# most of the time of lowering one.
@jax.jit
def _bit_by_bit(bits: jax.Array, weights: jax.Array, goal: jax.Array) -> jax.Array:
    """Finds the thresholds of `_above` [S], as bits, one bit in each pass."""
    top = jnp.int32(1) << (THRESHOLD_BITS - 1)
    step = lambda at, found: _search(bits, weights, goal, found, top >> at, 1)
    return lax.fori_loop(0, THRESHOLD_BITS, step, jnp.zeros(len(bits), jnp.int32))


@jax.jit
def _several_bits(bits: jax.Array, weights: jax.Array, goal: jax.Array) -> jax.Array:
    """Finds the thresholds of `_above` [S], as bits, `PASS_BITS` in each pass."""
    found = jnp.zeros(len(bits), jnp.int32)
    left = THRESHOLD_BITS
    while left:
        width = min(PASS_BITS, left)
        left -= width
        found = _search(bits, weights, goal, found, 1 << left, width)
    return found


def _search(
    bits: jax.Array,
    weights: jax.Array,
    goal: jax.Array,
    found: jax.Array,
    step: int | jax.Array,
    width: int,
) -> jax.Array:
    """Adds the next `width` bits, of which the last one counts `step`, to the thresholds found so
    far [S]."""
    tried = [found + (number * step - 1) for number in range(1, 1 << width)]
    kept = [jnp.where(bits <= each[:, None], weights, 0) for each in tried]
    too_few = [(total < goal).astype(jnp.int32) for total in _sums(kept)]
    return found + step * sum(too_few)


def _sums(rows: list[jax.Array]) -> Sequence[jax.Array]:
    """Adds up rows [S, V] of several arrays of one type in one reduction -> [S] of each."""
    zeros = [jnp.zeros((), rows[0].dtype) for _ in rows]
    add = lambda left, right: tuple(a + b for a, b in zip(left, right))
    return lax.reduce(tuple(rows), tuple(zeros), add, (1,))


def log_probabilities(
    logits: jax.Array, token: jax.Array, vocab: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-probabilities under logits [S, V / tp]: of ids token [S], of the likeliest MAX_LOGPROBS
    ids [S, k], and those ids [S, k]."""
    size = logits.shape[1]
    ids = lax.axis_index(TP) * size + jnp.arange(size, dtype=jnp.int32)
    logits = jnp.where(ids < vocab, logits, -jnp.inf)
    top = lax.pmax(logits.max(-1), TP)
    total = top + jnp.log(lax.psum(jnp.exp(logits - top[:, None]).sum(-1), TP))
    at = _local(token, size)
    chosen = lax.psum(
        jnp.take_along_axis(logits, at[:, None], 1, mode="fill", fill_value=0)[:, 0], TP
    )
    value, index = _top_k(logits, min(MAX_LOGPROBS, size))
    if lax.axis_size(TP) > 1:
        value, index = _top_of_all(value, ids[index])
    return chosen - total, value - total[:, None], index.astype(jnp.int32)


def _top_k(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k largest of each row of x [S, V] and their indices, as of `lax.top_k`: the lower index
    of equals first. Only those of the k groups with the greatest maxima are sorted."""
    rows, size = x.shape
    groups = -(-size // GROUP)
    if groups <= k:
        return lax.top_k(x, k)
    padded = jnp.pad(x, ((0, 0), (0, groups * GROUP - size)), constant_values=-jnp.inf)
    padded = padded.reshape(rows, groups, GROUP)
    _, chosen = lax.top_k(padded.max(-1), k)
    chosen = jnp.sort(chosen)  # so that of equals the lower index is before the other
    some = jnp.take_along_axis(padded, chosen[:, :, None], 1).reshape(rows, k * GROUP)
    value, place = lax.top_k(some, k)
    first = jnp.take_along_axis(chosen, place // GROUP, 1) * GROUP
    return value, first + place % GROUP


def _top_of_all(value: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Merges each rank's likeliest ids [S, k] into the likeliest of all, on every rank."""
    ranks = lax.axis_size(TP)
    k = value.shape[1]
    spread = lambda x: lax.psum(
        lax.dynamic_update_slice_in_dim(
            jnp.zeros((len(x), k * ranks), x.dtype), x, lax.axis_index(TP) * k, 1
        ),
        TP,
    )
    value, place = lax.top_k(spread(value), k)
    return value, jnp.take_along_axis(spread(ids), place, 1)
