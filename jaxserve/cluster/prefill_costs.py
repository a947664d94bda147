"""Predicts how long a member of a cluster takes to compute a prompt: by the predictor that its
scheduler has, made of the profile that it reports."""

from __future__ import annotations

from jaxserve.replica.info import ReplicaInfo
from jaxserve.scheduling.prefill_facts import predictor_of

SMOOTHING = 0.2  # weight of a new observation
MIN_OBSERVED = 16  # computed tokens; fewer say little about the time that they take


class PrefillCosts:
    """Seconds of prefills on a replica with these facts: by its mesh, its chunks, how long a prompt
    is and how much of it is cached. `scale` is what requests taught: by how much they took longer
    than predicted, or than nominal costs say where the replica has no profile."""

    def __init__(self, info: ReplicaInfo, scale: float = 1.0):
        self.facts = info.prefill
        self.scale = scale
        self._chunk = info.chunk_tokens
        self._predictor = predictor_of(info.prefill, info.mesh)

    def seconds(self, cached: int, total: int) -> float:
        """Predicted seconds in which it computes tokens `cached` to before `total` of a prompt."""
        return self.scale * self._alone(cached, total)

    def queued(self, seconds: float) -> float:
        """Seconds of queued prefills, of which the replica reports that they take `seconds`: it
        corrects them itself where its costs are seconds."""
        return seconds if self._predictor.calibrated else self.scale * seconds

    def _alone(self, cached: int, total: int) -> float:
        return self._predictor.prefill(cached, total, self._chunk)

    def learn(self, cached: int, total: int, seconds: float) -> None:
        """Learns from a prompt of which tokens `cached` to before `total` were computed in
        `seconds`."""
        if total - cached < MIN_OBSERVED or seconds <= 0:
            return
        ratio = seconds / self._alone(cached, total)
        self.scale *= (ratio / self.scale) ** SMOOTHING
