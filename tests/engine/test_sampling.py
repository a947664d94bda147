"""What the device samples, against plain numpy: on lanes and ranks, for rows that share a batch
with others of all kinds."""

from __future__ import annotations

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh

from jaxserve.api.sampling import SamplingParams
from jaxserve.engine import sampling, sampling_rows
from jaxserve.settings.schema import MeshConfig
from jaxserve.sharding.mesh import stage_meshes
from jaxserve.sharding.rules import spec

# 61 is prime: no number of ranks divides it
SLOTS = 8
V = 61
PADDED = 62
MESHES = [(1, 1), (1, 3), (2, 2)]  # lanes, ranks
END = 2


@functools.cache
def mesh_of(lanes: int, ranks: int) -> Mesh:
    return stage_meshes(MeshConfig(kvp=lanes, tp=ranks))[0]


STATE = sampling.SamplingState(
    **{name: spec(*axes) for name, axes in dataclasses.asdict(sampling.STATE_AXES).items()}
)
LANE = spec("lanes")
LOGITS = spec("lanes", None, "vocab")


@functools.cache
def program(name: str, lanes: int, ranks: int, vocab: int):
    """One of sampling's functions as the device runs it: jitted, inside shard_map. jit compiles it
    for each number of rows."""

    def sample(logits, slot, position, state, mask=None):
        token, state = sampling.sample(
            logits[0], slot[0], position[0], state, vocab, None if mask is None else mask[0]
        )
        return token[None], state

    def draw(logits, slot, position, state):
        return sampling.draw(logits[0], slot[0], position[0], state, vocab)[None]

    def log_probabilities(logits, token):
        return tuple(part[None] for part in sampling.log_probabilities(logits[0], token[0], vocab))

    f, into, out = {
        "admit": (sampling.admit, (STATE, spec()), STATE),
        "greedy": (lambda logits: sampling.greedy(logits[0], vocab)[None], (LOGITS,), LANE),
        "draw": (draw, (LOGITS, LANE, LANE, STATE), LANE),
        "sample": (sample, (LOGITS, LANE, LANE, STATE), (LANE, STATE)),
        "guided": (sample, (LOGITS, LANE, LANE, STATE, LANE), (LANE, STATE)),
        "log_probabilities": (log_probabilities, (LOGITS, LANE), (LANE, LANE, LANE)),
    }[name]
    return jax.jit(
        jax.shard_map(f, mesh=mesh_of(lanes, ranks), in_specs=into, out_specs=out, check_vma=False)
    )


