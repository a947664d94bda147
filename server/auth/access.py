"""Who calls, and how much each may ask for. All of it belongs to the event loop; time is an
argument.

`Authenticator.authenticate` makes a `Caller` of an Authorization header (Bearer KEY, or the Basic of
browsers with the key as password). A caller is admitted with a `Lease`, which counts against its
key's limits until it is closed. The counts belong to the key's name, so they outlive the caller,
which lasts for one call, and the key file, which may be written anew at any time.

A client's TLS certificate says that it may connect, not who it is: names and limits come with keys
alone.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import concurrent.futures
import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxserve.api.errors import RequestError
from jaxserve.server.auth.keys import MAX_KEY_CHARS, Key, Keys, Limits
from jaxserve.settings.schema import ServerConfig

HEADER = "authorization"
MAX_HEADER_CHARS = 2 * MAX_KEY_CHARS  # base64 of the longest key, with a name before it
RETRY_SECONDS = 1.0  # where only the end of other requests makes room
ROUNDING = 1e-6  # seconds


class Authenticator:
    """Who may come in. Without a key file everybody may, as the caller without a name. Errors:
    ConfigError for the file."""

    def __init__(self, config: ServerConfig):
        self._keys = Keys(config.api_keys) if config.api_keys is not None else None
        self._isolated = not config.share_prefixes
        self._usage: dict[str, Usage] = {}
        # waits for nothing that callers ask for
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "keys")
        self.anonymous = Caller("", "", Limits(), Usage(), False)

    async def refresh(self) -> None:
        """To be called now and then: sees whether the key file has changed, and reads it beside the
        event loop."""
        if self._keys is None or not self._keys.changed:
            return
        if await asyncio.get_running_loop().run_in_executor(self._thread, self._keys.refresh):
            names = self._keys.names
            self._usage = {
                name: usage for name, usage in self._usage.items() if name in names or usage.running
            }

    def authenticate(self, authorization: str | None, *, admin: bool = False) -> Caller:
        """The caller of a request with this header. admin: whether it came to the admin port.
        Errors: RequestError, UNAUTHENTICATED without a known key, PERMISSION_DENIED with one for
        the other port."""
        if self._keys is None:
            return self.anonymous
        if authorization is None:
            raise RequestError(
                HEADER,
                "an API key is missing: send it as Authorization: Bearer KEY",
                "UNAUTHENTICATED",
            )
        presented = presented_key(authorization)
        key = None if presented is None else self._keys.find(presented)
        if key is None:
            raise RequestError(
                HEADER, "not an API key of this server, sent as Bearer KEY", "UNAUTHENTICATED"
            )
        if key.admin != admin:
            said = (
                "this port needs an admin key"
                if admin
                else "an admin key works on the admin port only"
            )
            raise RequestError(HEADER, said, "PERMISSION_DENIED")
        return self._caller(key)

    def _caller(self, key: Key) -> Caller:
        usage = self._usage.get(key.name)
        if usage is None:
            usage = self._usage[key.name] = Usage()
        return Caller(key.name, key.tenant, key.limits, usage, self._isolated)


def presented_key(authorization: str) -> str | None:
    """The key of 'Bearer KEY' or of 'Basic BASE64', where that says 'anything:KEY'; None of
    anything else."""
    scheme, _, value = authorization.partition(" ")
    value = value.strip(" ")
    if len(value) > MAX_HEADER_CHARS:
        return None
    if scheme.lower() == "bearer":
        return value
    if scheme.lower() != "basic":
        return None
    try:
        _, colon, key = base64.b64decode(value, validate=True).decode().partition(":")
    except (binascii.Error, ValueError):
        return None
    return key if colon else None


class Usage:
    """What the requests of one key take now, and when the next one may come."""

    def __init__(self) -> None:
        self.running = self.queued = 0
        self._due = float("-inf")

    def check(self, limits: Limits, now: float) -> None:
        """Errors: RequestError where one more request is too much."""
        if limits.requests_per_minute is not None:
            wait = self._due - now + 60 / limits.requests_per_minute - 60
            if wait > ROUNDING:
                raise _too_much(
                    "requests_per_minute",
                    f"the limit of this key is {limits.requests_per_minute}",
                    wait,
                )
        if limits.concurrency is not None and self.running >= limits.concurrency:
            raise _too_much(
                "concurrency",
                f"{self.running} requests of this key run; its limit is {limits.concurrency}",
            )

    def check_tokens(self, limits: Limits, tokens: int) -> None:
        """Errors: RequestError where so many more prompt tokens are too much; INVALID_ARGUMENT
        where they are that alone."""
        most = limits.queued_tokens
        if most is None or self.queued + tokens <= most:
            return
        if tokens > most:  # which no waiting helps
            raise RequestError(
                "queued_tokens", f"the prompt has {tokens} tokens; the limit of this key is {most}"
            )
        said = f"{self.queued} prompt tokens of this key wait, and this prompt has {tokens}; the limit is {most}"
        raise _too_much("queued_tokens", said)

    def take(self, limits: Limits, now: float) -> None:
        """Counts a request."""
        self.running += 1
        # as if requests came evenly: one falls due so long after the one before
        if limits.requests_per_minute is not None:
            self._due = max(self._due, now) + 60 / limits.requests_per_minute


def _too_much(limit: str, message: str, wait: float = RETRY_SECONDS) -> RequestError:
    return RequestError(limit, message, "RESOURCE_EXHAUSTED", wait)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Caller:
    """Who a call is from; name and tenant are '' where no keys are asked for."""

    name: str
    tenant: str
    limits: Limits
    usage: Usage = dataclasses.field(repr=False)
    isolated: bool  # whether other tenants' prefixes are of no use to it

    def salt(self, asked: str) -> str:
        """What a request's blocks are salted with, given the salt that it asks for. Names have no
        colon, so no two tenants' are equal."""
        return f"{self.tenant}:{asked}" if self.isolated else asked

    def scoped(self, id: str) -> str:
        """A request's id among those of all callers: none can take, or learn of, another's."""
        return f"{self.name}:{id}" if self.name else id

    def own_id(self, scoped: str) -> str:
        """What the caller knows a request by."""
        return scoped.removeprefix(f"{self.name}:") if self.name else scoped

    def knows(self, scoped: str) -> bool:
        """Whether a request among those of all callers is its own."""
        return scoped.startswith(f"{self.name}:")

    def admit(self, now: float) -> Lease:
        """Lets a request in, at `now` (seconds of any steady clock); its prompt is counted by
        `Lease.queue`, once it was read. Errors: RequestError, RESOURCE_EXHAUSTED with
        `retry_after`."""
        self.usage.check(self.limits, now)
        self.usage.take(self.limits, now)
        return Lease(self)

    def owns(self, other: Caller) -> bool:
        """Whether the other's requests are its own, to abort and to hear of."""
        return self.name == other.name


