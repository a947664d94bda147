"""Everything that the documents name exists: files behind links, headings, classes and functions,
paths in backticks, modules after `python -m`."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("*.md"), ROOT / "experiments" / "README.md"])

FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
NAME = re.compile(r"`([A-Za-z_][\w.]*)`")
PATH = re.compile(r"`([\w.-]+(?:/[\w.-]+)+\.(?:py|proto|js|ipynb|md))`")
COMMAND = re.compile(r"python3? -m ((?:jaxserve|experiments|tests)\b[\w.]*\w)")


def prose(path: Path) -> str:
    """A document without its blocks of code."""
    return FENCE.sub("", path.read_text())


@functools.cache
def anchors(path: Path) -> set[str]:
    """Anchors of a document's headings, as GitHub and GitLab make them."""
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in HEADING.findall(prose(path)))
    return {heading.strip().replace(" ", "-") for heading in plain}


@functools.cache
def names_in(path: Path) -> set[str]:
    """Names that a module defines: functions, classes, constants, and members as Class.member."""

    def defined(body: list[ast.stmt]) -> Iterator[str]:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield node.name
            elif isinstance(node, ast.ClassDef):
                yield node.name
                yield from (f"{node.name}.{member}" for member in defined(node.body))
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                yield node.target.id
            elif isinstance(node, ast.Assign):
                yield from (target.id for target in node.targets if isinstance(target, ast.Name))

    return set(defined(ast.parse(path.read_text()).body))


def faults(document: Path) -> Iterator[str]:
    """Names in a document of what does not exist."""
    text = prose(document)
    for label, link in LINK.findall(text):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = document.parent / file if file else document
        if not target.exists():
            yield f"link to {link}"
        elif anchor and anchor not in anchors(target):
            yield f"no heading for {link}"
        elif target.suffix == ".py" and (name := NAME.fullmatch(label)):
            defined = name[1].removeprefix(f"{target.stem}.") in names_in(target)
            yield from () if defined else (f"{file} defines no {name[1]}",)
    for path in PATH.findall(text):
        if not (ROOT / path).exists() and not (document.parent / path).exists():
            yield f"path {path}"
    for module in COMMAND.findall(document.read_text()):
        place = ROOT / module.replace(".", "/")
        if not place.with_suffix(".py").exists() and not (place / "__main__.py").exists():
            yield f"module {module}"


def test_documents_are_found():
    assert {"README.md", "architecture.md", "index.md"} <= {path.name for path in DOCS}


@pytest.mark.parametrize("document", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_document_names_exists(document):
    assert not list(faults(document))


@pytest.mark.parametrize(
    "text",
    [
        "[a](missing.md)",
        "[a](there.py#lines) and [a](#missing)",
        "[`Missing`](there.py)",
        "[`There.missing`](there.py)",
        "see `jaxserve/missing.py`",
        "```sh\npython -m experiments.missing\n```",
    ],
)
def test_what_is_missing_is_found(text, tmp_path):
    (tmp_path / "there.py").write_text("class There:\n    def here(self): ...\n")
    (tmp_path / "a.md").write_text(text)
    assert list(faults(tmp_path / "a.md"))


def test_what_is_there_is_no_fault(tmp_path):
    (tmp_path / "there.py").write_text("class There:\n    def here(self): ...\n")
    (tmp_path / "a.md").write_text(
        "# One `thing`, and more\n[a](there.py), [`there.There.here`](there.py), "
        "[b](#one-thing-and-more), [c](https://example.org/x), `a/b`\n```\n[a](b.md)\n```\n"
    )
    assert not list(faults(tmp_path / "a.md"))
