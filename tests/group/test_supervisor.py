"""The supervisor of a group: real processes that end, hang and are killed."""

import contextlib
import os
import signal
import sys
import time

import psutil
import pytest

from jaxserve.group import supervisor
from jaxserve.group.member import BEAT_SECONDS, LOST, REFUSED
from tests.group.fakes import SILENT, Group
from tests.waiting import SOON, eventually

WORKERS = ("worker0", "worker1")
ALL = ("leader", *WORKERS)
BEATS = 1.0  # seconds in which a fake member beats several times


@pytest.fixture
def group(tmp_path):
    """Starts groups; nothing of them is left when a test ends."""
    made = []

    def start(*arguments, **fields):
        made.append(Group(tmp_path, *arguments, **fields))
        return made[-1]

    yield start
    for each in made:
        each.close()


def gone(pids):
    """Returns True if none of the processes runs any more. One that has lost its parent is reaped
    by process 1, at some time or never."""
    return not any(runs(pid) for pid in pids)


def runs(pid):
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


# --- the end of a command


@pytest.mark.parametrize("code", [0, 1, 3])
def test_the_leaders_exit_code_is_the_groups(group, code):
    running = group()
    running.ready()
    running.order("leader", "exit", str(code))
    assert running.code() == code
    assert [len(running.pids(name)) for name in ALL] == [1, 1, 1] and not running.left()


def test_workers_that_do_not_end_by_themselves_are_ended(group):
    running = group(orders={"worker1.stubborn": ""}, END_SECONDS=0.5)
    running.ready()
    running.order("leader", "exit", "0")
    assert running.code() == 0 and not running.left()


def test_workers_that_end_before_the_leader_are_not_started_again(group):
    running = group()
    running.ready()
    for name in WORKERS:
        running.order(name, "exit", "0")
    eventually(lambda: len(running.left()) <= 3 and not (running.folder / "worker1.exit").exists())
    time.sleep(0.5)
    running.order("leader", "exit", "0")
    assert running.code() == 0
    assert [len(running.pids(name)) for name in ALL] == [1, 1, 1]


TALKS = """
import json, os, sys
leads = json.loads(os.environ["JAXSERVE_GROUP"])["worker"] < 0
print("from the leader" if leads else "from a worker", sys.stdin.readline().strip())
"""


def test_stdin_and_stdout_are_the_leaders_and_workers_speak_to_stderr(group):
    running = group(command=[sys.executable, "-S", "-E", "-c", TALKS])
    out, _ = running.process.communicate(b"a line\n", SOON)
    assert out == b"from the leader a line\n"
    eventually(lambda: "from the leader" not in running.said)
    assert running.process.returncode == 0


def test_a_worker_that_was_refused_ends_the_group(group):
    running = group(orders={"worker1.fails": str(REFUSED)})
    assert running.code() == REFUSED and not running.left()
    assert len(running.pids("worker1")) == 1