class Device:
    """The sampling state of some lanes and ranks. What lies beyond the vocabulary is more likely
    than all else, and must not matter."""

    def __init__(self, lanes: int = 1, ranks: int = 1, vocab: int = V):
        self.lanes = lanes
        self.vocab = vocab
        self.pad = -vocab % ranks
        self.program = functools.partial(program, lanes=lanes, ranks=ranks, vocab=vocab)
        empty = sampling.empty_state(lanes, SLOTS, vocab + self.pad)
        self.state = sampling.SamplingState(
            **{name: np.zeros(*value) for name, value in empty.items()}
        )

    def admit(
        self, slot: int, lane: int = 0, prompt=(), output=(), seed: int = 0, **fields
    ) -> None:
        params = SamplingParams.make(**fields)
        for launch in sampling_rows.admissions(
            params, lane, slot, np.asarray(prompt, np.int32), list(output), seed, (END,)
        ):
            self.state = self.program("admit")(self.state, launch)

    def _whole(self, logits: np.ndarray) -> np.ndarray:
        """[S, V] for lane 0, or [lanes, S, V] -> [lanes, S, V']."""
        logits = np.broadcast_to(logits, (self.lanes, *logits.shape[-2:])).astype(np.float32)
        return np.pad(logits, ((0, 0), (0, 0), (0, self.pad)), constant_values=1e9)

    def sample(self, logits: np.ndarray, slots, positions, lane: int = 0) -> np.ndarray:
        """Tokens [S] of logits [S, V] on one lane; the rows of the others are nobody's."""
        slot = np.full((self.lanes, len(logits)), 2**30, np.int32)
        slot[lane] = slots
        position = np.broadcast_to(np.asarray(positions, np.int32), slot.shape)
        token, self.state = self.program("sample")(self._whole(logits), slot, position, self.state)
        return np.asarray(token)[lane]

    def draw(self, logits: np.ndarray, slots, position: int) -> np.ndarray:
        """Tokens [S] of logits [S, V] on lane 0, by the program that adjusts no logits."""
        slot, place = (
            np.broadcast_to(np.asarray(x, np.int32), (self.lanes, len(logits)))
            for x in (slots, position)
        )
        token = self.program("draw")(self._whole(logits), slot, place, self.state)
        return np.asarray(token)[0]

    def guided(self, logits: np.ndarray, slots, positions, allowed: np.ndarray) -> np.ndarray:
        """Samples of what is allowed [S, V] bool; what lies beyond the vocabulary is allowed too,
        and must not matter."""
        slot = np.broadcast_to(np.asarray(slots, np.int32), (self.lanes, len(logits)))
        bits = np.pad(allowed, ((0, 0), (0, -allowed.shape[1] % 32)), constant_values=True)
        mask = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
        assert mask.shape[1] == sampling_rows.mask_words(self.vocab + self.pad)
        position, mask = (
            np.broadcast_to(x, (self.lanes, *np.shape(x)))
            for x in (np.asarray(positions, np.int32), mask)
        )
        token, self.state = self.program("guided")(
            self._whole(logits), slot, position, self.state, mask
        )
        return np.asarray(token)[0]

    def greedy(self, logits: np.ndarray) -> np.ndarray:
        return np.asarray(self.program("greedy")(self._whole(logits)))[0]

    def log_probabilities(self, logits: np.ndarray, tokens: np.ndarray) -> list[np.ndarray]:
        tokens = np.broadcast_to(tokens.astype(np.int32), (self.lanes, len(tokens)))
        return [
            np.asarray(part)[0]
            for part in self.program("log_probabilities")(self._whole(logits), tokens)
        ]


@pytest.fixture(params=MESHES, ids="lanes{0[0]}-ranks{0[1]}".format)
def device(request) -> Device:
    return Device(*request.param)


def logits_of(seed: int, rows: int, spread: float = 2.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, spread, (rows, V)).astype(np.float32)


def draws(device: Device, row: np.ndarray, count: int = 4096, **fields) -> np.ndarray:
    device.admit(3, seed=7, **fields)
    positions = np.arange(count).reshape(-1, 1024)
    return np.concatenate(
        [device.sample(np.tile(row, (1024, 1)), np.full(1024, 3), part) for part in positions]
    )


def probabilities(row: np.ndarray, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """Returns what temperature, then top_k, then top_p, then min_p leave of each token."""
    p = np.exp((row - row.max()) / temperature, dtype=np.float64)
    if top_k > 0:
        p[p < np.sort(p)[-min(top_k, len(p))]] = 0
    order = np.argsort(-p, kind="stable")
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= top_p * p.sum()]] = 0
    p[p < min_p * p.max()] = 0
    return p / p.sum()


# --- greedy


def test_greedy_takes_the_first_of_equals(device):
    logits = logits_of(0, SLOTS)
    logits[1] = 0
    logits[2, [5, 60]] = logits[3, [20, 21, 40]] = 50
    logits[4, 60] = 50
    right = logits.argmax(-1)
    assert right[[1, 2, 3, 4]].tolist() == [0, 5, 20, 60]
    np.testing.assert_array_equal(device.greedy(logits), right)
    for slot in range(SLOTS):
        device.admit(slot, temperature=0)
    np.testing.assert_array_equal(device.sample(logits, range(SLOTS), 9), right)


