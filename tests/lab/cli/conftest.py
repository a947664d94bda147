"""Fixtures of the server's tests that tests of commands use too."""

from tests.server.conftest import serve

__all__ = ["serve"]
