"""What a real engine tells of itself while it runs."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter

import numpy as np
import pytest

from jaxserve.api.events import Finished
from jaxserve.api.request import Request
from jaxserve.api.sampling import SamplingParams
from jaxserve.engine.engine import Engine
from tests.engine.harness import Runner, engine


@pytest.fixture(scope="module")
def live() -> Engine:
    return engine(mesh="spp=2", seqs=4)


def prefilled(view: dict) -> Counter:
    """Tokens of prompts that were computed, by request and completion."""
    out: Counter = Counter()
    for step in view["steps"]:
        for number, _, _, length, decode in step["chunks"]:
            out[view["names"][number]] += 0 if decode else length
    return out


def test_all_that_was_computed_is_told_with_whose_it_was(live):
    runner = Runner(live)
    runner.submit(range(1, 151), id="long", max_tokens=5)
    runner.submit(range(40, 60), id="two", max_tokens=4, n=2, temperature=1.0)
    runner.run()
    view = live.view()
    ended = {(row[1], row[2]): dict(zip(view["end_columns"], row)) for row in view["ended"]}
    known = {name: count + ended[name]["cached"] for name, count in prefilled(view).items()}
    assert known == {("long", 0): 150, ("two", 0): 20, ("two", 1): 20}
    assert (
        ended["long", 0]["generated"] == 5
        and ended["long", 0]["ttft"] > 0
        and ended["long", 0]["tpot"] > 0
    )
    assert not view["requests"] and not view["flying"] and view["running"] == view["waiting"] == 0
    assert [sum(lane) for lane in view["pages"]] == [live.worker.plan.pages]
    assert all(len(step["spans"]) == 2 for step in view["steps"])


def test_a_view_can_be_had_at_any_time_and_misses_no_step(live):
    first = live.view(10**9)["next"]
    ended = threading.Event()
    steps = []
    seen = Counter()
    live.start()
    sampling = SamplingParams.make(temperature=0, max_tokens=500, ignore_eos=True)
    prompt = np.arange(1, 300)[::-1]
    request = Request.make(
        "r",
        prompt,
        sampling,
        vocab=live.info.vocab,
        max_len=live.info.max_model_len,
        arrival=live.now(),
    )
    live.submit(
        request,
        lambda events: (
            ended.set() if any(isinstance(event, Finished) for event in events) else None
        ),
    )
    until = time.monotonic() + 120
    since = first
    last = False
    while not last:
        assert time.monotonic() < until
        time.sleep(0.005)  # the engine's thread is to get the interpreter, too
        last = ended.is_set() and not live.view()["flying"]
        view = json.loads(json.dumps(live.view(since), allow_nan=False))
        seen.update(row[4] for row in view["requests"])
        steps = steps + [step["number"] for step in view["steps"]]
        since = view["next"]
    live.close()
    assert steps == list(range(first, since)) and len(steps) >= 504
    assert seen["decoding"] and set(seen) <= {"waiting", "prefilling", "decoding"}