def test_logits_that_are_not_finite_give_no_token_and_harm_no_other_row(device):
    logits = logits_of(1, SLOTS)
    right = logits.argmax(-1)
    logits[1, 3] = np.nan
    logits[2, 50] = np.nan
    logits[3] = -np.inf
    logits[5, 60] = np.inf
    logits[6, 4] = -np.inf
    right[[1, 2, 3, 5]] = sampling.BROKEN
    if right[6] == 4:
        right[6] = logits[6].argmax()
    np.testing.assert_array_equal(device.greedy(logits), right)
    for temperature in (0, 1):
        for slot in range(SLOTS):
            device.admit(slot, temperature=temperature, top_k=1, top_p=0.5, presence_penalty=1)
        np.testing.assert_array_equal(device.sample(logits, range(SLOTS), 9), right)
    device.admit(1, temperature=0, presence_penalty=1)
    assert device.sample(logits_of(1, SLOTS), range(SLOTS), 10)[1] >= 0  # nothing of it stays


# --- drawing

CHOICES = [
    dict(),
    dict(temperature=0.5),
    dict(temperature=3.0),
    dict(top_k=5),
    dict(top_k=500),
    dict(top_p=0.6),
    dict(min_p=0.2),
    dict(temperature=2.0, top_k=20, top_p=0.7, min_p=0.1),
    dict(temperature=0.7, top_k=3, top_p=0.99),
]


@pytest.mark.parametrize("fields", CHOICES, ids=str)
def test_draws_follow_the_distribution_and_reach_all_of_its_support_and_nothing_else(fields):
    row = logits_of(2, 1, spread=1.0)[0]
    count = np.bincount(draws(Device(), row, **fields), minlength=V)
    p = probabilities(row, **fields)
    assert set(np.flatnonzero(count)) <= set(np.flatnonzero(p))
    likely = p * 4096 > 25
    assert (count[likely] > 0).all()
    observed = np.append(count[likely], count[~likely].sum())
    expected = np.append(p[likely], p[~likely].sum()) * 4096
    chi_square = ((observed - expected)[expected > 0] ** 2 / expected[expected > 0]).sum()
    degrees = likely.sum()
    assert chi_square < degrees + 5 * np.sqrt(2 * degrees)


def test_drawing_alone_gives_the_tokens_of_the_program_that_also_adjusts_logits(device):
    for slot, fields in enumerate(CHOICES[:SLOTS]):
        device.admit(slot, seed=slot, **fields)
    for position in range(20):
        logits = logits_of(position, SLOTS)
        drawn = device.draw(logits, range(SLOTS), position)
        np.testing.assert_array_equal(drawn, device.sample(logits, range(SLOTS), position))


def test_tokens_are_the_same_on_devices_where_nothing_is_branched_over(monkeypatch):
    tokens = []
    for chosen in ("cpu", "default"):
        program.cache_clear()
        monkeypatch.setattr(
            sampling.lax, "platform_dependent", lambda x, chosen=chosen, **by: by[chosen](x)
        )
        device = Device()
        for slot, fields in enumerate(CHOICES[:SLOTS]):
            device.admit(slot, seed=slot, **{"temperature": 1.0, **fields})
        tokens.append([device.draw(logits_of(at, SLOTS), range(SLOTS), at) for at in range(20)])
        device.admit(0, temperature=0)
        tokens[-1].append(device.draw(logits_of(0, SLOTS), [0] * SLOTS, 0))
    program.cache_clear()
    np.testing.assert_array_equal(*tokens)


@given(st.integers(0, 2**32 - 1), st.integers(1, 3000), st.sampled_from([1, 2, 5, 1000]))
def test_thresholds_are_those_of_sorting(seed, size, values):
    """values: how many different ones there are at most, so that many tie."""
    random = np.random.default_rng(seed)
    x = -random.integers(0, values, (4, size)).astype(np.float32) / 7
    x[:, random.integers(0, size, 3)] = -np.inf
    x[:, 0] = 0
    k = random.integers(1, size + 1, 4).astype(np.int32)
    for chosen in ("cpu", "default"):
        with mock.patch.object(sampling.lax, "platform_dependent", lambda x, **by: by[chosen](x)):  # noqa: B023
            kept = np.asarray(sampling._keep_top_k(jnp.asarray(x), jnp.asarray(k)))
        for row, want, found in zip(x, k, kept):
            least = np.sort(row)[-want]
            np.testing.assert_array_equal(found, np.where(row >= least, row, -np.inf))


