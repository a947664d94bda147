"""KV events of the replica that is served, for other people's routers (docs/routers.md)."""

from __future__ import annotations

import contextlib
import logging

from jaxserve.observe.kv_event_publisher import KvEventPublisher, endpoint_host, topic_of
from jaxserve.observe.kv_events import KvEventLog
from jaxserve.replica.protocol import Replica
from jaxserve.server.own_address import is_loopback
from jaxserve.settings.schema import ConfigError, ServerConfig

log = logging.getLogger(__name__)


def check_kv_events(config: ServerConfig) -> None:
    """Refuses wrong endpoints, and those that strangers could reach, unless --insecure is set.
    Errors: ConfigError."""
    if config.kv_events is None and config.kv_events_replay is not None:
        raise ConfigError("kv_events_replay", "is for --kv_events")
    for field in ("kv_events", "kv_events_replay"):
        endpoint = getattr(config, field)
        if endpoint is None:
            continue
        host = endpoint_host(field, endpoint)
        if not is_loopback(host) and not config.insecure:
            raise ConfigError(
                field,
                f"{host!r} is not a loopback address, and anyone who reaches it can read the "
                "tokens of all prompts; add --insecure to let everybody who can",
            )


class KvEvents:
    """Publishes which blocks a replica stores and loses. Listens from the moment it is made.
    Errors: ConfigError."""

    def __init__(self, config: ServerConfig):
        assert config.kv_events is not None
        self._address = config.kv_events_address
        self._publisher = KvEventPublisher(config.kv_events, config.kv_events_replay)
        self.endpoint = self._publisher.endpoint
        self.replay_endpoint = self._publisher.replay
        self._replica: Replica | None = None
        self._events: KvEventLog | None = None

    def open(self, replica: Replica, address: str) -> None:
        """Begins to publish. address: HOST:PORT of the HTTP port, unless another is configured."""
        topic = topic_of(self._address or address, replica.info.served_name)
        events = self._publisher.start(topic, replica.info.block_size)
        replica.post(lambda: replica.block_events.subscribe(events))
        self._replica, self._events = replica, events
        log.info("KV events on %s, topic %s", self.endpoint, topic)

    def close(self) -> None:
        """Ends; waits seconds at most."""
        if self._replica is not None:
            self._replica.post(self._unsubscribe)
        self._publisher.close()

    def _unsubscribe(self) -> None:
        assert self._replica is not None and self._events is not None
        with contextlib.suppress(ValueError):  # it never came to listen
            self._replica.block_events.unsubscribe(self._events)
