"""What a member knows of its group, and its pulse."""

import json
import os
import subprocess
import sys

import pytest

from jaxserve.group.member import (
    LEADER,
    LOST,
    SECRET_VARIABLE,
    VARIABLE,
    Member,
    this_member,
)
from jaxserve.settings.schema import ConfigError
from tests.group.fakes import ROOT
from tests.waiting import SOON

BEATS = """
import sys, time
from jaxserve.group import member
member.BEAT_SECONDS = 0.05
pulse = member.Pulse(member.this_member())
pulse.tell(state="loading")
pulse.tell(state="ready", more=1)
print("on", flush=True)
time.sleep(float(sys.argv[1]))
"""


def test_a_member_is_what_its_supervisor_said(monkeypatch):
    member = Member(3, 4, "host", 7713, local=1, pipe=9, ranks_across_hosts=True, tls_cert="c")
    for name, text in member.environment().items():
        monkeypatch.setenv(name, text)
    assert this_member() == member and member.name == "worker 3" and not member.leads
    leader = Member(LEADER, 4, "host", 7713)
    assert leader.leads and leader.name == "leader"


def test_outside_of_groups_there_is_no_member(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert this_member() is None


@pytest.mark.parametrize("text", ["x", "[]", "3", "{}", '{"worker": 1, "size": 2}'])
def test_a_variable_that_nobody_else_sets_is_named_where_it_is_wrong(monkeypatch, text):
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(ConfigError, match="JAXSERVE_GROUP is not what `jaxserve launch` sets"):
        this_member()


@pytest.mark.parametrize("secret", ["", "fifteen letters"])
def test_a_short_secret_is_none(monkeypatch, secret):
    monkeypatch.setenv(SECRET_VARIABLE, secret)
    with pytest.raises(ConfigError, match="at least 16 characters"):
        Member(0, 1, "host", 1).secret  # noqa: B018
    monkeypatch.setenv(SECRET_VARIABLE, secret + " " * 16)
    assert Member(0, 1, "host", 1).secret == (secret + " " * 16).encode()


def test_the_secret_is_not_among_what_is_told_of_a_member(monkeypatch):
    monkeypatch.setenv(SECRET_VARIABLE, "a secret of some length")
    member = Member(0, 1, "host", 1)
    assert "some length" not in json.dumps(member.environment()) + repr(member)


def beating(pipe, seconds, **fields):
    member = Member(0, 1, "127.0.0.1", 1, pipe=pipe)
    return subprocess.Popen(
        [sys.executable, "-c", BEATS, str(seconds)],
        env={**os.environ, **member.environment(), "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **fields,
    )


def test_each_beat_is_a_line_that_says_what_the_member_does():
    reading, writing = os.pipe()
    process = beating(writing, 2.0, pass_fds=[writing])
    os.close(writing)
    with open(reading) as pipe:
        beats = [json.loads(line) for line in pipe]
    assert process.communicate(timeout=SOON)[1] == "" and process.returncode == 0
    states = [beat["state"] for beat in beats]
    assert states == sorted(states, key=["starting", "loading", "ready"].index)
    assert {"loading", "ready"} <= set(states)
    assert beats[-1] == {"state": "ready", "more": 1} and len(beats) > 4


def test_a_member_whose_supervisor_is_gone_ends():
    reading, writing = os.pipe()
    process = beating(writing, 1000, pass_fds=[writing])
    os.close(writing)
    try:
        assert process.stdout.readline() == "on\n"
        os.close(reading)
        assert process.wait(SOON) == LOST
        assert "worker 0: the supervisor is gone" in process.stderr.read()
    finally:
        process.kill()
        process.communicate()


def test_a_supervisor_that_reads_nothing_holds_nobody():
    reading, writing = os.pipe()
    process = beating(writing, 0.5, pass_fds=[writing])
    os.set_blocking(writing, False)
    try:
        while True:
            os.write(writing, bytes(4096))  # until it is full
    except BlockingIOError:
        pass
    assert process.communicate(timeout=SOON)[1] == "" and process.returncode == 0
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize("is_open", [True, False])
def test_what_a_member_starts_does_not_beat_into_files_of_its_own(tmp_path, is_open):
    """It has the member's variables, and under the pipe's number some file or none."""
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    process = beating(file, 0.3, pass_fds=[file] if is_open else [])
    out, err = process.communicate(timeout=SOON)
    os.close(file)
    assert (process.returncode, out, err) == (0, "on\n", "")
    assert (tmp_path / "file").read_bytes() == b""


def test_a_process_without_a_supervisor_has_no_pulse():
    process = beating(-1, 0)
    assert process.communicate(timeout=SOON) == ("on\n", "") and process.returncode == 0
