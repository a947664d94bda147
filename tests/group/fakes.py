"""Groups of small processes in place of a leader and workers, under a real supervisor in a process
of its own. Files in a folder tell each member what to do."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from tests.waiting import SOON, eventually

ROOT = Path(__file__).parents[2]
# members beat twenty times a second, if they get a core; tests of silent ones give another limit
QUICK = {
    "SILENT_SECONDS": 30.0,
    "BUSY_SECONDS": 30.0,
    "END_SECONDS": 5.0,
    "MAX_PAUSE_SECONDS": 0.1,
}
SILENT = 3.0  # a limit of silence, in seconds

SUPERVISOR = """
import json, os, signal, sys
from jaxserve.group import supervisor
from jaxserve.group.member import LEADER, Member
spec = json.loads(sys.argv[1])
if spec["ignores_children"]:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for name, value in spec["constants"].items():
    getattr(supervisor, name)  # there is one
    setattr(supervisor, name, value)
members = [Member(number, spec["workers"], "127.0.0.1", 1) for number in range(spec["workers"])]
if spec["leads"]:
    members.insert(0, Member(LEADER, spec["workers"], "127.0.0.1", 1))
say = lambda text: print(f"launch: {text}", file=sys.stderr, flush=True)
sys.exit(supervisor.Supervisor(members, spec["command"], os.environ, say).run())
"""

# A member: beats, does what the file FOLDER/NAME.WHAT says, and tells FOLDER/NAME.log of itself.
MEMBER = """
import json, os, signal, sys, time
folder = sys.argv[1]
me = json.loads(os.environ["JAXSERVE_GROUP"])
leads = me["worker"] < 0
name = "leader" if leads else "worker%d" % me["worker"]

def order(what):
    try:
        with open("%s/%s.%s" % (folder, name, what)) as file:
            return file.read()
    except FileNotFoundError:
        return None

def note(text):
    with open("%s/%s.log" % (folder, name), "a") as log:
        log.write("%d %s\\n" % (os.getpid(), text))

def end(code):
    if leads:
        open(folder + "/over", "w").close()  # the leader tells its workers
    sys.exit(code)

def signalled(number, frame):
    note("signal %d" % number)
    time.sleep(float(order("drain") or 0))
    end(int(order("drained") or 0))

if order("default_signals") is None:
    signal.signal(signal.SIGTERM, signalled)
    signal.signal(signal.SIGINT, signalled)
if order("starts_child") is not None:
    import subprocess
    text = "import sys, time; time.sleep(1000)"
    child = subprocess.Popen([sys.executable, "-S", "-c", text, folder])
    note("child %d" % child.pid)
note("started")
if order("fails") is not None:
    sys.exit(int(order("fails")))
while True:
    if order("exit") is not None:
        code = int(order("exit"))
        os.unlink("%s/%s.exit" % (folder, name))
        end(code)
    if not leads and os.path.exists(folder + "/over") and order("stubborn") is None:
        sys.exit(0)
    if order("mute") is None:
        said = order("says") or json.dumps({"state": order("state") or "ready"})
        os.write(me["pipe"], said.encode("latin-1") + b"\\n")
    time.sleep(0.05)
"""


class Group:
    """A supervisor and its members. folder: an empty one. constants: of the supervisor's module."""

    def __init__(
        self,
        folder: Path,
        workers: int = 2,
        *,
        leads: bool = True,
        orders: dict[str, str] | None = None,
        command: list[str] | None = None,
        ignores_children: bool = False,
        **constants: float,
    ):
        self.folder = folder
        self.names = ["leader"] * leads + [f"worker{number}" for number in range(workers)]
        for what, text in (orders or {}).items():
            (folder / what).write_text(text)
        command = command or [sys.executable, "-S", "-E", "-c", MEMBER]
        spec = {
            "constants": {**QUICK, **constants},
            "workers": workers,
            "leads": leads,
            "command": [*command, str(folder)],
            "ignores_children": ignores_children,
        }
        with open(folder / "stderr", "wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-c", SUPERVISOR, json.dumps(spec)],
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
            )

    def order(self, name: str, what: str, text: str = "") -> None:
        """Tells a member something, whole or not at all."""
        part = self.folder / f"{name}.part"
        part.write_text(text)
        part.replace(self.folder / f"{name}.{what}")

    def notes(self, name: str) -> list[tuple[int, str]]:
        """(process, what it noted), of all processes that had this name."""
        with contextlib.suppress(FileNotFoundError):
            lines = (self.folder / f"{name}.log").read_text().splitlines()
            return [(int(pid), text) for pid, _, text in (line.partition(" ") for line in lines)]
        return []

    def pids(self, name: str) -> list[int]:
        return [pid for pid, text in self.notes(name) if text == "started"]

    def pid(self, name: str) -> int:
        """The process that has this name now."""
        return self.pids(name)[-1]

    def started(self, times: int = 1, *names: str) -> None:
        """Waits until members, all by default, were started so often."""
        eventually(lambda: all(len(self.pids(name)) >= times for name in names or self.names))

    @property
    def said(self) -> str:
        """Returns what the supervisor and its members wrote to stderr."""
        return (self.folder / "stderr").read_text()

    def ready(self, times: int = 1) -> None:
        """Waits until the supervisor has said so often that tokens come."""
        self.started()
        eventually(lambda: self.said.count("launch: ready:") >= times)

    def kill(self, name: str, number: int = signal.SIGKILL) -> int:
        """Sends a signal to a member; returns which process that was."""
        pid = self.pid(name)
        os.kill(pid, number)
        return pid

    def code(self) -> int:
        """Waits for the supervisor's end."""
        return self.process.wait(SOON)

    def left(self) -> list[psutil.Process]:
        """Processes of this group that are there, of whatever parent."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                words = process.cmdline()
                if process.pid != self.process.pid and str(self.folder) in words:
                    found.append(process)
        return found

    def close(self) -> None:
        """Ends all, and fails where a supervisor that had ended left something behind."""
        ended = self.process.poll() is not None
        try:
            if ended:
                eventually(lambda: not self.left())
        finally:
            self.process.kill()
            for process in self.left():
                with contextlib.suppress(psutil.Error):
                    process.kill()
            self.process.communicate(timeout=SOON)
