"""Matches requests to lanes such that the fewest bytes move (TokenLake, section 5.2).

The queries of a request's tokens visit every lane that holds blocks of its prefix, and the new KV
goes to the lanes that are to hold it. What lies on the lane that computes the request stays there:
its bytes are the gain of that lane. A request on several lanes is cut into as many parts, and
counts as one for the group of lanes that it gets: the bytes between its parts are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxserve.lanes.work import Heads


class TokenBytes(NamedTuple):
    """Bytes per layer of a token that computes on another lane than the one concerned.

    query: its queries there and their partial output back, 2 d and 2 d in 16 bit. put: its new key
    and value, 4 d K / N.
    """

    query: int
    put: int

    @classmethod
    def of(cls, heads: Heads) -> TokenBytes:
        return cls(heads.query_bytes + heads.partial_bytes, heads.new_kv_bytes)


def gains(visits: np.ndarray, puts: np.ndarray, sizes: TokenBytes) -> np.ndarray:
    """Returns bytes that stay where a request computes on a lane [n, lanes].

    visits [n, lanes]: tokens of the request that query a lane; puts [n, lanes]: tokens whose new KV
    the lane is to hold.
    """
    return sizes.query * visits + sizes.put * puts


def match(gain: np.ndarray, room: Sequence[int] | np.ndarray) -> np.ndarray:
    """Returns the lane of each request [n] such that the sum of their gains is greatest.

    gain [n, lanes]: see `gains`; room [lanes]: requests that a lane can take. Takes O(n^3). Errors:
    ValueError where there are more requests than room.
    """
    from scipy.optimize import linear_sum_assignment  # slow to import

    places = np.repeat(np.arange(len(room)), np.minimum(room, len(gain)))
    if len(places) < len(gain):
        raise ValueError(f"{len(gain)} requests, and room for {len(places)}")
    return places[linear_sum_assignment(gain[:, places], maximize=True)[1]]


def match_groups(gain: np.ndarray, degrees: Sequence[int], room: np.ndarray) -> list[range]:
    """Returns the aligned group of lanes of each batch: of as many lanes as its degree, disjoint.

    gain [n, lanes]: a batch's gain on a group is the sum over its lanes. degrees: a chain of
    divisors of the number of lanes, as `lanes.groups.group_sizes` has them. room [lanes] bool:
    lanes that can be used. Larger batches come first, each degree is matched as a whole. Errors:
    ValueError where there are too few groups.
    """
    free = np.array(room, bool)
    lanes = len(free)
    groups: list[range] = [range(0)] * len(degrees)
    for degree in sorted(set(degrees), reverse=True):
        batches = [number for number, each in enumerate(degrees) if each == degree]
        whole = free.reshape(lanes // degree, degree).all(1)
        by_group = gain[batches].reshape(len(batches), lanes // degree, degree).sum(2)
        for batch, group in zip(batches, match(by_group, whole.astype(int)).tolist()):
            groups[batch] = range(group * degree, (group + 1) * degree)
            free[group * degree : (group + 1) * degree] = False
    return groups


def balanced_room(running: np.ndarray, requests: int) -> np.ndarray:
    """Returns how many of `requests` requests each lane may take [lanes], all lanes together at
    least that many, such that none then has more than the mean, rounded up. running [lanes]:
    requests that they have."""
    level = -(-(int(running.sum()) + requests) // len(running))
    return np.maximum(level - running, 0)
