"""What is counted equals what was served, on the real engine and, for the gaps between tokens,
beside the plain way to count them."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families as parse

from jaxserve.api.errors import RequestError
from jaxserve.api.events import Token
from jaxserve.api.request import Request, Slo
from jaxserve.api.sampling import SamplingParams
from jaxserve.clock import VirtualClock
from jaxserve.engine.build import build
from jaxserve.engine.engine import Engine
from jaxserve.engine.programs import Programs
from jaxserve.observe.attained import ATTAINED
from jaxserve.observe.metric_rows import READ, REJECTIONS
from jaxserve.observe.metrics import Metrics
from jaxserve.scheduling import Batch
from jaxserve.scheduling.events import (
    Admitted,
    CompletionEnded,
    DraftsChecked,
    EventBus,
    FirstToken,
    StepIssued,
)
from jaxserve.scheduling.sequence import Sequence, SequenceLimits
from jaxserve.settings.schema import (
    CacheConfig,
    EngineConfig,
    MeshConfig,
    ModelSource,
    SchedulerConfig,
)
from tests.engine.harness import Runner, fresh

COUNTERS = {
    "prompt_tokens",
    "generation_tokens",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "request_success",
    "prefill_jobs",
    "prefill_job_tokens",
    "ttft_slo_violations",
    "exchange_steps",
    "moved_pages",
    "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
    "spec_decode_num_accepted_tokens_per_pos",
    "tbt_slo_violations",
    "draft_model_seconds",
    "tenant_seconds",
    "xla_compiles",
    "xla_recompiles",
    "num_preemptions",
    "lora_device_loads",
    "num_step_interruptions",
    "kv_promises_given_up",
    "kv_blocks_stored",
    "kv_blocks_from_host",
    "kv_blocks_from_disk",
    "kv_blocks_from_peers",
    "kv_blocks_from_store",
    "kv_blocks_to_store",
    "kv_blocks_not_put",
    "kv_blocks_prefetched",
    "kv_blocks_wrong",
    "early_rejections",
    "goodput_requests",
    *(f"{of}_{name}" for of in ("class", "tenant") for name in ATTAINED),
}
GAUGES = {
    "kv_blocks_promised",
    "kv_blocks_leased",
    "kv_blocks_of_sessions",
    "lora_adapters_loaded",
    "lora_adapters_on_devices",
    "tenant_credit_seconds",
    "kv_blocks_in_host",
    "kv_blocks_on_disk",
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "queued_prefill_seconds",
    "predictions_doubtful",
    "predictor_scale",
    "cache_config_info",
}
HISTOGRAMS = {
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_slack_seconds",
    "chunk_size_tokens",
    "kvp_degree",
    "step_predicted_seconds",
    "step_seconds",
    "step_error_ratio",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_time_per_output_token_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
}

NO_SLO = Slo()
CHAT = Slo(class_name="chat")
BATCH = Slo(class_name="batch")


def made(mesh: str = "", pages: int = 60) -> Engine:
    scheduler = SchedulerConfig(
        max_seqs=4, chunk_tokens=32, classes="chat:ttft=0.5,tpot=0.05;batch:ttft=600,tpot=1"
    )
    return build(
        EngineConfig(
            ModelSource(model="random:tiny", max_model_len=512),
            MeshConfig.parse(mesh),
            CacheConfig(block_size=16, pages=pages, lane_tokens=64),
            scheduler,
            profile="none",
        ),
        progress=False,
        warm_up=False,
    )


@pytest.fixture(scope="module")
def built() -> Engine:
    return made()


@pytest.fixture
def real(built) -> Engine:
    return fresh(built, "grow")


def value(of: Engine | Metrics, name: str, **labels: str) -> float | None:
    registry = of.metrics_registry if isinstance(of, Engine) else of.registry
    return registry.get_sample_value(f"jaxserve:{name}", labels)


def total(of: Engine, name: str) -> float:
    """Returns the sum of a counter over its labels."""
    families = {family.name: family for family in of.metrics_registry.collect()}
    samples = families[f"jaxserve:{name}"].samples
    return sum(sample.value for sample in samples if sample.name.endswith("_total"))


def classes(of: Engine | Metrics, name: str) -> dict[str, float]:
    return {label: value(of, name, **{"class": label}) for label in ("default", "chat", "batch")}


class Served(Runner):
    """Keeps the batches; requests may be of the engine's classes."""

    def __init__(self, engine: Engine):
        super().__init__(engine)
        self.batches: list[Batch] = []
        engine.bus.subscribe(StepIssued, lambda step: self.batches.append(step.batch))

    def submit(
        self, prompt, id: str | None = None, rest: dict | None = None, slo: Slo = NO_SLO, **fields
    ) -> str:
        classes = self.engine.info.class_names
        return super().submit(
            prompt,
            id,
            {"slo": slo, "classes": classes, **(rest or {})},
            **{"ignore_eos": True, **fields},
        )

    def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(1000):
            if condition():
                return
            self.engine.step()
        raise AssertionError("it did not happen")

    @property
    def tokens(self) -> int:
        return sum(isinstance(event, Token) for events in self.events.values() for event in events)


