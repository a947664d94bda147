"""Reads what a program runs in CUDA graphs, and what the host does itself, from the text of its
thunks (`thunk_sequence_after_thunk_passes.txt` of XLA's dump)."""

from __future__ import annotations

import dataclasses
import re

_THUNK = re.compile(r"^( *)\d+: (k\w+)")
_GRAPH = "kCommandBuffer"
_BLOCKING = ("kWhile", "kConditional")  # the host reads a number from the device, and goes on by it
_HOLDING = (_GRAPH, *_BLOCKING, "kSequential")  # these launch nothing themselves


@dataclasses.dataclass(frozen=True)
class Pieces:
    """Parts of a program, each counted once, also in loops. graphs: CUDA graphs. loops: loops and
    branches for which the host waits. alone: kernels, copies and collectives that the host launches
    one by one."""

    graphs: float = 0.0
    loops: float = 0.0
    alone: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Pieces:
        """Counts the parts of a program."""
        counts = dict.fromkeys(("graphs", "loops", "alone"), 0)
        above: list[tuple[int, str]] = []  # indentation and kind of what a line is in
        for line in text.splitlines():
            match = _THUNK.match(line)
            if match is None:
                continue
            indent = len(match[1])
            kind = match[2]
            above = [each for each in above if each[0] < indent]
            if _GRAPH not in (each[1] for each in above):
                counts["graphs"] += kind == _GRAPH
                counts["loops"] += kind in _BLOCKING
                counts["alone"] += kind not in _HOLDING
            above.append((indent, kind))
        return cls(**counts)

    def __add__(self, other: Pieces) -> Pieces:
        return Pieces(
            self.graphs + other.graphs, self.loops + other.loops, self.alone + other.alone
        )

    def __mul__(self, times: float) -> Pieces:
        return Pieces(self.graphs * times, self.loops * times, self.alone * times)