@given(st.integers(0, 2**32 - 1), st.integers(1, 4000), st.sampled_from([1, 3, 50, 10**6]))
def test_the_largest_are_those_of_sorting_the_lower_index_of_equals_first(seed, size, values):
    random = np.random.default_rng(seed)
    x = random.integers(0, values, (3, size)).astype(np.float32)
    k = min(20, size)
    for found, wanted in zip(sampling._top_k(jnp.asarray(x), k), jax.lax.top_k(x, k)):
        np.testing.assert_array_equal(found, wanted)


def test_tokens_that_tie_at_the_threshold_all_stay():
    row = np.full(V, -20.0, np.float32)
    row[:10] = [3, 2, 2, 2, 1, 1, 0, 0, 0, 0]
    assert set(draws(Device(), row, 1024, top_k=2)) == {0, 1, 2, 3}
    assert set(draws(Device(), row, 1024, top_p=0.5)) == {0, 1, 2, 3}


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-20, 1e-5])
def test_a_temperature_next_to_nothing_is_greedy(temperature):
    logits = logits_of(3, SLOTS, spread=30)
    device = Device()
    for slot in range(SLOTS):
        device.admit(slot, temperature=temperature)
    np.testing.assert_array_equal(device.sample(logits, range(SLOTS), 5), logits.argmax(-1))


def test_a_token_depends_on_seed_and_position_alone_not_on_row_batch_or_mesh():
    logits = logits_of(4, 1)[0]
    kinds = [
        dict(),
        dict(top_k=9),
        dict(top_p=0.8),
        dict(min_p=0.05),
        dict(temperature=1.7, logit_bias={5: 2.0}),
    ]
    said = {}
    for lanes, ranks in MESHES:
        for rows in (1, 4):
            for first in (0, 3):
                device = Device(lanes, ranks)
                lane = lanes - 1
                for slot in range(SLOTS):  # strangers with other seeds and habits
                    device.admit(slot, lane, seed=1000 + slot, **kinds[(slot + first) % len(kinds)])
                for kind, fields in enumerate(kinds):
                    slot = (first + kind) % SLOTS
                    at = (first + kind) % rows
                    device.admit(slot, lane, seed=42 + kind, **fields)
                    slots = np.resize(np.delete(np.arange(SLOTS), slot), rows)
                    slots[at] = slot
                    others = logits_of(rows + first, rows)
                    others[at] = logits
                    tokens = [
                        int(device.sample(others, slots, position, lane)[at])
                        for position in (17, 18)
                    ]
                    assert said.setdefault(kind, tokens) == tokens, (
                        f"kind {kind}, lanes {lanes}, ranks {ranks}, {rows} rows, row {at}"
                    )
    assert len({token for tokens in said.values() for token in tokens}) > 3


def test_other_seeds_and_positions_give_other_tokens():
    device = Device()
    row = np.zeros((SLOTS, V), np.float32)
    for slot in range(SLOTS):
        device.admit(slot, seed=sampling_rows.fold_seed(5, slot))
    by_position = np.stack([device.sample(row, range(SLOTS), position) for position in range(20)])
    assert (
        len(np.unique(by_position, axis=0)) == 20 and len(np.unique(by_position, axis=1).T) == SLOTS
    )


def test_seeds_of_64_bits_and_their_completions_are_all_different():
    seeds = [-(2**63), -1, 0, 1, 2**31, 2**32, 2**63 - 1]
    folded = {sampling_rows.fold_seed(seed, index) for seed in seeds for index in range(4)}
    assert len(folded) == 28 and all(0 <= seed < 2**31 for seed in folded)


# --- what changes the logits