def prompts(*lengths: int) -> list[np.ndarray]:
    dice = np.random.default_rng(0)
    return [dice.integers(3, 500, length) for length in lengths]


# --- what is counted is what was served


@pytest.mark.parametrize("mesh", ["", "spp=2", "kvp=2"])
def test_the_counts_are_those_of_what_was_served(mesh):
    real = made(mesh)
    runner = Served(real)
    long, short, other = prompts(150, 20, 40)
    ids = [
        runner.submit(long, max_tokens=9),
        runner.submit(short, max_tokens=1),
        runner.submit(other, max_tokens=5, n=2),
    ]
    runner.run()
    ids.append(runner.submit(long, max_tokens=3))
    ids.append(runner.submit(long, max_tokens=3, rest={"bypass_prefix_cache": True}))
    runner.run()

    finished = {
        id: [runner.completion(id, index).finished for index in range(2 if id == ids[2] else 1)]
        for id in ids
    }
    tokens = runner.tokens
    assert tokens == sum(end.usage.completion for ends in finished.values() for end in ends)
    assert value(real, "generation_tokens_total") == tokens
    assert value(real, "prompt_tokens_total") == 3 * 150 + 20 + 40
    assert value(real, "prefix_cache_queries_total") == 2 * 150 + 20 + 40
    assert value(real, "prefix_cache_hits_total") == finished[ids[3]][0].usage.cached >= 128
    reasons = [end.reason for ends in finished.values() for end in ends]
    for reason in ("stop", "length", "cancelled", "deadline", "error", "other"):
        assert value(real, "request_success_total", finished_reason=reason) == reasons.count(reason)
    for name in (
        "time_to_first_token_seconds",
        "request_queue_time_seconds",
        "e2e_request_latency_seconds",
        "request_slack_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
    ):
        assert value(real, f"{name}_count") == len(ids), name
    assert (
        value(real, "request_prompt_tokens_sum") == 3 * 150 + 20 + 40
        and value(real, "request_generation_tokens_sum") == tokens
    )
    assert value(real, "request_time_per_output_token_seconds_count") == len(reasons) - 1, (
        "one has a single token"
    )
    spent = sum(
        value(real, f"request_{part}_time_seconds_sum") for part in ("queue", "prefill", "decode")
    )
    assert spent == pytest.approx(value(real, "e2e_request_latency_seconds_sum"))
    first = [finished[id][0].timing for id in ids if id != ids[2]]
    assert (
        value(real, "time_to_first_token_seconds_sum")
        >= sum(timing.first_token for timing in first) - 1e-6
    )
    assert value(real, "inter_token_latency_seconds_count") == tokens - len(reasons)

    sizes = np.concatenate([batch.length[~batch.is_decode] for batch in runner.batches])
    degrees = np.concatenate(
        [np.count_nonzero(batch.blocks_per_lane[~batch.is_decode], 1) for batch in runner.batches]
    )
    assert value(real, "chunk_size_tokens_count") == value(real, "kvp_degree_count") == sizes.size
    assert value(real, "chunk_size_tokens_sum") == sizes.sum() and value(
        real, "chunk_size_tokens_bucket", le="32.0"
    ) == np.count_nonzero(sizes <= 32)
    assert value(real, "kvp_degree_sum") == degrees.sum() and degrees.max() == (
        2 if mesh == "kvp=2" else 1
    )
    assert (
        value(real, "step_seconds_count")
        == value(real, "step_predicted_seconds_count")
        == len(runner.batches)
    )
    assert value(real, "step_predicted_seconds_sum") == pytest.approx(
        sum(batch.seconds for batch in runner.batches)
    )
    assert 0 < value(real, "step_error_ratio_count") < len(runner.batches)