def test_the_number_of_a_dead_process_is_no_others_until_its_children_are_killed(group):
    """A signal to its process group could meet a stranger otherwise."""
    running = group(orders={"worker1.stubborn": ""}, END_SECONDS=5.0)
    running.ready()
    pid = running.pid("leader")
    running.order("leader", "exit", "0")
    eventually(lambda: (running.folder / "over").exists())
    eventually(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    time.sleep(0.3)
    assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert running.code() == 0 and gone([pid])


def test_exit_codes_are_known_also_where_the_caller_ignores_the_end_of_children(group):
    running = group(ignores_children=True)
    running.ready()
    running.kill("worker0")
    running.started(2, *WORKERS)
    running.order("leader", "exit", "3")
    assert running.code() == 3


# --- members that die or hang


def test_after_a_worker_died_all_workers_start_anew_and_the_leader_goes_on(group):
    running = group(3)
    running.ready()
    before = {name: running.pid(name) for name in running.names}
    running.kill("worker1")
    running.started(2, "worker0", "worker1", "worker2")
    assert running.pids("leader") == [before["leader"]]
    assert gone(pid for name, pid in before.items() if name != "leader")
    assert f"worker 1 (process {before['worker1']}) ended with SIGKILL" in running.said
    assert "restarting worker 0, worker 1, worker 2" in running.said
    running.order("leader", "exit", "0")
    assert running.code() == 0


@pytest.mark.parametrize("code", [1, LOST])
def test_a_worker_that_ends_with_an_error_is_started_anew(group, code):
    running = group()
    running.ready()
    running.order("worker0", "exit", str(code))
    running.started(2, *WORKERS)
    assert f"ended with exit code {code}" in running.said
    assert len(running.pids("leader")) == 1


def test_a_worker_that_hangs_is_noticed_and_replaced(group):
    running = group(SILENT_SECONDS=SILENT)
    running.ready()
    stopped = running.kill("worker0", signal.SIGSTOP)
    running.started(2, *WORKERS)
    assert gone([stopped]) and len(running.pids("leader")) == 1
    assert f"worker 0 (process {stopped}) has said nothing for" in running.said


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_after_the_leader_died_or_hung_all_start_anew(group, number):
    running = group(SILENT_SECONDS=SILENT)
    running.ready()
    before = [running.pid(name) for name in ALL]
    running.kill("leader", number)
    running.started(2)
    assert gone(before)
    running.ready(2)
    assert "restarting leader, worker 0, worker 1" in running.said


def test_a_leader_that_ends_because_a_group_is_lost_is_started_anew(group):
    running = group()
    running.ready()
    running.order("leader", "exit", str(LOST))
    eventually(lambda: (running.folder / "over").exists())
    (running.folder / "over").unlink()
    running.started(2, "leader")


def test_all_members_at_once_can_be_killed(group):
    running = group()
    running.ready()
    for name in (*WORKERS, "leader"):
        running.kill(name)
    running.started(2)
    running.ready(2)


PULSE = """
import sys, time
from jaxserve.group.member import Pulse, this_member
member = this_member()
pulse = Pulse(member)
pulse.tell(state="ready")
name = "leader" if member.leads else f"worker{member.worker}"
import os
with open(f"{sys.argv[1]}/{name}.log", "a") as log:
    log.write(f"{os.getpid()} started\\n")
time.sleep(1000)
"""


def test_a_stopped_worker_is_known_within_ten_seconds(group):
    """Members beat as they do, with the limits as they are."""
    assert supervisor.SILENT_SECONDS + 2 * BEAT_SECONDS < 10
    running = group(command=[sys.executable, "-c", PULSE], SILENT_SECONDS=supervisor.SILENT_SECONDS)
    running.ready()
    began = time.monotonic()
    running.kill("worker1", signal.SIGSTOP)
    running.started(2, *WORKERS)
    took = time.monotonic() - began
    assert took > supervisor.SILENT_SECONDS - 2 * BEAT_SECONDS
    assert len(running.pids("leader")) == 1


BUSY = """
import json, os, sys, time
me = json.loads(os.environ["JAXSERVE_GROUP"])
name = "leader" if me["worker"] < 0 else f"worker{me['worker']}"
with open(f"{sys.argv[1]}/{name}.log", "a") as log:
    log.write(f"{os.getpid()} started\\n")
silent_at = time.monotonic() + (1.0 if name == "worker1" else 1000.0)
while time.monotonic() < silent_at:
    os.write(me["pipe"], b'{"state": "ready"}\\n')
    time.sleep(0.05)
while True:
    pass
"""


def test_a_member_that_computes_may_say_nothing_for_longer(group):
    """Such as one that reads a program, with Python's lock, where others have the processors."""
    limits = {"SILENT_SECONDS": 1.0, "BUSY_SECONDS": 1000.0}
    running = group(command=[sys.executable, "-c", BUSY], **limits)
    running.ready()
    time.sleep(4.0)
    assert len(running.pids("worker1")) == 1


def test_a_member_that_computes_and_says_nothing_is_given_up_in_the_end(group):
    limits = {"SILENT_SECONDS": 1.0, "BUSY_SECONDS": 2.0}
    running = group(command=[sys.executable, "-c", BUSY], **limits)
    running.started(2, *WORKERS)


def test_a_member_that_has_not_spoken_yet_may_take_its_time(group):
    """Such as one that imports from a slow disk, or a command of another kind."""
    orders = {f"{name}.mute": "" for name in ALL}  # one that speaks might have no core for so long
    running = group(orders=orders, SILENT_SECONDS=0.5)
    running.started()
    time.sleep(1.2)
    running.order("leader", "exit", "0")
    assert running.code() == 0
    assert [len(running.pids(name)) for name in ALL] == [1, 1, 1]


def test_what_a_member_says_that_is_no_beat_harms_nobody(group):
    running = group(orders={"worker0.says": '\xff{"state', "worker1.says": "[]\n3\n\nnull"})
    running.ready()
    time.sleep(0.3)
    running.order("leader", "exit", "4")
    assert running.code() == 4 and len(running.pids("worker0")) == 1


def test_a_supervisor_that_was_stopped_does_not_take_its_members_for_dead(group):
    running = group(SILENT_SECONDS=SILENT)
    running.ready()
    running.process.send_signal(signal.SIGSTOP)
    time.sleep(SILENT + 1)
    running.process.send_signal(signal.SIGCONT)
    time.sleep(0.5)
    assert [len(running.pids(name)) for name in ALL] == [1, 1, 1]
    running.order("leader", "exit", "5")
    assert running.code() == 5


# --- starts that fail


def test_a_group_that_never_makes_a_token_is_given_up(group):
    running = group(orders={"leader.state": "waiting", "worker0.fails": "1"})
    assert running.code() == LOST and not running.left()
    assert len(running.pids("worker0")) == supervisor.MAX_FAILURES
    assert f"{supervisor.MAX_FAILURES} starts in a row without a token: given up" in running.said


def test_a_leaders_word_from_before_does_not_count_for_new_workers(group):
    """It says that it is ready, for it has not noticed yet; the new workers never are."""
    running = group()
    running.ready()
    running.order("worker0", "fails", "1")
    running.kill("worker0")
    assert running.code() == LOST
    assert len(running.pids("worker0")) == 1 + supervisor.MAX_FAILURES
    assert running.said.count("launch: ready:") == 1


def test_a_start_that_made_a_token_makes_good_for_those_that_failed(group):
    running = group(MAX_FAILURES=2)
    running.ready()
    for times in range(2, 6):
        running.order("leader", "state", "waiting")
        time.sleep(BEATS)  # else new workers may have started before the leader says so
        running.kill("worker1")
        running.started(times, *WORKERS)
        running.order("leader", "state", "ready")
        running.ready(times)
    assert len(running.pids("leader")) == 1


def test_pauses_between_starts_that_fail_grow(group):
    running = group(
        orders={"leader.state": "waiting", "worker0.fails": "1"},
        MAX_PAUSE_SECONDS=1.5,
        MAX_FAILURES=3,
    )
    assert running.code() == LOST
    pauses = [
        line.partition(" in ")[2] for line in running.said.splitlines() if "restarting" in line
    ]
    assert pauses == ["1 s", "1.5 s"]


def test_a_signal_ends_the_pause_before_a_start(group):
    running = group(orders={"leader.state": "waiting", "worker0.fails": "1"}, MAX_PAUSE_SECONDS=30)
    eventually(lambda: " in 4 s" in running.said)
    starts = len(running.pids("worker0"))
    running.process.send_signal(signal.SIGTERM)
    assert running.code() == 0 and len(running.pids("worker0")) == starts


def test_a_leader_that_ends_during_the_pause_ends_the_group(group):
    running = group(orders={"leader.state": "waiting", "worker0.fails": "1"}, MAX_PAUSE_SECONDS=30)
    eventually(lambda: " in 4 s" in running.said)
    starts = len(running.pids("worker0"))
    running.order("leader", "exit", "6")
    assert running.code() == 6 and len(running.pids("worker0")) == starts


# --- signals to the supervisor


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_goes_to_the_leader_which_ends_its_workers(group, number):
    running = group(orders={"leader.drain": "0.5", "leader.drained": "7"})
    running.ready()
    began = time.monotonic()
    running.process.send_signal(number)
    assert running.code() == 7 and time.monotonic() - began >= 0.5
    assert [text for _, text in running.notes("leader")] == ["started", f"signal {int(number)}"]
    assert [text for name in WORKERS for _, text in running.notes(name)] == ["started"] * 2


def test_a_leader_that_a_signal_ends_gives_the_code_that_shells_know(group):
    running = group(orders={"leader.default_signals": "", "worker0.stubborn": ""}, END_SECONDS=0.3)
    running.ready()
    running.process.send_signal(signal.SIGTERM)
    assert running.code() == 128 + signal.SIGTERM and not running.left()


def test_a_second_signal_ends_all_at_once(group):
    running = group(orders={"leader.drain": "1000"}, SILENT_SECONDS=1000)
    running.ready()
    running.process.send_signal(signal.SIGTERM)
    eventually(lambda: len(running.notes("leader")) == 2)
    time.sleep(0.2)
    assert running.process.poll() is None
    running.process.send_signal(signal.SIGTERM)
    assert running.code() == 128 + signal.SIGTERM  # long before the leader has drained
    assert not running.left()


def test_a_leader_that_hangs_does_not_hold_the_end(group):
    running = group(SILENT_SECONDS=SILENT)
    running.ready()
    running.kill("leader", signal.SIGSTOP)
    running.process.send_signal(signal.SIGTERM)
    assert running.code() == 128 + signal.SIGTERM and not running.left()


def test_a_signal_at_the_very_start_leaves_nothing(group):
    running = group()
    running.started(1, "leader")
    running.process.send_signal(signal.SIGTERM)
    running.code()
    assert not running.left()


@pytest.mark.parametrize("stopped", [(), ALL], ids=["", "stopped members"])
def test_no_member_outlives_a_supervisor_that_is_killed(group, stopped):
    running = group()
    running.ready()
    pids = [running.pid(name) for name in ALL]
    for name in stopped:
        running.kill(name, signal.SIGSTOP)
    running.process.kill()
    assert running.code() == -signal.SIGKILL
    eventually(lambda: gone(pids) and not running.left())


def test_what_members_have_started_ends_with_them(group):
    orders = {f"{name}.starts_child": "" for name in ALL}
    running = group(orders=orders)
    running.ready()

    def children(name):
        return [int(text.split()[1]) for _, text in running.notes(name) if "child" in text]

    first = [children(name)[0] for name in ALL]
    assert not gone(first[:1])
    running.kill("worker0")
    running.started(2, *WORKERS)
    assert gone(first[1:]) and runs(first[0])
    running.order("leader", "exit", "0")
    assert running.code() == 0
    eventually(lambda: gone(pid for name in ALL for pid in children(name)))


# --- what is left while it runs


def test_starting_anew_leaves_no_zombies_and_no_open_files(group):
    running = group(MAX_FAILURES=1000)
    running.ready()
    process = psutil.Process(running.process.pid)
    files = process.num_fds()
    for times in range(2, 7):
        running.kill("leader" if times % 2 else "worker1")
        running.started(times, *WORKERS)
    eventually(lambda: process.num_fds() <= files)
    children = process.children()
    assert len(children) == 3
    assert psutil.STATUS_ZOMBIE not in [child.status() for child in children]


def test_a_member_has_no_files_of_the_others(group):
    running = group()
    running.ready()
    with contextlib.suppress(psutil.AccessDenied):
        for name in ALL:
            folder = f"/proc/{running.pid(name)}/fd"
            pipes = [os.readlink(f"{folder}/{number}") for number in os.listdir(folder)]
            # its own, and the test's at stdin and stdout of the leader
            assert sum("pipe:" in pipe for pipe in pipes) == (3 if name == "leader" else 1)


def test_a_command_that_cannot_be_run_is_told_and_leaves_nothing(group):
    running = group(command=["/no/such/command"])
    assert running.code() == 1
    assert "/no/such/command" in running.said and not running.left()


# --- a machine that has workers only


def test_workers_whose_leader_is_elsewhere_end_with_it(group):
    running = group(leads=False)
    running.ready()
    running.order("worker0", "exit", "0")
    time.sleep(0.3)
    assert running.process.poll() is None
    running.order("worker1", "exit", "0")
    assert running.code() == 0
    assert [len(running.pids(name)) for name in WORKERS] == [1, 1]


def test_workers_that_have_lost_their_leader_start_anew_however_often(group):
    running = group(leads=False, MAX_FAILURES=2)
    for times in range(1, 5):
        running.ready(times)
        running.order("worker0", "exit", str(LOST))
        running.started(times + 1)
    assert running.process.poll() is None


def test_workers_that_find_no_leader_are_given_up(group):
    running = group(leads=False, orders={"worker0.fails": str(LOST), "worker1.state": "joining"})
    assert running.code() == LOST and not running.left()
    assert len(running.pids("worker0")) == supervisor.MAX_FAILURES


def test_a_signal_ends_workers_whose_leader_is_elsewhere(group):
    running = group(leads=False)
    running.ready()
    running.process.send_signal(signal.SIGTERM)
    assert running.code() == 0 and not running.left()
    assert [text for _, text in running.notes("worker1")] == ["started", "signal 15"]
