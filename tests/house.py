"""Counts of the product's size and shape, made by parsing: `python -m tests.house [ROOM...]`.

Without a room: the totals and a row for each room. With rooms: their rows, and every place that
is over a limit. Generated code is left out. `tests/test_house.py` holds the limits.
"""

from __future__ import annotations

import argparse
import ast
import functools
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

LARGEST_CLASS = 30  # methods
MOST_PARAMETERS = 8  # without self and cls
LINE_LENGTH = 100  # columns

# Openings that leave a docstring's first line without a verb and its object, and without a thing.
FRAGMENTS = (
    "also",
    "and",
    "as",
    "because",
    "but",
    "else",
    "errors:",
    "for its",
    "for their",
    "how",
    "if",
    "neither",
    "no longer",
    "not",
    "of",
    "or",
    "so",
    "that",
    "the same",
    "then",
    "there are",
    "there is",
    "these",
    "those",
    "to be",
    "until",
    "what",
    "when",
    "where",
    "whether",
    "which",
    "why",
    "with",
)
# Adverbs, participles and adjectives that stand where a noun would say what is in the variable.
NOT_NOUNS = (
    "alone",
    "anew",
    "at",
    "before",
    "beside",
    "done",
    "found",
    "given",
    "gone",
    "here",
    "held",
    "home",
    "kept",
    "known",
    "left",
    "made",
    "most",
    "near",
    "own",
    "rest",
    "said",
    "seen",
    "so_far",
    "taken",
    "there",
    "told",
    "whole",
    "whose",
    "within",
)


@dataclass(frozen=True)
class Place:
    """A line of a file, and what was counted there."""

    path: Path
    line: int
    what: str
    size: int = 1

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.what}"


@dataclass(frozen=True)
class Source:
    """A Python file: its path, and its dotted name as it is imported."""

    path: Path
    name: str

    @property
    def room(self) -> str:
        parts = self.name.split(".")
        return (parts[1] if len(parts) > 1 else "") if parts[0] == "jaxserve" else parts[0]

    @functools.cached_property
    def text(self) -> str:
        return self.path.read_text()

    @functools.cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    def place(self, node: ast.AST | int, what: str, size: int = 1) -> Place:
        return Place(self.path, getattr(node, "lineno", node), what, size)


def sources(folder: str) -> list[Source]:
    """Python files of a top folder of the repository, without generated code."""
    paths = [
        Path(top) / file
        for top, _, files in os.walk(ROOT / folder, followlinks=True)
        for file in files
        if file.endswith(".py") and "_pb2" not in file
    ]
    return [Source(path, _dotted(path)) for path in sorted(paths)]


def _dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def classes(source: Source) -> Iterator[Place]:
    """Classes, with the number of their methods."""
    for node in source.nodes:
        if isinstance(node, ast.ClassDef):
            methods = sum(isinstance(child, FUNCTIONS) for child in node.body)
            yield source.place(node, f"{node.name} has {methods} methods", methods)


def functions(source: Source) -> Iterator[Place]:
    """Functions and methods, with the number of their parameters."""
    for node in source.nodes:
        if isinstance(node, FUNCTIONS):
            names = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            count = sum(name.arg not in ("self", "cls") for name in names)
            yield source.place(node, f"{node.name} has {count} parameters", count)


def conditionals(source: Source) -> Iterator[Place]:
    """Conditional expressions (`a if c else b`)."""
    for node in source.nodes:
        if isinstance(node, ast.IfExp):
            yield source.place(node, "conditional expression")


def nested_conditionals(source: Source) -> Iterator[Place]:
    """Conditional expressions that hold another one as an operand."""
    for node in source.nodes:
        if isinstance(node, ast.IfExp):
            inside = (node.body, node.test, node.orelse)
            if any(isinstance(child, ast.IfExp) for child in inside):
                yield source.place(node, "nested conditional expression")


def docstrings(source: Source) -> Iterator[tuple[int, str]]:
    """Line and text of the docstring of the module, and of every class and function."""
    for node in source.nodes:
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text


