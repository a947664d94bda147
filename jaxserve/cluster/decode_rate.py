"""Predicts how long a replica takes for a token of each sequence, from what its requests took."""

from __future__ import annotations

WEIGHT = 0.1  # of a new observation
LEAST_SPREAD = 0.25  # variance of the number of sequences, below which it tells no slope


class DecodeRate:
    """Seconds per token as a line over the sequences that decode: least squares, in which older
    observations weigh less and less. A line never falls: more sequences take no less time."""

    def __init__(self) -> None:
        self._seen = False
        self._sequences = self._seconds = 0.0  # weighted means
        self._variance = self._covariance = 0.0

    def learn(self, sequences: int, seconds: float) -> None:
        """Takes what one request saw: the sequences that decoded, and its seconds per token."""
        if not self._seen:
            self._seen = True
            self._sequences = sequences
            self._seconds = seconds
            return
        off = sequences - self._sequences
        error = seconds - self._seconds
        self._sequences += WEIGHT * off
        self._seconds += WEIGHT * error
        self._variance = (1 - WEIGHT) * (self._variance + WEIGHT * off * off)
        self._covariance = (1 - WEIGHT) * (self._covariance + WEIGHT * off * error)

    def seconds(self, sequences: int) -> float:
        """Predicted seconds per token while `sequences` decode; 0 before anything was seen."""
        slope = 0.0
        if self._variance >= LEAST_SPREAD:
            slope = max(self._covariance / self._variance, 0.0)
        return max(self._seconds + slope * (sequences - self._sequences), 0.0)
