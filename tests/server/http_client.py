"""Helpers of tests that speak HTTP with a served fake engine."""

from __future__ import annotations

import json
from typing import Any

import httpx


class HttpClient(httpx.Client):
    """A client of a server; `served` is the server. It loads no certificates, which would take
    50 ms of each test, and which a server without TLS has no use for."""

    def __init__(self, served: Any):
        super().__init__(base_url=served.server.url, timeout=60, verify=False)
        self.served = served

    @property
    def engine(self) -> Any:
        return self.served.engine


def post(client: httpx.Client, path: str, body: Any, **headers: str) -> httpx.Response:
    """Posts JSON, or bytes as they are."""
    data = body if isinstance(body, (bytes, str)) else json.dumps(body)
    return client.post(path, content=data, headers={"content-type": "application/json", **headers})


def events(client: httpx.Client, path: str, body: dict) -> tuple[list[dict], str]:
    """The chunks of a streamed answer, and its last line as text."""
    with client.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [
            line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")
        ]
    return [json.loads(line) for line in lines[:-1]], lines[-1]
