"""`jaxserve launch`: mistakes, the group's secret, and a small group from the command line."""

import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import threading
import time

import pytest
import trustme

from jaxserve.cli import launch
from jaxserve.cli import main as cli
from jaxserve.group.environment import PORT, Place
from jaxserve.group.member import LEADER
from jaxserve.group.own_code import own_command
from jaxserve.settings.schema import ConfigError
from tests.group.fakes import MEMBER, ROOT
from tests.waiting import SOON, eventually

TASK = {
    "SLURM_NTASKS": "2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NODELIST": "127.0.0.[1-2]",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
}


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """Outside of all groups, with a cache folder of its own."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "PMI", "LWS_", "JAXSERVE_GROUP")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path / "cache"))


def run(capsys, *arguments):
    """(exit code, what went to stderr)"""
    code = cli.main(["launch", *arguments])
    return code, capsys.readouterr().err


@pytest.fixture
def pair(tmp_path):
    """A certificate's file and its key's."""
    issued = trustme.CA().issue_cert("127.0.0.1")
    issued.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    issued.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    return str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")


# --- mistakes, told before anything is started


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "jaxserve launch: give a command behind --"),
        (["--processes=2"], "jaxserve launch: give a command behind --"),
        (["--processes=2", "--"], "jaxserve launch: give a command behind --"),
        (["serve"], "jaxserve launch: give a command behind --"),
        (["--processes=0", "--", "true"], "jaxserve launch: --processes=0: 0 is below the limit 1"),
        (["--mesh=tp=2", "--", "serve"], "jaxserve launch: unknown flag --mesh"),
        (
            ["--hosts=198.51.100.7,198.51.100.8", "--", "true"],
            f"jaxserve launch: --hosts: 198.51.100.7,198.51.100.8: 0 of them are this machine "
            f"({socket.gethostname()})",
        ),
        (["--hosts=127.0.0.1,127.0.0.1", "--", "true"], "2 of them are this machine"),
        (["--hosts=127.0.0.1,,198.51.100.8", "--", "true"], "is not a list of hosts"),
        (["--hosts=" + "x" * 300 + ",a..b", "--", "true"], "0 of them are this machine"),
        (
            ["--hosts=127.0.0.1,198.51.100.8", "--", "true"],
            "JAXSERVE_GROUP_SECRET must be set, to the same text of at least 16 characters on all",
        ),
        (["--tls_cert=/no/cert", "--", "true"], "--tls_cert: tls_cert needs tls_key too"),
        (["--tls_key=/no/key", "--", "true"], "--tls_key: tls_cert needs tls_key too"),
        (
            ["--tls_cert=/no/cert", "--tls_key=/no/key", "--", "true"],
            "--tls_cert: /no/cert: no such file",
        ),
        (["--", "/no/such/command"], "/no/such/command: No such file or directory"),
        (["--", "/"], "/: Permission denied"),
    ],
)
def test_mistakes_are_named_and_nothing_is_started(capsys, arguments, message):
    code, err = run(capsys, *arguments)
    assert code == cli.USAGE and message in " ".join(err.split()), err


def test_a_key_that_is_missing_or_anothers_is_named(capsys, pair, tmp_path):
    certificate, key = pair
    code, err = run(capsys, f"--tls_cert={certificate}", "--tls_key=/no/key", "--", "true")
    assert code == cli.USAGE and "--tls_key: /no/key: no such file" in err
    other = trustme.CA().issue_cert("127.0.0.1")
    other.private_key_pem.write_to_path(str(tmp_path / "other.pem"))
    for wrong in (tmp_path / "other.pem", certificate):
        code, err = run(capsys, f"--tls_cert={certificate}", f"--tls_key={wrong}", "--", "true")
        assert code == cli.USAGE and f"--tls_cert: {certificate}, {wrong}:" in err


def test_a_secret_that_can_be_guessed_is_refused(capsys, monkeypatch):
    monkeypatch.setenv("JAXSERVE_GROUP_SECRET", "short")
    code, err = run(capsys, "--", "true")
    assert code == cli.USAGE and "JAXSERVE_GROUP_SECRET must have at least 16 characters" in err
    assert "short" not in err


def test_mpirun_that_does_not_tell_the_first_host_is_told_of_the_flag(capsys, monkeypatch):
    for name, text in {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", text)
    code, err = run(capsys, "--", "true")
    assert code == cli.USAGE
    assert "--hosts: Open MPI does not tell the first host: give --hosts" in err


# --- members


def members(place, **values):
    options = {option.name: option.default for option in launch.OPTIONS}
    return launch.members_of({**options, **values}, place)


def test_a_group_on_one_machine_listens_on_loopback_alone():
    leader, *workers = members(Place(0, 1, "127.0.0.1"), processes=3)
    assert (leader.worker, leader.host, leader.workers) == (LEADER, "127.0.0.1", 3)
    assert [(worker.worker, worker.local) for worker in workers] == [(0, 0), (1, 1), (2, 2)]
    assert {worker.port for worker in workers} == {leader.port} != {PORT}


def test_hosts_have_workers_in_their_order_and_the_first_the_leader():
    first = members(Place(0, 2, "a"), processes=2)
    second = members(Place(1, 2, "a"), processes=2)
    assert [member.worker for member in first + second] == [LEADER, 0, 1, 2, 3]
    assert [member.local for member in second] == [0, 1]
    assert {(m.host, m.port, m.workers) for m in first + second} == {("a", PORT, 4)}


def test_tasks_on_the_same_host_have_devices_of_their_own():
    third = members(Place(3, 4, "a", local=1), processes=2)
    assert [(member.worker, member.local) for member in third] == [(6, 2), (7, 3)]


@pytest.mark.parametrize(
    "words, ours",
    [
        (["serve", "--mesh=tp=2"], True),
        (["bench", "engine", "--json"], True),
        (["bench"], False),
        (["python", "script.py", "serve"], False),
    ],
)
def test_our_commands_run_by_this_python_and_others_as_they_are(words, ours):
    assert launch.command_of(words) == (own_command("jaxserve", *words) if ours else words)


# --- the secret


def test_the_secret_of_a_job_is_made_once_is_private_and_goes_with_it(tmp_path):
    old = os.umask(0)
    try:
        found = []

        def second():
            with launch.group_secret(Place(1, 2, "a", job="slurm-7.0")) as secret:
                found.append(secret)

        waiting = threading.Thread(target=second)
        waiting.start()
        time.sleep(0.1)
        assert not found, "it waits for the first host"
        with launch.group_secret(Place(0, 2, "a", job="slurm-7.0")) as secret:
            waiting.join(SOON)
            folder = tmp_path / "cache" / "groups"
            (file,) = folder.iterdir()
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            assert found == [secret] == [file.read_text()] and len(secret) == 64
            second()
            assert found == [secret] * 2
        assert list(folder.iterdir()) == []
    finally:
        os.umask(old)


def test_jobs_have_secrets_of_their_own():
    with (
        launch.group_secret(Place(0, 2, "a", job="slurm-7.0")) as one,
        launch.group_secret(Place(0, 2, "a", job="slurm-7.1")) as other,
        launch.group_secret(Place(0, 1, "127.0.0.1")) as alone,
    ):
        assert len({one, other, alone}) == 3


def test_a_folder_that_others_can_write_to_holds_no_secret(tmp_path):
    (tmp_path / "cache" / "groups").mkdir(parents=True)
    (tmp_path / "cache" / "groups").chmod(0o777)
    held = launch.group_secret(Place(0, 2, "a", job="slurm-7.0"))
    with pytest.raises(ConfigError, match="writable by other users"), held:
        pass


def test_hosts_that_do_not_share_the_folder_are_told(monkeypatch):
    monkeypatch.setattr(launch, "SECRET_SECONDS", 0.3)
    held = launch.group_secret(Place(1, 2, "a", job="slurm-7.0"))
    with pytest.raises(ConfigError, match="share the cache folder"), held:
        pass


# --- from the command line


def started(folder, *flags, words=None, **environment):
    """A launched group of small processes that is told what to do by files in `folder`."""
    words = words or [sys.executable, "-S", "-E", "-c", MEMBER, str(folder)]
    return subprocess.Popen(
        [sys.executable, "-m", "jaxserve", "launch", *flags, "--", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_group_from_the_command_line(tmp_path):
    process = started(tmp_path, "--processes=2")
    try:
        eventually(lambda: len(list(tmp_path.glob("*.log"))) == 3)
        (tmp_path / "leader.exit").write_text("9")
        _, err = process.communicate(timeout=SOON)
        assert process.returncode == 9, err
        assert not list((tmp_path / "cache").glob("groups/*")), "one machine needs no file"
    finally:
        process.kill()


SHOWS = """
import json, os, sys
me = json.loads(os.environ["JAXSERVE_GROUP"])
me["secret"] = os.environ["JAXSERVE_GROUP_SECRET"]
with open("%s/%d.json" % (sys.argv[1], me["worker"]), "w") as file:
    json.dump(me, file)