def first_sentence(text: str) -> str:
    """The first sentence of a docstring, on one line."""
    paragraph = " ".join(text.split("\n\n")[0].split())
    ends = (at for at in map(paragraph.find, (". ", "? ", ": ")) if at >= 0)
    return paragraph[: min(ends, default=len(paragraph)) + 1]


def is_fragment(text: str) -> bool:
    """True where a docstring opens with a fragment or is a question."""
    sentence = first_sentence(text)
    words = sentence.lower().split()
    opening = {" ".join(words[:count]).rstrip(",") for count in (1, 2)}
    return not opening.isdisjoint(FRAGMENTS) or sentence.endswith("?")


def fragments(source: Source) -> Iterator[Place]:
    """Docstrings that cannot be read alone: fragments and questions."""
    for line, text in docstrings(source):
        if is_fragment(text):
            yield source.place(line, f"docstring: {first_sentence(text)[:70]!r}")


def wide_lines(source: Source) -> Iterator[Place]:
    """Lines over `LINE_LENGTH` columns."""
    for number, line in enumerate(source.lines, 1):
        if len(line) > LINE_LENGTH:
            yield source.place(number, f"{len(line)} columns")


def tuple_assignments(source: Source) -> Iterator[Place]:
    """Assignments of several values to several names in one statement."""
    for node in source.nodes:
        is_tuple = isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
        if is_tuple and any(isinstance(target, ast.Tuple) for target in node.targets):
            yield source.place(node, "tuple assignment")


def vague_names(source: Source) -> Iterator[Place]:
    """Variables and parameters named with a word of `NOT_NOUNS`."""
    for node in source.nodes:
        is_bound = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        name = node.id if is_bound else getattr(node, "arg", None)
        if (is_bound or isinstance(node, ast.arg)) and name in NOT_NOUNS:
            yield source.place(node, f"name: {name}")


# Columns of the table, and what is listed for a room that is asked for.
COUNTS = {
    "conditionals": conditionals,
    "nested": nested_conditionals,
    "fragments": fragments,
    "wide": wide_lines,
    "tuples": tuple_assignments,
    "names": vague_names,
}
LISTED = ("nested", "fragments", "wide", "names")


def imported(source: Source, names: frozenset[str]) -> set[str]:
    """Modules of the product that a file imports, anywhere in it.

    `from package import module` is an import of the module; `from package import name` is one of
    the package's `__init__`.
    """
    found = set()
    for node in source.nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in names else node.module)
    return (found & names) - {source.name}


def circles(product: Iterable[Source]) -> list[list[str]]:
    """Groups of files that import each other (strongly connected, by Tarjan's algorithm)."""
    product = list(product)
    names = frozenset(source.name for source in product)
    graph = {source.name: sorted(imported(source, names)) for source in product}
    # The package's own `__getattr__` imports the public names when they are asked for.
    graph["jaxserve"] = []
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = lowest[name] = len(order)
        stack.append(name)
        for other in graph[name]:
            if other not in order:
                visit(other)
                lowest[name] = min(lowest[name], lowest[other])
            elif other in stack:
                lowest[name] = min(lowest[name], order[other])
        if lowest[name] == order[name]:
            at = stack.index(name)
            groups.append(sorted(stack[at:]))
            del stack[at:]

    sys.setrecursionlimit(10_000)
    for name in graph:
        if name not in order:
            visit(name)
    return [group for group in groups if len(group) > 1]


