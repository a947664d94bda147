"""Checks the words of docstrings, comments, strings and documents: `python -m tests.words PATH...`.

Rules:
- The first sentence of a docstring is a verb and its object, or says what the thing is. It can be
  read without its neighbours: it opens with none of `tests.house.FRAGMENTS` and is no question.
- Docstrings, comments, strings that people read (help texts, errors, descriptions of metrics) and
  documents use none of `WORDS`.

Text between backquotes and code blocks of documents are left alone: names are not prose.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.house import ROOT, Place, Source, docstrings, first_sentence, is_fragment, sources

# Phrases that readers stumble over, and what says it plainly.
WORDS = {
    "so many": "a number, or `that many`",
    "told": "passed, given, notified, configured",
    "whoever": "the caller, the client, any thread that",
    "nobody": "no request, no caller, no user",
    "anew": "again, from scratch",
    "hears": "receives, is notified",
    "of which it": "two sentences",
    "is said": "is stated, is set",
    "as it says": "as configured, as documented",
    "where there is": "if it has, with",
    "beside which": "next to it",
    "mends": "fixes, repairs",
}
PATTERN = re.compile(
    r"\b(" + "|".join(word.replace(" ", r"\s+") for word in WORDS) + r")\b", re.IGNORECASE
)
CODE_BLOCK = re.compile(r"^([`~]{3,})[^\n]*\n.*?^\1[`~]*\s*$", re.DOTALL | re.MULTILINE)
INLINE_CODE = re.compile(r"(`+)(?!`).+?\1", re.DOTALL)


def _blank(match: re.Match[str]) -> str:
    """Replaces all but line ends, so that places stay."""
    return re.sub(r"[^\n]", "_", match[0])


def faults_of_text(path: Path, line: int, text: str) -> Iterator[Place]:
    """Phrases of `WORDS` in a text that begins on a line of a file."""
    for match in PATTERN.finditer(INLINE_CODE.sub(_blank, text)):
        word = " ".join(match[0].split())
        at = line + text.count("\n", 0, match.start())
        yield Place(path, at, f'"{word}": say {WORDS[word.lower()]}')


def _strings(source: Source) -> Iterator[tuple[int, str]]:
    """Lines and texts of strings with a space in them, docstrings included."""
    for node in source.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


def _comments(source: Source) -> Iterator[tuple[int, str]]:
    """Lines and texts of comments. Lines that hold nothing else and follow each other are one."""
    first = 0
    texts: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type != tokenize.COMMENT:
            continue
        line = token.start[0]
        follows = line == first + len(texts) and token.line.lstrip().startswith("#")
        if texts and not follows:
            yield first, "\n".join(texts)
            texts = []
        first = first if texts else line
        texts.append(token.string.lstrip("# "))
    if texts:
        yield first, "\n".join(texts)


def faults_of_source(source: Source) -> Iterator[Place]:
    """Faults in the docstrings, comments and strings of a Python file."""
    for line, text in docstrings(source):
        if is_fragment(text):
            yield Place(source.path, line, f"fragment or question: {first_sentence(text)[:60]!r}")
    for line, text in (*_comments(source), *_strings(source)):
        yield from faults_of_text(source.path, line, text)


def faults_of_document(path: Path) -> Iterator[Place]:
    """Faults in the prose of a Markdown document."""
    yield from faults_of_text(path, 1, CODE_BLOCK.sub(_blank, path.read_text()))


def faults(path: Path) -> list[Place]:
    """Faults of a file, or of all Python files and documents of a folder, in order of lines."""
    path = path.absolute()
    if path.is_file():
        is_python = path.suffix == ".py"
        found = faults_of_source(Source(path, path.stem)) if is_python else faults_of_document(path)
        return sorted(found, key=lambda place: place.line)
    inner = [source.path for source in sources(str(path.relative_to(ROOT)))]
    return [fault for file in [*inner, *sorted(path.rglob("*.md"))] for fault in faults(file)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Checks words; see the top of tests/words.py.")
    parser.add_argument("paths", nargs="+", type=Path, help="files and folders of this repository")
    found = [fault for path in parser.parse_args().paths for fault in faults(path)]
    print(*found, sep="\n", end="\n" if found else "")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