class Lease:
    """A request's part of its key's limits, until `close`."""

    def __init__(self, caller: Caller):
        self._caller = caller
        self._queued = 0
        self._open = True

    def queue(self, tokens: int) -> None:
        """So many more prompt tokens wait. Errors: as of `Usage.check_tokens`; nothing is counted
        then."""
        if self._open:
            self._caller.usage.check_tokens(self._caller.limits, tokens)
            self._caller.usage.queued += tokens
            self._queued += tokens

    def started(self) -> None:
        """The first token came. May be called for every token."""
        self._caller.usage.queued -= self._queued
        self._queued = 0

    def close(self) -> None:
        """The request ended, however. May be called again."""
        self.started()
        if self._open:
            self._open = False
            self._caller.usage.running -= 1


def own(caller: Caller, streams: Mapping[str, Any], request_id: str | None) -> list[str]:
    """Ids of the streams that a caller may abort: one, or all of its own where none is named.
    Streams have a `caller`.

    Errors: RequestError NOT_FOUND, the same for another's request and for one that is not there.
    """
    if request_id is None:
        return [id for id, stream in streams.items() if caller.owns(stream.caller)]
    scoped = caller.scoped(request_id)
    stream = streams.get(scoped)
    if stream is None or not caller.owns(stream.caller):
        raise RequestError("request_id", f"{request_id[:100]!r} is not running", "NOT_FOUND")
    return [scoped]