def test_gauges_tell_how_it_is_now(real):
    runner = Served(real)
    assert [
        value(real, name)
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    ] == [0, 0, 0]
    for prompt in prompts(*[100] * 6):
        runner.submit(prompt, max_tokens=20)
    assert (value(real, "num_requests_running"), value(real, "num_requests_waiting")) == (0, 6)
    waiting = value(real, "queued_prefill_seconds")
    for _ in range(20):
        real.step()
    load = real.load()
    assert (
        value(real, "num_requests_running") == load.running == 4
        and value(real, "num_requests_waiting") == load.waiting == 2
    )
    assert value(real, "kv_cache_usage_perc") == pytest.approx(
        1 - (load.pages_free + load.pages_cached) / load.pages_total
    )
    assert 0 < value(real, "queued_prefill_seconds") == load.queued_prefill_seconds < waiting
    assert value(real, "predictor_scale") == real.scheduler.predictor.scale
    runner.run()
    assert [
        value(real, name)
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    ] == [0, 0, 0]
    assert value(real, "xla_compiles_total") == real.worker.compiles > 0


def test_a_late_first_token_is_a_violation_of_its_class(real):
    real.clock, runner = VirtualClock(100.0), Served(real)
    (prompt,) = prompts(20)
    runner.submit(prompt, max_tokens=2, slo=CHAT)
    runner.submit(prompt, max_tokens=2, slo=BATCH)
    runner.submit(prompt, max_tokens=2, slo=Slo(ttft=3.0))
    runner.submit(prompt, max_tokens=2, slo=Slo(ttft=30.0, class_name="chat"))
    real.clock.advance(110.0)
    runner.run()
    assert classes(real, "ttft_slo_violations_total") == {"default": 1, "chat": 1, "batch": 0}
    assert value(real, "request_slack_seconds_count") == 4
    below = [
        value(real, "request_slack_seconds_bucket", le=le)
        for le in ("-10.0", "-5.0", "0.0", "20.0", "500.0", "1000.0")
    ]
    assert below == [0, 2, 2, 3, 3, 4]  # 9.5 and 7 s late, 20 and 590 s early
    assert (
        value(real, "time_to_first_token_seconds_sum")
        == value(real, "request_queue_time_seconds_sum")
        == 40
    )


