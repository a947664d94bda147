"""What commands write: checked before the work begins, not after it."""

from __future__ import annotations

from typing import Any

from jaxserve.settings.schema import ConfigError


def check_writable(flag: str, name: str) -> None:
    """The file that a flag names must be one that can be written. Errors: ConfigError."""
    try:
        open(name, "a").close()
    except OSError as error:
        raise ConfigError(flag, f"{name}: {error.strerror}") from None


def figure_class(flag: str = "plot", what: str = "needs") -> Any:
    """Matplotlib's Figure. Errors: ConfigError for the flag where it is not installed."""
    try:
        import matplotlib  # noqa: F401
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(flag, f"{what} matplotlib: pip install jaxserve[experiments]") from None
    return Figure
