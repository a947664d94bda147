"""The chart's container starts, serves and ends as Kubernetes has it do, without a container: the
same command line and variables, on a root that is read-only and without capabilities where the
machine lets tests have that; other ports, and folders of the test for those of the container."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxserve.cli.main import main
from tests.conftest import QUICK_COMPILES
from tests.deploy import helm
from tests.deploy.command_lines import CommandLine, health_check, of_image, of_pods

ROOT = Path(__file__).parents[2]
TINY = {
    "model": "random:tiny",
    "max_model_len": 256,
    "max_seqs": 2,
    "chunk_tokens": 16,
    "min_chunk": 16,
    "profile": "none",
}
START_SECONDS = 240.0
KEYS = "/etc/jaxserve/keys/keys.yaml"
# A mount of its own for each writable folder; then the rest is read-only
SEALED = """
mount --make-rprivate /
for folder in "$@"; do mount --bind "$folder" "$folder"; done
mount -o remount,ro,bind /
exec setpriv --no-new-privs --inh-caps=-all --bounding-set=-all
"""

pytestmark = pytest.mark.skipif(helm.helm() is None, reason=f"no helm: `{helm.COMMAND}`")


def sealed(folders: list[str], command: list[str]) -> list[str]:
    """The command, on a root that is read-only but for the folders, where that can be had."""
    script = SEALED.strip() + " " + shlex.join(command)
    prefix = ["unshare", "--mount", "bash", "-e", "-c"]
    try:
        probe = [*prefix, SEALED.strip() + " true", "probe", *folders]
        possible = subprocess.run(probe, capture_output=True, timeout=30).returncode == 0
    except OSError:
        possible = False
    return [*prefix, script, "sealed", *folders] if possible else command


def placed(line: CommandLine, folder: Path) -> CommandLine:
    """Places a command line in a folder that stands for the container's root; its files are written
    there, with the modes that volumes of Secrets have, and its folders made as `fsGroup` leaves
    volumes."""

    def here(text: str) -> str:
        return re.sub(r"(^|=)/(etc|cache)/", rf"\1{folder}/\2/", text)

    for name, text in line.files.items():
        path = folder / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o440)
    folders = [folder / name.lstrip("/") for name in line.folders]
    for each in folders:
        each.mkdir(parents=True)
        each.chmod(0o2775)
    own = {"JAXSERVE_CACHE", "HF_HOME"}
    return CommandLine(
        [here(argument) for argument in line.arguments],
        {name: here(text) if name in own else text for name, text in line.environment.items()},
        line.files,
        [str(each) for each in folders],
        line.grace,
    )


@pytest.fixture
def container(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[CommandLine, str]:
    """The chart's container, with a tiny model; and an API key."""
    (line,) = of_pods(helm.render({"settings": TINY}), of_image())
    keys = tmp_path / "keys.yaml"
    assert main(["keys", f"--file={keys}", "--add=test"]) == 0
    key = capsys.readouterr().out.split()[-1]
    line.files = {**line.files, KEYS: keys.read_text()}
    return placed(line, tmp_path / "root"), key


@pytest.fixture
def server(container: tuple[CommandLine, str], tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    line, _ = container
    scratch = next(folder for folder in line.folders if folder.endswith("/tmp"))
    environment = {
        **line.environment,
        "PATH": os.environ["PATH"],
        "HOME": next(folder for folder in line.folders if folder.endswith("/cache")),
        "TMPDIR": scratch,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": " ".join(QUICK_COMPILES),
    }
    own = ["--host=127.0.0.1", "--port=0", "--grpc_port=0"]  # not where others may listen
    command = [sys.executable, "-m", "jaxserve", *line.arguments, *own]
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(
            sealed(line.folders, command),
            cwd="/",
            env=environment,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def get(url: str, body: dict | None = None, key: str = "") -> tuple[int, bytes]:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, data, headers), timeout=30
        ) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def address(process: subprocess.Popen[str]) -> str:
    """Returns the address of HTTP that the server prints."""
    assert process.stdout is not None
    for text in process.stdout:
        if found := re.search(r"http://\S+", text):
            return found[0].rstrip("/")
    raise AssertionError("the server told no address")


def docker_says_healthy(url: str) -> bool:
    """By the image's HEALTHCHECK, at the server's port."""
    python, *arguments = health_check()
    assert python == "python"
    there = [argument.replace("http://127.0.0.1:8000", url) for argument in arguments]
    return subprocess.run([sys.executable, *there], capture_output=True, timeout=30).returncode == 0


def test_the_container_serves_and_drains(container, server, tmp_path):
    line, key = container
    url = address(server)
    assert get(f"{url}/health")[0] == 200  # it lives while it loads
    until = time.monotonic() + START_SECONDS
    while get(f"{url}/ready")[0] != 200:
        assert time.monotonic() < until and server.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.2)
    body = {"model": "random:tiny", "prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}
    assert get(f"{url}/v1/completions", body)[0] == 401
    status, answer = get(f"{url}/v1/completions", body, key)
    assert status == 200 and json.loads(answer)["usage"]["completion_tokens"] == 4

    assert docker_says_healthy(url)
    server.send_signal(signal.SIGTERM)
    assert server.wait(line.grace) == 0, (tmp_path / "log").read_text()
    cache = Path(line.environment["JAXSERVE_CACHE"])
    assert cache.stat().st_mode & 0o077 == 0
    assert list(cache.glob("**/*")), "nothing was kept for the next start"
    assert not docker_says_healthy(url)