def private_names(product: Iterable[Source]) -> frozenset[str]:
    """Names with one leading underscore that the product defines: methods, attributes, functions,
    and constants."""
    found = set()
    for source in product:
        for node in source.nodes:
            if isinstance(node, (ast.ClassDef, *FUNCTIONS)):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return frozenset(name for name in found if _is_private(name))


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def private_reaches(test: Source, names: frozenset[str]) -> Iterator[Place]:
    """Uses of the product's private names in a test: `x._y` where x is not self or cls, imports,
    and names given to `setattr` or `getattr`. A test's own private names may look the same: what
    the file defines itself is left out."""
    names -= private_names([test])
    for node in test.nodes:
        if isinstance(node, ast.Attribute) and node.attr in names:
            owner = node.value
            if not (isinstance(owner, ast.Name) and owner.id in ("self", "cls", "os", "sys")):
                yield test.place(node, f"uses {ast.unparse(node)[-60:]}")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxserve"):
            for alias in node.names:
                if _is_private(alias.name):
                    yield test.place(node, f"imports {alias.name} of {node.module}")
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("setattr", "getattr")):
            for value in node.args[:2]:
                name = value.value if isinstance(value, ast.Constant) else None
                if isinstance(name, str) and name.rsplit(".")[-1] in names:
                    yield test.place(node, f"patches {name}")


def reaches() -> list[Place]:
    """Private reaches of all tests."""
    names = private_names(sources("jaxserve"))
    return [place for test in sources("tests") for place in private_reaches(test, names)]


def large_classes(product: Iterable[Source]) -> list[Place]:
    """Classes over `LARGEST_CLASS` methods."""
    return [c for source in product for c in classes(source) if c.size > LARGEST_CLASS]


def wide_functions(product: Iterable[Source]) -> list[Place]:
    """Functions over `MOST_PARAMETERS` parameters."""
    return [f for source in product for f in functions(source) if f.size > MOST_PARAMETERS]


def _row(name: str, product: list[Source]) -> str:
    lines = sum(len(source.lines) for source in product)
    largest = max((c.size for source in product for c in classes(source)), default=0)
    counts = {
        key: sum(len(list(count(source))) for source in product) for key, count in COUNTS.items()
    }
    share = 1000 * counts["conditionals"] / max(lines, 1)
    rest = " ".join(f"{counts[key]:>9}" for key in COUNTS if key != "conditionals")
    return (
        f"{name:<14}{len(product):>6}{lines:>8}{largest:>9}{len(wide_functions(product)):>9}"
        f"{share:>10.1f} {rest}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Counts the product's size and shape.")
    parser.add_argument("rooms", nargs="*", help="rooms to list in detail; all rooms by default")
    asked = parser.parse_args().rooms
    product = sources("jaxserve")
    rooms: dict[str, list[Source]] = {}
    for source in product + sources("experiments") + sources("tests"):
        rooms.setdefault(source.room, []).append(source)
    others = [key for key in COUNTS if key != "conditionals"]
    print(
        f"{'room':<14}{'files':>6}{'lines':>8}{'methods':>9}{'params>8':>9}{'cond/1000':>10} "
        + " ".join(f"{key:>9}" for key in others)
    )
    for room in asked or sorted(rooms):
        print(_row(room or "(top)", rooms[room]))
    if not asked:
        print(_row("product", product))
    chosen = [source for room in asked for source in rooms[room]] or product
    print("\nLargest classes:")
    largest = sorted((c for s in chosen for c in classes(s)), key=lambda c: -c.size)
    print(*largest[:10], sep="\n")
    print(f"\nFunctions over {MOST_PARAMETERS} parameters:", *wide_functions(chosen), sep="\n")
    print("\nCircles of files:")
    for group in circles(product):
        if not asked or {name.split(".")[1] for name in group} & set(asked):
            print(" <-> ".join(group))
    paths = [room if room == "tests" else f"tests/{room}/" for room in asked]
    private = [p for p in reaches() if not asked or any(path in str(p) for path in paths)]
    print(f"\nPrivate reaches of tests: {len(private)}")
    if asked:
        print(*private, sep="\n")
        for key in LISTED:
            places = [place for source in chosen for place in COUNTS[key](source)]
            print(f"\n{key}: {len(places)}", *places, sep="\n")
    else:
        by_file = Counter(place.path.relative_to(ROOT).as_posix() for place in private)
        print(*(f"{count:>5} {path}" for path, count in by_file.most_common(20)), sep="\n")


if __name__ == "__main__":
    main()
