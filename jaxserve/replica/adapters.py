"""The adapters that a replica serves: names by which requests call them, loading and unloading."""

from __future__ import annotations

import functools
import logging
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, TypeVar

from jaxserve.api.errors import RequestError
from jaxserve.api.request import UNKNOWN_MODEL, Request, adapter_identity, adapter_name
from jaxserve.scheduling import Scheduler
from jaxserve.settings.schema import AdapterConfig

T = TypeVar("T")
log = logging.getLogger(__name__)
MAX_NAME_CHARS = 200
_NAME = re.compile(r"[A-Za-z0-9._/:-]+")


class Exclusively(Protocol):
    """Runs what changes the scheduler while nothing else does."""

    def __call__(self, work: Callable[[], T], /) -> T: ...


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that is served. folder: of its files, as it was given. identity: see
    `adapter_identity`. number: of when its files were read last, by which commands to the devices
    name it."""

    name: str
    folder: str
    identity: str
    number: int


class Adapters(Protocol):
    """The adapters of a replica. Methods may be called from any thread; those that change them may
    wait for files to be read, and for a step."""

    @property
    def by_name(self) -> Mapping[str, Adapter]:
        """The adapters that new requests may have. Never waits."""

    def load(self, name: str, folder: str, in_place: bool = False) -> Adapter:
        """Reads an adapter's files, and serves it from now on. in_place: also where one of this
        name is served, whose requests go on with it. Errors: RequestError for a name in use, and
        for files that cannot be served."""

    def unload(self, name: str) -> None:
        """Takes no new requests for an adapter; those that were accepted go on with it. Errors:
        RequestError, NOT_FOUND, for an unknown name."""


class NoAdapters:
    """Adapters of a replica that has no room for some."""

    @property
    def by_name(self) -> Mapping[str, Adapter]:
        return MappingProxyType({})

    def load(self, name: str, folder: str, in_place: bool = False) -> Adapter:
        raise RequestError(
            "lora_name", "the replica has no places for adapters", "FAILED_PRECONDITION"
        )

    def unload(self, name: str) -> None:
        raise not_loaded(name)

    def load_given(self, name: str, folder: str) -> Adapter:
        return self.load(name, folder)

    def settle(self) -> None:
        """Does nothing: see `LocalAdapters.settle`."""

    def read_missing(self) -> None:
        """Does nothing: see `LocalAdapters.read_missing`."""

    def current(self, request: Request) -> Request:
        """Returns the request: see `LocalAdapters.current`."""
        return request

    def withdraw_lost(self) -> frozenset[str]:
        """Returns none: see `LocalAdapters.withdraw_lost`."""
        return frozenset()


class AdapterSource(Protocol):
    """Adapters in host memory, by number."""

    def load(self, number: int, folder: str) -> str:
        """Reads an adapter's files; returns its fingerprint. May be called on any thread, beside
        steps. Errors: RequestError for files that cannot be served."""

    def drop(self, number: int) -> None:
        """Forgets an adapter, which no step has any more."""

    def take_lost(self) -> Sequence[int]:
        """Returns the numbers of the adapters that are not in host memory any more, each once."""


class LocalAdapters:
    """The adapters of a replica in this process. source: reads their files. exclusively: runs what
    changes the scheduler while nothing else does. taken: names that adapters may not have. config:
    how many may be in host memory, beside one whose files are read, and the folder below which they
    must be.

    Adapters that leave host memory are served all the same: their files are read again when a
    sequence needs them. If these are not the same by then, they are served no more.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        source: AdapterSource,
        exclusively: Exclusively,
        taken: Sequence[str],
        config: AdapterConfig,
    ):
        self._scheduler = scheduler
        self._source = source
        self._exclusively = exclusively
        self._taken = frozenset(taken)
        self._config = config
        self._changing = threading.Lock()  # one change at a time; held while files are read
        self._by_name: Mapping[str, Adapter] = {}  # replaced as a whole: others read it
        self._leaving: list[Adapter] = []
        self._loaded = 0
        self._reading = False  # files of an adapter that a sequence lacks
        self._unreadable: list[Adapter] = []  # of those, until they are withdrawn
        scheduler.slots.adapters.most_held = config.max_cpu_loras

    @property
    def by_name(self) -> Mapping[str, Adapter]:
        return self._by_name

    def load(self, name: str, folder: str, in_place: bool = False) -> Adapter:
        return self.load_given(name, self._checked(folder), in_place)

    def _checked(self, folder: str) -> str:
        """Returns the path of a folder that a request names. Errors: RequestError."""
        if self._config.lora_root is None:
            raise RequestError(
                "lora_path",
                "no adapter can be loaded while serving: the server was started without lora_root",
                "FAILED_PRECONDITION",
            )
        root = Path(self._config.lora_root).resolve()
        try:
            path = (root / folder).resolve()
            exists = path.is_dir()
        except (OSError, ValueError, RuntimeError):
            path = Path()
            exists = False
        if not path.is_relative_to(root):
            raise RequestError("lora_path", f"{folder[:200]!r} is not below lora_root")
        if not exists:
            raise RequestError("lora_path", f"there is no folder {folder[:200]!r}", "NOT_FOUND")
        return str(path)

    def load_given(self, name: str, folder: str, in_place: bool = False) -> Adapter:
        """Serves an adapter as `load` does, of any folder: that the settings name."""
        check_name(name)
        with self._changing:
            if name in self._taken or (name in self._by_name and not in_place):
                raise RequestError("lora_name", f"{name!r} has already been loaded")

            def enter(number: int, fingerprint: str) -> Adapter:
                adapter = Adapter(name, folder, adapter_identity(name, fingerprint), number)
                self._enter(adapter)
                return adapter

            return self._read(folder, enter)

    def _read(self, folder: str, enter: Callable[[int, str], T]) -> T:
        """Reads an adapter's files; returns what `enter` does with its number and its fingerprint,
        exclusively. Runs while the adapters are `_changing`. Errors: RequestError."""
        self._loaded += 1
        number = self._loaded
        try:
            fingerprint = self._source.load(number, folder)
            return self._exclusively(lambda: enter(number, fingerprint))
        except BaseException:
            self._source.drop(number)
            raise

    def _enter(self, adapter: Adapter) -> None:
        """Serves an adapter in place of another of its name, whose memory it takes over where the
        files are the same."""
        before = self._by_name.get(adapter.name)
        self._by_name = {**self._by_name, adapter.name: adapter}
        if before is not None:
            self._leaving.append(before)
        for twin in [each for each in self._leaving if each.identity == adapter.identity]:
            # what runs, and what is on the devices, is the same adapter: the new copy replaces it
            self._leaving.remove(twin)
            self._source.drop(twin.number)
        self._hold(adapter)
        self.settle()

    def _hold(self, adapter: Adapter) -> None:
        """Notes that an adapter is in host memory; forgets those that leave it for that."""
        for number in self._scheduler.slots.adapters.hold(adapter.identity, adapter.number):
            self._source.drop(number)

    def read_missing(self) -> None:
        """Begins to read the files of an adapter that a sequence lacks, if one does, beside steps.
        Runs exclusively."""
        if self._reading:
            return
        adapter = self._known(self._scheduler.slots.adapters.take_missing())
        if adapter is not None and adapter not in self._unreadable:
            self._reading = True
            threading.Thread(target=self._read_again, args=(adapter,), daemon=True).start()

    def _known(self, identity: str) -> Adapter | None:
        """Finds an adapter that requests may have."""
        every = [*self._by_name.values(), *self._leaving]
        return next((each for each in every if each.identity == identity), None)

    def _read_again(self, adapter: Adapter) -> None:
        """Brings an adapter back into host memory."""
        try:
            with self._changing:
                self._read(adapter.folder, functools.partial(self._enter_again, adapter))
        except RequestError as error:
            if error.status != "UNAVAILABLE":  # else it is still missing in the next step
                log.error("adapter %s is lost: %s", adapter.name, error.message)
                self._unreadable.append(adapter)
        finally:
            self._reading = False

    def _enter_again(self, adapter: Adapter, number: int, fingerprint: str) -> None:
        """Takes in an adapter that was read again. Errors: RequestError for one that is another by
        now."""
        identity = adapter.identity
        if self._known(identity) != adapter:  # it was unloaded, or loaded again, meanwhile
            self._source.drop(number)
            return
        if adapter_identity(adapter.name, fingerprint) != identity:
            raise RequestError("lora_path", f"the files of {adapter.folder} have changed")
        again = replace(adapter, number=number)
        self._leaving = [again if each == adapter else each for each in self._leaving]
        if self._by_name.get(adapter.name) == adapter:
            self._by_name = {**self._by_name, adapter.name: again}
        self._hold(again)

    def unload(self, name: str) -> None:
        with self._changing:
            if name not in self._by_name:
                raise not_loaded(name)
            self._exclusively(lambda: self._leave(name))

    def _leave(self, name: str) -> None:
        left = dict(self._by_name)
        self._leaving.append(left.pop(name))
        self._by_name = left
        self.settle()

    def current(self, request: Request) -> Request:
        """Returns a request with the adapter that its name stands for now, where the one that it
        names was replaced while it was on its way."""
        known = self._scheduler.slots.adapters.numbers
        if not request.adapter or request.adapter in known:
            return request
        adapter = self._by_name.get(adapter_name(request.adapter))
        return request if adapter is None else replace(request, adapter=adapter.identity)

    def withdraw_lost(self) -> frozenset[str]:
        """Serves no more the adapters that are lost (see `AdapterSource`), or could not be read
        again; returns their identities, whose requests cannot go on. Runs exclusively."""
        numbers = set(self._source.take_lost())
        while self._unreadable:
            numbers.add(self._unreadable.pop().number)
        if not numbers:
            return frozenset()
        lost = [each for each in self._by_name.values() if each.number in numbers]
        self._leaving += lost
        self._by_name = {
            name: each for name, each in self._by_name.items() if each.number not in numbers
        }
        return frozenset(each.identity for each in self._leaving if each.number in numbers)

    def settle(self) -> None:
        """Frees adapters that were unloaded and have no requests left. Runs exclusively."""
        if not self._leaving:
            return
        used = {sequence.request.adapter for sequence in self._scheduler.sequences.values()}
        for adapter in self._leaving:
            if adapter.identity not in used:
                self._scheduler.slots.adapters.forget(adapter.identity)
                self._source.drop(adapter.number)
        self._leaving = [each for each in self._leaving if each.identity in used]


def check_name(name: str) -> None:
    """Checks the name of an adapter. Errors: RequestError."""
    if len(name) > MAX_NAME_CHARS or not _NAME.fullmatch(name):
        raise RequestError(
            "lora_name",
            f"must be 1 to {MAX_NAME_CHARS} letters, digits and any of . _ / : -, not {name!r:.80}",
        )


def not_loaded(name: str) -> RequestError:
    """Makes the error of an adapter that is not served."""
    fault = f"the adapter {name!r:.100} is not loaded"
    return RequestError("lora_name", fault, "NOT_FOUND", reason=UNKNOWN_MODEL)
