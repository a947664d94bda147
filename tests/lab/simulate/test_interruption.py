"""Long steps in groups of layers are interrupted for prompts that would be late, by times worked by
hand: 10 ms per token and nothing else; a chunk of 64 tokens takes 640 ms, each of its four groups
160 ms."""

from __future__ import annotations

import pytest

from jaxserve.api.request import Request, Slo
from jaxserve.lab.simulate.arrival import Arrival, to_request
from jaxserve.lab.simulate.replica import VirtualReplica
from jaxserve.lab.simulate.run import drive
from tests.lab.simulate.test_replica import MAX_LEN, made

PATIENT = 100.0  # seconds


def asked(number: int, at: float, prompt: int, ttft: float, output: int = 1) -> tuple[Request, str]:
    slo = Slo(ttft=ttft, tpot=PATIENT)
    return to_request(Arrival(at, prompt, output), number, MAX_LEN, slo), ""


def first_tokens(replica: VirtualReplica, *requests: tuple[Request, str]) -> list[float]:
    """Clock seconds of the first tokens, by number."""
    records = drive(replica, requests).records
    return [round(record.first, 6) for record in sorted(records, key=lambda record: int(record.id))]


def in_groups(groups: int = 4, policy: str = "edf", **settings) -> VirtualReplica:
    return made(layer_groups=groups, policy=policy, **settings)


def test_a_prompt_that_would_be_late_runs_between_two_groups_of_layers():
    """It comes within the first group, and after it runs for 40 ms; the long one is 40 ms later."""
    replica = in_groups()
    found = first_tokens(replica, asked(0, 0.0, 64, PATIENT), asked(1, 0.1, 4, 0.3))
    assert found == [0.68, 0.2]
    assert replica.scheduler.interruptions == 1


@pytest.mark.parametrize(
    "groups, policy, due, of_long",
    [
        pytest.param(1, "edf", 0.3, PATIENT, id="steps are whole"),
        pytest.param(4, "fcfs", 0.3, PATIENT, id="the policy looks at no deadlines"),
        pytest.param(4, "edf", 0.6, PATIENT, id="it is in time after the step"),
        pytest.param(4, "edf", 0.09, PATIENT, id="it is late in any case"),
        pytest.param(4, "edf", 0.3, 0.66, id="the long one would be late"),
    ],
)
def test_a_step_goes_on_where(groups, policy, due, of_long):
    replica = in_groups(groups, policy)
    found = first_tokens(replica, asked(0, 0.0, 64, of_long), asked(1, 0.1, 4, due))
    assert found == [0.64, 0.68]
    assert replica.scheduler.interruptions == 0


def test_a_long_one_that_is_late_itself_makes_way():
    """It is due after 640 ms, and waited for 100 ms: nothing of it is lost by 40 ms more."""
    found = first_tokens(
        in_groups(), asked(0, 0.0, 10, PATIENT), asked(1, 0.0, 64, 0.64), asked(2, 0.3, 4, 0.2)
    )
    assert found[2] < found[1]


def test_what_interrupts_goes_on_beside_the_next_prompt_that_does():
    """The second token of the first one comes with the step of the other."""
    replica = in_groups()
    records = drive(
        replica,
        [
            asked(0, 0.0, 64, PATIENT),
            asked(1, 0.1, 4, 0.3, output=2),
            asked(2, 0.3, 4, 0.25),
        ],
    ).records
    first, second = (record for record in records if record.id in "12")
    assert replica.scheduler.interruptions == 2
    assert first.output == 2 and first.end == pytest.approx(second.end) and first.end < 0.5


def test_a_step_goes_on_between_two_others():
    """Prompts that come all the time: after each that interrupts a group of layers runs, so that
    three at most do."""
    replica = in_groups()
    shorts = [asked(number, 0.05 * number, 4, 0.26) for number in range(1, 12)]
    found = first_tokens(replica, asked(0, 0.0, 64, PATIENT), *shorts)
    assert len({first for first in found[1:] if first < found[0]}) == 3


@pytest.mark.parametrize("groups, cached", [(4, 0), (1, 16)])
def test_a_prompt_whose_layers_have_not_all_run_serves_no_other(groups, cached):
    """The short one begins as the long one does: it reads those blocks only once they are whole."""
    replica = in_groups(groups, prefix_caching=True)
    long = Arrival(0.0, 64, 1, blocks=(1, 2, 3, 4), block=16)
    short = Arrival(0.1, 20, 1, blocks=(1,), block=16)
    requests = [
        (to_request(long, 0, MAX_LEN, Slo(ttft=PATIENT)), ""),
        (to_request(short, 1, MAX_LEN, Slo(ttft=0.4)), ""),
    ]
    records = {record.id: record for record in drive(replica, requests).records}
    assert replica.scheduler.interruptions == (groups > 1)
    assert records["1"].cached == cached
