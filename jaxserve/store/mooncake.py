"""Blocks in a Mooncake Store: memory of many hosts, shared by all replicas (extra `mooncake`).

The store is a cold tier that may lose anything at any time. It may also hang for half a minute, and
has been seen to return another object's bytes with a code of success. So every value ends in a
trailer with a checksum over key and bytes, which is compared with the bytes as the caller gets
them, and every call runs on a thread of its own, under a deadline. Any error is a miss.

The client can read and write all memory that is registered with it, for all who reach its ports,
which ask for no password (SECURITY.md). Registered is staging memory and nothing else: blocks are
copied in and out.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from jaxserve.settings.schema import ConfigError
from jaxserve.store.call_threads import CallThread, CallThreads
from jaxserve.store.checksum import Buffer, block_checksum, crc32c, flat_bytes

FIELD = "kv_store"  # the setting that errors name
ROWS = 16  # blocks of one call
THREADS = 2  # calls at once
RETRY_SECONDS = 10.0  # between attempts to reach the master
CLOSE_SECONDS = 10.0
KEEP_SECONDS = 3600.0  # that a block to be kept is pinned where it does not expire
CLIENT_BYTES = 16 << 20  # of the client's own memory
ENVIRONMENT = {  # of the client, which takes settings no other way; what is set already counts
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",
    "MC_TCP_SLICE_SIZE": str(1 << 20),
    "MC_TCP_STATUS_TIMEOUT_SEC": "5",
    "MC_RPC_TIMEOUT_MS": "2000",
    "MC_RPC_CONNECT_TIMEOUT_MS": "2000",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_STORE_CLIENT_METRIC": "0",
    "MC_LOG_LEVEL": "ERROR",
}
_MAGIC = b"jaxkv001"
# magic, bytes of the block, expiry (unix seconds, 0 for never), hash of the object's name
_FIELDS = struct.Struct("<8sQd16s")
_CHECKSUM = struct.Struct("<I")  # over the block's key, its bytes, and the fields
_TRAILER_BYTES = _FIELDS.size + _CHECKSUM.size
log = logging.getLogger(__name__)


class MooncakeBlocks:
    """Blocks of `block_bytes` under keys, in the Mooncake Store of a master.

    All methods may be called by any thread. Each returns within `seconds`, and says of every key
    whether it went well. Until the master is reached, which is tried in the background for as long
    as it takes, everything is a miss."""

    def __init__(
        self,
        master: str,
        block_bytes: int,
        host: str,
        identity: bytes = b"",
        seconds: float = 5.0,
        protocol: str = "tcp",
        devices: str = "",
        now: Callable[[], float] = time.time,
    ):
        """master: host:port. host: this machine's name or address, by which others reach it.
        identity: what the bytes' meaning depends on, such as a hash of model and layout. protocol:
        tcp or rdma, over these devices. now: unix seconds.
        Errors: ConfigError where the package is not installed, or `master` is no address;
        ValueError where a block has no byte."""
        if block_bytes < 1:
            raise ValueError(f"block_bytes is {block_bytes}; it must be at least 1")
        self._master = _address(master)
        self.block_bytes = block_bytes
        self._api = load_client()
        self._setup = (host, "P2PHANDSHAKE", 0, CLIENT_BYTES, protocol, devices, master)
        self._prefix = f"{_MAGIC.decode()}/{blake2b(identity, digest_size=16).hexdigest()}/"
        self._seconds = seconds
        self._now = now
        self._value_bytes = block_bytes + _TRAILER_BYTES
        self._threads = CallThreads(THREADS, ROWS, self._value_bytes)
        self._client: Any = None
        self._closed = threading.Event()
        self._told: set[str] = set()
        self._connecting = threading.Thread(
            target=self._connect, name="mooncake-connect", daemon=True
        )
        self._connecting.start()
        atexit.register(self.close)  # the client crashes where the process ends during its calls

    @property
    def connected(self) -> bool:
        """Returns whether the master was reached."""
        return self._client is not None

    def put(
        self,
        keys: Sequence[bytes],
        blocks: Sequence[Buffer],
        expires: float = 0.0,
        keep: bool = False,
    ) -> list[bool]:
        """Stores blocks; returns of each whether it is there now. What is there under a key
        already stays as it is.

        expires: unix seconds from which on they are misses, 0 for never. keep: evicted last.
        Errors: ValueError for blocks of another size than `block_bytes`."""
        payloads = self._checked(keys, blocks)
        deadline = time.monotonic() + self._seconds
        stored = []
        for part in _parts(keys):
            stored += self._put(keys[part], payloads[part], expires, keep, deadline)
        return stored

    def get(self, keys: Sequence[bytes], into: Sequence[Buffer]) -> list[bool]:
        """Fetches blocks; returns of each whether it came whole. Where it did not, what `into`
        holds is no block. Errors: ValueError for memory of another size, or read-only."""
        targets = self._checked(keys, into)
        if not all(target.flags.writeable for target in targets):
            raise ValueError("the memory to fetch a block into is read-only")
        deadline = time.monotonic() + self._seconds
        whole = []
        for part in _parts(keys):
            whole += self._get(keys[part], targets[part], deadline)
        return whole

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Returns of each block whether the master believes to have it; that a host has died is
        known to the master after some time only. A block is there when `get` has it."""
        return [code == 1 for code in self._names_only("batch_is_exist", keys)]

    def discard(self, keys: Sequence[bytes]) -> None:
        """Removes blocks, also while they are read."""
        self._names_only("batch_remove", keys, True)

    def close(self) -> None:
        """Leaves the store. Where a call hangs, the client is left as it is."""
        atexit.unregister(self.close)
        self._closed.set()
        idle = self._threads.close(CLOSE_SECONDS)
        self._connecting.join(CLOSE_SECONDS)
        client, self._client = self._client, None
        if client is not None and idle:
            closing = threading.Thread(target=client.close, name="mooncake-close", daemon=True)
            closing.start()
            closing.join(CLOSE_SECONDS)

    def _checked(self, keys: Sequence[bytes], buffers: Sequence[Buffer]) -> list[np.ndarray]:
        if len(keys) != len(buffers):
            raise ValueError(f"{len(keys)} keys and {len(buffers)} blocks")
        flat = [flat_bytes(buffer) for buffer in buffers]
        for each in flat:
            if each.size != self.block_bytes:
                raise ValueError(f"{each.size} bytes; a block has {self.block_bytes}")
        return flat

    def _connect(self) -> None:
        while not self._closed.is_set():
            try:
                self._client = self._connected_client()
                log.info("the Mooncake Store of %s:%d is connected", *self._master)
                return
            except Exception as error:  # the client's are of any kind
                self._tell(f"no master answers at %s:%d, tried again: {error}" % self._master)
            self._closed.wait(RETRY_SECONDS)

    def _connected_client(self) -> Any:
        """Connects to the master. Errors: OSError where it does not answer."""
        # While it sets itself up the client holds the interpreter's lock: nearly 5 s where no one
        # listens at the address.
        socket.create_connection(self._master, self._seconds).close()
        client = self._api.MooncakeDistributedStore()
        if client.setup(*self._setup) or not self._register(client):
            raise OSError("the client cannot be set up")
        return client

    def _register(self, client: Any) -> bool:
        return all(
            client.register_buffer(thread.memory.ctypes.data, thread.memory.nbytes) == 0
            for thread in self._threads.all
        )

    def _put(
        self,
        keys: Sequence[bytes],
        payloads: list[np.ndarray],
        expires: float,
        keep: bool,
        deadline: float,
    ) -> list[bool]:
        names = self.names(keys)
        with self._threads.borrow(deadline) as thread:
            if thread is None:
                return [False] * len(keys)
            for row, name, key, payload in zip(thread.rows, names, keys, payloads):
                row[: self.block_bytes] = payload
                trailer = self._trailer(name, expires, block_checksum(key, payload))
                row[self.block_bytes :] = np.frombuffer(trailer, np.uint8)
            places = self._places(thread, len(keys))
            config = self._replication(expires, keep)
            codes = self._call(thread, "batch_put_from", deadline, names, *places, config)
        return [code == 0 for code in codes]

    def _get(self, keys: Sequence[bytes], targets: list[np.ndarray], deadline: float) -> list[bool]:
        names = self.names(keys)
        whole = [False] * len(keys)
        wrong = []
        with self._threads.borrow(deadline) as thread:
            if thread is None:
                return whole
            places = self._places(thread, len(keys))
            codes = self._call(thread, "batch_get_into", deadline, names, *places)
            for at, row in enumerate(thread.rows[: len(keys)]):
                if codes[at] == self._value_bytes:
                    whole[at] = self._copy(row, names[at], keys[at], targets[at])
                    wrong += [] if whole[at] else [names[at]]
            if wrong:  # a value that is there already would stay, whatever is put
                self._tell("a block came expired or damaged, and was removed")
                self._call(thread, "batch_remove", deadline, wrong, True)
        return whole

    def _copy(self, row: np.ndarray, name: str, key: bytes, target: np.ndarray) -> bool:
        """Copies a block out of staging memory; returns whether the copy is the whole block that
        was asked for, and not expired."""
        target[:] = row[: self.block_bytes]
        trailer = row[self.block_bytes :].tobytes()
        expires = _FIELDS.unpack_from(trailer)[2]
        if math.isnan(expires) or 0 < expires <= self._now():
            return False
        return trailer == self._trailer(name, expires, block_checksum(key, target))

    def _places(self, thread: CallThread, count: int) -> tuple[list[int], list[int]]:
        """Addresses and sizes of the first rows, as the client takes them."""
        return [row.ctypes.data for row in thread.rows[:count]], [self._value_bytes] * count

    def _trailer(self, name: str, expires: float, checksum: int) -> bytes:
        """Trailer that follows a block. checksum: of its key and bytes."""
        digest = blake2b(name.encode(), digest_size=16).digest()
        fields = _FIELDS.pack(_MAGIC, self.block_bytes, expires, digest)
        return fields + _CHECKSUM.pack(crc32c(fields, checksum))

    def _replication(self, expires: float, keep: bool) -> Any:
        config = self._api.ReplicateConfig()
        if keep:
            seconds = expires - self._now() if expires else KEEP_SECONDS
            config.soft_pin_action = self._api.SoftPinAction.ENABLE
            config.soft_pin_ttl_ms = max(1, int(1000 * seconds))
        return config

    def names(self, keys: Sequence[bytes]) -> list[str]:
        return [self._prefix + key.hex() for key in keys]

    def _names_only(self, method: str, keys: Sequence[bytes], *arguments: Any) -> list[int]:
        """Calls what moves no bytes; returns the codes."""
        deadline = time.monotonic() + self._seconds
        with self._threads.borrow(deadline) as thread:
            if thread is None:
                return [-1] * len(keys)
            return self._call(thread, method, deadline, self.names(keys), *arguments)

    def _call(
        self, thread: CallThread, method: str, deadline: float, names: list[str], *arguments: Any
    ) -> list[int]:
        """Calls the client on a borrowed thread. Returns its codes, one for each name; -1 where it
        failed or did not answer in time."""
        none = [-1] * len(names)
        client = self._client
        if client is None:
            return none
        try:
            codes = thread.call(getattr(client, method), names, *arguments, deadline=deadline)
        except TimeoutError:
            self._tell(f"{method}: no answer within {self._seconds:g} s")
            return none
        except Exception as error:
            self._tell(f"{method}: {error}")
            return none
        return codes if len(codes) == len(names) else none

    def _tell(self, what: str) -> None:
        """Logs what happens, the first time only."""
        if what not in self._told:
            self._told.add(what)
            log.warning("Mooncake Store: %s (not logged again)", what)


def _parts(keys: Sequence[bytes]) -> Iterator[slice]:
    """The parts of a batch that fit a thread's memory."""
    return (slice(begin, begin + ROWS) for begin in range(0, len(keys), ROWS))


def load_client() -> Any:
    """The package's module. Errors: ConfigError where it, or a library that it needs, is not
    installed."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import mooncake.store
    except ImportError as error:
        raise ConfigError(
            FIELD,
            "needs pip install 'jaxserve[mooncake]', and the system's libibverbs1 and libnuma1: "
            f"{error}",
        ) from None
    return mooncake.store


def address_towards(master: str) -> str:
    """This machine's address, as a master at host:port sees it. Errors: ConfigError where the host
    has none."""
    host, port = _address(master)
    try:
        family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(FIELD, f"there is no way to {host}: {error.strerror}") from None


def _address(text: str) -> tuple[str, int]:
    """Parses host:port. Errors: ConfigError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(FIELD, f"{text!r} is no host:port of a Mooncake master")
    return host.strip("[]"), int(port)
