"""Tables in Markdown, as GitHub, GitLab and Python-Markdown read them alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, without a newline at its end. Cells are Markdown; a bar in one is a character, but
    must not be between backticks: the three differ there."""
    return "\n".join(map(_line, (head, ["---"] * len(head), *rows)))


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def code(text: str) -> str:
    """Text as code that may have bars in it."""
    return f"<code>{plain(text)}</code>"


def plain(text: str) -> str:
    """Text whose characters mean themselves; backticks still make code of what they enclose."""
    return text.replace("<", "&lt;").replace("*", "&#42;")
