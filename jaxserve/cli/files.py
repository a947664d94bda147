"""Checks of output files, made before the work begins and not after it."""

from __future__ import annotations

from typing import Any

from jaxserve.settings.schema import ConfigError


def check_writable(flag: str, name: str) -> None:
    """Refuses a file that cannot be written. Errors: ConfigError for the flag."""
    try:
        open(name, "a").close()
    except OSError as error:
        raise ConfigError(flag, f"{name}: {error.strerror}") from None


def check_picture(flag: str, name: str) -> None:
    """Refuses a picture that could not be drawn. Errors: ConfigError for the flag."""
    if not name.endswith((".png", ".svg")):
        raise ConfigError(flag, f"{name!r} ends neither in .png nor in .svg")
    figure_class(flag)


def figure_class(flag: str = "plot", what: str = "needs") -> Any:
    """Imports Matplotlib's Figure. Errors: ConfigError for the flag where it is not installed."""
    try:
        import matplotlib  # noqa: F401
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(flag, f"{what} matplotlib: pip install jaxserve[experiments]") from None
    return Figure
