"""Dynamo's own indexer of KV reads our events: `python -m dynamo.indexer` subscribes to a real
publisher and is asked over HTTP how much of a prompt a replica has.

Needs ai-dynamo-runtime 1.6 in the environment of JAXSERVE_DYNAMO_PYTHON, or in this one.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import httpx
import numpy as np
import pytest

from jaxserve.cache.block_events import Medium, StoredBlocks
from jaxserve.group.channel import free_port
from jaxserve.observe.kv_event_publisher import KvEventPublisher, topic_of
from jaxserve.observe.kv_events import KvEventLog
from tests.waiting import eventually

PYTHON = os.environ.get("JAXSERVE_DYNAMO_PYTHON", sys.executable)
MODEL = "tiny"
WORKER = 7
SIZE = 16
BLOCKS = 4
PROMPT = tuple(range(100, 100 + BLOCKS * SIZE))
SALT = "tenant-a"
START_SECONDS = 60.0
STOP_SECONDS = 10.0


def dynamo(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python code where Dynamo is."""
    command = [PYTHON, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=START_SECONDS)


@pytest.fixture(scope="module")
def installed() -> None:
    with contextlib.suppress(OSError):
        if dynamo("import dynamo.indexer").returncode == 0:
            return
    pytest.skip(f"{PYTHON} has no ai-dynamo-runtime 1.6: set JAXSERVE_DYNAMO_PYTHON")


class Indexer:
    """A process of Dynamo's indexer that listens to one replica."""

    def __init__(self, endpoint: str, port: int):
        arguments = [f"--port={port}", f"--block-size={SIZE}", f"--model-name={MODEL}"]
        workers = f"--workers={WORKER}={endpoint}"
        command = [PYTHON, "-m", "dynamo.indexer", *arguments, workers]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=5)

    @property
    def healthy(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return self._client.get("/health").status_code == 200
        return False

    def overlap(self, tokens: tuple[int, ...], salt: str = "") -> int:
        """Tokens at a prompt's beginning that the replica has, by its index."""
        answer = self._client.post(
            "/query_by_hash",
            json={"block_hashes": hashes_of(tokens, salt), "model_name": MODEL},
        )
        answer.raise_for_status()
        return most(answer.json())

    def close(self) -> None:
        self._client.close()
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_SECONDS)


@functools.cache
def hashes_of(tokens: tuple[int, ...], salt: str) -> list[int]:
    """Dynamo's own hashes of a prompt's blocks in a cache namespace, as its frontend makes them."""
    code = (
        "import json, sys; from dynamo.llm import compute_block_hash_for_seq as of;"
        "tokens, size, salt = json.loads(sys.argv[1]);"
        "print(json.dumps(of(tokens, size, cache_namespace=salt or None)))"
    )
    ran = dynamo(code, json.dumps([tokens, SIZE, salt]))
    assert ran.returncode == 0, ran.stderr
    signed = np.array(json.loads(ran.stdout), np.uint64).view(np.int64)
    return [int(value) for value in signed]


def most(answer: dict) -> int:
    """The score of our worker's only rank in an answer of the indexer; 0 where it has none."""
    return answer["scores"].get(str(WORKER), {}).get("0", 0)


@pytest.fixture
def publisher() -> Iterator[KvEventPublisher]:
    pytest.importorskip("zmq", reason="pip install 'jaxserve[cluster]'")
    found = KvEventPublisher("tcp://127.0.0.1:0")
    yield found
    found.close()


@pytest.fixture
def indexer(installed: None, publisher: KvEventPublisher) -> Iterator[Indexer]:
    found = Indexer(publisher.endpoint, free_port("127.0.0.1"))
    try:
        eventually(lambda: found.healthy, START_SECONDS)
        yield found
    finally:
        found.close()


def store(events: KvEventLog, salt: str, first: int = 0, stop: int = BLOCKS) -> list[bytes]:
    """Stores blocks of the prompt; their keys are of the salt, too."""
    key = lambda block: f"{salt:>8}{block:08d}".encode()
    parent = key(first - 1) if first else None
    tokens = np.array(PROMPT[first * SIZE : stop * SIZE], np.int32)
    keys = [key(block) for block in range(first, stop)]
    events.stored(StoredBlocks(keys, parent=parent, tokens=tokens, salt=salt))
    return keys


def reached(overlap: Callable[[], int], tokens: int) -> None:
    eventually(lambda: overlap() == tokens, START_SECONDS)


def test_dynamos_indexer_finds_a_salted_prompt_by_its_salt_alone(
    indexer: Indexer, publisher: KvEventPublisher
) -> None:
    events = publisher.start(topic_of("127.0.0.1:8000", MODEL), SIZE)
    store(events, SALT, 0, 2)
    store(events, SALT, 2)  # in an event of its own, after a parent: salted as well
    reached(lambda: indexer.overlap(PROMPT, SALT), len(PROMPT))
    assert indexer.overlap(PROMPT) == 0
    assert indexer.overlap(PROMPT, "tenant-b") == 0
    keys = store(events, "", 0, 3)
    reached(lambda: indexer.overlap(PROMPT), 3 * SIZE)
    assert indexer.overlap(PROMPT, SALT) == len(PROMPT)
    events.removed(keys, Medium.DEVICE)
    reached(lambda: indexer.overlap(PROMPT), 0)
    assert indexer.overlap(PROMPT, SALT) == len(PROMPT)
