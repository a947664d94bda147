"""The table of a cluster's overload, and what counts as an error in it."""

from __future__ import annotations

from experiments.benchmarks.cluster_overload import errors, shown
from experiments.benchmarks.overload import Asked, figures
from jaxserve.api.errors import RequestError

OBJECTIVES = {"ttft": 4.0, "tpot": 0.5}


def ended(status: str = "", ttft: float = 1.0) -> Asked:
    one = Asked(100)
    if status:
        one.refuse(RequestError("", "refused", status, reason="ttft"))
    else:
        one.first, one.last, one.tokens = one.came + ttft, one.came + ttft + 1.0, 11
    return one


def test_only_refusals_are_no_errors():
    asked = [ended(), ended("429"), ended("429"), ended("503")]
    assert errors(asked) == 1
    assert figures(asked, 10.0, OBJECTIVES)["statuses"] == {"429": 2, "503": 1}


def test_the_table_has_what_was_in_time_and_memory_by_process():
    found = {**figures([ended(), ended(ttft=5.0)], 10.0, OBJECTIVES), "errors": 0}
    memory = {"before": {"conductor 1": 100.0}, "10x": {"conductor 1": 120.0}}
    text = shown({"phases": {"10x": found}, "memory_mib": memory})
    assert "50.0%" in text and "0.10" in text
    assert text.splitlines()[-1].split() == ["conductor", "1", "100", "120"]
