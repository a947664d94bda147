"""What experiments say of mistakes."""

from __future__ import annotations


def assert_one_line(told: str, command: str, said: str) -> None:
    """`told`, of a command, is one line that begins with its name and has `said` in it."""
    assert told.startswith(f"{command}: ") and said in told and told.count("\n") == 1
