"""A plane like those that users have, within one process, and what may go wrong with it."""

import functools
import importlib
import itertools
import threading
import time

import numpy as np
import pytest

from jaxserve.transfer import Window
from jaxserve.transfer.mooncake import MooncakePlane
from jaxserve.transfer.nixl import NixlPlane
from jaxserve.transfer.plane import Arrival, Staging
from jaxserve.transfer.staging_pool import StagingPool

NAME = "in-process"


def missing(module):
    """Why an engine is not there; '' where it is."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        return f"{module} is not installed: {error}"
    return ""


def engine(kind, module, name, size):
    """A parameter of tests: what makes an engine's plane with little memory, and its name."""
    why = missing(module)
    made = functools.partial(kind, send_bytes=size)
    return pytest.param(made, name, id=name, marks=pytest.mark.skipif(bool(why), reason=why))


def engines(size):
    """The planes of engines that users may have installed, as parameters of tests."""
    return [
        engine(MooncakePlane, "mooncake.engine", "mooncake-tcp", size),
        engine(NixlPlane, "nixl._api", "nixl", size),
    ]


EXPOSED = {}  # by place
NUMBERS = itertools.count()


class InProcessPlane:
    """A `Plane` by which the reader brings blocks: all planes of the process see what is exposed.

    harm: called with the number of each read and the bytes that it brings, as a copy; what it
    returns comes in their place, or, where that is a text, it is the fault.
    """

    writes = False

    def __init__(self, memory, host="127.0.0.1", harm=lambda number, data: data, name=NAME):
        self.name = name
        self.memory = memory
        self.address = host
        self.harm = harm
        self.reads = 0
        self.pool = StagingPool(np.empty(1 << 24, np.uint8))

    def lend(self, base, size, seconds):
        return Window("nowhere:1", "", size, next(NUMBERS))

    def bring(self, into, place, done):
        arrival = Arrival()
        number, self.reads = self.reads, self.reads + 1

        def run():
            began = time.monotonic()
            found = self.harm(number, EXPOSED[place].copy())
            if isinstance(found, str):
                arrival.error = found
            else:
                np.copyto(into, found)
            arrival.seconds = time.monotonic() - began
            arrival.over.set()
            done()

        threading.Thread(target=run, daemon=True).start()
        return arrival

    def end(self, window):
        pass

    def stage(self, size, seconds):
        staging = self.pool.take(size, seconds)
        return staging and Staging(staging.buffers, staging.close)

    def expose(self, data, window, offset, seconds):
        place = f"{next(NUMBERS)}"
        EXPOSED[place] = data
        return place

    def close(self):
        pass
