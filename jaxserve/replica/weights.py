"""The weights of a running replica: new ones in their place, pauses, and sleep.

No answer is ever computed with two versions: weights are exchanged only once all requests that have
begun are over, and those that have not begin after it. Which version an answer is of stands in its
`Finished` events.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Literal, Protocol, TypeVar

from jaxserve.api.errors import RequestError
from jaxserve.scheduling import Scheduler
from jaxserve.scheduling.request_table import FIRST_VERSION

T = TypeVar("T")
WeightSource = str | Mapping[str, Any]  # a path, or arrays by their Hugging Face names
Mode = Literal["abort", "finish", "keep"]
MODES = ("abort", "finish", "keep")
PARTS = ("weights", "kv_cache")  # of what sleeps
LEVELS = (1, 2)
MODEL_PATH = "model_path"
MAX_VERSION_CHARS = 200
RUNNING = "running"
PAUSED = "paused"
ASLEEP = "asleep"
POLL_SECONDS = 0.002
# in a cache's fingerprint, between the first weights and those that are served
UPDATED = " updated: "
NOTHING_READ = "FAILED_PRECONDITION"  # status of `WeightsHolder.use` where it changed nothing


class WeightsHolder(Protocol):
    """Whatever has the weights on devices. Methods are called one at a time, and all but `read`
    while no step is in flight."""

    def read(self, source: WeightSource) -> str:
        """Reads new weights, beside steps; where memory is short it only checks them, and `use`
        reads them. Returns their fingerprint. Errors: RequestError where they cannot take the place
        of those that are served."""
        raise NotImplementedError

    def use(self) -> None:
        """Puts what was read in the place of the weights on the devices. Errors: RequestError where
        it cannot be read: there are no weights then, but with the status NOTHING_READ."""
        raise NotImplementedError

    def forget(self) -> None:
        """Forgets what was read, if anything was."""
        raise NotImplementedError

    def sleep(self, level: int) -> None:
        """Takes weights and KV from the devices. level: 1 keeps the weights in host memory, 2 does
        not keep them."""
        raise NotImplementedError

    def wake(self) -> None:
        """Brings the weights from host memory back to the devices, if they are there."""
        raise NotImplementedError


class ReplicaWeights(Protocol):
    """The weights of a replica. Methods may be called from any thread, and wait until what they say
    is done; meanwhile others of them wait."""

    @property
    def version(self) -> str:
        """The version of the weights that requests are computed with from now on. Never waits."""

    @property
    def state(self) -> str:
        """RUNNING, PAUSED or ASLEEP. Never waits."""

    def pause(self, mode: Mode = "abort") -> None:
        """Begins no steps until `resume`. Requests that have begun end with the reason cancelled
        (abort), go on to their ends first (finish), or stay where they are and go on later (keep).
        Others wait, also those that come meanwhile. Errors: RequestError."""

    def resume(self) -> None:
        """Ends a pause. Errors: RequestError while the replica sleeps."""

    def update(
        self, source: WeightSource, version: str | None = None, mode: Mode = "finish"
    ) -> str:
        """Replaces the weights by others of the same model, and returns their version. source: a
        path, or arrays by Hugging Face names. version: a name; None counts up. mode: as of `pause`,
        but not keep: an answer would be of two versions. Errors: RequestError, after which the
        weights are those of before, unless it says that there are none."""

    def sleep(self, level: int = 1, mode: Mode = "abort") -> None:
        """Pauses, and frees the devices' memory: of KV, and of weights, which go to host memory
        (level 1) or nowhere (level 2, after which they must be updated). mode: as of `pause`; what
        is kept begins again from its first token, and so only with level 1. Errors:
        RequestError."""

    def wake_up(self, parts: Collection[str] = PARTS) -> None:
        """Brings back what sleeps, and goes on once all is there. parts: of PARTS. Errors:
        RequestError where there are no weights to bring back."""


class NoWeights:
    """Weights of a replica that has none of its own, such as a virtual one."""

    version = FIRST_VERSION
    state = RUNNING

    def pause(self, mode: Mode = "abort") -> None:
        raise _without_weights()

    def resume(self) -> None:
        raise _without_weights()

    def update(
        self, source: WeightSource, version: str | None = None, mode: Mode = "finish"
    ) -> str:
        raise _without_weights()

    def sleep(self, level: int = 1, mode: Mode = "abort") -> None:
        raise _without_weights()

    def wake_up(self, parts: Collection[str] = PARTS) -> None:
        raise _without_weights()


def _without_weights() -> RequestError:
    return RequestError("", "this replica has no weights to change", "FAILED_PRECONDITION")


class Loop(Protocol):
    """Whatever runs steps, as far as weights need it: an engine."""

    def exclusively_when_free(self, work: Callable[[], T]) -> T:
        """Runs what reads or changes the scheduler while nothing else does, however long a step
        takes to be issued. Errors: RequestError, UNAVAILABLE, where none will be."""

    def end_begun(self, error: RequestError | None = None) -> None:
        """Ends all requests that have begun, with this error or the reason cancelled. Runs
        exclusively."""

    def begin_again(self) -> None:
        """Has requests that have begun wait, to be computed from their first token: what was on the
        devices is lost. Runs exclusively, while nothing is in flight."""

    def reset_devices(self) -> None:
        """Makes empty KV on the devices. Runs exclusively, while nothing is in flight."""

    def weights_changed(self) -> None:
        """Is notified of other weights, once the scheduler has taken them in. Runs exclusively."""


class LocalWeights:
    """The weights of a replica in this process. holder: has them on devices. loop: runs its steps,
    and none while `stopped`."""

    def __init__(self, scheduler: Scheduler, holder: WeightsHolder, loop: Loop):
        self.stopped = False
        self._scheduler = scheduler
        self._holder = holder
        self._loop = loop
        self._identity = scheduler.cache.identity  # with the first weights
        self._changing = threading.Lock()  # one change at a time; held while weights are read
        self._paused = False
        self._asleep: set[str] = set()  # of PARTS
        self._lost = False  # there are no weights to be had
        self._newest = int(FIRST_VERSION)  # number of the newest numbered version

    @property
    def version(self) -> str:
        return self._scheduler.requests.weight_version

    @property
    def state(self) -> str:
        if self._asleep or self._lost:
            return ASLEEP
        return PAUSED if self._paused else RUNNING

    def pause(self, mode: Mode = "abort") -> None:
        check_mode(mode)
        self._cut_short(mode)
        with self._changing:
            with self._going_on_after_errors():
                self._stop(mode)
            self._paused = True

    def resume(self) -> None:
        with self._changing:
            if self.state == ASLEEP:
                raise RequestError("", "the replica sleeps: wake it up", "FAILED_PRECONDITION")
            self._paused = False
            self._go_on()

    def update(
        self, source: WeightSource, version: str | None = None, mode: Mode = "finish"
    ) -> str:
        check_mode(mode, but="keep")
        self._cut_short(mode)
        with self._changing:
            name, number = self._next_version(version)
            fingerprint = self._holder.read(source)
            try:
                with self._going_on_after_errors():
                    self._stop(mode)
                    self._exclusively(lambda: self._use(name, fingerprint))
            finally:
                self._holder.forget()
            self._newest = number
            self._go_on_if_running()
            return name

    def _next_version(self, given: str | None) -> tuple[str, int]:
        """Returns the name of the next version, and the number of the newest numbered one with it.
        Errors: RequestError."""
        if given is None:
            return str(self._newest + 1), self._newest + 1
        check_version(given)
        if given == self.version:
            raise RequestError("weight_version", f"{given!r} is served already", "ALREADY_EXISTS")
        number = int(given) if given.isdecimal() else 0
        return given, max(number, self._newest)

    def _use(self, name: str, fingerprint: str) -> None:
        """Exchanges the weights. Nothing is in flight."""
        # none that came since the last look: another replica has begun it
        self._loop.end_begun(_replaced())
        try:
            self._holder.use()
        except RequestError as error:
            if error.status == NOTHING_READ:
                raise
            self._lost = True
            fault = f"{error.message}; there are no weights now: update them"
            raise RequestError(error.field, fault, error.status) from None
        except BaseException:
            self._lost = True
            raise
        self._lost = False
        self._asleep.discard("weights")
        identity = self._identity
        own = f"{identity.fingerprint}{UPDATED}{fingerprint} {name}"
        self._scheduler.renew(identity._replace(fingerprint=own), name)
        self._loop.weights_changed()

    def sleep(self, level: int = 1, mode: Mode = "abort") -> None:
        if level not in LEVELS:
            raise RequestError("level", f"must be 1 or 2, not {level!r:.50}")
        check_mode(mode, but="keep" if level > 1 else None)
        self._cut_short(mode)
        with self._changing, self._going_on_after_errors():
            self._stop(mode)
            self._exclusively(lambda: self._fall_asleep(level))

    def _fall_asleep(self, level: int) -> None:
        if not self._asleep:
            self._loop.begin_again()
        self._holder.sleep(level)
        self._asleep.update(PARTS)
        self._lost = self._lost or level > 1

    def wake_up(self, parts: Collection[str] = PARTS) -> None:
        for part in parts:
            if part not in PARTS:
                raise RequestError("tags", f"{part!r:.50} is none of {', '.join(PARTS)}")
        with self._changing:
            if self._lost and "weights" in parts:
                raise RequestError("", "there are no weights: update them", "FAILED_PRECONDITION")
            if "weights" in parts and "weights" in self._asleep:
                self._exclusively(self._holder.wake)
                self._asleep.discard("weights")
            if "kv_cache" in parts and "kv_cache" in self._asleep:
                self._exclusively(self._loop.reset_devices)
                self._asleep.discard("kv_cache")
            self._go_on_if_running()

    # --- steps

    def _exclusively(self, work: Callable[[], T]) -> T:
        return self._loop.exclusively_when_free(work)

    def _cut_short(self, mode: Mode) -> None:
        """Ends what an earlier change waits for, where this one does not wait for it."""
        if mode == "abort" and self._changing.locked():
            self._exclusively(self._loop.end_begun)

    def _stop(self, mode: Mode) -> None:
        """Stops all steps, once what has begun is over as `mode` says. Errors: RequestError."""
        self._exclusively(lambda: self._begin_to_stop(mode))
        over = self._all_read if mode == "keep" else self._all_over
        while not self._exclusively(over):
            time.sleep(POLL_SECONDS)

    def _begin_to_stop(self, mode: Mode) -> None:
        scheduler = self._scheduler
        if mode == "finish" and self.state == ASLEEP and scheduler.requests.begun():
            raise RequestError(
                "mode", "requests have begun, and none ends in sleep: abort", "FAILED_PRECONDITION"
            )
        scheduler.hold(True)
        if mode == "abort":
            self._loop.end_begun()
        self.stopped = mode == "keep" or self.state == ASLEEP

    def _all_over(self) -> bool:
        """Stops steps where all that has begun is over, and returns whether it is."""
        over = self._all_read() and not self._scheduler.requests.begun()
        self.stopped = self.stopped or over
        return over

    def _all_read(self) -> bool:
        return not self._scheduler.flying

    def _go_on(self) -> None:
        def go_on() -> None:
            self._scheduler.hold(False)
            self.stopped = False

        self._exclusively(go_on)

    def _go_on_if_running(self) -> None:
        if self.state == RUNNING:
            self._go_on()

    @contextlib.contextmanager
    def _going_on_after_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._go_on_if_running()
            raise


def _replaced() -> RequestError:
    return RequestError("", "the weights were replaced: send the request again", "UNAVAILABLE")


def check_mode(mode: str, but: str | None = None) -> None:
    """Checks what is to happen to running requests. but: what may not. Errors: RequestError."""
    if mode not in MODES:
        raise RequestError("mode", f"must be one of {', '.join(MODES)}, not {mode!r:.50}")
    if mode == but:
        raise RequestError("mode", "cannot be keep: an answer would be of two versions of weights")


def check_version(version: str) -> None:
    """Checks the name of a version. Errors: RequestError."""
    if not (0 < len(version) <= MAX_VERSION_CHARS and version.isprintable()):
        raise RequestError(
            "weight_version", f"must be 1 to {MAX_VERSION_CHARS} characters that can be printed"
        )