def test_a_token_that_keeps_its_stream_waiting_is_a_violation_of_its_class(real):
    real.clock, runner = VirtualClock(100.0), Served(real)
    for prompt, slo in zip(
        prompts(20, 21, 22, 23), (CHAT, BATCH, NO_SLO, Slo(class_name="chat", tpot=2.0))
    ):
        runner.submit(prompt, max_tokens=50, slo=slo)
    runner.until(lambda: value(real, "time_to_first_token_seconds_count") == 4)
    count = value(real, "inter_token_latency_seconds_count")
    for seconds in (0.06, 0.04, 1.5):  # tpot: 0.05, 1, 0.1 and 2
        real.clock.advance(real.clock.now() + seconds)
        before = runner.tokens
        runner.until(lambda before=before: runner.tokens > before)
    assert classes(real, "tbt_slo_violations_total") == {"default": 1, "chat": 2, "batch": 1}
    assert value(real, "inter_token_latency_seconds_count") == count + 12
    assert value(real, "inter_token_latency_seconds_sum") == pytest.approx(4 * 1.6)
    assert value(real, "inter_token_latency_seconds_bucket", le="0.05") == count + 4
    real.fail(RequestError("", "enough"))


@pytest.mark.parametrize("late", [False, True])
def test_what_ends_before_its_first_token_counts_by_its_reason_and_against_its_class_if_it_was_late(
    real, late
):
    real.clock, runner = VirtualClock(100.0), Served(real)
    runner.submit(prompts(300)[0], "cancelled", max_tokens=2, slo=CHAT)
    runner.submit(prompts(30)[0], "expired", max_tokens=2, slo=CHAT, rest={"deadline": 100.2})
    runner.submit(prompts(30)[0], "twins", max_tokens=2, n=2, slo=CHAT)
    real.step()
    real.clock.advance(101.0 if late else 100.3)
    assert real.cancel("cancelled") and real.stop("twins", 1)
    # the other twin is still to come
    assert classes(real, "ttft_slo_violations_total")["chat"] == late
    real.fail(RequestError("", "the engine failed"))
    while real.step():
        pass
    ended = {
        reason: value(real, "request_success_total", finished_reason=reason)
        for reason in ("cancelled", "stop", "error", "length")
    }
    assert ended == {"cancelled": 1, "stop": 1, "error": 2, "length": 0}
    assert classes(real, "ttft_slo_violations_total") == {
        "default": 0,
        "chat": 3 * late,
        "batch": 0,
    }
    assert (
        value(real, "time_to_first_token_seconds_count")
        == value(real, "e2e_request_latency_seconds_count")
        == 0
    )
    assert value(real, "prompt_tokens_total") == value(real, "generation_tokens_total") == 0


def test_deadlines_and_cancelled_streams_count_their_tokens(real):
    real.clock, runner = VirtualClock(100.0), Served(real)
    runner.submit(prompts(20)[0], "deadline", max_tokens=100, rest={"deadline": 105.0})
    runner.submit(prompts(20)[0], "cancelled", max_tokens=100)
    runner.until(lambda: value(real, "generation_tokens_total") >= 20)
    real.cancel("cancelled")
    real.clock.advance(106.0)
    runner.run()
    assert value(real, "generation_tokens_total") == runner.tokens
    assert (
        value(real, "prompt_tokens_total") == 40
        and value(real, "e2e_request_latency_seconds_count") == 0
    )
    for reason in ("deadline", "cancelled"):
        assert value(real, "request_success_total", finished_reason=reason) == 1


def test_prompts_for_other_replicas_are_counted_apart_from_users_requests(real):
    runner = Served(real)
    runner.submit(prompts(20)[0], "job", max_tokens=1, rest={"job": True})
    runner.submit(prompts(30)[0], "user", max_tokens=3)
    runner.run()
    assert value(real, "prefill_jobs_total", finished_reason="length") == 1
    assert value(real, "prefill_job_tokens_total") == 20
    assert value(real, "request_success_total", finished_reason="length") == 1
    assert value(real, "prompt_tokens_total") == 30
    assert value(real, "generation_tokens_total") == 3
    assert value(real, "time_to_first_token_seconds_count") == 1
    assert value(real, "e2e_request_latency_seconds_count") == 1


