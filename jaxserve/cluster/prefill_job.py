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
from jaxserve.cluster.router import Placement

SUFFIX = "#prefill"  # of the ids of jobs
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


@dataclasses.dataclass(eq=False)
class PrefillJob:
    """A prompt that `member` computes for the member that decodes it. Its fields change under the
    lock of its maker. source: where the decode member asks for the blocks. expected_on: the member
    that decodes if things stay as they are; the request counts as work to come there while it waits
    for the job. prefill: predicted seconds of computing; ready_at: predicted clock second of its
    end. begun: some of its blocks are there. ended: the member does nothing for it any more.
    failed: its KV will not come, or not all of it."""

    request: Request
    member: Member
    source: KvSource
    expected_on: Member
    prefill: float = 0.0
    ready_at: float = 0.0
    begun: bool = False
    ended: bool = False
    failed: bool = False

    @property
    def useful(self) -> bool:
        """True if its blocks can be asked for."""
        return not self.failed and self.member.alive


def job_for(request: Request, placement: Placement) -> PrefillJob:
    """The job of computing a request's prompt, on a member that has an address. Only full blocks
    can be fetched from it."""
    member = placement.prefill_on
    assert member is not None and member.kv_address is not None
    job = dataclasses.replace(
        request,
        id=request.id + SUFFIX,
        sampling=ONE_TOKEN,
        guide=None,
        kv_source=placement.fetch,
        job=True,
    )
    size = member.replica.info.block_size
    source = KvSource(member.kv_address, len(request.prompt) // size, job.id, size)
    return PrefillJob(job, member, source, placement.member)
