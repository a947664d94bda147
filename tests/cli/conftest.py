"""Fixtures of the server's tests that tests of commands use too, and of their own."""

import logging

import pytest

from tests.server.conftest import serve

__all__ = ["serve"]


@pytest.fixture(autouse=True)
def own_logs():
    """Gives loggers the levels and handlers back that they had: commands set up those of their
    process, which here is that of all tests."""
    loggers = [logging.getLogger(), logging.getLogger("jaxserve")]
    before = [(logger, logger.level, logger.handlers.copy()) for logger in loggers]
    yield
    for logger, level, handlers in before:
        logger.setLevel(level)
        logger.handlers[:] = handlers