def test_the_servers_own_probes_are_no_traffic(real):
    runner = Served(real)
    runner.submit(prompts(20)[0], "probe", max_tokens=3, rest={"probe": True})
    real.step()
    running = real.view()
    assert (running["requests"], running["running"], running["waiting"]) == ([], 0, 0)
    assert running["left_out"] == {"running": 0, "waiting": 0, "ended": 0}
    runner.run()
    view = real.view()
    assert view["ended"] == [] and view["names"] == {}
    for name in ("request_success", "generation_tokens", "prompt_tokens", "class_requests"):
        assert total(real, name) == 0
    assert value(real, "time_to_first_token_seconds_count") == 0
    runner.submit(prompts(20)[0], "user", max_tokens=3)
    runner.run()
    assert total(real, "request_success") == 1 and value(real, "generation_tokens_total") == 3
    assert [row[1] for row in real.view()["ended"]] == ["user"]


def test_requests_and_tokens_in_time_are_counted_by_class_and_by_tenant(built):
    real = fresh(built, "grow", classes="chat:ttft=50,tpot=2;batch:ttft=0.5,tpot=2")
    runner = Served(real)
    real.clock = VirtualClock(100.0)
    runner.submit(prompts(20)[0], "quick", max_tokens=4, slo=CHAT, rest={"tenant": "acme"})
    runner.submit(prompts(20)[0], "late", max_tokens=6, slo=BATCH, rest={"tenant": "acme"})
    runner.submit(prompts(20)[0], "both", max_tokens=5, n=2, slo=CHAT, rest={"tenant": "umbrella"})
    while real.step():
        real.clock.advance(real.clock.now() + 1.0)
    counts = {
        "chat": (2, 2, 14, 14),
        "batch": (1, 0, 6, 0),
        "default": (0, 0, 0, 0),
    }
    for name, expected in counts.items():
        found = [value(real, f"class_{row}_total", **{"class": name}) for row in ATTAINED]
        assert tuple(found) == expected, name
    for tenant, expected in {"acme": (2, 1, 10, 4), "umbrella": (1, 1, 10, 10)}.items():
        found = [value(real, f"tenant_{row}_total", tenant=tenant) for row in ATTAINED]
        assert tuple(found) == expected, tenant
    assert value(real, "goodput_requests_total") == 2


def test_preempted_sequences_are_counted_once_and_their_wait_is_a_gap(built):
    real = fresh(built, "grow", decode_reserve=0.0)
    runner = Served(real)
    real.clock = VirtualClock(100.0)
    for prompt in prompts(*[40] * 4):  # 60 pages hold 960 tokens, they come to 1760
        runner.submit(prompt, max_tokens=400)
    while real.step():
        real.clock.advance(real.clock.now() + 1.0)
    assert value(real, "chunk_size_tokens_sum") > 4 * 40, "nothing was preempted"
    assert (
        value(real, "prompt_tokens_total") == 160
        and value(real, "time_to_first_token_seconds_count") == 4
    )
    assert value(real, "inter_token_latency_seconds_count") == 4 * 399
    assert value(real, "num_preemptions_total") > 0
    timings = [runner.completion(id).finished.timing for id in runner.events]
    assert value(real, "inter_token_latency_seconds_sum") == pytest.approx(
        sum(t.total - t.first_token for t in timings)
    )


def test_two_engines_do_not_mix(built):
    first = fresh(built, "grow")
    runner = Served(first)
    runner.submit(prompts(20)[0], max_tokens=5)
    runner.run()
    before = generate_latest(first.metrics_registry)
    second = fresh(built, "grow")
    runner = Served(second)
    runner.submit(prompts(30)[0], max_tokens=5)
    runner.run()
    assert value(first, "prompt_tokens_total") == 20 and value(second, "prompt_tokens_total") == 30
    assert generate_latest(first.metrics_registry) == before


