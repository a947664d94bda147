"""The experiment on predictions of prefills, on a few simulated prompts."""

from __future__ import annotations

from experiments.benchmarks.prefill_prediction import observe, simulated


def test_the_predictor_is_closer_than_seconds_per_token():
    replica = simulated()
    observed = observe(replica, ((500, 0), (20_000, 0), (20_000, 16_000)), 30)[10:]
    replica.close()
    assert {one.kind for one in observed} == {0, 1, 2}
    worst = max(abs(one.by_predictor / one.seconds - 1) for one in observed)
    assert worst < 0.05 < max(abs(one.by_rate / one.seconds - 1) for one in observed)
