"""Has programs that are traced on a CPU use what a GPU would use, to be compiled for one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

from jaxserve.kernels import ops
from jaxserve.kernels.cpu import library


@contextlib.contextmanager
def as_on_a_gpu(attend: Callable | None = None) -> Iterator[None]:
    """Without the kernels for CPUs. attend: attention over pages; None: XLA's."""
    found = attend or ops.ATTEND["xla"]
    with (
        mock.patch.dict(ops.ATTEND, xla=found, cpu=found),
        mock.patch.object(library, "unsupported", lambda: "it is compiled for a GPU"),
    ):
        yield
