"""Words of the product and its documents are plain, and the check finds what it is for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import words
from tests.house import ROOT

CHECKED = ("jaxserve", "docs", "README.md", "SECURITY.md")


@pytest.mark.parametrize("path", CHECKED)
def test_words_are_plain(path):
    assert not [str(fault) for fault in words.faults(ROOT / path)]


def found(path: Path, text: str) -> list[tuple[int, str]]:
    path.write_text(text)
    return [(fault.line, fault.what.split(":")[0]) for fault in words.faults(path)]


def test_docstrings_comments_and_strings_are_checked(tmp_path):
    text = (
        '"""Whether it is."""\n'
        "x = 1\n"
        "# not so\n"
        "# many\n"
        "def f():\n"
        '    """Returns a block.\n\n    A sink hears of it."""\n'
        "    raise ValueError('told is a word', f'it is {x} nobody')\n"
        "told = 'told'\n"
    )
    assert found(tmp_path / "a.py", text) == [
        (1, "fragment or question"),
        (3, '"so many"'),
        (8, '"hears"'),
        (9, '"told"'),
        (9, '"nobody"'),
    ]


def test_code_in_documents_is_left_alone(tmp_path):
    text = "```sh\ntold\n```\nas `told` says\n\nNobody\n\n~~~\nso many\n~~~\n"
    assert found(tmp_path / "a.md", text) == [(6, '"Nobody"')]
