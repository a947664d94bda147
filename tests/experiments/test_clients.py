"""The runner of other people's clients, without them: programs of calls, expected failures, the
table."""

import json
import os
import subprocess
import sys

import pytest
import yaml

from experiments.clients.__main__ import chosen
from experiments.clients.catalogue import CLIENTS, PROGRAMS
from experiments.clients.outcomes import (
    EXPECTED,
    Outcome,
    expected_failures,
    judged,
    keep,
    kept,
    shown,
    summary,
)
from jaxserve.settings.schema import ConfigError

PROGRAM = """
import sys
sys.path.insert(0, {folder!r})
from check import MODEL, call, main

@call
def passes():
    assert MODEL == "a-model"

@call
async def fails_in_an_assertion():
    assert MODEL == "another"

@call
def fails_in_an_error():
    raise ValueError("a  reason" + "x" * 1000)

main("pip")
"""


@pytest.fixture
def lines(tmp_path):
    """The lines that a program of three calls writes."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(folder=str(PROGRAMS)))
    results = tmp_path / "results"
    environment = {
        "CHECK_URL": "http://nowhere",
        "CHECK_MODEL": "a-model",
        "CHECK_RESULTS": str(results),
        "CHECK_TOKENIZER": "",
    }
    subprocess.run([sys.executable, str(program)], env=os.environ | environment, check=True)
    return results.read_text().splitlines()


def test_a_program_tells_versions_and_what_became_of_each_call(lines):
    versions, *calls = map(json.loads, lines)
    assert versions["versions"]["pip"]
    reasons = {line["call"]: line["reason"] for line in calls}
    assert reasons["passes"] is None
    assert reasons["fails_in_an_assertion"] == 'assert MODEL == "another"'
    assert reasons["fails_in_an_error"].startswith("ValueError: a reason")
    assert len(reasons["fails_in_an_error"]) <= 400


def test_failures_are_told_apart_by_whether_they_are_expected(lines):
    known = {"*error": "no reason", "pass*": "it never did"}
    found = judged("one", lines, "exit code 1", known, date="today", server="0")
    assert found.calls == 4 and found.passed == 1 and found.fixed == ["passes"]
    assert found.expected == {"fails_in_an_error": "no reason"}
    assert set(found.failed) == {"fails_in_an_assertion", "(the program)"}
    assert "passes now" in shown([found]) and "another" in shown([found])


def test_outcomes_are_kept_one_by_one_and_summed_up(tmp_path, lines):
    keep(judged("one", lines, "", {}, date="today", server="0"), tmp_path)
    keep(Outcome("two", "today", "0", missing="not installed"), tmp_path)
    found = kept(tmp_path, ["two", "one", "three"])
    assert [outcome.client for outcome in found] == ["two", "one"]
    text = summary(found, "# Head\n")
    assert "| two | not installed |" in text and "## one" in text and "## two" not in text


def test_clients_are_chosen_by_name():
    assert {client.name for client in chosen("litellm, openai")} == {"openai", "litellm"}
    with pytest.raises(ConfigError, match="nobody"):
        chosen("nobody")


def test_every_client_has_a_program_and_expected_failures_are_of_clients():
    names = [client.name for client in CLIENTS]
    assert len(set(names)) == len(names)
    assert all((PROGRAMS / client.program).is_file() for client in CLIENTS)
    assert set(yaml.safe_load(EXPECTED.read_text()) or {}) <= set(names)


def test_patterns_are_listed_by_reason(tmp_path):
    file = tmp_path / "expected.yaml"
    file.write_text("one:\n  a reason:\n    - first\n    - second*\n")
    assert expected_failures("one", file) == {"first": "a reason", "second*": "a reason"}
    assert expected_failures("two", file) == {}
