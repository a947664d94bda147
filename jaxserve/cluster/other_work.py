"""Work of others than this conductor on a replica, estimated from what the replica reports.

A conductor knows its own requests at once and one by one. Of those that other conductors, or anyone
else, sent to the same replica it knows their number, and the load of all requests together, both as
the replica reported them last, half a second ago at most while it is well. Their part of the load
is taken to be their part of the requests.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxserve.scheduling import Load


class OtherWork(NamedTuple):
    """Requests of others on a replica. requests: that have not ended. decodes: of these, how many
    have slots. queued_tokens, queued_seconds: of their prompts, not computed yet; seconds as the
    replica predicts them."""

    requests: int = 0
    decodes: int = 0
    queued_tokens: float = 0.0
    queued_seconds: float = 0.0


NO_OTHER_WORK = OtherWork()


def other_work(requests: int, load: Load | None) -> OtherWork:
    """The work of others who have `requests` requests on a replica with this load of all requests;
    None before its first report: each of theirs is taken to decode."""
    if requests <= 0:
        return NO_OTHER_WORK
    if load is None:
        return OtherWork(requests, requests)
    part = requests / max(load.running + load.waiting, requests)
    return OtherWork(
        requests,
        round(load.running * part),
        load.queued_prefill_tokens * part,
        load.queued_prefill_seconds * part,
    )
