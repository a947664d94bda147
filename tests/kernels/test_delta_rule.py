"""The gated delta rule in pieces and token by token gives what its definition does."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.kernels.delta_rule import (
    PIECE,
    DeltaTokens,
    advance,
    advance_row,
    complete,
    follow,
    no_tokens,
    of_any_state,
)

K, G, KEY, VALUE = 2, 3, 8, 5


def tokens(count: int, seed: int = 0, decay: float = 0.3) -> DeltaTokens:
    noise = np.random.default_rng(seed)
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    draw = lambda *shape: noise.standard_normal((count, *shape))
    return DeltaTokens(
        *(
            jnp.asarray(x, jnp.float32)
            for x in (
                unit(draw(K, KEY)),
                unit(draw(K, KEY)),
                draw(K, G, VALUE),
                noise.uniform(0, 1, (count, K, G)),
                -noise.exponential(decay, (count, K, G)),
            )
        )
    )


def defined(given: DeltaTokens, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rule as it is written in the paper, token by token and head by head, in f64."""
    q, k, v, beta, log_decay = (np.asarray(x, np.float64) for x in given)
    state = state.astype(np.float64).copy()
    out = np.zeros_like(v)
    for t in range(len(q)):
        for i in range(K):
            for j in range(G):
                decayed = np.exp(log_decay[t, i, j]) * state[i, j]
                missed = v[t, i, j] - k[t, i] @ decayed
                state[i, j] = decayed + np.outer(k[t, i], beta[t, i, j] * missed)
                out[t, i, j] = q[t, i] @ state[i, j]
    return out, state


def random_state(seed: int = 1) -> np.ndarray:
    shape = (K, G, KEY, VALUE)
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("count", [1, 2, 31, PIECE, PIECE + 1, 3 * PIECE - 5])
@pytest.mark.parametrize("decay", [0.01, 0.3, 30.0])
def test_rows_are_as_defined(count, decay):
    given = tokens(count, decay=decay)
    wanted, after = defined(given, random_state())
    out, state = advance_row(given, jnp.asarray(random_state()))
    np.testing.assert_allclose(out, wanted, atol=1e-4)
    np.testing.assert_allclose(state, after, atol=1e-4)


def test_single_tokens_of_several_sequences_are_as_defined():
    states = np.stack([random_state(seed) for seed in range(4)])
    given = tokens(4)
    out, after = advance(given, jnp.asarray(states))
    for i in range(4):
        one = DeltaTokens(*(x[i : i + 1] for x in given))
        wanted, state = defined(one, states[i])
        np.testing.assert_allclose(out[i], wanted[0], atol=1e-5)
        np.testing.assert_allclose(after[i], state, atol=1e-5)


def test_a_repeated_key_is_corrected_every_time():
    """The system of a piece is worst where all keys are equal: f32 still solves it."""
    given = tokens(2 * PIECE)
    key = jnp.broadcast_to(given.k[:1], given.k.shape)
    given = given._replace(k=key, q=key, beta=jnp.ones_like(given.beta))
    given = given._replace(log_decay=jnp.zeros_like(given.log_decay))
    out, _ = advance_row(given, jnp.asarray(random_state()))
    np.testing.assert_allclose(out, given.v, atol=1e-4)


def test_tokens_that_change_nothing_leave_the_bits_of_a_state():
    nothing = jax.tree.map(jnp.zeros_like, tokens(7))
    state = jnp.asarray(random_state())
    np.testing.assert_array_equal(advance_row(nothing, state)[1], state)
    one = DeltaTokens(*(x[:1] for x in nothing))
    np.testing.assert_array_equal(advance(one, state[None])[1][0], state)


@pytest.mark.parametrize("decay", [0.01, 0.3])
def test_tokens_computed_before_their_state_is_known_are_completed_by_it(decay):
    """In two rows, as on a lane."""
    given = tokens(3 * PIECE - 5, decay=decay)
    wanted, after = defined(given, random_state())
    change = no_tokens((K, G, KEY, VALUE))
    np.testing.assert_array_equal(follow(change, random_state()), random_state())
    outs = []
    for first, last in ((0, PIECE + 3), (PIECE + 3, len(given.q))):
        row = of_any_state(DeltaTokens(*(field[first:last] for field in given)))
        out, change = advance_row(row, change)
        outs.append(out)
    completed = complete(jnp.concatenate(outs), jnp.asarray(random_state()))
    np.testing.assert_allclose(completed, wanted, atol=1e-4)
    np.testing.assert_allclose(follow(change, random_state()), after, atol=1e-4)
