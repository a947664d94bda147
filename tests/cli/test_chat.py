"""`jaxserve chat` and `complete`: what a person at a terminal, and a pipe, see of a server."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import time

import pytest

from jaxserve.cli.main import main
from tests.server.fakes import EOS, FakeReplica, next_token
from tests.server.keyed import sha

SECONDS = 60.0


def served_saying(serve, text: str, **config):
    return serve(FakeReplica(script=[*text.encode(), EOS]), **config)


def url(served) -> str:
    return f"--url={served.server.url}"


def noted(served) -> list[str]:
    """Prompts of requests to come, as texts."""
    seen: list[str] = []
    submit = served.engine.submit

    def take(request, sink):
        seen.append(bytes(token for token in request.prompt.tolist() if token < 256).decode())
        submit(request, sink)

    served.engine.submit = take
    return seen


def test_lines_of_a_pipe_are_messages_of_one_conversation(serve, capsys, monkeypatch):
    served = served_saying(serve, "Fine.")
    seen = noted(served)
    monkeypatch.setattr(sys, "stdin", io.StringIO("How?\nSure?\n/clear\nAgain?\n"))
    assert main(["chat", url(served), "--system=Be brief."]) == 0
    assert capsys.readouterr().out == "Fine.\n" * 3
    assert "Be brief." in seen[1] and seen[1].index("How?") < seen[1].index("Fine.")
    assert seen[1].index("Fine.") < seen[1].index("Sure?")
    assert "How?" not in seen[2] and "Be brief." in seen[2]


def test_sampling_is_the_flags(serve, capsys, monkeypatch):
    served = serve(FakeReplica())
    monkeypatch.setattr(sys, "stdin", io.StringIO("x\n"))
    assert main(["chat", url(served), "--max_tokens=3", "--temperature=0.5", "--seed=7"]) == 0
    assert main(["complete", "ab", url(served), "--max_tokens=4", "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    expected = list(b"ab")
    for _ in range(4):
        expected.append(next_token(expected, 0))
    assert told["text"].encode() == bytes(expected[2:])
    assert (told["prompt_tokens"], told["tokens"], told["reason"]) == (2, 4, "length")


def test_a_text_goes_on_from_a_pipe(serve, capsys, monkeypatch):
    served = served_saying(serve, "Hello there")
    monkeypatch.setattr(sys, "stdin", io.StringIO("Say: "))
    assert main(["complete", url(served)]) == 0
    assert capsys.readouterr().out == "Hello there\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(["complete", url(served)]) == 2
    assert "--prompt: is empty" in capsys.readouterr().err


KEYS = f"""
keys:
  - {{name: one, sha256: {sha("a-key")}}}
"""


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_faults_are_told_in_a_line(command, serve, capsys, monkeypatch, tmp_path):
    def failed(*flags: str) -> str:
        monkeypatch.setattr(sys, "stdin", io.StringIO("x" * 20))
        assert main([command, *flags]) == 2
        said = capsys.readouterr().err.strip()
        assert "\n" not in said and "Traceback" not in said
        return said

    assert "--url: http://127.0.0.1:9" in failed("--url=http://127.0.0.1:9")
    assert "--url: " in failed("--url=nowhere")
    (tmp_path / "keys.yaml").write_text(KEYS)
    (tmp_path / "keys.yaml").chmod(0o600)
    keyed = served_saying(serve, "ok", api_keys=str(tmp_path / "keys.yaml"))
    assert "--api_key: " in failed(url(keyed)) and "--api_key: " in failed(
        url(keyed), "--api_key=b"
    )
    monkeypatch.setenv("JAXSERVE_API_KEY", "a-key")
    monkeypatch.setattr(sys, "stdin", io.StringIO("x"))
    assert main([command, url(keyed)]) == 0
    capsys.readouterr()
    model = "--model=other"
    assert "other" in failed(url(keyed), model)
    assert "max_tokens" in failed(url(keyed), "--max_tokens=0")


# Makes the terminal the process's own, so that Ctrl-C typed there is a signal, also where whoever
# started the tests ignores it; becomes the command then.
OWN_TERMINAL = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, "-m", "jaxserve", *sys.argv[1:]])
"""


class Terminal:
    """A command behind a pseudo terminal."""

    def __init__(self, *arguments: str):
        self._end, other = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWN_TERMINAL, *arguments],
            stdin=other,
            stdout=other,
            stderr=other,
            start_new_session=True,
        )
        os.close(other)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    def until(self, pattern: str) -> str:
        """Waits for a text; what was shown up to it is taken."""
        end = time.monotonic() + SECONDS
        while not (found := re.search(pattern, self.shown)):
            assert time.monotonic() < end, self.shown
            if select.select([self._end], [], [], 0.1)[0]:
                self.shown += os.read(self._end, 4096).decode(errors="replace")
        taken, self.shown = self.shown[: found.end()], self.shown[found.end() :]
        return taken

    def close(self) -> int:
        try:
            return self.process.wait(SECONDS)
        finally:
            self.process.kill()
            self.process.wait()
            os.close(self._end)


def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on(serve):
    served = serve(FakeReplica(step_seconds=0.02))
    seen = noted(served)
    terminal = Terminal("chat", url(served), "--max_tokens=3000")
    terminal.until(r">>> ")
    terminal.type("Talk\n")
    terminal.until(r"Talk\r\n.{3}")
    assert served.engine.requests
    terminal.type("\x03")
    terminal.until(r"ended by you")
    until = time.monotonic() + SECONDS
    while served.engine.requests:
        assert time.monotonic() < until, "the server goes on"
        time.sleep(0.01)
    terminal.until(r">>> ")
    terminal.type("More\n")
    terminal.until(r"More\r\n.{3}")
    assert "Talk" in seen[1] and "More" in seen[1]
    terminal.type("\x03")
    terminal.until(r">>> ")
    terminal.type("\x1b[A\n")  # the line before, by readline
    assert "More" in terminal.until(r"\r\n.{3}")
    terminal.type("\x03")
    terminal.until(r">>> ")
    assert seen[2].count("More") == 2
    terminal.type("/nothing\n")
    terminal.until(r"/nothing is not a command")
    terminal.until(r">>> ")
    terminal.type("\x04")
    assert terminal.close() == 0


def test_a_message_that_fails_is_taken_back_and_the_conversation_goes_on(serve):
    served = served_saying(serve, "Fine.")
    terminal = Terminal("chat", url(served))
    terminal.until(r">>> ")
    terminal.type("How?\n")
    terminal.until(r"tokens/s")
    terminal.until(r">>> ")
    served.engine.fault = RuntimeError("broken")
    terminal.type("Sure?\n")
    terminal.until(r"/clear forgets the conversation")
    served.engine.fault = None
    terminal.until(r">>> ")
    terminal.type("Again?\n")
    assert "Fine." in terminal.until(r"tokens/s")
    terminal.until(r">>> ")
    terminal.type("/quit\n")
    assert terminal.close() == 0


@pytest.mark.matrix
def test_a_model_of_this_machine_is_served_meanwhile(capsys, monkeypatch, smollm2_gguf):
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is the capital of France?\n"))
    flags = ["--max_tokens=8", "--temperature=0", "--max_model_len=256", "--profile=none"]
    assert main(["chat", str(smollm2_gguf), *flags]) == 0
    assert "Paris" in capsys.readouterr().out
