"""The metrics of a replica: one row each, with the help that Prometheus shows. Names are those of
vLLM behind our prefix, and new ones for what it has no name for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from jaxserve.lanes.exchange import EXCHANGES
from jaxserve.observe.attained import ATTAINED

PREFIX = "jaxserve:"
REASONS = ("stop", "length", "cancelled", "deadline", "error")
KEY_LIMITS = ("requests_per_minute", "concurrency", "queued_tokens")  # of the caller's key
REJECTIONS = ("queue", "ttft", "tpot", "deadline", *KEY_LIMITS)
OTHER = "other"  # the label of any other reason

# read at each scrape
READ_GAUGES: Mapping[str, str] = {
    "num_requests_running": "Sequences that have a slot (a request has n of them)",
    "num_requests_waiting": "Sequences that wait for a slot",
    "kv_cache_usage_perc": (
        "Share of KV pages in use, 0 to 1; pages that are only kept for reuse do not count"
    ),
    "queued_prefill_seconds": (
        "Predicted seconds of prefill in the queue and left of running prompts"
    ),
    "predictor_scale": (
        "What the profile's times are multiplied by after what steps really took; 1: as measured"
    ),
    "predictions_doubtful": (
        "1 while predicted times cannot be trusted: their profile was measured beside other work, "
        "or steps stay off it; else 0"
    ),
    "kv_blocks_promised": "KV blocks that are kept for prompts that wait",
    "kv_blocks_leased": "KV blocks that stay for as long as operators asked",
    "kv_blocks_of_sessions": "KV blocks that are kept for the next turns of conversations",
    "lora_adapters_loaded": "Adapters that requests may name",
    "lora_adapters_on_devices": "Adapters on the devices",
    "kv_blocks_in_host": "KV blocks in host memory",
    "kv_blocks_on_disk": "KV blocks on disk",
}
READ_COUNTERS: Mapping[str, str] = {
    "num_preemptions": "Sequences that lost their slot to others and had to wait again",
    "num_step_interruptions": (
        "Long steps between whose layers another step ran, for prompts that would have been late"
    ),
    "lora_device_loads": "Times that an adapter was brought to the devices",
    "kv_promises_given_up": "Prompts that waited and lost the KV blocks that were kept for them",
    "kv_blocks_stored": "KV blocks that left the devices and were kept in host memory",
    "kv_blocks_from_host": "KV blocks read from host memory",
    "kv_blocks_from_disk": "KV blocks read from disk",
    "kv_blocks_from_peers": "KV blocks read from other replicas",
    "kv_blocks_from_store": "KV blocks read from the shared store",
    "kv_blocks_to_store": "KV blocks put into the shared store",
    "kv_blocks_not_put": "KV blocks that the shared store was too slow, or had no room, to take",
    "kv_blocks_prefetched": "KV blocks brought from disk to host memory for prompts that waited",
    "kv_blocks_wrong": (
        "KV blocks in host memory whose checksum was wrong; they were computed again"
    ),
    "draft_model_seconds": "Seconds in which the draft model made tokens",
    "xla_compiles": "XLA programs compiled, or read from the folder of compiled ones",
    "xla_recompiles": (
        "XLA programs compiled after warm-up, which a request had to wait for; 0 is right"
    ),
}
READ: Mapping[str, tuple[Callable[..., Metric], str]] = {
    **{name: (GaugeMetricFamily, help) for name, help in READ_GAUGES.items()},
    **{name: (CounterMetricFamily, help) for name, help in READ_COUNTERS.items()},
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
RATIOS = [0.1, 0.25, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.35, 1.5, 1.75]
RATIOS += [2.0, 3.0, 5.0, 10.0]
SIZES = [float(2**power) for power in range(17)]
LENGTHS = [float(2**power) for power in range(25)]
LANES = [1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 96.0, 128.0]
OF_WORKERS = {
    "alive": "Whether the process is there that has these devices, 0 or 1",
    "lag": "Steps that were issued and that the process has not finished",
    "device_bytes": "Bytes in use on the process's devices",
}
# read at each scrape, of each replica (the label `source`) of which KV was asked, by the plane by
# which it came
TRANSFER_RATE = "kv_transfer_bytes_per_second"  # a gauge; the others count
OF_TRANSFERS: Mapping[str, str] = {
    TRANSFER_RATE: "Bytes per second at which KV comes from another replica, as learnt",
    "kv_transfer_blocks": "KV blocks that came from another replica",
    "kv_transfer_missed": "KV blocks that were asked of another replica and did not come",
    "kv_transfer_bytes": "Bytes of KV that came from another replica",
    "kv_transfer_seconds": "Seconds for which requests waited for KV of another replica",
}


class Labelled(NamedTuple):
    """A counter for each value of a label."""

    help: str
    label: str


class Distribution(NamedTuple):
    """A histogram. bounds: upper ones of its buckets, the infinite one left out."""

    help: str
    bounds: Sequence[float]


# by place, from 0 on, among the proposed tokens of a sequence in a step (the label `position`);
# places above 0 are there once a token at them was right
RIGHT_BY_POSITION = "spec_decode_num_accepted_tokens_per_pos"
RIGHT_HELP = "Proposed tokens that were right, by their place behind the last known token"
# values of labels beside `class`, whose values are configured
LABEL_VALUES: Mapping[str, Collection[str]] = {
    "finished_reason": (*REASONS, OTHER),
    "reason": (*REJECTIONS, OTHER),
    "exchange": EXCHANGES.keys(),
}
COUNTERS: Mapping[str, str] = {
    "prompt_tokens": (
        "Tokens of prompts, reused ones included, counted with a request's first token"
    ),
    "generation_tokens": "Tokens generated",
    "prefix_cache_queries": "Tokens of prompts that were looked up in the prefix cache",
    "prefix_cache_hits": "Tokens of prompts whose KV was reused",
    "goodput_requests": (
        "Requests that ran to their end with TTFT and TPOT within their objectives"
    ),
    "moved_pages": "Pages that changed lanes",
    "spec_decode_num_drafts": "Times that proposed tokens of a sequence were checked in a step",
    "spec_decode_num_draft_tokens": "Proposed tokens that were checked",
    "spec_decode_num_accepted_tokens": "Proposed tokens that were right; the others were wasted",
    "prefill_job_tokens": (
        "Tokens of prompts for other replicas that were computed here; no other metric of requests "
        "or tokens counts these jobs"
    ),
}
LABELLED: Mapping[str, Labelled] = {
    "request_success": Labelled(
        "Sequences that ended (a request has n of them), by reason, faults included",
        "finished_reason",
    ),
    "prefill_jobs": Labelled(
        "Prompts that were computed for other replicas, by the reason of their end",
        "finished_reason",
    ),
    "early_rejections": Labelled(
        "Requests refused before anything of them was computed, by reason", "reason"
    ),
    "ttft_slo_violations": Labelled(
        "Requests whose first token came, or that ended without one, after it was due", "class"
    ),
    "tbt_slo_violations": Labelled(
        "Tokens that came later after the one before than their request's objective says", "class"
    ),
    **{f"class_{name}": Labelled(f"{help}, by class", "class") for name, help in ATTAINED.items()},
    "exchange_steps": Labelled(
        "Steps with sequences on several lanes, by how their queries and blocks met; a step whose "
        "prompts and decodes met in two ways counts for both",
        "exchange",
    ),
}
HISTOGRAMS: Mapping[str, Distribution] = {
    "time_to_first_token_seconds": Distribution(
        "Seconds from a request's arrival to its first token", WAITS
    ),
    "request_queue_time_seconds": Distribution(
        "Seconds from a request's arrival to its first chunk, recorded with its first token", WAITS
    ),
    "e2e_request_latency_seconds": Distribution(
        "Seconds from a request's arrival to its end, where that is a stop or its length", WAITS
    ),
    "request_prefill_time_seconds": Distribution(
        "Seconds from a request's first chunk to its first token, recorded at its end", WAITS
    ),
    "request_decode_time_seconds": Distribution(
        "Seconds from a request's first token to its last, recorded at its end", WAITS
    ),
    "request_time_per_output_token_seconds": Distribution(
        "Mean seconds per token of a completion, recorded at its end", STEPS
    ),
    "request_prompt_tokens": Distribution(
        "Tokens of a request's prompt, recorded at its end", LENGTHS
    ),
    "request_generation_tokens": Distribution(
        "Tokens that a request generated, recorded at its end", LENGTHS
    ),
    "request_slack_seconds": Distribution(
        "Seconds left, at a request's first token, until that was due; below 0: it was late", SLACKS
    ),
}
# counted for all sequences of a step at once, see metrics.Tally
TALLIES: Mapping[str, Distribution] = {
    "step_predicted_seconds": Distribution(
        "Predicted seconds of a step in the slowest stage (with --profile=none: work, not seconds)",
        STEPS,
    ),
    "step_seconds": Distribution(
        "Seconds a step took since the one before it was read,"
        " or since it was issued where that was later",
        STEPS,
    ),
    "step_error_ratio": Distribution(
        "Seconds of a step by those predicted,"
        " without steps that compiled or that found idle stages",
        RATIOS,
    ),
    "inter_token_latency_seconds": Distribution("Seconds between a sequence's tokens", STEPS),
    "chunk_size_tokens": Distribution("Tokens of a prefill chunk", SIZES),
    "kvp_degree": Distribution("Lanes that hold blocks of a prefill chunk's sequence", LANES),
}
