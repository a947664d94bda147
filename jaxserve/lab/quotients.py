"""Quotients of figures that may be of nothing."""

from __future__ import annotations


def quotient(amount: float, of: float, otherwise: float = 0.0) -> float:
    """Divides by a number that is not negative; `otherwise` for 0."""
    return amount / of if of > 0 else otherwise


def per_later_token(seconds: float, tokens: int) -> float:
    """Mean seconds per token after the first. seconds: from the first token to the last; 0 without
    later ones."""
    return quotient(seconds, tokens - 1)


def cell(value: float | None, form: str, factor: float = 1.0, empty: str = "-") -> str:
    """Formats a figure for a table; `empty` if it is not known."""
    return empty if value is None else format(value * factor, form)
