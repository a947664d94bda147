"""Shares of a replica's time by tenant, as settings give them."""

from __future__ import annotations

import math
import re

from jaxserve.api.errors import ConfigError

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")  # of a tenant, and of a key
MIN_SHARE, MAX_SHARE = 0.001, 1000.0


def shares_by_tenant(text: str) -> dict[str, float]:
    """Reads the shares in 'team-a:2;team-b:1', by tenant. Errors: ConfigError."""
    shares: dict[str, float] = {}
    for part in filter(None, map(str.strip, text.split(";"))):
        name, _, share = map(str.strip, part.partition(":"))
        if not NAME.fullmatch(name):
            raise ConfigError(
                "tenant_shares",
                f"{name!r} is not a name of 1 to 64 letters, digits, ., - and _, as in "
                "team-a:2;team-b:1",
            )
        if name in shares:
            raise ConfigError("tenant_shares", f"{name} is given more than once")
        try:
            number = float(share)
        except ValueError:
            number = math.nan
        if not MIN_SHARE <= number <= MAX_SHARE:
            raise ConfigError(
                "tenant_shares",
                f"{name}: {share!r} is not a number of {MIN_SHARE:g} to {MAX_SHARE:g}",
            )
        shares[name] = number
    return shares
