"""A process that kills writers of a store at random moments and reads what they left:
`python -m tests.store.killed_writers FOLDER KILLS SEED`. Prints, as JSON, how many blocks were read
back right, how many were torn, and how many were wrong.

Writers are forked, for that takes a hundredth of a new interpreter's start; hence this process of
its own, which has no other thread.
"""

import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

from jaxserve.store.disk import DiskBlocks
from jaxserve.store.record import record_bytes
from tests.store.fakes import block_of, key_of

BLOCK = 200_000
RECORDS = 40
KEYS = 120


def store_in(folder: Path) -> DiskBlocks:
    return DiskBlocks(folder, RECORDS * record_bytes(BLOCK), BLOCK)


def write_for_ever(folder: Path, seed: int) -> None:
    store = store_in(folder)

    def use(thread: int) -> None:
        rng = random.Random(1000 * seed + thread)
        into = bytearray(BLOCK)
        while True:
            key = key_of(rng.randrange(KEYS))
            store.put(key, block_of(key, BLOCK), keep=rng.random() < 0.2)
            store.get(key_of(rng.randrange(KEYS)), into)

    for thread in range(3):
        threading.Thread(target=use, args=(thread,)).start()


def kill_one(folder: Path, seed: int, after: float) -> None:
    writer = os.fork()
    if not writer:
        write_for_ever(folder, seed)
        threading.Event().wait()
    time.sleep(after)
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)


def read_back(folder: Path) -> dict[str, int]:
    store = store_in(folder)
    into = np.zeros(BLOCK, np.uint8)
    found = {"right": 0, "torn": 0, "wrong": 0}
    for key in sorted(store.keys()):
        if not store.get(key, into):
            found["torn"] += 1
        elif (into == block_of(key, BLOCK)).all():
            found["right"] += 1
        else:
            found["wrong"] += 1
    store.close()
    return found


def main() -> None:
    folder, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    rng = random.Random(seed)
    rounds = []
    for turn in range(kills):
        kill_one(folder, seed + turn, 0.05 + 0.15 * rng.random())
        rounds.append(read_back(folder))
    print(json.dumps(rounds))


if __name__ == "__main__":
    main()
