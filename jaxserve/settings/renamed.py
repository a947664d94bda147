"""Old spellings of settings and of their values: each works for one more version, with a warning.

`FLAGS` and `VALUES` are the only places where an old spelling is known. Flags, variables of the
environment, settings files and keyword arguments all come through `current_name` and
`current_value`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

log = logging.getLogger(__name__)

FLAGS: Mapping[str, str] = {}  # old name -> name
VALUES: Mapping[str, Mapping[str, str]] = {  # setting -> old value -> value
    # the papers' LRS is the least relative slack, --policy=slack
    "policy": {"lrs": "llf"},
}


def current_name(name: str) -> str:
    """Today's name of a setting; an old one is warned of."""
    if name not in FLAGS:
        return name
    log.warning("%s is now %s; the old name goes with the next version", name, FLAGS[name])
    return FLAGS[name]


def current_value(name: str, value: Any) -> Any:
    """Today's spelling of a setting's value; an old one is warned of."""
    if not isinstance(value, str) or value not in VALUES.get(name, {}):
        return value
    new = VALUES[name][value]
    log.warning("%s=%s is now %s; the old value goes with the next version", name, value, new)
    return new
