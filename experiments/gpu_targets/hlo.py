"""Reads compiled programs of XLA for GPUs: what they launch, how many bytes that moves and what it
computes, from the text of their HLO; and what goes into CUDA graphs, from that of their thunks.

Arrays are counted as they are touched: a gather or a slice reads its result, a scatter or an update
in place writes its updates, and a kernel that changes arrays in place writes there what it reads
and writes nowhere else. A pool of KV pages is never counted as read whole by a kernel.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

_HEAD = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(
    r"^\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>.*?) (?P<operation>[a-z][\w\-]*)\((?P<rest>.*)$"
)
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_CALLED = re.compile(
    r"\b(?:to_apply|calls|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_ALIASED = re.compile(r"\boutput_to_operand_aliasing=\{(.*?\))\}")
_ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{\}\)")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_CONTRACTED_BY_LIBRARY = re.compile(r'"lhs_contracting_dimensions":\["(\d+)"')

# operations that launch nothing
_FREE = {
    "parameter",
    "constant",
    "bitcast",
    "tuple",
    "get-tuple-element",
    "after-all",
    "opt-barrier",
    "partition-id",
    "replica-id",
}
_COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-permute",
    "reduce-scatter",
    "ragged-all-to-all",
)
_READ_IN_PART = ("gather", "dynamic-slice", "slice")
_WRITTEN_IN_PART = ("scatter", "dynamic-update-slice")
PRODUCT = "product"
ATTENTION = "attention"
COLLECTIVE = "collective"


def arrays(type_: str) -> list[tuple[int, int]]:
    """Counts the elements and the bytes of each array of a type."""
    counts = (
        (kind, math.prod(int(n) for n in shape.split(",") if n))
        for kind, shape in _ARRAY.findall(type_)
    )
    return [(count, count * width(kind)) for kind, count in counts]


def type_bytes(type_: str) -> int:
    """Counts the bytes of a type, all arrays of a tuple together."""
    return sum(size for _, size in arrays(type_))


def width(kind: str) -> int:
    """Bytes of a number of a kind such as bf16; those of less than a byte count as one."""
    if kind == "pred":
        return 1
    bits = re.match(r"[a-z]+(\d+)", kind)
    return max(1, int(bits[1]) // 8) if bits else 0  # a token has none


def computations(text: str) -> tuple[str, dict[str, list[str]]]:
    """The name of a module's entry computation, and the lines of each computation."""
    bodies: dict[str, list[str]] = {}
    entry = name = ""
    for line in text.splitlines():
        if line[:1].strip() and (head := _HEAD.match(line)) and not line.startswith("HloModule"):
            name = head["name"]
            bodies[name] = []
            entry = name if head["entry"] else entry
        elif name:
            bodies[name].append(line)
    return entry, bodies


def called(line: str) -> Iterator[str]:
    """Names of the computations that an instruction calls."""
    yield from _CALLED.findall(line)
    for names in _BRANCHES.findall(line):
        yield from (name.strip().lstrip("%") for name in names.split(","))


@dataclasses.dataclass(frozen=True)
class Instruction:
    """An instruction of a computation. arguments: the text of its operands; rest: what is behind
    it."""

    name: str
    type: str
    operation: str
    arguments: str
    rest: str

    @classmethod
    def parse(cls, line: str) -> Instruction | None:
        """Returns the instruction of a line, if there is one on it."""
        match = _INSTRUCTION.match(line)
        if match is None:
            return None
        depth = 1
        end = 0
        rest = match["rest"]
        while end < len(rest) and depth:
            depth += (rest[end] == "(") - (rest[end] == ")")
            end += 1
        arguments = rest[: end - 1]
        return cls(match["name"], match["type"], match["operation"], arguments, rest[end:])

    @functools.cached_property
    def operands(self) -> list[str]:
        """Names of what it takes."""
        return re.findall(r"%([\w.\-]+)", self.arguments)

    @property
    def bytes(self) -> int:
        """Bytes of its result."""
        return type_bytes(self.type)

    @functools.cached_property
    def in_place(self) -> dict[int, int]:
        """Numbers of results that are operands which it changes, and of these operands."""
        found = _ALIASED.search(self.rest)
        pairs = _ALIAS.findall(found[1]) if found else ()
        return {int(result or 0): int(operand) for result, operand in pairs}

    @property
    def target(self) -> str:
        """The library's name of a custom call; else ''."""
        found = _TARGET.search(self.rest)
        return found[1] if found else ""


