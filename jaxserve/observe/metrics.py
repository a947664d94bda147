"""Metrics of a replica for Prometheus: counts what happens, by the rows of `metric_rows`.

A step may give a token to hundreds of sequences, and is counted in a few microseconds all the same:
what happened to all of them alike is one number, not one each. What the engine knows anyway is read
at each scrape.
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

from jaxserve.api.attainment import ENDS_BY_ITSELF
from jaxserve.api.events import Finished, Summary
from jaxserve.api.request import Request
from jaxserve.observe.attained import ATTAINED, NOTHING, Attained
from jaxserve.observe.metric_rows import (
    COUNTERS,
    HISTOGRAMS,
    LABEL_VALUES,
    LABELLED,
    OF_TRANSFERS,
    OF_WORKERS,
    OTHER,
    PREFIX,
    READ,
    RIGHT_BY_POSITION,
    RIGHT_HELP,
    TALLIES,
    TRANSFER_RATE,
)
from jaxserve.scheduling.events import (
    Admitted,
    CompletionEnded,
    DraftsChecked,
    EventBus,
    FirstToken,
    Rejected,
    StepIssued,
    StepRead,
    Tokens,
)
from jaxserve.settings.schema import DEFAULT_CLASS


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


class TokenGaps:
    """Counts tokens and the seconds between them, for all sequences of a step at once.

    generated: all tokens; gaps: seconds between a sequence's tokens; slow: gaps above the
    objective, by number of the class.
    """

    def __init__(self, slots: int, generated: Counter, gaps: Tally, slow: Sequence[Counter]):
        self._generated = generated
        self._gaps = gaps
        self._slow = slow
        # per slot: clock seconds of the last token, infinity before the first
        self._token_at = np.zeros(slots)
        self._tpot = np.full(slots, np.inf)  # and its objective
        self._class_of = np.zeros(slots, np.int32)
        # slots whose last tokens came together, and when: else `_token_at`
        self._group = b""
        self._group_at = 0.0
        self._group_tpot = np.inf  # the least objective of these

    def admit(self, slot: int, tpot: float, class_number: int, last: float | None) -> None:
        """Begins to count a sequence in this slot. last: clock second of its last token, if it has
        been running before."""
        self._ungroup()
        self._token_at[slot] = np.inf if last is None else last
        self._tpot[slot] = tpot
        self._class_of[slot] = class_number

    def count(self, slots: np.ndarray, now: float, further: int = 0) -> None:
        """Counts a token for each of these slots [n], in any order, and others that came with
        them."""
        if not slots.size:
            return
        self._generated.inc(slots.size + further)
        if slots.tobytes() == self._group:  # as in the step before: one gap is that of all
            gap = now - self._group_at
            self._gaps.add(gap, slots.size)
            if gap > self._group_tpot:
                self._count_slow(slots, gap)
        else:
            self._ungroup()
            gaps = now - self._token_at[slots]
            begun = np.isfinite(gaps)  # a first token has no gap
            self._gaps.add_all(gaps[begun])
            self._count_slow(slots[begun], gaps[begun])
            self._group = slots.tobytes()
            self._group_tpot = float(self._tpot[slots].min())
        self._group_at = now

    def _ungroup(self) -> None:
        self._token_at[np.frombuffer(self._group, np.int32)] = self._group_at
        self._group = b""

    def _count_slow(self, slots: np.ndarray, gaps: np.ndarray | float) -> None:
        slow = gaps > self._tpot[slots]
        if slow.any():
            for number, count in enumerate(np.bincount(self._class_of[slots[slow]]).tolist()):
                self._slow[number].inc(count)


class Metrics:
    """The metrics of one engine, in a `registry` of its own.

    slots: sequences that run at once. classes: names of classes of requests; what names none is
    counted as of class `default`. read: returns the values that READ describes; it is called at
    each scrape, from the scraper's thread. workers: returns those of OF_WORKERS for each process
    that has devices, if these are other processes. transfers: those of OF_TRANSFERS by source
    and plane.
    """

    def __init__(
        self,
        slots: int,
        classes: Iterable[str],
        read: Callable[[], Mapping[str, float]],
        workers: Callable[[], Sequence[Mapping[str, Any]]] = lambda: (),
        transfers: Callable[[], Mapping[tuple[str, str], Mapping[str, float]]] = dict,
    ):
        self.registry = CollectorRegistry(auto_describe=True)
        self._read = read
        self._workers = workers
        self._transfers = transfers
        self._prefix_caching = False
        self._classes = (DEFAULT_CLASS, *classes)
        self._counters = {
            name: Counter(PREFIX + name, help, registry=self.registry)
            for name, help in COUNTERS.items()
        }
        self._labelled = {name: self._make_labelled(name) for name in LABELLED}
        self._right_by_position = Counter(
            PREFIX + RIGHT_BY_POSITION, RIGHT_HELP, ("position",), registry=self.registry
        )
        self._right_by_position.labels("0")
        self._histograms = {
            name: Histogram(PREFIX + name, row.help, registry=self.registry, buckets=row.bounds)
            for name, row in HISTOGRAMS.items()
        }
        self._tallies = {
            name: Tally(self.registry, name, row.help, row.bounds) for name, row in TALLIES.items()
        }
        self.gaps = TokenGaps(
            slots,
            self._counters["generation_tokens"],
            self._tallies["inter_token_latency_seconds"],
            list(self._labelled["tbt_slo_violations"].values()),
        )
        self.hit_tokens = 0  # what `prefix_cache_hits` counts
        self.attained: dict[str, Attained] = {}  # by tenant
        self._hidden_slots = np.zeros(slots, bool)  # their tokens reach no user
        self.registry.register(self)

    def _make_labelled(self, name: str) -> dict[str, Counter]:
        """Makes the counters of a row of LABELLED, by value of the label."""
        help, label = LABELLED[name]
        counter = Counter(PREFIX + name, help, (label,), registry=self.registry)
        return {value: counter.labels(value) for value in LABEL_VALUES.get(label, self._classes)}

    def configured(self, **labels: object) -> None:
        """Adds `cache_config_info` with these labels, which do not change."""
        info = Info(
            PREFIX + "cache_config", "The KV cache: what it is made of", registry=self.registry
        )
        info.info({name: str(value) for name, value in labels.items()})

    def describe(self) -> Iterator[Metric]:
        """Yields what is read at each scrape, without values."""
        for name, (family, help) in READ.items():
            yield family(PREFIX + name, help)

    def collect(self) -> Iterator[Metric]:
        """Yields what is read at each scrape."""
        values = self._read()
        for name, (family, help) in READ.items():
            yield family(PREFIX + name, help, value=values[name])
        yield from self._of_transfers()
        workers = self._workers()
        if not workers:
            return
        for name, help in OF_WORKERS.items():
            gauge = GaugeMetricFamily(f"{PREFIX}worker_{name}", help, labels=["worker"])
            for worker in workers:
                gauge.add_metric([str(worker["worker"])], float(worker.get(name, 0)))
            yield gauge

    def _of_transfers(self) -> Iterator[Metric]:
        by_route = self._transfers()
        for name, help in OF_TRANSFERS.items() if by_route else ():
            make = GaugeMetricFamily if name == TRANSFER_RATE else CounterMetricFamily
            family = make(PREFIX + name, help, labels=["source", "plane"])
            for labels, values in by_route.items():
                family.add_metric(labels, values[name])
            yield family

    def listen(self, bus: EventBus, prefix_caching: bool) -> None:
        """Counts what happens from now on. prefix_caching: whether prompts are looked up in the
        cache of prefixes."""
        self._prefix_caching = prefix_caching
        bus.subscribe(Admitted, self._admitted)
        bus.subscribe(StepIssued, self._step_issued)
        bus.subscribe(StepRead, self._step_read)
        bus.subscribe(FirstToken, self._first_token)
        bus.subscribe(Tokens, self._tokens)
        bus.subscribe(DraftsChecked, self._drafts_checked)
        bus.subscribe(CompletionEnded, self._completion_ended)
        bus.subscribe(Rejected, lambda event: self._count("early_rejections", event.reason))

    def _count(self, name: str, value: str) -> None:
        """Counts one in the row of LABELLED; values that it does not list are counted as `other`,
        whatever requests say."""
        counters = self._labelled[name]
        counters[value if value in counters else OTHER].inc()

    def _count_late(self, class_name: str | None) -> None:
        self._labelled["ttft_slo_violations"][self._classes[self._number(class_name)]].inc()

    def _number(self, class_name: str | None) -> int:
        """Returns the number of a class: there are no more than were configured and the default,
        whatever requests say."""
        if class_name not in self._classes:
            return 0
        return self._classes.index(class_name)

    # --- steps

    def _step_issued(self, event: StepIssued) -> None:
        for exchange in event.exchanges:
            self._labelled["exchange_steps"][exchange].inc()
        if event.exchanges:
            self._counters["moved_pages"].inc(len(event.batch.moves))

    def _step_read(self, event: StepRead) -> None:
        predicted = event.batch.seconds
        self._tallies["step_predicted_seconds"].add(predicted)
        self._tallies["step_seconds"].add(event.seconds)
        if event.comparable and predicted > 0:
            self._tallies["step_error_ratio"].add(event.seconds / predicted)

    def _tokens(self, event: Tokens) -> None:
        batch = event.batch
        further = int(np.count_nonzero(~self._hidden_slots[event.further]))
        self.gaps.count(event.slots[~self._hidden_slots[event.slots]], event.now, further)
        if batch.tokens.size:
            chunks = batch.is_chunk
            degrees = np.count_nonzero(batch.blocks_per_lane[chunks], axis=1)
            self._tallies["chunk_size_tokens"].add_all(batch.length[chunks])
            self._tallies["kvp_degree"].add_all(degrees)

    def _drafts_checked(self, event: DraftsChecked) -> None:
        slots, of_slot = np.unique(event.batch.slot[event.batch.drafts], return_inverse=True)
        self._counters["spec_decode_num_drafts"].inc(len(slots))
        self._counters["spec_decode_num_draft_tokens"].inc(len(of_slot))
        self._counters["spec_decode_num_accepted_tokens"].inc(int(event.right.sum()))
        right = np.bincount(of_slot[event.right], minlength=len(slots))
        for position in range(right.max(initial=0)):
            reached = int(np.count_nonzero(right > position))
            self._right_by_position.labels(str(position)).inc(reached)

    # --- requests

    def _admitted(self, event: Admitted) -> None:
        sequence = event.sequence
        self._hidden_slots[event.slot] = sequence.request.job or sequence.request.probe
        class_number = self._number(sequence.request.slo.class_name)
        self.gaps.admit(event.slot, sequence.tpot, class_number, sequence.last_token_at)

    def _first_token(self, event: FirstToken) -> None:
        sequence = event.sequence
        request = sequence.request
        if not event.of_request or request.probe:
            return
        if request.job:
            computed = len(request.prompt) - sequence.cached_tokens
            self._counters["prefill_job_tokens"].inc(computed)
            return
        started = event.now if sequence.started_at is None else sequence.started_at
        slack = event.ttft_deadline - event.now
        self._observe("time_to_first_token_seconds", event.now - request.arrival)
        self._observe("request_queue_time_seconds", started - request.arrival)
        self._observe("request_slack_seconds", slack)
        self._counters["prompt_tokens"].inc(len(request.prompt))
        if sequence.reads_cache and self._prefix_caching:
            self._counters["prefix_cache_queries"].inc(len(request.prompt))
        self._counters["prefix_cache_hits"].inc(sequence.cached_tokens)
        self.hit_tokens += sequence.cached_tokens
        if slack < 0:
            self._count_late(request.slo.class_name)

    def _completion_ended(self, event: CompletionEnded) -> None:
        """Counts an end, and with the last one of a request that of the request."""
        request = event.request
        if request.probe:
            return
        self._count("prefill_jobs" if request.job else "request_success", event.event.reason)
        if not event.of_request or request.job:
            return
        self._count_attained(request, Attained.of(event.of_request))
        if all(end.reason in ENDS_BY_ITSELF for end in event.of_request):
            self._request_completed(event.of_request)
        late = request.arrival + event.event.timing.total > event.ttft_deadline
        if late and not event.had_token:
            self._count_late(request.slo.class_name)

    def _count_attained(self, request: Request, attained: Attained) -> None:
        """Counts whether a request that ended was in time, and its tokens."""
        name = self._classes[self._number(request.slo.class_name)]
        for field in ATTAINED:
            self._labelled[f"class_{field}"][name].inc(getattr(attained, field))
        self.attained[request.tenant] = self.attained.get(request.tenant, NOTHING) + attained
        self._counters["goodput_requests"].inc(attained.requests_in_time)

    def _request_completed(self, ends: Sequence[Finished]) -> None:
        """Counts a request that ran to its end."""
        summary = Summary.of(ends)
        self._observe("e2e_request_latency_seconds", summary.total)
        self._observe("request_prefill_time_seconds", summary.prefill)
        self._observe("request_decode_time_seconds", summary.decode)
        self._observe("request_prompt_tokens", ends[0].usage.prompt)
        self._observe("request_generation_tokens", summary.output)
        for end in ends:
            if end.tpot is not None:
                self._observe("request_time_per_output_token_seconds", end.tpot)

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)
