"""Classes of requests: how an operator names their objectives, and what a request's class does to
its turn and to its tokens."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from jaxserve.api.errors import RequestError
from jaxserve.api.request import Request, Slo
from jaxserve.api.sampling import SamplingParams
from jaxserve.cache import CacheManager
from jaxserve.costs.coefficients import Costs
from jaxserve.scheduling import Scheduler
from jaxserve.scheduling.batch_reader import StepResults
from jaxserve.settings.schema import (
    CacheConfig,
    ConfigError,
    MeshConfig,
    Objectives,
    SchedulerConfig,
)

CLASSES = "chat:ttft=0.5,tpot=0.05;batch:ttft=600,stretch=20,tpot=1"
TOKEN = Costs(layers=1, linear_token=0.001)  # a step takes a millisecond per token


def made(**settings) -> Scheduler:
    config = SchedulerConfig(
        **{"policy": "slack", "classes": CLASSES, "chunk_tokens": 64, **settings}
    )
    cache = CacheManager(CacheConfig(16, 1000, prefix_caching=False), 1, config.max_seqs)
    return Scheduler(config, cache, MeshConfig(), 10_000, costs=TOKEN)


def request(
    id: str,
    class_name: str | None = None,
    prompt: int = 64,
    priority: int = 0,
    classes: Iterable[str] = ("chat", "batch"),
    **slo,
):
    return Request.make(
        id,
        [1] * prompt,
        SamplingParams(max_tokens=100),
        vocab=10,
        max_len=10_000,
        classes=tuple(classes),
        slo=Slo(class_name=class_name, **slo),
        priority=priority,
    )


def first(scheduler: Scheduler, *requests: Request) -> str:
    """The request that is prefilled first, all waiting."""
    for each in requests:
        scheduler.add(each)
    batch = scheduler.start(0.0)
    return scheduler.sequences[int(batch.seq[0])].id


# --- the setting


def test_a_class_has_the_servers_own_objectives_for_what_it_leaves_out():
    text = "chat:ttft=0.5 , tpot=0.05; batch:stretch=20;plain;a-B_9:tpot=1e-3;"
    config = SchedulerConfig(ttft=3.0, ttft_stretch=4.0, tpot=0.2, classes=text)
    assert config.class_names == ("chat", "batch", "plain", "a-B_9")
    assert config.objectives["chat"] == Objectives(0.5, 4.0, 0.05) and config.objectives[
        "batch"
    ] == Objectives(3.0, 20.0, 0.2)
    assert (
        config.objectives["plain"] == Objectives(3.0, 4.0, 0.2)
        and config.objectives["a-B_9"].tpot == 0.001
    )
    own = config.objectives[None]
    assert (own.ttft, own.ttft_stretch, own.tpot) == (
        3.0,
        4.0,
        0.2,
    ) and SchedulerConfig().class_names == ()


@pytest.mark.parametrize(
    "classes, message",
    [
        (
            "chat:tfft=1",
            "chat: 'tfft=1' is not FIELD=NUMBER, each of ttft, stretch, tpot, tbt at most once",
        ),
        ("chat:ttft_stretch=4", "chat: 'ttft_stretch=4' is not FIELD"),
        (
            "chat:ttft=1,ttft=2",
            "chat: 'ttft=2' is not FIELD=NUMBER, each of ttft, stretch, tpot, tbt at most once",
        ),
        ("chat:0.5", "chat: '0.5' is not FIELD"),
        ("chat:ttft", "chat: ttft: '' is not a number"),
        ("chat:ttft=soon", "chat: ttft: 'soon' is not a number"),
        ("chat:ttft=nan", "chat: ttft: 'nan' is not a number"),
        ("chat:tpot=inf", "chat: tpot: 'inf' is not a number"),
        ("chat:ttft=0", "chat: ttft: 0.0 is below the limit 0.001"),
        ("fine;chat:tpot=-1", "chat: tpot: -1.0 is below the limit 0.0001"),
        ("chat:stretch=0.5", "chat: ttft_stretch: 0.5 is below the limit 1"),
        ("chat:ttft=1;batch;chat:tpot=1", "chat is given more than once"),
        ("default:ttft=1", "default stands for requests that name no class"),
        (
            "ttft=0.5,tpot=0.1",
            "'ttft=0.5,tpot=0.1' is not a name of 1 to 64 letters, digits, - and _",
        ),
        (":ttft=1", "'' is not a name"),
        ("my chat:ttft=1", "'my chat' is not a name"),
        ("schön", "'schön' is not a name"),
        ("x" * 65, "is not a name"),
    ],
)
def test_a_setting_that_cannot_be_used_is_refused_with_the_class_and_what_is_wrong(
    classes, message
):
    with pytest.raises(ConfigError) as error:
        SchedulerConfig(classes=classes)
    assert (
        error.value.field == "classes"
        and str(error.value).startswith("classes: ")
        and message in str(error.value)
    )


def test_a_name_may_have_64_characters():
    assert SchedulerConfig(classes="x" * 64).class_names == ("x" * 64,)


# --- requests


@pytest.mark.parametrize("policy", ["slack", "edf"])
def test_a_request_of_a_tight_class_is_prefilled_before_an_earlier_one_of_a_lax_class(policy):
    assert (
        first(made(policy=policy), request("earlier", "batch"), request("tight", "chat")) == "tight"
    )
    assert (
        first(made(policy=policy), request("earlier", "chat"), request("lax", "batch")) == "earlier"
    )
    assert first(made(policy=policy), request("earlier"), request("later")) == "earlier"
    assert (
        first(made(policy="fcfs"), request("earlier", "batch"), request("tight", "chat"))
        == "earlier"
    )


def test_a_class_without_a_name_lies_between_a_tight_and_a_lax_one():
    scheduler = made(policy="edf")
    assert (
        first(scheduler, request("lax", "batch"), request("plain"), request("tight", "chat"))
        == "tight"
    )
    assert scheduler.sequences[int(scheduler.start(0.0).seq[-1])].id == "plain"


def test_the_ttft_objective_is_the_requests_own_else_its_classs_by_length_and_priority():
    def objective(asked: Request, classes: str = CLASSES) -> float:
        return made(classes=classes).times.deadline(asked) - asked.arrival

    assert (
        objective(request("a")) == 2.0
        and objective(request("a", "chat")) == 0.5
        and objective(request("a", "batch")) == 600
    )
    # the server's own stretch
    assert objective(request("a", "chat", prompt=640)) == pytest.approx(3 * 0.64)
    assert objective(request("a", "batch", prompt=640)) == 600
    assert objective(request("a", "batch", prompt=640), "batch:stretch=20") == pytest.approx(
        20 * 0.64
    )
    assert (
        objective(request("a", "chat", priority=-2)) == 0.125
        and objective(request("a", "chat", priority=1)) == 1.0
    )
    assert objective(request("a", "batch", ttft=0.3, priority=5)) == 0.3
    # no prompt is due before it could be there
    assert objective(request("a", "batch", ttft=0.03)) == pytest.approx(0.064)


@pytest.mark.parametrize(
    "class_name, own, tpot",
    [(None, None, 0.1), ("chat", None, 0.05), ("batch", None, 1.0), ("batch", 0.07, 0.07)],
)
def test_chunks_leave_the_decodes_of_a_class_the_time_that_it_is_promised(class_name, own, tpot):
    """A decode takes a millisecond, as does a token of the long prompt beside it, which comes in
    rows of 4."""
    scheduler = made(chunking="adaptive", chunk_tokens=4096, min_chunk=4, step_time=10.0)
    scheduler.add(request("decode", class_name, prompt=4, tpot=own))
    scheduler.finish(scheduler.start(0.0), StepResults(np.ones(1, np.int32)), 0.01)
    scheduler.add(request("long", "batch", prompt=5000))
    assert 0.97 * tpot - 0.005 < scheduler.start(0.01).seconds <= tpot + 1e-9


@pytest.mark.parametrize(
    "known, message", [(("chat", "batch"), "known are chat, batch"), ((), "there are none")]
)
def test_a_request_of_an_unknown_class_is_refused_by_name(known, message):
    with pytest.raises(RequestError) as error:
        request("a", "Chat", classes=known)
    assert (error.value.field, error.value.status) == ("slo.class_name", "INVALID_ARGUMENT")
    assert str(error.value) == f"slo.class_name: 'Chat' is not a class of requests here; {message}"