@dataclasses.dataclass
class Traffic:
    """Launches of kernels and copies, and what they do. weights: bytes read of weights; pool: bytes
    read of KV pages other than by a kernel of attention; cached, streamed: all other bytes that are
    read or written, those of arrays that the L2 cache holds, and of larger ones."""

    launches: float = 0.0
    weights: float = 0.0
    pool: float = 0.0
    cached: float = 0.0
    streamed: float = 0.0
    flops: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(a + b for a, b in zip(self.values, other.values)))

    def __mul__(self, times: float) -> Traffic:
        return Traffic(*(times * value for value in self.values))

    @property
    def values(self) -> tuple[float, ...]:
        return dataclasses.astuple(self)


Classes = dict[str, Traffic]  # by what is launched


def added(one: Classes, other: Mapping[str, Traffic], times: float = 1.0) -> Classes:
    """Adds what is launched `times` to another count."""
    both = dict(one)
    for name, traffic in other.items():
        both[name] = both.get(name, Traffic()) + traffic * times
    return both


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes by which arrays are recognised. pool: elements of a layer's KV pages on a device.
    weights: numbers of bytes of parameters that are weights. cache: bytes of the L2 cache. loop,
    inner_loop: how often loops run whose number of rounds depends on contexts; the second within a
    loop that has a known one."""

    pool: int
    weights: frozenset[int]
    cache: float = math.inf
    loop: float = 1.0
    inner_loop: float = 1.0


class Program:
    """A compiled module. text: its HLO after all passes, in which names are unique."""

    def __init__(self, text: str, sizes: Sizes):
        self._entry, lines = computations(text)
        parsed = {name: map(Instruction.parse, body) for name, body in lines.items()}
        self._bodies = {
            name: [one for one in body if one is not None] for name, body in parsed.items()
        }
        self._named = {one.name: one for body in self._bodies.values() for one in body}
        self._sizes = sizes
        parameters = (one for one in self._bodies[self._entry] if one.operation == "parameter")
        self._weights = {one.name for one in parameters if one.bytes in sizes.weights}

    def traffic(self) -> Classes:
        """Counts what a run launches."""
        return self._of(self._entry)

    def _of(self, name: str, inner: bool = False) -> Classes:
        """Counts what a computation launches. inner: it is in a loop."""
        out: Classes = {}
        for one in self._bodies[name]:
            names = list(called(one.rest))
            if one.operation in _FREE or one.operation.endswith("-done"):
                continue
            if one.operation == "while":
                known = _TRIPS.search(one.rest)
                unknown = self._sizes.inner_loop if inner else self._sizes.loop
                trips = float(known[1]) if known else unknown
                for each in names:
                    out = added(out, self._of(each, inner or known is not None), trips)
            elif one.operation == "conditional":
                branches = [self._of(each, inner) for each in names]
                out = added(out, max(branches, key=_cost))
            elif one.operation in ("call", "async-start"):
                for each in names:
                    out = added(out, self._of(each, inner))
            else:
                launched = self._launched(one)
                out = added(out, {self._kind(launched): self._launch(launched)})
        return out

    def _launched(self, one: Instruction) -> Instruction:
        """Returns the custom call of a fusion that only points it at slices; else the instruction
        itself."""
        return next((each for each in self._inner(one) if each.operation == "custom-call"), one)

    def _inner(self, one: Instruction) -> list[Instruction]:
        """Instructions of a fusion; of another instruction, itself."""
        if one.operation != "fusion":
            return [one]
        (name,) = called(one.rest)
        return self._bodies[name]

    def _kind(self, one: Instruction) -> str:
        """Names the class of a launch."""
        operations = {each.operation for each in self._inner(one)}
        if one.operation.removesuffix("-start") in _COLLECTIVES:
            return COLLECTIVE
        if one.operation == "custom-call":
            return self._kind_of_call(one)
        if "dot" in operations:
            return PRODUCT
        return next((name for name in ("scatter", "sort", "copy") if name in operations), "other")

    def _kind_of_call(self, one: Instruction) -> str:
        if "gemm" in one.target or "matmul" in one.target:
            return PRODUCT
        operands = self._operands(one)
        if self._is_pool(one):
            return "scatter"
        if any(self._is_pool(each) for each in operands):
            return ATTENTION
        if any(self._is_weight(each) for each in operands):
            return PRODUCT
        return one.target

    def _operands(self, one: Instruction) -> list[Instruction]:
        return [self._named[name] for name in one.operands]

    def _is_pool(self, one: Instruction) -> bool:
        return any(count == self._sizes.pool for count, _ in arrays(one.type))

    def _is_weight(self, one: Instruction) -> bool:
        """True for a parameter of the module that is one of its weights."""
        while one.operation == "bitcast":
            one = self._operands(one)[0]
        return one.name in self._weights

    def _launch(self, one: Instruction) -> Traffic:
        """Counts a launch."""
        out = Traffic(launches=1.0, flops=self._flops(one))
        moved = []
        for at, operand in enumerate(self._operands(one)):
            if at in one.in_place.values():
                continue
            if self._is_pool(operand) and one.operation == "custom-call":
                continue
            read = self._read(one, at, operand.bytes)
            if self._is_pool(operand) and read < operand.bytes:
                out.pool += read
            elif self._is_weight(operand):
                out.weights += read
            else:
                moved.append(read)
        moved += self._written(one, sum(moved))
        out.cached = sum(count for count in moved if count <= self._sizes.cache)
        out.streamed = sum(moved) - out.cached
        return out

    def _read(self, one: Instruction, at: int, whole: float) -> float:
        """Counts the bytes that a launch reads of its operand number `at`."""
        if one.operation != "fusion":
            return _read_by(one, at, whole)
        parameter = next(
            each
            for each in self._inner(one)
            if each.operation == "parameter" and each.arguments.strip() == str(at)
        )
        return min(whole, sum(self._uses(self._inner(one), parameter, whole)))

    def _uses(
        self, inner: Sequence[Instruction], used: Instruction, whole: float
    ) -> Iterator[float]:
        """Yields the bytes that each use in a fusion reads."""
        for user in inner:
            for at, name in enumerate(user.operands):
                if name != used.name:
                    continue
                if user.operation == "bitcast":
                    yield from self._uses(inner, user, whole)
                else:
                    yield _read_by(user, at, whole)

    def _written(self, one: Instruction, read: float) -> Iterator[float]:
        """Yields the bytes that a launch which reads `read` bytes writes to each array."""
        if one.operation == "fusion":
            yield from self._written_by(self._inner(one)[-1])
        elif one.operation == "custom-call":
            results = [size for _, size in arrays(one.type)]
            new = [size for at, size in enumerate(results) if at not in one.in_place]
            yield from new
            yield min(sum(results) - sum(new), max(0, read - sum(new)))
        else:
            yield from self._written_by(one)

    def _written_by(self, root: Instruction) -> Iterator[int]:
        operands = self._operands(root)
        if root.operation in ("tuple", "bitcast"):
            for operand in operands:
                yield from self._written_by(operand)
        elif root.operation == "scatter" and self._in_place(root):
            yield from (update.bytes for update in operands[_targets(root) + 1 :])
        elif root.operation == "dynamic-update-slice" and self._in_place(root):
            yield operands[1].bytes
        else:
            yield from (size for _, size in arrays(root.type))

    def _in_place(self, root: Instruction) -> bool:
        """True if what a scatter or an update changes was there before the launch."""
        one = self._operands(root)[0]
        while one.operation in ("bitcast", *_WRITTEN_IN_PART):
            one = self._operands(one)[0]
        return one.operation in ("parameter", "get-tuple-element", "fusion", "copy")

    def _flops(self, one: Instruction) -> float:
        """Counts the operations of a launch's products."""
        if one.operation == "custom-call":
            return self._flops_of_call(one)
        return sum(self._flops_of_dot(dot) for dot in self._inner(one) if dot.operation == "dot")

    def _flops_of_dot(self, dot: Instruction) -> float:
        contracted = _CONTRACTED.search(dot.rest)
        assert contracted is not None, dot.rest
        shape = _shape(self._operands(dot)[0].type)
        inputs = math.prod(shape[int(at)] for at in contracted[1].split(",") if at)
        return 2.0 * arrays(dot.type)[0][0] * inputs

    def _flops_of_call(self, one: Instruction) -> float:
        if self._kind_of_call(one) != PRODUCT:
            return 0.0
        shapes = [_shape(each.type) for each in self._operands(one)]
        contracted = _CONTRACTED_BY_LIBRARY.search(one.rest)
        if contracted is not None:
            return 2.0 * arrays(one.type)[0][0] * shapes[0][int(contracted[1])]
        # rows of groups [T, K], each by the matrix [K, N] of its group
        rows, inputs = next(shape for shape in shapes if len(shape) == 2)
        return 2.0 * rows * inputs * _shape(one.type)[-1]


def _read_by(user: Instruction, at: int, whole: float) -> float:
    """Counts the bytes that an instruction reads of its operand number `at`."""
    if user.operation in _READ_IN_PART and at == 0:
        return user.bytes
    if user.operation in _WRITTEN_IN_PART and at < _targets(user):
        return 0.0
    return whole


def _targets(one: Instruction) -> int:
    """Number of the arrays that a scatter or an update changes, which are its first operands."""
    return 1 if one.operation == "dynamic-update-slice" else (len(one.operands) - 1) // 2


def _shape(type_: str) -> list[int]:
    """Dimensions of the first array of a type."""
    found = _ARRAY.search(type_)
    assert found is not None, type_
    return [int(n) for n in found[2].split(",") if n]


def _cost(classes: Mapping[str, Traffic]) -> float:
    return sum(sum(traffic.values) for traffic in classes.values())