@pytest.mark.parametrize(
    "slo, second, good",
    [
        (Slo(ttft=50, tpot=2), None, 1),
        (Slo(ttft=0.5, tpot=2), None, 0),
        (Slo(ttft=50, tpot=0.5), None, 0),
        (Slo(ttft=50, tpot=2), "stop", 1),
        (Slo(ttft=50, tpot=2), "cancelled", 0),
    ],
)
def test_goodput_is_what_ran_to_its_end_within_its_objectives(built, slo, second, good):
    real = fresh(built, "grow")
    runner = Served(real)
    real.clock = VirtualClock(100.0)
    id = runner.submit(prompts(40)[0], max_tokens=6, n=2 if second else 1, slo=slo)
    while real.step():
        real.clock.advance(real.clock.now() + 1.0)
        if second == "stop":
            real.stop(id, 1)
        elif id in real.registry and any(
            isinstance(event, Token) and event.index == 1 for event in runner.events[id]
        ):
            real.registry.notify(real.scheduler.cancel(id, real.now(), second, 1))
    assert value(real, "goodput_requests_total") == good
    assert value(real, "request_prompt_tokens_count") == (second != "cancelled")


def test_recompiles_are_those_after_warm_up():
    programs = Programs()
    programs.get("lazy", Lowered)
    assert (programs.compiles, programs.recompiles) == (1, 0), "nothing was warmed up"
    programs.warm_up({"a": Lowered, "b": Lowered}, lambda name: None)
    assert (programs.compiles, programs.recompiles) == (3, 0)
    programs.get("a", Lowered)
    programs.get("c", Lowered)
    assert (programs.compiles, programs.recompiles) == (4, 1)


class Lowered:
    def as_text(self) -> str:
        return "text"

    def compile(self) -> str:
        return "program"


# --- what is told


def told(of: Engine) -> dict:
    return {
        family.name.removeprefix("jaxserve:"): family
        for family in parse(generate_latest(of.metrics_registry).decode())
    }


def test_proposed_tokens_that_were_right_are_counted_by_their_place():
    metrics = Metrics(2, (), lambda: dict.fromkeys(READ, 0.0))
    bus = EventBus()
    metrics.listen(bus, prefix_caching=True)
    batch = SimpleNamespace(slot=np.array([1, 0, 0, 0, 1, 1]), drafts=range(1, 6))
    for right in ([True, True, False, True, False], [True, False, False, False, False]):
        bus.publish(DraftsChecked(batch, np.array(right)))
    name = "jaxserve:spec_decode_num_accepted_tokens"
    value = metrics.registry.get_sample_value
    assert [value(f"{name}_per_pos_total", {"position": each}) for each in "012"] == [3, 1, None]
    assert value(f"{name}_total") == 4
    assert value("jaxserve:spec_decode_num_drafts_total") == 4


def test_every_metric_is_told_and_explained(real):
    runner = Served(real)
    runner.submit(prompts(20)[0], max_tokens=5)
    runner.run()
    families = {
        name: family for name, family in told(real).items() if not name.endswith("_created")
    }
    assert {name for name, family in families.items() if family.type == "counter"} == COUNTERS
    assert {name for name, family in families.items() if family.type == "gauge"} == GAUGES
    assert {name for name, family in families.items() if family.type == "histogram"} == HISTOGRAMS
    assert all(len(family.documentation) > 12 for family in families.values())


def test_buckets_of_slack_are_symmetric_about_zero(real):
    bounds = [
        float(sample.labels["le"])
        for sample in told(real)["request_slack_seconds"].samples
        if "le" in sample.labels
    ][:-1]
    assert (
        bounds == sorted(bounds)
        and bounds == [-bound for bound in reversed(bounds)]
        and 0.0 in bounds
    )


