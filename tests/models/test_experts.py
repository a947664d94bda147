"""Which experts a router chooses, and with which weights."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.checkpoint.specs import RouterSpec
from jaxserve.models.experts import route

LOGITS = np.random.default_rng(0).standard_normal((50, 16)).astype(np.float32)


def softmax(x: np.ndarray) -> np.ndarray:
    grown = np.exp(x)
    return grown / grown.sum(-1, keepdims=True)


def best(x: np.ndarray, count: int) -> np.ndarray:
    return np.argsort(-x, -1, kind="stable")[:, :count]


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_the_best_scores_are_the_weights(scores, normalised):
    weights, chosen = route(LOGITS, RouterSpec(scores, normalised, scale=1.5), 3)
    all_scores = softmax(LOGITS) if scores == "softmax" else 1 / (1 + np.exp(-LOGITS))
    np.testing.assert_array_equal(chosen, best(LOGITS, 3))
    right = np.take_along_axis(all_scores, best(LOGITS, 3), 1)
    if normalised:
        right = right / right.sum(1, keepdims=True)
    np.testing.assert_allclose(weights, 1.5 * right, rtol=1e-5)


def test_weights_may_be_a_softmax_of_the_chosen_logits():
    weights, chosen = route(LOGITS, RouterSpec("chosen"), 4)
    np.testing.assert_array_equal(chosen, best(LOGITS, 4))
    right = softmax(np.take_along_axis(LOGITS, best(LOGITS, 4), 1))
    np.testing.assert_allclose(weights, right, rtol=1e-5)


def test_a_correction_changes_the_choice_but_no_weight():
    correction = np.linspace(-2, 2, 16, dtype=np.float32)
    router = RouterSpec("sigmoid", normalised=False, correction=True)
    weights, chosen = route(LOGITS, router, 3, correction)
    scores = 1 / (1 + np.exp(-LOGITS))
    np.testing.assert_array_equal(chosen, best(scores + correction, 3))
    assert (np.asarray(chosen) != best(LOGITS, 3)).any()
    np.testing.assert_allclose(
        weights, np.take_along_axis(scores, np.asarray(chosen), 1), rtol=1e-5
    )


def test_experts_are_those_of_the_best_groups():
    router = RouterSpec("sigmoid", groups=4, best_groups=2)
    _, chosen = route(LOGITS, router, 3)
    scores = 1 / (1 + np.exp(-LOGITS))
    for row, ids in zip(scores, np.asarray(chosen)):
        value = np.sort(row.reshape(4, 4))[:, -2:].sum(1)
        allowed = [i for group in best(value[None], 2)[0] for i in range(4 * group, 4 * group + 4)]
        assert ids.tolist() == sorted(allowed, key=lambda i: -row[i])[:3]
