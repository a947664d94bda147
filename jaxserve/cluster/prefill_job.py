"""Prefill jobs: a prompt that one member computes for another, which fetches its KV and decodes.

A job is a request of its own with one token of output, which is not reported to the caller. It ends
with the request that it is for, at the latest when that has its first token: by then its KV is no
longer waited for.
"""

from __future__ import annotations

import dataclasses

from jaxserve.api.request import KvSource, Request
from jaxserve.api.sampling import SamplingParams
from jaxserve.cluster.member import Member

SUFFIX = "#prefill"  # of the ids of jobs
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


@dataclasses.dataclass(eq=False)
class PrefillJob:
    """A prompt that `member` computes for the member that decodes it. Its fields change under the
    lock of its maker. source: where the decode member asks for the blocks. ready_at: predicted
    clock second of its end. ended: the member does nothing for it any more. failed: its KV will
    not come, or not all of it."""

    request: Request
    member: Member
    source: KvSource
    ready_at: float = 0.0
    ended: bool = False
    failed: bool = False

    @property
    def useful(self) -> bool:
        """True if its blocks can be asked for."""
        return not self.failed and self.member.alive


def job_for(request: Request, member: Member, fetch: KvSource | None) -> PrefillJob:
    """The job of computing a request's prompt. member: which has an address. fetch: from where the
    job may get the prompt's first blocks. Only full blocks can be fetched."""
    assert member.address is not None
    job = dataclasses.replace(
        request, id=request.id + SUFFIX, sampling=ONE_TOKEN, guide=None, kv_source=fetch, job=True
    )
    size = member.replica.info.block_size
    source = KvSource(member.address, len(request.prompt) // size, job.id, size)
    return PrefillJob(job, member, source)
