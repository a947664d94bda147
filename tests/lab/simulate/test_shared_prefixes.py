"""Workloads with shared prefixes have the published means, share what they say they share, and are
the same work at every rate."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from jaxserve.lab.simulate.arrival import Arrival
from jaxserve.lab.simulate.shared_prefixes import ANSWER, UNIT, WORKLOADS, together
from jaxserve.lab.simulate.workload import parse
from jaxserve.settings.schema import ConfigError


def first_ids(arrivals: list[Arrival]) -> Counter:
    return Counter(int(arrival.blocks[0]) for arrival in arrivals)


@pytest.mark.parametrize("name, prompt", [("loogle", 24_000), ("scbench", 145_000)])
def test_prompts_have_the_published_means(name, prompt):
    found = parse(name, qps=1.0, requests=3000, seed=1)
    assert np.mean([a.prompt for a in found]) == pytest.approx(prompt, rel=0.15)
    assert [a.time for a in found] == sorted(a.time for a in found)
    assert len(found) / found[-1].time == pytest.approx(1.0, rel=0.1)


def test_documents_are_asked_about_by_zipfs_law():
    counts = first_ids(parse("loogle:zipf=1.2,documents=50", qps=1.0, requests=5000))
    ordered = [count for _, count in counts.most_common()]
    weights = 1 / np.arange(1, 51) ** 1.2
    assert ordered[0] / 5000 == pytest.approx(weights[0] / weights.sum(), rel=0.1)
    even = first_ids(parse("loogle:zipf=0,documents=50", qps=1.0, requests=5000))
    assert max(even.values()) < 2 * min(even.values())


@pytest.mark.parametrize("name", ["loogle", "scbench", "sharegpt-o3"])
def test_one_seed_is_the_same_work_at_every_rate(name):
    slow, fast = (parse(name, qps=qps, requests=200) for qps in (0.5, 4.0))
    kind = lambda found: sorted((a.prompt, a.output) for a in found)[:50]
    if name == "loogle":
        assert kind(slow) == kind(fast)
    assert slow[-1].time > fast[-1].time
    assert slow != parse(name, qps=0.5, requests=200, seed=1)


def test_a_turn_continues_the_one_before_with_its_answer():
    found = parse("sharegpt-o3", qps=5.0, requests=400)
    system = found[0].blocks[: 4096 // UNIT]
    later = 0
    sessions: dict[int, Arrival] = {}
    for arrival in found:
        assert (arrival.blocks[: len(system)] == system).all()
        own = int(arrival.blocks[len(system)])
        before = sessions.get(own)
        if before is not None:
            later += 1
            answer = np.full(before.output // UNIT, ANSWER)
            head = np.concatenate([before.blocks, answer])
            assert (arrival.blocks[: len(head)] == head).all()
            assert arrival.time >= before.time + 3.0
        sessions[own] = arrival
    assert later > 100
    assert max(a.prompt + a.output for a in found) > 4096


def test_workloads_that_run_together_share_nothing():
    found = together(tuple(WORKLOADS.values()), 3.0, 300, 0)
    kinds = Counter(arrival.kind for arrival in found)
    assert len(found) == 300 and set(kinds) == {"document", "session", "chat"}
    ids = {kind: set() for kind in kinds}
    for arrival in found:
        ids[arrival.kind] |= set(arrival.blocks.tolist()) - {ANSWER}
    assert sum(map(len, ids.values())) == len(set.union(*ids.values()))


@pytest.mark.parametrize(
    "spec, said",
    [
        ("loogle:zip=1", "unknown option 'zip'"),
        ("loogle:documents=0", "documents"),
        ("scbench:zipf=1", "unknown option 'zipf'"),
        ("loogel", "did you mean loogle?"),
    ],
)
def test_what_is_wrong_is_said(spec, said):
    with pytest.raises(ConfigError, match=said.replace("?", r"\?")):
        parse(spec, qps=1.0)
