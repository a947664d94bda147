"""Tells routers how busy the replica is, in the header of an answer, where they ask for it: the
load reports of ORCA, in the forms that vLLM has."""

from __future__ import annotations

import json
from collections.abc import Mapping

from jaxserve.api.errors import RequestError
from jaxserve.scheduling import Load

FORMAT_HEADER = "endpoint-load-metrics-format"  # of requests
LOAD_HEADER = "endpoint-load-metrics"
FORMATS = ("TEXT", "JSON")


def wanted_format(headers: Mapping[str, str]) -> str | None:
    """The form of a report that a request's headers ask for; None for none. Errors:
    RequestError."""
    form = headers.get(FORMAT_HEADER)
    if form is None:
        return None
    if form.upper() not in FORMATS:
        raise RequestError(FORMAT_HEADER, f"must be one of {', '.join(FORMATS)}")
    return form.upper()


def load_header(load: Load, form: str) -> dict[str, str]:
    """The header that reports a load. form: one of FORMATS."""
    used = load.pages_total - load.pages_free - load.pages_cached
    metrics = {
        "kv_cache_usage_perc": round(used / max(1, load.pages_total), 4),
        "num_requests_running": load.running,
        "num_requests_waiting": load.waiting,
    }
    if form == "JSON":
        return {LOAD_HEADER: f"JSON {json.dumps({'named_metrics': metrics})}"}
    report = ", ".join(f"named_metrics.{name}={value}" for name, value in metrics.items())
    return {LOAD_HEADER: f"TEXT {report}"}
