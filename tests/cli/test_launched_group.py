"""`jaxserve launch`: a command as a group of processes, end to end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.group.member import VARIABLE

LAUNCH = [sys.executable, "-m", "jaxserve", "launch"]


MARK = f"GROUP_OF_TEST={os.getpid()}"  # tells our groups from others on this machine
ENVIRONMENT = {**os.environ, **dict([MARK.split("=")])}


def launch(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*LAUNCH, *arguments], capture_output=True, text=True, timeout=400, env=ENVIRONMENT
    )


def members() -> list[int]:
    """Processes of the groups that were started here."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        ours = MARK.encode() in variables
        if ours and any(variable.startswith(f"{VARIABLE}=".encode()) for variable in variables):
            found.append(int(folder.name))
    return found


# fixtures: a model, and what it must say
FIRST_LAYERS = ("smollm2_first_layers", "golden_first_layers")
WHOLE = ("smollm2_gguf", "golden")


@pytest.mark.parametrize(
    "model, processes, mesh",
    [
        pytest.param(FIRST_LAYERS, "2", "spp=2", id="first layers"),
        pytest.param(WHOLE, "2", "spp=2", marks=pytest.mark.matrix),
        pytest.param(WHOLE, "2", "spp=2,kvp=2,tp=3", marks=pytest.mark.matrix),
        pytest.param(WHOLE, "4", "spp=2,kvp=2,tp=3", marks=pytest.mark.matrix),
    ],
)
def test_generate_prints_what_the_reference_says(model, processes, mesh, request, tmp_path):
    checkpoint, golden = map(request.getfixturevalue, model)
    cases = [case for case in golden["cases"] if len(case["prompt_ids"]) < 400]
    lines = [
        {
            "prompt_ids": case["prompt_ids"],
            "max_tokens": len(case["output_ids"]),
            "ignore_eos": True,
        }
        for case in cases
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    done = launch(
        f"--processes={processes}",
        "--",
        "generate",
        f"--model={checkpoint}",
        f"--mesh={mesh}",
        f"--input={file}",
        "--json",
        "--dtype=float32",
        "--max_model_len=512",
        "--max_seqs=4",
        "--pages=160",
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line)["output_ids"] for line in done.stdout.splitlines()]
    assert found == [case["output_ids"] for case in cases]
    assert "worker 1: " in done.stderr and "tokens come" in done.stderr


@pytest.mark.matrix
def test_a_script_with_an_llm_runs_as_it_is(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from jaxserve.api.sampling import SamplingParams\n"
        "from jaxserve.llm import LLM\n"
        "for salt in (1, 2):\n"
        "    with LLM('random:tiny', 'spp=2', max_model_len=256) as llm:\n"
        "        done = llm.generate([[5, 6, 7 + salt]], SamplingParams(max_tokens=4))\n"
        "        print(len(done[0].ids))\n"
    )
    done = launch("--processes=2", "--", sys.executable, str(script))
    assert (done.returncode, done.stdout.split()) == (0, ["4", "4"]), done.stderr
    assert not members()


@pytest.mark.matrix
def test_a_mesh_that_cannot_be_dealt_out_is_refused_at_once():
    done = launch("--processes=3", "--", "generate", "--mesh=spp=2,kvp=2,tp=3", "--prompt=x")
    assert done.returncode == 2 and done.stdout == ""
    assert "--mesh: spp=2,kvp=2,tp=3 cannot be dealt out to 3 processes: each would" in done.stderr
    assert "it can to 1, 2, 4" in done.stderr and "Traceback" not in done.stderr
    assert not members()


@pytest.mark.matrix
def test_sigterm_ends_a_server_and_all_its_workers(tmp_path):
    command = [*LAUNCH, "--processes=2", "--", "serve", "--model=random:tiny", "--mesh=spp=2"]
    ports = ["--grpc_port=0", "--port=0", "--max_model_len=256", "--profile=none"]
    rest = [
        "--policy=fcfs",
        "--chunking=static",
        "--admission=queue",
        "--max_seqs=2",
        "--chunk_tokens=32",
    ]
    with open(tmp_path / "log", "w+") as log:
        process = subprocess.Popen(
            [*command, *ports, *rest], stdout=subprocess.PIPE, stderr=log, env=ENVIRONMENT
        )
        try:
            assert process.stdout.readline()  # it listens
            for _ in range(400):
                if "tokens come" in (tmp_path / "log").read_text():
                    break
                try:
                    process.wait(0.2)
                except subprocess.TimeoutExpired:
                    continue
                break
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert len(members()) >= 3
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()
    assert not members()
    assert not os.path.exists(f"/proc/{process.pid}")
