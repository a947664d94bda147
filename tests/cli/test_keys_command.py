"""`jaxserve keys`."""

import asyncio
import concurrent.futures
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.api.errors import RequestError
from jaxserve.cli import main as cli
from jaxserve.server.auth.access import Authenticator
from jaxserve.server.auth.keys import read
from jaxserve.settings.schema import ServerConfig

ROOT = Path(__file__).parents[2]


@pytest.fixture
def file(tmp_path):
    return tmp_path / "keys.yaml"


def run(capsys, file, *arguments):
    """(exit code, what went to stdout, to stderr)"""
    code = cli.main(["keys", f"--file={file}", *arguments])
    return code, *capsys.readouterr()


def test_a_key_is_printed_once_and_only_its_hash_is_kept(capsys, file):
    old = os.umask(0)
    try:
        code, out, err = run(capsys, file, "--add=alice", "--tenant=team")
    finally:
        os.umask(old)
    assert code == 0 and re.fullmatch(r"jaxserve-[\w-]{43}\n", out) and not err
    assert (
        out.strip() not in file.read_text()
        and out[9:-1] not in file.read_text()
        and file.stat().st_mode & 0o777 == 0o600
    )
    caller = Authenticator(ServerConfig(api_keys=str(file))).authenticate(f"Bearer {out.strip()}")
    assert (caller.name, caller.tenant) == ("alice", "team")
    assert [path.name for path in file.parent.iterdir()] == ["keys.yaml"]


def test_keys_come_and_go_and_the_rest_stays(capsys, file):
    file.write_text(
        """# by hand
keys:
  - {name: old, sha256: "%s", limits: {concurrency: 3, queued_tokens: 1000}}
"""
        % ("5" * 64)
    )
    file.chmod(0o600)
    first = read(file)
    admin = run(capsys, file, "--add=boss", "--admin")[1].strip()
    alice = run(capsys, file, "--add=alice")[1].strip()
    assert read(file)[:1] == first and [key.name for key in read(file)] == ["old", "boss", "alice"]
    access = Authenticator(ServerConfig(api_keys=str(file)))
    assert access.authenticate(f"Bearer {admin}", admin=True).name == "boss"
    code, out, _ = run(capsys, file, "--list")
    assert (
        code == 0
        and admin not in out
        and [line.split() for line in out.splitlines()[2:]]
        == [
            ["old", "old", "no", "-", "3", "1000"],
            ["boss", "boss", "yes", "-", "-", "-"],
            ["alice", "alice", "no", "-", "-", "-"],
        ]
    )
    assert run(capsys, file, "--remove=alice") == (0, "", "")
    asyncio.run(access.refresh())
    with pytest.raises(RequestError):
        access.authenticate(f"Bearer {alice}")
    run(capsys, file, "--remove=boss"), run(capsys, file, "--remove=old")
    assert read(file) == []


def test_a_link_stays_one(capsys, file, tmp_path):
    (tmp_path / "link").symlink_to(file)
    run(capsys, tmp_path / "link", "--add=a")
    run(capsys, tmp_path / "link", "--add=b")
    assert (tmp_path / "link").is_symlink() and [key.name for key in read(file)] == ["a", "b"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "--add: give one of --add=NAME, --remove=NAME and --list"),
        (["--add=a", "--remove=b"], "--add: give one of"),
        (["--add=a b"], "--add: 'a b' is not a name"),
        (["--add=c", "--tenant=x/y"], "--tenant: 'x/y' is not a name"),
        (["--add=a"], "--add: {file} has a key 'a' already"),
        (["--remove=z"], "--remove: there is no key 'z'; known are a"),
        (["--list", "--file=/no/such/file"], "--file: /no/such/file: No such file"),
        (["--add=x", "--file=/no/such/file"], "--file: /no/such: No such file"),
    ],
)
def test_mistakes_are_named_and_change_nothing(capsys, file, arguments, message):
    run(capsys, file, "--add=a")
    before = file.read_text()
    code, out, err = run(capsys, file, *arguments)
    assert (
        (code, out) == (2, "") and message.format(file=file) in err and len(err.splitlines()) == 1
    )
    assert file.read_text() == before


def test_a_file_that_cannot_be_used_is_left_as_it_is(capsys, file):
    for text, mode, message in (
        ("keys: [", 0o600, "line 1: is not YAML"),
        ("keys: []", 0o644, "chmod 600"),
    ):
        file.write_text(text)
        file.chmod(mode)
        code, out, err = run(capsys, file, "--add=a")
        assert (
            (code, out) == (2, "")
            and f"--file: {file}" in err
            and message in err
            and file.read_text() == text
        )


def test_two_who_add_at_once_both_get_their_key(file):
    command = [sys.executable, "-m", "jaxserve", "keys", f"--file={file}"]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        add = lambda i: subprocess.run(
            [*command, f"--add=k{i}"], cwd=ROOT, capture_output=True, text=True
        )
        done = list(pool.map(add, range(12)))
    assert all(one.returncode == 0 for one in done) and {key.name for key in read(file)} == {
        f"k{i}" for i in range(12)
    }
