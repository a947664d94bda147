"""The limits of size and shape that hold for the product, and that the counts find what they are
for. `python -m tests.house ROOM` lists every place."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import house
from tests.house import Source

CONDITIONALS = 10  # per 1,000 lines
PRIVATE_REACHES = 20  # of tests into the product
PRODUCT = house.sources("jaxserve")


def places(count) -> list[str]:
    return [str(place) for source in PRODUCT for place in count(source)]


def test_no_class_has_too_many_methods():
    assert not [str(place) for place in house.large_classes(PRODUCT)]


def test_no_function_but_a_kernel_has_too_many_parameters():
    others = [source for source in PRODUCT if source.room != "kernels"]
    assert not [str(place) for place in house.wide_functions(others)]


def test_conditional_expressions_are_few_and_never_nested():
    lines = sum(len(source.lines) for source in PRODUCT)
    assert len(places(house.conditionals)) * 1000 <= CONDITIONALS * lines
    assert not places(house.nested_conditionals)


def test_lines_fit():
    assert not places(house.wide_lines)


def test_no_files_import_each_other_in_a_circle():
    assert not house.circles(PRODUCT)


def test_tests_use_public_names():
    found = [str(place) for place in house.reaches()]
    assert len(found) <= PRIVATE_REACHES, found


# --- the counts


def source(folder: Path, text: str, name: str = "jaxserve.room.module") -> Source:
    path = folder / f"{name}.py"
    path.write_text(text)
    return Source(path, name)


@pytest.mark.parametrize(
    "text, is_fragment",
    [
        ("Returns the page of a block.", False),
        ("Pages of one lane.", False),
        ("Notes on what was read.", False),
        ("Of the engine, those included that do not count.", True),
        ("There are none.", True),
        ("The same, for several.", True),
        ("Whether a block is cached.", True),
        ("Is it cached?", True),
        ("As of the last step,\nall pages.", True),
    ],
)
def test_fragments_and_questions_are_recognised(text, is_fragment):
    assert house.is_fragment(text) is is_fragment


def test_methods_and_parameters_are_counted_without_self(tmp_path):
    text = "class A:\n  x: int = 0\n  def f(self, a, b=1, *c, d): pass\n  async def g(self): pass"
    one = source(tmp_path, text)
    assert [place.size for place in house.classes(one)] == [2]
    assert [place.size for place in house.functions(one)] == [3, 0]


def test_nested_conditional_expressions_are_found(tmp_path):
    one = source(tmp_path, "a = 1 if b else 2 if c else 3\nd = f(1 if b else 2) if c else 3")
    assert [place.line for place in house.nested_conditionals(one)] == [1]
    assert len(list(house.conditionals(one))) == 4


def test_a_circle_through_a_function_and_a_package_is_found(tmp_path):
    files = {
        "jaxserve.a": "from jaxserve.b import name",
        "jaxserve.b": "from jaxserve.b.c import other",
        "jaxserve.b.c": "def f():\n    from jaxserve import a",
        "jaxserve.d": "from jaxserve import a",
    }
    written = [source(tmp_path, text, name) for name, text in files.items()]
    assert house.circles(written) == [["jaxserve.a", "jaxserve.b", "jaxserve.b.c"]]


def test_private_reaches_of_all_kinds_are_found(tmp_path):
    test = source(
        tmp_path,
        "from jaxserve.m import _f\n"
        "x._secret.y\n"
        "monkeypatch.setattr(m, '_secret', 1)\n"
        "class Mine:\n"
        "    def __init__(self): self._own = 1\n"
        "    def f(self, other): return other._own + self._secret",
        "tests.test_m",
    )
    found = house.private_reaches(test, frozenset({"_secret", "_own"}))
    assert sorted(place.line for place in found) == [1, 2, 3]
