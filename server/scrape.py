"""/metrics over HTTP, for Prometheus: the library's own server, on a thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, make_wsgi_app, start_http_server

from jaxserve.config import ConfigError

PATH = "/metrics"
IDLE_SECONDS = 10                                    # until a connection that asks nothing is closed


class Scrape:
    """Listens at once, and tells nothing until it is given the `registry` of an engine."""

    def __init__(self, host: str, port: int):
        """Errors: ConfigError where the address cannot be had."""
        self.registry = CollectorRegistry()
        try:
            self._server, self._thread = start_http_server(port, host.strip("[]"), self.registry)
        except OSError as error:
            raise ConfigError("metrics_port", f"cannot listen on {host}:{port}: {error.strerror or error}") from None
        handler: Any = self._server.RequestHandlerClass
        self._server.RequestHandlerClass = type("Handler", (handler,), {"timeout": IDLE_SECONDS})
        self._server.set_app(self._answer)           # the library's application answers on every path
        self.port = self._server.server_port

    def _answer(self, environ: dict[str, Any], start_response: Callable) -> Iterable[bytes]:
        if environ["PATH_INFO"] != PATH:
            start_response("404 Not Found", [("Content-Type", "text/plain")])
            return [b"metrics are at /metrics\n"]
        plain = {**environ, "HTTP_ACCEPT": "text/plain"}              # in OpenMetrics the library makes underscores of the names' colons
        return make_wsgi_app(self.registry)(plain, start_response)

    def close(self) -> None:
        """Ends it; blocks for up to half a second."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