if me["worker"] < 0:  # until the other host's have come
    import time
    while not os.path.exists(sys.argv[1] + "/1.json"):
        time.sleep(0.05)
"""


def test_two_tasks_of_slurm_make_one_group(tmp_path):
    words = [sys.executable, "-S", "-E", "-c", SHOWS, str(tmp_path)]
    tasks = [started(tmp_path, words=words, SLURM_PROCID=str(n), **TASK) for n in range(2)]
    try:
        said = [task.communicate(timeout=SOON)[1] for task in tasks]
        assert [task.returncode for task in tasks] == [0, 0], said
        assert "launch: Slurm: number 1 of 2, leader on 127.0.0.1" in said[1]
        told = [json.loads((tmp_path / f"{number}.json").read_text()) for number in (-1, 0, 1)]
        assert len({member["secret"] for member in told}) == 1 and len(told[0]["secret"]) == 64
        assert {(m["host"], m["port"], m["workers"]) for m in told} == {("127.0.0.1", PORT, 2)}
        assert list((tmp_path / "cache" / "groups").iterdir()) == []
    finally:
        for task in tasks:
            task.kill()


def test_srun_of_one_task_is_a_group_on_one_machine(tmp_path):
    if shutil.which("true") is None:
        pytest.skip("no such program here")
    alone = {**TASK, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}
    process = started(tmp_path, words=["true"], **alone)
    assert process.wait(SOON) == 0
