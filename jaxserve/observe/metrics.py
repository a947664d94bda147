"""What an engine did and how it is, for Prometheus. Names are vLLM's behind our prefix, and new
ones for what it has no name for.

A step may give a token to hundreds of sequences, and is counted in a few microseconds all the same:
what happened to all of them alike is one number, not one each. What the engine knows anyway is read
when somebody asks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Histogram, Info
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from jaxserve.api.events import Finished, Summary
from jaxserve.scheduling.events import (
    Admitted,
    CompletionEnded,
    EventBus,
    FirstToken,
    Rejected,
    StepIssued,
    StepRead,
    Tokens,
)
from jaxserve.settings.schema import DEFAULT_CLASS

PREFIX = "jaxserve:"
REASONS = ("stop", "length", "cancelled", "deadline", "error")
EXCHANGES = ("gather", "pass_q", "pass_kv")
REJECTIONS = (
    "queue",
    "ttft",
    "tpot",
    "deadline",
    "requests_per_minute",
    "concurrency",
    "queued_tokens",
)
OTHER = "other"  # the label of any other reason

READ: dict[str, tuple[Callable[..., Metric], str]] = {
    "num_requests_running": (
        GaugeMetricFamily,
        "Sequences that have a slot (a request has n of them)",
    ),
    "num_requests_waiting": (GaugeMetricFamily, "Sequences that wait for a slot"),
    "kv_cache_usage_perc": (
        GaugeMetricFamily,
        "Share of KV pages in use, 0 to 1; pages that are only kept for reuse do not count",
    ),
    "queued_prefill_seconds": (
        GaugeMetricFamily,
        "Predicted seconds of prefill in the queue and left of running prompts",
    ),
    "predictor_scale": (
        GaugeMetricFamily,
        "What the profile's times are multiplied by after what steps really took; 1: as measured",
    ),
    "num_preemptions": (
        CounterMetricFamily,
        "Sequences that lost their slot to others and had to wait again",
    ),
    "kv_blocks_stored": (
        CounterMetricFamily,
        "KV blocks that left the devices and were kept in host memory",
    ),
    "kv_blocks_from_host": (CounterMetricFamily, "KV blocks read from host memory"),
    "kv_blocks_from_disk": (CounterMetricFamily, "KV blocks read from disk"),
    "kv_blocks_from_peers": (CounterMetricFamily, "KV blocks read from other replicas"),
    "kv_blocks_from_store": (CounterMetricFamily, "KV blocks read from the shared store"),
    "kv_blocks_to_store": (CounterMetricFamily, "KV blocks put into the shared store"),
    "kv_blocks_not_put": (
        CounterMetricFamily,
        "KV blocks that the shared store was too slow, or had no room, to take",
    ),
    "kv_blocks_prefetched": (
        CounterMetricFamily,
        "KV blocks brought from disk to host memory for prompts that waited",
    ),
    "kv_blocks_wrong": (
        CounterMetricFamily,
        "KV blocks in host memory whose checksum was wrong; they were computed again",
    ),
    "kv_blocks_in_host": (GaugeMetricFamily, "KV blocks in host memory"),
    "kv_blocks_on_disk": (GaugeMetricFamily, "KV blocks on disk"),
    "xla_compiles": (
        CounterMetricFamily,
        "XLA programs compiled, or read from the folder of compiled ones",
    ),
    "xla_recompiles": (
        CounterMetricFamily,
        "XLA programs compiled after warm-up, which a request had to wait for; 0 is right",
    ),
}


def _decades(first: int, last: int, steps: Sequence[float]) -> list[float]:
    """Bounds: `steps` times 10^first and so on to 10^last, which ends them."""
    return [float(f"{step}e{power}") for power in range(first, last) for step in steps] + [
        float(f"1e{last}")
    ]


WAITS = _decades(-3, 4, (1, 2, 3, 5))
STEPS = _decades(-3, 1, (1, 1.5, 2, 3, 4, 5, 6, 8))
LATE = _decades(-2, 4, (1, 2, 5))
SLACKS = [-seconds for seconds in reversed(LATE)] + [0.0] + LATE
RATIOS = [
    0.1,
    0.25,
    0.5,
    0.6,
    0.7,
    0.8,
    0.9,
    0.95,
    1.0,
    1.05,
    1.1,
    1.2,
    1.35,
    1.5,
    1.75,
    2.0,
    3.0,
    5.0,
    10.0,
]
SIZES = [float(2**power) for power in range(17)]
LENGTHS = [float(2**power) for power in range(25)]
LANES = [1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 96.0, 128.0]
OF_WORKERS = {
    "alive": "Whether the process is there that has these devices, 0 or 1",
    "lag": "Steps that were issued and that the process has not finished",
    "device_bytes": "Bytes in use on the process's devices",
}


class Tally:
    """A histogram that takes a value many times, or many values, at once; the library's takes one.
    One thread adds, any may collect."""

    def __init__(self, registry: CollectorRegistry, name: str, help: str, bounds: Sequence[float]):
        self._name = PREFIX + name
        self._help = help
        self._bounds = list(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def add(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def add_all(self, values: np.ndarray) -> None:
        for place, count in enumerate(np.bincount(np.searchsorted(self._bounds, values)).tolist()):
            self._counts[place] += count
        self._sum += float(values.sum())

    def collect(self) -> Iterator[Metric]:
        below = list(accumulate(self._counts.copy()))
        yield HistogramMetricFamily(
            self._name, self._help, list(zip([*map(str, self._bounds), "+Inf"], below)), self._sum
        )


class Metrics:
    """The metrics of one engine, in a `registry` of its own.

    slots: sequences that run at once. classes: names of classes of requests; what names none is
    counted as of class `default`. read: the values that READ describes, asked for at each scrape,
    from the scraper's thread. workers: the same for OF_WORKERS, of each process that has devices,
    where they are others.
    """

    def __init__(
        self,
        slots: int,
        classes: Iterable[str],
        read: Callable[[], Mapping[str, float]],
        workers: Callable[[], Sequence[Mapping[str, Any]]] = lambda: (),
    ):
        self.registry = CollectorRegistry(auto_describe=True)
        self._read = read
        self._workers = workers
        labels = [DEFAULT_CLASS, *classes]
        self._class = {label: index for index, label in enumerate(labels)}
        # per slot: clock seconds of the last token, infinity before the first
        self._token_at = np.zeros(slots)
        self._tpot = np.full(slots, np.inf)  # and its objective
        self._class_of = np.zeros(slots, np.int32)  # and its class, an index of `labels`
        # slots whose last tokens came together, and when: else `_token_at`
        self._group, self._group_at = b"", 0.0
        self._group_tpot = np.inf  # the least objective of these

        self._prompt = self._counter(
            "prompt_tokens",
            "Tokens of prompts, reused ones included, counted with a request's first token",
        )
        self._generated = self._counter("generation_tokens", "Tokens generated")
        self._queries = self._counter(
            "prefix_cache_queries", "Tokens of prompts that were looked up in the prefix cache"
        )
        self.hit_tokens = 0  # what `_hits` counts
        self._hits = self._counter("prefix_cache_hits", "Tokens of prompts whose KV was reused")
        ended = self._counter(
            "request_success",
            "Sequences that ended (a request has n of them), by reason, faults included",
            "finished_reason",
        )
        self._ended = {reason: ended.labels(reason) for reason in (*REASONS, OTHER)}
        rejected = self._counter(
            "early_rejections",
            "Requests refused before anything of them was computed, by reason",
            "reason",
        )
        self._rejected = {reason: rejected.labels(reason) for reason in (*REJECTIONS, OTHER)}
        self._goodput = self._counter(
            "goodput_requests",
            "Requests that ran to their end with TTFT and TPOT within their objectives",
        )
        late = self._counter(
            "ttft_slo_violations",
            "Requests whose first token came, or that ended without one, after it was due",
            "class",
        )
        self._late = [late.labels(label) for label in labels]
        slow = self._counter(
            "tbt_slo_violations",
            "Tokens that came later after the one before than their request's objective says",
            "class",
        )
        self._slow = [slow.labels(label) for label in labels]

        exchanges = self._counter(
            "exchange_steps",
            "Steps with sequences on several lanes, by how their queries and blocks met",
            "exchange",
        )
        self._exchanges = {name: exchanges.labels(name) for name in EXCHANGES}
        self._moved = self._counter("moved_pages", "Pages that changed lanes")

        self._ttft = self._histogram(
            "time_to_first_token_seconds",
            "Seconds from a request's arrival to its first token",
            WAITS,
        )
        self._queue = self._histogram(
            "request_queue_time_seconds",
            "Seconds from a request's arrival to its first chunk, recorded with its first token",
            WAITS,
        )
        self._e2e = self._histogram(
            "e2e_request_latency_seconds",
            "Seconds from a request's arrival to its end, where that is a stop or its length",
            WAITS,
        )
        self._prefill = self._histogram(
            "request_prefill_time_seconds",
            "Seconds from a request's first chunk to its first token, recorded at its end",
            WAITS,
        )
        self._decode = self._histogram(
            "request_decode_time_seconds",
            "Seconds from a request's first token to its last, recorded at its end",
            WAITS,
        )
        self._pace = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean seconds per token of a completion, recorded at its end",
            STEPS,
        )
        self._prompts = self._histogram(
            "request_prompt_tokens", "Tokens of a request's prompt, recorded at its end", LENGTHS
        )
        self._outputs = self._histogram(
            "request_generation_tokens",
            "Tokens that a request generated, recorded at its end",
            LENGTHS,
        )
        self._slack = self._histogram(
            "request_slack_seconds",
            "Seconds left, at a request's first token, until that was due; below 0: it was late",
            SLACKS,
        )
        self._predicted = self._tally(
            "step_predicted_seconds",
            "Predicted seconds of a step in the slowest stage"
            " (with --profile=none: work, not seconds)",
            STEPS,
        )
        self._seconds = self._tally(
            "step_seconds",
            "Seconds a step took since the one before it was read,"
            " or since it was issued where that was later",
            STEPS,
        )
        self._ratio = self._tally(
            "step_error_ratio",
            "Seconds of a step by those predicted,"
            " without steps that compiled or that found idle stages",
            RATIOS,
        )
        self._gaps = self._tally(
            "inter_token_latency_seconds", "Seconds between a sequence's tokens", STEPS
        )
        self._sizes = self._tally("chunk_size_tokens", "Tokens of a prefill chunk", SIZES)
        self._degrees = self._tally(
            "kvp_degree", "Lanes that hold blocks of a prefill chunk's sequence", LANES
        )
        self.registry.register(self)

    def configured(self, **labels: object) -> None:
        """What does not change, as labels of `cache_config_info`."""
        info = Info(
            PREFIX + "cache_config", "The KV cache: what it is made of", registry=self.registry
        )
        info.info({name: str(value) for name, value in labels.items()})

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, help, labels, registry=self.registry)

    def _histogram(self, name: str, help: str, bounds: Sequence[float]) -> Histogram:
        return Histogram(PREFIX + name, help, registry=self.registry, buckets=bounds)

    def _tally(self, name: str, help: str, bounds: Sequence[float]) -> Tally:
        return Tally(self.registry, name, help, bounds)

    def describe(self) -> Iterator[Metric]:
        for name, (family, help) in READ.items():
            yield family(PREFIX + name, help)

    def collect(self) -> Iterator[Metric]:
        """What is read at each scrape."""
        values = self._read()
        for name, (family, help) in READ.items():
            yield family(PREFIX + name, help, value=values[name])
        workers = self._workers()
        for name, help in OF_WORKERS.items() if workers else ():
            gauge = GaugeMetricFamily(f"{PREFIX}worker_{name}", help, labels=["worker"])
            for worker in workers:
                gauge.add_metric([str(worker["worker"])], float(worker.get(name, 0)))
            yield gauge

    # --- what happens

    def listen(self, bus: EventBus, prefix_caching: bool) -> None:
        """Counts what happens from now on. prefix_caching: whether prompts are looked up in the
        cache of prefixes."""
        self._prefix_caching = prefix_caching
        bus.subscribe(Admitted, self._admitted)
        bus.subscribe(StepIssued, self._step_issued)
        bus.subscribe(StepRead, self._step_read)
        bus.subscribe(FirstToken, self._first_token)
        bus.subscribe(Tokens, self._tokens)
        bus.subscribe(CompletionEnded, self._completion_ended)
        bus.subscribe(Rejected, lambda event: self.rejected(event.reason))

    def _admitted(self, event: Admitted) -> None:
        sequence = event.sequence
        class_name = sequence.request.slo.class_name
        self.admitted(event.slot, sequence.tpot, class_name, sequence.last_token_at)

    def _step_issued(self, event: StepIssued) -> None:
        if event.exchange:
            self.exchanged(event.exchange, len(event.batch.moves))

    def _step_read(self, event: StepRead) -> None:
        self.step(event.batch.seconds, event.seconds, event.comparable)

    def _first_token(self, event: FirstToken) -> None:
        if not event.of_request:
            return
        sequence = event.sequence
        request = sequence.request
        started = event.now if sequence.started_at is None else sequence.started_at
        looked_up = sequence.reads_cache and self._prefix_caching
        self.first_token(
            event.now - request.arrival,
            started - request.arrival,
            event.ttft_deadline - event.now,
            len(request.prompt),
            len(request.prompt) if looked_up else 0,
            sequence.cached_tokens,
            request.slo.class_name,
        )

    def _tokens(self, event: Tokens) -> None:
        batch = event.batch
        self.tokens(event.slots, event.now)
        if batch.tokens.size:
            chunks = ~batch.is_decode
            degrees = np.count_nonzero(batch.blocks_per_lane[chunks], axis=1)
            self.chunks(batch.length[chunks], degrees)

    def _completion_ended(self, event: CompletionEnded) -> None:
        """Counts an end, and where it was the last of its request, that of the request."""
        self.sequence_ended(event.event.reason)
        if not event.of_request:
            return
        request = event.request
        given = event.ttft_deadline - request.arrival
        if all(end.reason in ("stop", "length") for end in event.of_request):
            self.request_completed(list(event.of_request), given, event.tpot)
        late = request.arrival + event.event.timing.total > event.ttft_deadline
        if late and not event.had_token:
            self.late(request.slo.class_name)

    # --- a step

    def exchanged(self, exchange: str, moved: int) -> None:
        """A step with sequences on several lanes, before which so many pages changed lanes, was
        issued."""
        self._exchanges[exchange].inc()
        self._moved.inc(moved)

    def step(self, predicted: float, seconds: float, comparable: bool) -> None:
        """A step took so long. comparable: with what was predicted."""
        self._predicted.add(predicted)
        self._seconds.add(seconds)
        if comparable and predicted > 0:
            self._ratio.add(seconds / predicted)

    def chunks(self, sizes: np.ndarray, degrees: np.ndarray) -> None:
        """Prefill chunks of a step: tokens of each, and lanes that hold its sequence."""
        self._sizes.add_all(sizes)
        self._degrees.add_all(degrees)

    def admitted(self, slot: int, tpot: float, class_name: str | None, last: float | None) -> None:
        """A sequence got this slot. last: when its last token came, where it had been running
        before."""
        self._part()
        self._token_at[slot] = np.inf if last is None else last
        self._tpot[slot], self._class_of[slot] = tpot, self._index(class_name)

    def tokens(self, slots: np.ndarray, now: float) -> None:
        """The sequences in these slots, in any order, got a token each."""
        if not slots.size:
            return
        self._generated.inc(slots.size)
        if slots.tobytes() == self._group:  # the same as in the step before: one gap is that of all
            gap = now - self._group_at
            self._gaps.add(gap, slots.size)
            if gap > self._group_tpot:
                self._count_slow(slots, gap)
        else:
            self._part()
            gaps = now - self._token_at[slots]
            begun = np.isfinite(gaps)  # a first token has no gap
            self._gaps.add_all(gaps[begun])
            self._count_slow(slots[begun], gaps[begun])
            self._group, self._group_tpot = slots.tobytes(), float(self._tpot[slots].min())
        self._group_at = now

    def _part(self) -> None:
        """The group is one no more."""
        self._token_at[np.frombuffer(self._group, np.int32)] = self._group_at
        self._group = b""

    def _count_slow(self, slots: np.ndarray, gaps: np.ndarray | float) -> None:
        slow = gaps > self._tpot[slots]
        if slow.any():
            for index, count in enumerate(np.bincount(self._class_of[slots[slow]]).tolist()):
                self._slow[index].inc(count)

    # --- a request

    def first_token(
        self,
        seconds: float,
        queued: float,
        slack: float,
        prompt: int,
        looked_up: int,
        cached: int,
        class_name: str | None,
    ) -> None:
        """A request's first token came after `seconds`, of which it waited for its first chunk as
        `queued` says, `slack` before it was due. The rest counts tokens of its prompt."""
        self._ttft.observe(seconds)
        self._queue.observe(queued)
        self._slack.observe(slack)
        self._prompt.inc(prompt)
        self._queries.inc(looked_up)
        self._hits.inc(cached)
        self.hit_tokens += cached
        if slack < 0:
            self.late(class_name)

    def late(self, class_name: str | None) -> None:
        """A request's first token did not come in time."""
        self._late[self._index(class_name)].inc()

    def sequence_ended(self, reason: str) -> None:
        self._ended[reason if reason in REASONS else OTHER].inc()

    def request_completed(self, ends: Sequence[Finished], ttft: float, tpot: float) -> None:
        """A request ran to its end, which is that of its last completion. ttft, tpot: its
        objectives in seconds."""
        whole = Summary.of(ends)
        self._e2e.observe(whole.total)
        self._prefill.observe(whole.prefill)
        self._decode.observe(whole.decode)
        self._prompts.observe(ends[0].usage.prompt)
        self._outputs.observe(whole.output)
        for end in ends:
            if end.tpot is not None:
                self._pace.observe(end.tpot)
        self._goodput.inc((whole.ttft or 0.0) <= ttft and (whole.tpot or 0.0) <= tpot)

    def rejected(self, reason: str) -> None:
        """A request was refused for there was too much to do; reason: one of REJECTIONS, anything
        else counts as other."""
        self._rejected[reason if reason in REJECTIONS else OTHER].inc()

    def _index(self, class_name: str | None) -> int:
        """The label of a class: whatever requests say, there are no more labels than classes and
        the default."""
        return self._class.get(DEFAULT_CLASS if class_name is None else class_name, 0)