def test_labels_are_bounded_whatever_requests_say(real):
    runner = Served(real)
    hostile = ["other", 'x"} 1\n', "", "a" * 10_000, "défaut", "chat\n"]
    for name in hostile:
        with pytest.raises(RequestError, match="not a class"):
            runner.submit(prompts(5)[0], f"r-{len(name)}", slo=Slo(class_name=name))
        # beyond the door
        request = Request("r", np.ones(5, np.int32), SamplingParams(), slo=Slo(class_name=name))
        limits = SequenceLimits(1, frozenset(), 1.0, 0.1)
        sequence = Sequence(0, 0, request, limits, real.scheduler.cache.block_hashes)
        real.bus.publish(Admitted(sequence, 0))
        real.bus.publish(FirstToken(sequence, 2.0, True, 1.0))
        end = sequence.finished(name, 2.0)
        real.bus.publish(CompletionEnded(request, end, 1.0, 0.1, (), True))
        real.count_rejected(name)
    real.count_rejected("queue")
    labels = {
        (key, label)
        for family in told(real).values()
        for sample in family.samples
        for key, label in sample.labels.items()
    }
    assert {label for key, label in labels if key == "class"} == {"default", "chat", "batch"}
    assert {label for key, label in labels if key == "finished_reason"} == {
        "stop",
        "length",
        "cancelled",
        "deadline",
        "error",
        "other",
    }
    assert {label for key, label in labels if key == "reason"} == {*REJECTIONS, "other"}
    assert value(real, "ttft_slo_violations_total", **{"class": "default"}) == len(hostile)
    assert value(real, "early_rejections_total", reason="other") == len(hostile)
    assert value(real, "early_rejections_total", reason="queue") == 1


def test_the_cache_is_described_by_labels(real):
    (sample,) = told(real)["cache_config_info"].samples
    assert (
        sample.value == 1
        and {"block_size": "16", "num_gpu_blocks": "60", "cache_dtype": "float32"}.items()
        <= sample.labels.items()
    )


# --- gaps between tokens


@dataclasses.dataclass
class Plain:
    """A slot, counted the plain way."""

    last: float | None
    tpot: float
    name: str | None


@pytest.mark.parametrize("seed", range(20))
def test_gaps_are_those_counted_one_by_one(seed):
    dice = random.Random(seed)
    metrics = Metrics(8, ("chat", "batch"), lambda: dict.fromkeys(READ, 0.0))
    slots: dict[int, Plain] = {}
    slow = dict.fromkeys(("default", "chat", "batch"), 0)
    gaps = []
    tokens = 0
    now = 50.0
    chosen: list[int] = []
    for _ in range(300):
        now += dice.choice((0.0, 0.01, 0.06, 0.5, 3.0))
        if dice.random() < 0.1:
            slot = dice.randrange(8)
            last = dice.choice((None, now - 0.7))
            slots[slot] = Plain(
                last, dice.choice((0.05, 0.1, 2.0)), dice.choice((None, "chat", "batch"))
            )
            number = ("default", "chat", "batch").index(slots[slot].name or "default")
            metrics.gaps.admit(slot, slots[slot].tpot, number, last)
        if dice.random() < 0.2 or not set(chosen) <= set(slots):
            chosen = dice.sample(sorted(slots), dice.randint(0, len(slots)))
        metrics.gaps.count(np.array(chosen, np.int32), now)
        for slot in chosen:
            plain = slots[slot]
            tokens = tokens + 1
            if plain.last is not None:
                gaps.append(now - plain.last)
                slow[plain.name or "default"] += gaps[-1] > plain.tpot
            plain.last = now
    assert classes(metrics, "tbt_slo_violations_total") == slow and sum(slow.values())
    assert value(metrics, "generation_tokens_total") == tokens and value(
        metrics, "inter_token_latency_seconds_count"
    ) == len(gaps)
    assert value(metrics, "inter_token_latency_seconds_sum") == pytest.approx(sum(gaps))
    for le in (0.02, 0.1, 1.0, 10.0):
        assert value(metrics, "inter_token_latency_seconds_bucket", le=str(le)) == sum(
            gap <= le for gap in gaps
        )
