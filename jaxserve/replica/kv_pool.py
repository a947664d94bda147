"""The cached blocks of replicas, as operators ask for them: which replica has those of a prompt,
and leases that keep them there for a time.

A block is known by the tokens up to its end. All that is asked here is of the full blocks at the
beginning of a prompt.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np

from jaxserve.api.errors import RequestError
from jaxserve.cache import CacheManager
from jaxserve.cache.hashes import BlockHashes, is_block
from jaxserve.cache.locks import Lock
from jaxserve.store.kv_file import KvFile

MAX_LEASE_SECONDS = 86400.0
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class KvHolding:
    """Blocks of a prompt on one replica. blocks: full ones of the prompt, of `block_size` tokens.
    on_devices: of these, from the first on, with a page; below: those behind them in host memory or
    on disk; -1: it is not known in which tier the blocks `on_devices` are."""

    replica: str
    block_size: int
    blocks: int
    on_devices: int
    below: int = 0

    @property
    def held(self) -> int:
        """Blocks that are there, from the first on."""
        return self.on_devices + max(self.below, 0)


@dataclasses.dataclass(frozen=True)
class KvLease:
    """Blocks that stay on a replica. id: by which it is released. on_devices, below: blocks of the
    prompt that it keeps. seconds: that are left."""

    id: str
    replica: str
    on_devices: int
    below: int
    seconds: float


class KvPool(Protocol):
    """The cached blocks of one replica or of a cluster. salt: of the tenant whose prefixes they
    are. replica: a name, as `find` gives it; "": the one that has most of the prompt. All methods
    may be called from any thread, and may wait for a step. Errors: RequestError that names the
    field."""

    def find(self, prompt: np.ndarray, salt: str) -> list[KvHolding]:
        """Returns what each replica has of a prompt [tokens] int32."""

    def lease(self, prompt: np.ndarray, salt: str, seconds: float, replica: str) -> KvLease:
        """Keeps a prompt's blocks where they are for `seconds`, at most MAX_LEASE_SECONDS.
        Errors: RequestError, NOT_FOUND where there are none, RESOURCE_EXHAUSTED where leases would
        take more than their share."""

    def release(self, lease: str) -> bool:
        """Ends a lease; False for one that has ended."""

    def leases(self) -> list[KvLease]:
        """Returns the leases that have not ended."""

    def replicate(self, prompt: np.ndarray, salt: str, target: str, source: str) -> KvHolding:
        """Copies a prompt's blocks from one replica to another; returns what that has then. Errors:
        RequestError, NOT_FOUND where no replica has any."""


@runtime_checkable
class HasKvPool(Protocol):
    """A replica, or a cluster, whose cached blocks operators may ask for."""

    @property
    def kv_pool(self) -> KvPool:
        """The cached blocks."""


@runtime_checkable
class KvFiles(Protocol):
    """A pool whose blocks can be had and given as files. Errors: RequestError that names the
    field."""

    def get(self, prompt: np.ndarray, salt: str, first: int, most_bytes: int) -> KvFile:
        """Returns blocks of a prompt from number `first` on, as many as are there and go into
        `most_bytes`, one at least. Errors: RequestError, NOT_FOUND for none."""

    def put(self, file: KvFile, salt: str) -> int:
        """Takes blocks into host memory; returns how many were not there and have room. Errors:
        RequestError for blocks of another model or type, or that are not what they were."""


class LocalKvPool:
    """The blocks of one cache; implements `KvPool`. run: runs what reads or changes the cache while
    nothing else does, and returns its result. now: clock seconds."""

    def __init__(
        self,
        cache: CacheManager,
        run: Callable[[Callable[[], Any]], Any],
        now: Callable[[], float],
    ):
        self._cache = cache
        self._run = run
        self._now = now

    def find(self, prompt: np.ndarray, salt: str) -> list[KvHolding]:
        on_pages, below = (_blocks(keys) for keys in self._found(prompt, salt))
        size = self._cache.block_size
        return [KvHolding("", size, len(prompt) // size, on_pages, below)]

    def _found(self, prompt: np.ndarray, salt: str) -> tuple[Sequence[bytes], Sequence[bytes]]:
        """Returns the keys of a prompt's pages, and of what is in lower tiers."""
        return self._run(lambda: self._look(self._hashes(prompt, salt), len(prompt)))

    def _hashes(self, prompt: np.ndarray, salt: str) -> BlockHashes:
        hashes = self._cache.block_hashes(salt, lambda first, last: prompt[first:last])
        blocks = len(prompt) // self._cache.block_size
        if blocks:
            hashes[blocks - 1]
        return hashes

    def _look(self, hashes: BlockHashes, tokens: int) -> tuple[list[bytes], list[bytes]]:
        published = self._cache.published
        blocks = tokens // self._cache.block_size
        pages = self._cache.match(hashes, blocks).pages
        prefix = published.reachable(hashes, blocks, pages)
        return published.keys_of(prefix, hashes)

    def _seen_before(self, hashes: BlockHashes, blocks: int) -> list[bytes]:
        """Returns the keys of what is seen behind one block less than these, on pages and below: a
        request of the same prompt computes its last token."""
        return self._cache.published.seen.keys(max(blocks - 1, 0), hashes)

    def lease(self, prompt: np.ndarray, salt: str, seconds: float, replica: str) -> KvLease:
        check_lease_seconds(seconds)
        _check_only(replica)
        hashes = self._hashes(prompt, salt)
        return self._run(lambda: self._lock(hashes, len(prompt), seconds))

    def _lock(self, hashes: BlockHashes, tokens: int, seconds: float) -> KvLease:
        leases = self._cache.leases
        leases.release_due(self._now())
        on_pages, below = self._look(hashes, tokens)
        if not on_pages and not below:
            raise RequestError("prompt", "has no block here", "NOT_FOUND")
        blocks = _blocks(on_pages) + _blocks(below)
        for key in self._seen_before(hashes, blocks):
            if key in self._cache.pages.with_key:
                on_pages.append(key)
            elif self._cache.below.holds(key):
                below.append(key)
        on_pages = list(dict.fromkeys(on_pages))
        below = list(dict.fromkeys(below))
        if not leases.has_room(on_pages, below):
            raise RequestError(
                "prompt",
                f"has blocks on {len(on_pages)} pages and {len(below)} below; leases may take "
                f"{leases.most_pages} and {leases.most_below}, and {len(leases)} are leased",
                "RESOURCE_EXHAUSTED",
            )
        id = secrets.token_hex(8)
        made = leases.lock(id, self._now() + seconds, on_pages, below)
        return self._view(made, seconds)

    def release(self, lease: str) -> bool:
        return self._run(lambda: self._release(lease))

    def _release(self, lease: str) -> bool:
        leases = self._cache.leases
        leases.release_due(self._now())
        known = lease in leases.holders()
        leases.release(lease)
        return known

    def leases(self) -> list[KvLease]:
        return self._run(self._all)

    def _all(self) -> list[KvLease]:
        leases = self._cache.leases
        now = self._now()
        leases.release_due(now)
        return [self._view(one, one.due - now) for one in leases.all()]

    @staticmethod
    def _view(lock: Lock, seconds: float) -> KvLease:
        return KvLease(str(lock.holder), "", _blocks(lock.on_pages), _blocks(lock.below), seconds)

    def replicate(self, prompt: np.ndarray, salt: str, target: str, source: str) -> KvHolding:
        raise RequestError("replica", "is the only one here: a conductor copies between replicas")


def _blocks(keys: Sequence[bytes]) -> int:
    """Counts the blocks among pages, by their keys."""
    return sum(map(is_block, keys))


def check_lease_seconds(seconds: float) -> None:
    """Checks the time of a lease. Errors: RequestError."""
    if not 0 < seconds <= MAX_LEASE_SECONDS:
        raise RequestError(
            "seconds", f"must be above 0 and at most {MAX_LEASE_SECONDS:g}, not {seconds:g}"
        )


def _check_only(replica: str) -> None:
    if replica:
        raise RequestError("replica", f"{replica!r} is unknown: this server is one replica")
