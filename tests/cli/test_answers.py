"""Processes of their own that give an answer, hang, or crash."""

import sys

import pytest

from jaxserve.cli.answers import NoAnswer, answer_of


def command(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_the_answer_is_the_last_line():
    code = "import sys; print('first'); print(sys.stdin.read().upper())"
    assert answer_of(command(code), 30, '{"n": 1}') == {"N": 1}


def test_a_process_that_takes_too_long_is_ended():
    with pytest.raises(TimeoutError, match=r"longer than 0\.5 s"):
        answer_of(command("import time; time.sleep(60)"), 0.5)


def test_a_process_that_fails_is_quoted():
    with pytest.raises(NoAnswer, match="gone") as failed:
        answer_of(command("raise SystemError('gone')"), 30)
    assert failed.value.code == 1