def penalised(
    logits,
    prompt,
    output,
    repetition_penalty=1.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    logit_bias=None,
) -> np.ndarray:
    """Repetition over prompt and output; presence and frequency over the output alone."""
    x = logits.astype(np.float64).copy()
    for token in {*prompt, *output}:
        x[token] = x[token] / repetition_penalty if x[token] > 0 else x[token] * repetition_penalty
    for token in set(output):
        x[token] -= presence_penalty + frequency_penalty * output.count(token)
    for token, bias in (logit_bias or {}).items():
        x[token] += bias
    return x


def test_penalties_and_bias_are_those_of_their_formulas_as_the_output_grows(device):
    rng = np.random.default_rng(5)
    kinds = [
        dict(repetition_penalty=1.5),
        dict(repetition_penalty=0.6),
        dict(presence_penalty=1.0),
        dict(frequency_penalty=0.7),
        dict(presence_penalty=-2.0, frequency_penalty=-0.1),
        dict(logit_bias={4: 3.0, 60: -100.0, 0: 1.5}),
        dict(
            repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.3, logit_bias={7: 1.0}
        ),
        dict(),
    ]
    prompts = [rng.integers(0, V, 15).tolist() for _ in kinds]
    # some come back after a preemption
    outputs = [rng.integers(0, V, 5 * (slot % 2)).tolist() for slot in range(SLOTS)]
    for slot, fields in enumerate(kinds):
        device.admit(slot, temperature=0, prompt=prompts[slot], output=outputs[slot], **fields)
    logits = logits_of(6, SLOTS)
    for step in range(25):
        tokens = device.sample(logits, range(SLOTS), 20 + step)
        for slot, fields in enumerate(kinds):
            assert (
                tokens[slot]
                == penalised(logits[slot], prompts[slot], outputs[slot], **fields).argmax()
            ), f"step {step}, {fields}"
            outputs[slot].append(int(tokens[slot]))


def test_histories_longer_than_a_launch_are_all_noted():
    device = Device()
    prompt = np.r_[np.full(3 * sampling_rows.HISTORY, 9), 11]
    device.admit(
        2,
        temperature=0,
        prompt=prompt,
        output=[30] * (sampling_rows.HISTORY + 100),
        repetition_penalty=50,
        frequency_penalty=0.001,
    )
    row = np.full(V, -50.0, np.float32)
    row[[9, 11, 30, 31]] = 10, 10, 60, 0.19  # 60 / 50 - 0.001 * 1124 = 0.076
    device.state = jax.tree.map(np.asarray, device.state)
    assert device.sample(np.tile(row, (SLOTS, 1)), [2] + [2**30] * 7, 5000)[0] == 9  # 10 / 50 = 0.2
    row[[9, 11]] = 5
    assert device.sample(np.tile(row, (SLOTS, 1)), [2] + [2**30] * 7, 5001)[0] == 31


def test_a_slot_that_is_given_away_remembers_nothing(device):
    rng = np.random.default_rng(8)
    device.admit(
        1,
        temperature=0,
        prompt=range(30),
        output=[5] * 9,
        repetition_penalty=3,
        frequency_penalty=2,
        logit_bias={8: 100},
        min_tokens=90,
    )
    device.sample(logits_of(8, SLOTS), [1] + [2**30] * 7, 50)
    device.admit(1, temperature=0)
    logits = rng.normal(0, 2, (SLOTS, V))
    logits[0, END] = 90
    assert device.sample(logits, [1] + [2**30] * 7, 31)[0] == END


def test_min_tokens_bars_end_ids_and_stop_ids_until_then(device):
    logits = np.zeros((SLOTS, V), np.float32)
    logits[:, [END, 40, 50, 9]] = 9, 8, 7, 6
    kinds = [
        dict(min_tokens=3),
        dict(min_tokens=3, stop_token_ids=[40, 50]),
        dict(min_tokens=3, stop_token_ids=[40], ignore_eos=True),
        dict(),
    ]
    for slot, fields in enumerate(kinds):
        device.admit(slot, temperature=0, prompt=range(10), **fields)
    slots = [0, 1, 2, 3] + [2**30] * 4
    for position in (10, 11, 12):
        assert device.sample(logits, slots, position)[:4].tolist() == [40, 9, END, END]
    assert device.sample(logits, slots, 13)[:4].tolist() == [END] * 4


