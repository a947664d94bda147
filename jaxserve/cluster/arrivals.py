"""Refuses requests that would miss their objectives on a live cluster, before anything is computed
for them (Mooncake, section 4.3): `admission` on what a conductor predicts."""

from __future__ import annotations

import math

from jaxserve.api.request import Request
from jaxserve.cluster.admission import ADMISSION, AdmissionView
from jaxserve.cluster.member import Member
from jaxserve.cluster.member_table import MemberTable
from jaxserve.cluster.router import Placement
from jaxserve.settings.schema import ConfigError


class ArrivalCheck:
    """Checks where a request would go. Its caller keeps the members' work from changing meanwhile.

    policy: none; early: refuses what would come too late, or decode too slowly with the load of
    now; predicted: with the load when its prompt will have been computed. Errors: ConfigError for
    another policy.
    """

    def __init__(self, table: MemberTable, policy: str):
        if policy not in ADMISSION:
            raise ConfigError("overload", f"must be one of {', '.join(ADMISSION)}, not {policy!r}")
        self._table = table
        self._checks = ADMISSION[policy]

    def check(self, request: Request, placement: Placement, now: float) -> None:
        """Checks a request that comes now. Errors: RequestError, RESOURCE_EXHAUSTED with
        `retry_after`, if it is refused."""
        if not self._checks:
            return
        objectives = self._table.objectives.of(request.slo.class_name)
        member = placement.member
        whole = (placement.prefill_on or member).prefill(0, len(request.prompt))
        view = AdmissionView(
            ttft=placement.ttft,
            tbt_now=member.decode_rate.seconds(member.decodes + 1),
            tbt_later=self._tbt_at(member, now + placement.ttft),
            ttft_objective=objectives.ttft_budget(request, whole),
            tbt_objective=objectives.tpot_of(request),
            completion=member.completion,
        )
        for check in self._checks:
            check(view)

    def _tbt_at(self, member: Member, at: float) -> float:
        """Predicted seconds per token at clock second `at` on the average member of that one's
        role, with one sequence more."""
        pool = [other for other in self._table.all if other.joined and other.role is member.role]
        seconds = [other.decode_rate.seconds(self._decodes_at(other, at) + 1) for other in pool]
        return math.fsum(seconds) / max(len(seconds), 1)

    @staticmethod
    def _decodes_at(member: Member, at: float) -> int:
        """Sequences that will decode there at clock second `at`; of others as many as now."""
        own, _ = member.work.decodes_at(at, member.completion)
        return own + member.other_work.decodes
