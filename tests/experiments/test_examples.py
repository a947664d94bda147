"""The examples run, each in a process of its own as a reader would start it, on a tiny model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.text.vocabulary import EOS, tokenizer
from tests.weights.models import TINY, tensors, write_folder

ROOT = Path(__file__).parents[2]
SMALL = {  # few programs, so that the server of an example is compiled soon
    "JAX_PLATFORMS": "cpu",
    "JAXSERVE_PROFILE": "none",
    "JAXSERVE_MAX_SEQS": "1",
    "JAXSERVE_CHUNK_TOKENS": "64",
    "JAXSERVE_KV_MEMORY_GIB": "0.01",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A folder with random weights and a tokenizer of bytes."""
    config = replace(TINY, vocab=tokenizer().vocab, eos_ids=(EOS,), max_len=512)
    folder = write_folder(tmp_path_factory.mktemp("model"), config, tensors(config))
    tokenizer().save(folder)
    return folder


def run(example: str, model: Path, *flags: str) -> str:
    """Runs an example; returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", f"experiments.examples.{example}", f"--model={model}", *flags],
        cwd=ROOT,
        env=os.environ | SMALL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_offline(model):
    lines = run("offline", model, "--mesh=tp=2").splitlines()
    assert [line.split(" -> ")[0] for line in lines] == [
        "'The capital of France is'",
        "'Once upon a time'",
    ]
    assert all(re.search(r"\((length|stop)\)$", line) for line in lines)


def test_structured_output(model):
    person, sky, date = re.fullmatch(
        r"Describe a person as JSON: (.*)\nThe sky is (.*)\nA date in the year 2000: (.*)\n",
        run("structured_output", model),
        re.DOTALL,
    ).groups()
    found = json.loads(person)
    assert found.keys() == {"name", "age"} and 0 <= found["age"] <= 120
    assert sky in ("blue", "green") and re.fullmatch(r"2000-\d\d-\d\d", date)


@pytest.mark.matrix
def test_both_clients_of_one_server_read_the_same(model):
    printed = run("client", model)
    grpc, http = re.fullmatch(r"gRPC: (.*)\nHTTP: (.*)\n", printed, re.DOTALL).groups()
    assert grpc == http and grpc