def test_all_stop_ids_of_a_request_and_a_whole_logit_bias_fit():
    device = Device(vocab=2048)
    stops = list(range(100, 132))
    bias = dict.fromkeys(range(1000, 1512), -100.0)
    device.admit(0, temperature=0, stop_token_ids=stops, min_tokens=1, logit_bias=bias)
    logits = np.zeros((SLOTS, 2048), np.float32)
    logits[:, 1000:1512] = 50
    logits[:, stops] = 40
    logits[:, END] = 30
    logits[:, 1999] = 1
    assert device.sample(logits, [0] + [2**30] * 7, 0)[0] == 1999


# --- log-probabilities


@pytest.mark.parametrize("vocab, ranks", [(61, 1), (61, 3), (513, 2), (513, 4)])
def test_log_probabilities_are_those_of_the_softmax(vocab, ranks):
    device = Device(1, ranks, vocab)
    rng = np.random.default_rng(9)
    logits = rng.normal(0, 3, (SLOTS, vocab)).astype(np.float32)
    logits[0] += 300
    tokens = rng.integers(0, vocab, SLOTS)
    tokens[1] = vocab - 1
    tokens[2] = 0
    chosen, top, ids = device.log_probabilities(logits, tokens)
    wide = logits.astype(np.float64)
    right = wide - wide.max(-1, keepdims=True)
    right -= np.log(np.exp(right).sum(-1, keepdims=True))
    np.testing.assert_allclose(chosen, right[np.arange(SLOTS), tokens], atol=2e-5)
    np.testing.assert_allclose(top[:, :20], -np.sort(-right)[:, :20], atol=2e-5)
    np.testing.assert_array_equal(ids[:, :20], np.argsort(-right)[:, :20])


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_padding_of_the_vocabulary_is_never_sampled(ranks):
    device = Device(1, ranks, 513)
    logits = np.zeros((1024, 513), np.float32)  # the pad is at 1e9
    assert (device.greedy(logits) == 0).all()
    device.admit(0, seed=3)
    tokens = np.concatenate(
        [device.sample(logits, np.zeros(1024), at * 1024 + np.arange(1024)) for at in range(4)]
    )
    assert tokens.min() >= 0 and tokens.max() == 512


def test_only_what_a_mask_allows_is_sampled_and_the_best_of_it_where_greedy(device):
    rng = np.random.default_rng(4)
    logits = logits_of(5, 40)
    allowed = rng.random((40, V)) < 0.1
    allowed[np.arange(40), rng.integers(0, V, 40)] = True
    allowed[:3] = np.arange(V) == np.array([[0], [V - 1], [31]])
    for lane in range(device.lanes):
        device.admit(1, lane, temperature=0)
        device.admit(2, lane, temperature=1.0, top_p=0.9, seed=1)
    greedy = device.guided(logits, np.full(40, 1), np.arange(40), allowed)
    assert greedy.tolist() == np.where(allowed, logits, -np.inf).argmax(1).tolist()
    drawn = device.guided(logits, np.full(40, 2), np.arange(40), allowed)
    assert allowed[np.arange(40), drawn].all() and (drawn != greedy).any()
    everything = device.guided(logits, np.full(40, 2), np.arange(40), np.ones_like(allowed))
    assert everything.tolist() == device.sample(logits, np.full(40, 2), np.arange(40)).tolist()


def test_a_row_that_may_say_nothing_harms_no_other(device):
    logits = logits_of(6, 3)
    allowed = np.ones((3, V), bool)
    allowed[1] = False
    for lane in range(device.lanes):
        device.admit(1, lane, temperature=0)
    said = device.guided(logits, np.full(3, 1), np.arange(3), allowed)
    assert said.tolist() == [logits[0].argmax(), sampling.BROKEN, logits[2].argmax()]
