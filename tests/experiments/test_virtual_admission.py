"""What each admission policy refuses, and when."""

from __future__ import annotations

import pytest

from experiments.virtual_cluster.admission import POLICIES, tbt, tbt_at
from jaxserve.api.errors import RequestError
from jaxserve.cluster.admission import AdmissionView
from jaxserve.cluster.assignments import Assignments
from jaxserve.costs.coefficients import Costs
from jaxserve.costs.predictor import Predictor
from jaxserve.settings.schema import MeshConfig

GOOD = AdmissionView(ttft=1, tbt_now=0.05, tbt_later=0.05, ttft_objective=2, tbt_objective=0.1)
LATE = GOOD._replace(ttft=5.0)
BUSY = GOOD._replace(tbt_now=0.2)
BUSY_LATER = GOOD._replace(tbt_later=0.2)


def refusals(name: str) -> tuple[list[bool], list[bool]]:
    """Returns for LATE, BUSY and BUSY_LATER, on arrival and before decoding, True if it is
    refused."""

    def refuses(check, view):
        try:
            check(view)
        except RequestError as error:
            assert error.status == "RESOURCE_EXHAUSTED"
            assert error.retry_after > 0 and error.reason in ("ttft", "tpot")
            return True
        return False

    policy = POLICIES[name]
    assert not refuses(policy.check_arrival, GOOD) and not refuses(policy.check_decode, GOOD)
    views = LATE, BUSY, BUSY_LATER
    return (
        [refuses(policy.check_arrival, view) for view in views],
        [refuses(policy.check_decode, view) for view in views],
    )


@pytest.mark.parametrize(
    ("name", "arrival", "decode"),
    [
        ("none", [False, False, False], [False, False, False]),
        ("baseline", [True, False, False], [False, True, False]),
        ("early", [True, True, False], [False, True, False]),
        ("predicted", [True, False, True], [False, True, False]),
    ],
)
def test_each_policy_refuses_at_its_stage(name, arrival, decode):
    assert refusals(name) == (arrival, decode)


PREDICTOR = Predictor(Costs(layers=1, decode=0.01, decode_seq=0.01), MeshConfig())


def test_decoding_is_predicted_with_those_that_come_and_without_those_that_leave():
    member = Assignments()
    member.expect_decode("leaves", 100, 0.0)
    member.begin_decode("leaves", 0.0)
    member.expect_decode("comes", 100, 8.0)
    member.expect_decode("comes later", 100, 30.0)

    def at(second):
        return tbt_at(PREDICTOR, [member], second, completion=10.0, tokens=100)

    assert at(5.0) == pytest.approx(tbt(PREDICTOR, 2, 200))
    assert at(9.0) == pytest.approx(tbt(PREDICTOR, 3, 300))
    assert at(20.0) == pytest.approx(tbt(PREDICTOR, 1, 100))
