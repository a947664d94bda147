"""Reads the collectives out of the text of an HLO module, compiled or only lowered."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Sequence

import numpy as np

from experiments.gpu_targets.hlo import called, computations, type_bytes

# all-reduce-start has the type of its operands; the other starts have (operands, results, ...)
OPERATIONS = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")
_INSTRUCTION = re.compile(
    rf"^\s+(?:ROOT )?\S+ = (?P<type>.+?) (?P<name>{'|'.join(OPERATIONS)})(?P<start>-start)?\("
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_LISTED = re.compile(r"replica_groups=\{((?:\{[\d,]+\},?)*)\}")
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}")


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective of a program. bytes: of its result on one device (all-gather), of its operands
    on one device (others). groups: devices that talk to each other, numbered as in the program's
    mesh; of a collective-permute, (source, target) each. times: how often the program runs it;
    looped: once in each round of a loop whose length the compiler does not know."""

    operation: str
    bytes: int
    groups: tuple[tuple[int, ...], ...]
    times: int = 1
    looped: bool = False

    def sent(self, hosts: Sequence[int]) -> dict[tuple[int, int], float]:
        """Bytes that each device sends when it runs once, by the host of the device and that of the
        one it sends to; hosts: of each device. All-gather, reduce-scatter and all-reduce as in a
        ring that visits the hosts one after the other, which is what NCCL's rings do."""
        out: dict[tuple[int, int], float] = {}
        for group in self.groups:
            for source, target, share in self._links(group, hosts):
                pair = hosts[source], hosts[target]
                out[pair] = out.get(pair, 0.0) + share * self.bytes
        return out

    def _links(
        self, group: tuple[int, ...], hosts: Sequence[int]
    ) -> Iterator[tuple[int, int, float]]:
        """Who sends what share of `bytes` to whom."""
        if self.operation == "collective-permute":
            yield *group, 1.0  # type: ignore[misc]
            return
        count = len(group)
        if self.operation == "all-to-all":
            for source in group:
                yield from ((source, target, 1 / count) for target in group if target != source)
            return
        ring = sorted(group, key=lambda device: hosts[device])
        rounds = 2 if self.operation == "all-reduce" else 1
        for at, source in enumerate(ring):
            yield source, ring[(at + 1) % count], rounds * (count - 1) / count

    def crosses(self, hosts: Sequence[int]) -> bool:
        """Returns true if it is between devices of several hosts."""
        return any(len({hosts[device] for device in group}) > 1 for group in self.groups)


def collectives(text: str, devices: int) -> list[Collective]:
    """The collectives of a module in the order of its text, equal ones counted together. devices:
    of its mesh."""
    entry, bodies = computations(text)

    @functools.cache
    def inside(name: str) -> tuple[Collective, ...]:
        found: list[Collective] = []
        for line in bodies.get(name, ()):
            if (match := _INSTRUCTION.match(line)) is not None:
                found.append(_collective(match, line, devices))
                continue
            loop = " while(" in line
            trips = _TRIPS.search(line)
            for name_ in called(line):
                for each in inside(name_):
                    times = each.times * (int(trips[1]) if loop and trips else 1)
                    looped = each.looped or (loop and trips is None)
                    found.append(dataclasses.replace(each, times=times, looped=looped))
        return tuple(found)

    counts: dict[Collective, int] = {}
    for each in inside(entry):
        one = dataclasses.replace(each, times=1)
        counts[one] = counts.get(one, 0) + each.times
    return [dataclasses.replace(one, times=times) for one, times in counts.items()]


def _collective(match: re.Match[str], line: str, devices: int) -> Collective:
    type_ = match["type"]
    name = match["name"]
    if match["start"] and name != "all-reduce":
        type_ = _parts(type_)[1]
    return Collective(name, type_bytes(type_), _groups(line, name, devices))


def _parts(type_: str) -> list[str]:
    """The members of a tuple's type."""
    depth = 0
    parts = [""]
    for character in re.sub(r"/\*.*?\*/", "", type_)[1:-1]:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _groups(line: str, name: str, devices: int) -> tuple[tuple[int, ...], ...]:
    if name == "collective-permute":
        pairs = _PAIRS.search(line)
        assert pairs is not None, line
        found = re.findall(r"\{(\d+),(\d+)\}", pairs[1])
        return tuple((int(source), int(target)) for source, target in found)
    grid = _grid(line, devices)
    if grid is not None:
        return tuple(tuple(group) for group in grid.tolist())
    listed = _LISTED.search(line)
    assert listed is not None, line
    groups = [tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", listed[1])]
    return tuple(groups) or (tuple(range(devices)),)


def _grid(line: str, devices: int) -> np.ndarray | None:
    """Groups [n, size] that are written as a reshaped and transposed count, or as axes of a
    mesh."""
    if (iota := _IOTA.search(line)) is not None:
        shape = [int(n) for n in iota[3].split(",")]
        axes = [int(n) for n in iota[4].split(",")] if iota[4] else range(len(shape))
        count = np.arange(math.prod(shape)).reshape(shape).transpose(axes)
        return count.reshape(int(iota[1]), int(iota[2]))
    if (mesh := _MESH.search(line)) is not None:
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        named = re.findall(r"'(\w+)'", mesh[2])
        names = list(sizes)
        rest = [at for at, name in enumerate(names) if name not in named]
        axes = [*rest, *(names.index(name) for name in named)]
        count = np.arange(devices).reshape(list(sizes.values())).transpose(axes)
        return count.reshape(-1, math.prod(sizes[name] for name in named))
    return None
