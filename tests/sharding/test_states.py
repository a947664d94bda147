"""States and windows that pass between lanes are those of one lane, wherever runs of a sequence
are."""

from __future__ import annotations

import dataclasses
import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

from jaxserve.kernels.delta_rule import DeltaTokens
from jaxserve.sharding.lane_groups import LaneGroups
from jaxserve.sharding.mesh import KVP, TP
from jaxserve.sharding.rows import spread_rows
from jaxserve.sharding.states import Chain, pass_inputs, pass_states
from tests.examples import examples

K, G, KEY, VALUE = 2, 2, 4, 3
KEPT = 3
CHANNELS = 2
SLOTS = 5
WIDTH = 4  # tokens of a row
ROWS = 7  # of a lane
pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
SEVERAL = [(2, 2), (4, 2), (4, 4), (8, 4), (8, 8)]
DEFAULT = [(4, 2)]
MESHES = [
    pytest.param(*mesh, marks=() if mesh in DEFAULT else pytest.mark.matrix) for mesh in SEVERAL
]


@dataclasses.dataclass
class Chunk:
    """Tokens of a sequence in a step: (lane, length) of its runs, in order."""

    slot: int
    start: int
    home: int
    runs: list[tuple[int, int]]


@dataclasses.dataclass
class Step:
    """Chunks whose runs are on random lanes of their groups. rows [lanes, ROWS, 5]: slot, start,
    length, a number of entries, home."""

    lanes: int
    size: int
    seed: int
    chunks: list[Chunk] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        free = [ROWS] * self.lanes
        for slot in rng.sample(range(SLOTS), rng.randint(1, SLOTS)):
            group = rng.randrange(self.lanes // self.size) * self.size
            home = rng.randrange(self.size)
            chunk = Chunk(slot, rng.choice((0, 1, 2, 9)), home, [])
            for _ in range(rng.randint(1, 6)):
                lane = group + rng.randrange(self.size)
                length = rng.randint(1, 3 * WIDTH)
                if free[lane] < 3 or (chunk.runs and chunk.runs[-1][0] == lane):
                    continue
                free[lane] -= -(-length // WIDTH)
                chunk.runs.append((lane, length))
            self.chunks.append(chunk)

    def rows(self) -> np.ndarray:
        rows = np.zeros((self.lanes, ROWS, 5), np.int32)
        used = [0] * self.lanes
        for chunk in self.chunks:
            at = chunk.start
            for lane, length in chunk.runs:
                for first in range(0, length, WIDTH):
                    size = min(WIDTH, length - first)
                    rows[lane, used[lane]] = chunk.slot, at + first, size, 0, chunk.home
                    used[lane] += 1
                at += length
        return rows


@functools.cache
def compiled(lanes: int, size: int):
    """A program that passes inputs and states: rows, tokens of all rows, inputs of all rows,
    windows, states -> outputs, inputs before runs by row, windows, states; all [lanes, ...]."""
    groups = LaneGroups(size)

    def program(rows, tokens, tails, window, states):
        every = groups.gather_rows(rows[0])
        fields = jnp.concatenate([every[:, :3], jnp.zeros((len(every), size), jnp.int32)], 1)
        table = jnp.zeros((2, SLOTS, 1), jnp.int32)
        spread = spread_rows(fields, 0, WIDTH, table, 1, 16)
        chain = Chain(dataclasses.replace(spread, home=every[:, 4]), groups)
        before, window = pass_inputs(chain, tails[0], window[0])
        mine = jax.tree.map(lambda x: x[0], tokens)
        out, states = pass_states(chain, mine, states[0])
        return jax.tree.map(lambda x: x[None], (out, before, window, states))

    mesh = Mesh(np.array(jax.devices()[:lanes]).reshape(lanes, 1), (KVP, TP))
    lane = PartitionSpec(KVP)
    specs = dict(in_specs=(lane,) * 5, out_specs=(lane,) * 4, check_vma=False)
    return jax.jit(jax.shard_map(program, mesh=mesh, **specs))


def tokens(rng: np.random.Generator, *shape: int) -> DeltaTokens:
    draw = lambda *rest: rng.standard_normal((*shape, *rest)).astype(np.float32)
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    beta = rng.uniform(0, 1, (*shape, K, G)).astype(np.float32)
    decay = -rng.exponential(0.1, (*shape, K, G)).astype(np.float32)
    return DeltaTokens(unit(draw(K, KEY)), unit(draw(K, KEY)), draw(K, G, VALUE), beta, decay)


def computed(given: DeltaTokens, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rule token by token, in f64: outputs and the state after them."""
    state = state.astype(np.float64)
    outs = []
    for q, k, v, beta, log_decay in zip(*given):
        state = state * np.exp(log_decay)[..., None, None]
        new = beta[..., None] * (v - np.einsum("kh,kghv->kgv", k, state))
        state = state + np.einsum("kh,kgv->kghv", k, new)
        outs.append(np.einsum("kh,kghv->kgv", q, state))
    return np.stack(outs), state


def of_run(x: np.ndarray, lane: int, rows: range, length: int) -> np.ndarray:
    """Tokens of a run, of x [lanes, ROWS, WIDTH, ...]."""
    return x[lane, rows.start : rows.stop].reshape(-1, *x.shape[3:])[:length]


@pytest.mark.parametrize("lanes, size", MESHES)
def test_runs_on_any_lanes_give_what_one_lane_gives(lanes, size):
    @settings(max_examples=examples(30))
    @given(seed=st.integers(0, 10**6))
    def check(seed: int) -> None:
        check_step(Step(lanes, size, seed))

    check()


def check_step(step: Step) -> None:
    rng = np.random.default_rng(step.seed)
    rows = step.rows()
    given = tokens(rng, step.lanes, ROWS, WIDTH)
    live = np.arange(WIDTH) < rows[..., 2:3]
    masked = [np.where(live[..., None, None], gate, 0) for gate in given[3:]]
    given = given._replace(beta=masked[0], log_decay=masked[1])
    inputs = rng.standard_normal((step.lanes, ROWS, WIDTH, K, CHANNELS)).astype(np.float32)
    window = rng.standard_normal((step.lanes, SLOTS, K, KEPT, CHANNELS)).astype(np.float32)
    states = rng.standard_normal((step.lanes, SLOTS, K, G, KEY, VALUE)).astype(np.float32)
    tails = np.full((step.lanes, ROWS, K, KEPT, CHANNELS), np.nan, np.float32)
    places = {}  # by chunk: lane and rows of each run
    used = [0] * step.lanes
    for chunk in step.chunks:
        for lane, length in chunk.runs:
            count = -(-length // WIDTH)
            run = range(used[lane], used[lane] + count)
            used[lane] += count
            places.setdefault(chunk.slot, []).append((lane, run, length))
            flat = of_run(inputs, lane, run, length)[-KEPT:]
            tails[lane, run.stop - 1, :, KEPT - len(flat) :] = flat.transpose(1, 0, 2)
    out, before, windows, after = map(
        np.asarray, compiled(step.lanes, step.size)(rows, given, tails, window, states)
    )
    wanted_window, wanted_states = window.copy(), states.copy()
    for chunk in step.chunks:
        if not chunk.runs:
            continue
        home = chunk.runs[0][0] // step.size * step.size + chunk.home
        state = states[home, chunk.slot] * (chunk.start > 0)
        last = window[home, chunk.slot] * (chunk.start > 0)
        for run in places[chunk.slot]:
            mine = DeltaTokens(*(of_run(x, *run) for x in given))
            wanted, state = computed(mine, state)
            np.testing.assert_allclose(of_run(out, *run), wanted, atol=2e-5)
            np.testing.assert_array_equal(before[run[0], run[1].stop - 1], last)
            entered = of_run(inputs, *run).transpose(1, 0, 2)
            last = np.concatenate([last, entered], 1)[:, -KEPT:]
        wanted_states[home, chunk.slot] = state
        wanted_window[home, chunk.slot] = last
    np.testing.assert_array_equal(windows, wanted_window)
    np.testing.assert_allclose(after, wanted_states, atol=2e-5)
