"""Compiles a program once for all engines of a file that have it in common.

Most tests of engines make one or two of their own, of the same few sizes, and what these take is
the time to trace, lower and compile their programs. Engines with equal plans on the same devices
have equal programs, whatever their weights, caches and schedulers.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest

MODULE = "jaxserve.engine.stage_programs"
# Files about when programs are compiled, and how long that takes.
OWN = ("test_programs.py", "test_start.py", "test_warm_up.py")


class ProgramsOnce:
    """Keeps compiled programs by plan, devices and name until the last test of a file. A test that
    replaces parts of modules, which may change what is traced, compiles its own."""

    def __init__(self) -> None:
        self.made: dict[tuple[str, str], Any] = {}
        self.shared = False
        self.patched = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        names = getattr(item, "fixturenames", ())
        self.shared = "monkeypatch" not in names and item.path.name not in OWN
        if MODULE in sys.modules and not self.patched:
            self.patched = True
            self._patch(sys.modules[MODULE].StagePrograms)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        if nextitem is None or nextitem.path != item.path:
            self.made.clear()

    def _patch(self, programs: Any) -> None:
        def get(self_: Any, name: str, lower: Any) -> Any:
            compiled = super(programs, self_).get  # which a test may have replaced
            if name in self_.compiled or not self.shared:
                return compiled(name, lower)
            key = _identity(self_), name
            if key in self.made:
                self_.compiled[name] = self.made[key]
            else:
                self.made[key] = compiled(name, lower)
            return self_.compiled[name]

        programs.get = get


def _identity(programs: Any) -> str:
    """Writes down all that programs are made of, but for their names."""
    if not hasattr(programs, "identity"):
        devices = [[device.id for device in stage.mesh.devices.flat] for stage in programs._stages]
        programs.identity = f"{programs._plan!r} {devices}"
    return programs.identity
