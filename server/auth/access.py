"""Authenticates callers by API key, and enforces the limits of each key.

`Authenticator.authenticate` finds the `Caller` behind an Authorization header: Bearer KEY, or the
Basic scheme of browsers with the key as the password. Each request holds a `Reservation`, which
counts against its key's limits until it is closed. Counts belong to the key's name, so they outlive
both the `Caller`, which lasts for one call, and the key file, which may be rewritten at any time.

A client's TLS certificate only permits to connect: names and limits come from keys alone. All of
this belongs to the event loop; time is an argument.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import concurrent.futures
import dataclasses
from collections.abc import Sequence

from jaxserve.api.errors import RequestError
from jaxserve.server.auth.keys import MAX_KEY_CHARS, Key, Keys, Limits
from jaxserve.server.throttle import Throttle
from jaxserve.settings.schema import ServerConfig

HEADER = "authorization"
MAX_HEADER_CHARS = 2 * MAX_KEY_CHARS  # base64 of the longest key, with a name before it
RETRY_SECONDS = 1.0  # suggested where only the end of other requests makes room
ROUNDING_SECONDS = 1e-6


class Authenticator:
    """Knows the API keys of a server. Without any everybody is the anonymous caller. Errors:
    ConfigError for the file."""

    def __init__(self, config: ServerConfig):
        self._keys = Keys(config.api_keys, config.api_key) if config.asks_for_keys else None
        self._isolated = not config.share_prefixes
        self._usage: dict[str, KeyUsage] = {}
        # of its own: callers can keep the shared threads busy
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "keys")
        self.anonymous = Caller("", "", Limits(), KeyUsage(), False)

    async def refresh(self) -> None:
        """Reads the key file again, in a thread, if it has changed. To be called periodically."""
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
        the other port.
        """
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
        if admin and not key.admin:
            raise RequestError(HEADER, "this port needs an admin key", "PERMISSION_DENIED")
        if key.admin and not admin:
            raise RequestError(
                HEADER, "an admin key works on the admin port only", "PERMISSION_DENIED"
            )
        return self._caller(key)

    def _caller(self, key: Key) -> Caller:
        usage = self._usage.get(key.name)
        if usage is None:
            usage = self._usage[key.name] = KeyUsage()
        return Caller(key.name, key.tenant, key.limits, usage, self._isolated)


def sole_header(values: Sequence[str]) -> str | None:
    """The Authorization header among those of a request. Errors: RequestError for several: a proxy
    in front may have checked another one."""
    if len(values) > 1:
        raise RequestError(HEADER, "is given more than once", "UNAUTHENTICATED")
    return values[0] if values else None


def presented_key(authorization: str) -> str | None:
    """The key in 'Bearer KEY', or in 'Basic BASE64' of 'anything:KEY'; None in anything else."""
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


class KeyUsage:
    """Current use of one key by its requests. running: requests. queued_tokens: prompt tokens of
    those without a first token. throttle: refuses its calls unread at overload."""

    def __init__(self) -> None:
        self.throttle = Throttle()
        self.running = 0
        self.queued_tokens = 0
        # when the next request would fall due if they came evenly, at the key's rate
        self._next_due = float("-inf")

    def check(self, limits: Limits, now: float) -> None:
        """Refuses one more request if it exceeds a limit. Errors: RequestError,
        RESOURCE_EXHAUSTED."""
        if limits.requests_per_minute is not None:
            # a minute's requests may come at once
            wait = self._next_due - now + 60 / limits.requests_per_minute - 60
            if wait > ROUNDING_SECONDS:
                raise _exhausted(
                    "requests_per_minute",
                    f"the limit of this key is {limits.requests_per_minute}",
                    wait,
                )
        if limits.concurrency is not None and self.running >= limits.concurrency:
            raise _exhausted(
                "concurrency",
                f"{self.running} requests of this key run; its limit is {limits.concurrency}",
            )

    def check_tokens(self, limits: Limits, tokens: int) -> None:
        """Refuses further queued prompt tokens above the limit. Errors: RequestError;
        INVALID_ARGUMENT if they alone exceed it, which no waiting helps."""
        limit = limits.queued_tokens
        if limit is None or self.queued_tokens + tokens <= limit:
            return
        if tokens > limit:
            raise RequestError(
                "queued_tokens", f"the prompt has {tokens} tokens; the limit of this key is {limit}"
            )
        raise _exhausted(
            "queued_tokens",
            f"{self.queued_tokens} prompt tokens of this key wait, and this prompt has {tokens}; "
            f"the limit is {limit}",
        )

    def add(self, limits: Limits, now: float) -> None:
        """Counts one more request."""
        self.running += 1
        if limits.requests_per_minute is not None:
            self._next_due = max(self._next_due, now) + 60 / limits.requests_per_minute


def _exhausted(limit: str, message: str, wait: float = RETRY_SECONDS) -> RequestError:
    return RequestError(limit, message, "RESOURCE_EXHAUSTED", wait)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Caller:
    """Whom a call is from. name: of its key; name and tenant are '' where no keys are required.
    isolated: whether cached prefixes are shared only within its tenant."""

    name: str
    tenant: str
    limits: Limits
    usage: KeyUsage = dataclasses.field(repr=False)
    isolated: bool

    def cache_salt(self, requested: str) -> str:
        """The salt for the prefix cache, given the one that a request names. Tenants' names have no
        colon, so no two tenants get equal salts."""
        return f"{self.tenant}:{requested}" if self.isolated else requested

    def scoped_id(self, own_id: str) -> str:
        """A request's id, unique among all callers: none can take, or learn of, another's."""
        return f"{self.name}:{own_id}" if self.name else own_id

    def own_id(self, scoped_id: str) -> str:
        """The id by which the caller knows its request: the inverse of `scoped_id`."""
        return scoped_id.removeprefix(f"{self.name}:") if self.name else scoped_id

    def owns_id(self, scoped_id: str) -> bool:
        """Returns whether a request is the caller's own."""
        return scoped_id.startswith(f"{self.name}:")

    def is_same(self, other: Caller) -> bool:
        """Returns whether both have one key: each may see and abort the other's requests."""
        return self.name == other.name

    def reserve(self, now: float) -> Reservation:
        """Admits a request at `now`, seconds of a steady clock; its prompt is counted by
        `Reservation.add_prompt`, once it is tokenized. Errors: as of `KeyUsage.check`."""
        self.usage.check(self.limits, now)
        self.usage.add(self.limits, now)
        return Reservation(self)


class Reservation:
    """The share of its key's limits that one request takes up, until `close`."""

    def __init__(self, caller: Caller):
        self._caller = caller
        self._queued_tokens = 0
        self._open = True

    def add_prompt(self, tokens: int) -> None:
        """Counts prompt tokens that wait for their first output. Errors: as of
        `KeyUsage.check_tokens`; nothing is counted then."""
        if self._open:
            self._caller.usage.check_tokens(self._caller.limits, tokens)
            self._caller.usage.queued_tokens += tokens
            self._queued_tokens += tokens

    def prompt_done(self) -> None:
        """Releases the prompt, once the first token came. May be called for every token."""
        self._caller.usage.queued_tokens -= self._queued_tokens
        self._queued_tokens = 0

    def close(self) -> None:
        """Releases all, when the request has ended. May be called again."""
        self.prompt_done()
        if self._open:
            self._open = False
            self._caller.usage.running -= 1
