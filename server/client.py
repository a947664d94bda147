"""The client: `Client` for threads and scripts, `AsyncClient` for asyncio. Both speak jaxserve.v1
and raise `ServerError`.

Both take the same keyword arguments: `api_key`, where the server asks for one; `root_certificates`,
the authorities of the server's certificate, and for a server that wants a client certificate
`certificate` and `private_key`. These are PEM bytes, and any of them, or `tls=True` with the
system's authorities, turns TLS on.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxserve.api.sampling import SamplingParams
from jaxserve.server import jaxserve_pb2 as pb
from jaxserve.server import jaxserve_pb2_grpc as rpc
from jaxserve.server.grpc.errors import ServerError
from jaxserve.server.grpc.proto import Given, generate_message, output_of, set_prompt
from jaxserve.text.output import Completion, CompletionCollector, Output

OPTIONS = [  # pings through minutes of prefill, not more often than the server lets
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]


@dataclasses.dataclass(frozen=True)
class Credentials:
    """How a client proves who it is, and knows who it talks to."""

    api_key: str | None = dataclasses.field(default=None, repr=False)
    tls: bool = False
    root_certificates: bytes | None = None
    certificate: bytes | None = None
    private_key: bytes | None = dataclasses.field(default=None, repr=False)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return () if self.api_key is None else (("authorization", f"Bearer {self.api_key}"),)

    def channel(self, module: Any, target: str) -> Any:
        """module: grpc or grpc.aio."""
        if not (self.tls or self.root_certificates or self.certificate or self.private_key):
            return module.insecure_channel(target, OPTIONS)
        credentials = grpc.ssl_channel_credentials(
            self.root_certificates, self.private_key, self.certificate
        )
        return module.secure_channel(target, credentials, OPTIONS)


class Calls:
    """What both clients share: stubs, and what goes with every call."""

    def __init__(self, module: Any, target: str, credentials: Credentials):
        channel = self.channel = credentials.channel(module, target)
        self.metadata = credentials.metadata
        self.inference = rpc.InferenceStub(channel)
        self.control = rpc.ControlStub(channel)
        self.health = health_pb2_grpc.HealthStub(channel)


class Client:
    """`with Client("127.0.0.1:8470") as client: print(client.complete("Once upon a
    time")[0].text)`. Safe to share between threads."""

    def __init__(self, target: str, **credentials: Any):
        self._calls = Calls(grpc, target, Credentials(**credentials))

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._calls.channel.close()

    def generate(
        self,
        prompt: Given,
        sampling: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        **fields: Any,
    ) -> Iterator[Output]:
        """Events as they come: Accepted, Progress, Delta, Finished. Sent when the first is asked
        for; closing the iterator aborts it.

        prompt: text, token ids, or chat messages (dicts of role and content). timeout: seconds.
        fields: `guided`, a Guided, and others of GenerateRequest, such as request_id, ids_only, kv.
        Errors: ServerError.
        """
        message = generate_message(prompt, sampling, **fields)
        call = self._calls.inference.Generate(
            message, timeout=timeout, metadata=self._calls.metadata
        )
        try:
            for event in call:
                yield output_of(event)
        except grpc.RpcError as error:
            raise ServerError(error) from None
        finally:
            call.cancel()

    def complete(
        self,
        prompt: Given,
        sampling: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        **fields: Any,
    ) -> list[Completion]:
        """The n completions, whole. Arguments and errors as for `generate`."""
        gathered = CompletionCollector(_ids_of(prompt))
        for output in self.generate(prompt, sampling, timeout=timeout, **fields):
            gathered.add(output)
        return gathered.completions()

    def tokenize(self, prompt: Given, special: bool = True) -> list[int]:
        return list(
            self._call(self._calls.inference.Tokenize, _tokenize_message(prompt, special)).ids
        )

    def detokenize(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return self._call(
            self._calls.inference.Detokenize,
            pb.DetokenizeRequest(ids=ids, skip_special=skip_special),
        ).text

    def abort(self, request_id: str | None = None) -> int:
        """Aborts one request, or all where no id is given; returns how many."""
        return self._call(self._calls.control.Abort, _abort_message(request_id)).aborted

    def model_info(self) -> pb.GetModelInfoResponse:
        return self._call(self._calls.control.GetModelInfo, pb.GetModelInfoRequest())

    def server_info(self) -> pb.GetServerInfoResponse:
        return self._call(self._calls.control.GetServerInfo, pb.GetServerInfoRequest())

    def load(self) -> pb.GetLoadResponse:
        return self._call(self._calls.control.GetLoad, pb.GetLoadRequest())

    def healthy(self) -> bool:
        """Whether the server takes requests now; False too where nothing answers."""
        try:
            answer = self._calls.health.Check(health_pb2.HealthCheckRequest(), timeout=5)
        except grpc.RpcError:
            return False
        return answer.status == health_pb2.HealthCheckResponse.SERVING

    def wait_ready(self, timeout: float) -> None:
        """Returns once the server takes requests. Errors: TimeoutError."""
        deadline = time.monotonic() + timeout
        while not self.healthy():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the server is not ready after {timeout} s")
            time.sleep(0.05)

    def _call(self, method: Any, message: Any) -> Any:
        try:
            return method(message, metadata=self._calls.metadata)
        except grpc.RpcError as error:
            raise ServerError(error) from None


class AsyncClient:
    """As `Client`, on the running event loop."""

    def __init__(self, target: str, **credentials: Any):
        self._calls = Calls(grpc.aio, target, Credentials(**credentials))

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._calls.channel.close()

    async def generate(
        self,
        prompt: Given,
        sampling: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        **fields: Any,
    ) -> AsyncIterator[Output]:
        """As `Client.generate`. To abort: cancel the task, or `aclose` the iterator."""
        message = generate_message(prompt, sampling, **fields)
        call = self._calls.inference.Generate(
            message, timeout=timeout, metadata=self._calls.metadata
        )
        try:
            async for event in call:
                yield output_of(event)
        except grpc.RpcError as error:
            raise ServerError(error) from None
        finally:
            call.cancel()

    async def complete(
        self,
        prompt: Given,
        sampling: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        **fields: Any,
    ) -> list[Completion]:
        gathered = CompletionCollector(_ids_of(prompt))
        async for output in self.generate(prompt, sampling, timeout=timeout, **fields):
            gathered.add(output)
        return gathered.completions()

    async def tokenize(self, prompt: Given, special: bool = True) -> list[int]:
        return list(
            (
                await self._call(self._calls.inference.Tokenize, _tokenize_message(prompt, special))
            ).ids
        )

    async def detokenize(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return (
            await self._call(
                self._calls.inference.Detokenize,
                pb.DetokenizeRequest(ids=ids, skip_special=skip_special),
            )
        ).text

    async def abort(self, request_id: str | None = None) -> int:
        return (await self._call(self._calls.control.Abort, _abort_message(request_id))).aborted

    async def model_info(self) -> pb.GetModelInfoResponse:
        return await self._call(self._calls.control.GetModelInfo, pb.GetModelInfoRequest())

    async def server_info(self) -> pb.GetServerInfoResponse:
        return await self._call(self._calls.control.GetServerInfo, pb.GetServerInfoRequest())

    async def load(self) -> pb.GetLoadResponse:
        return await self._call(self._calls.control.GetLoad, pb.GetLoadRequest())

    async def _call(self, method: Any, message: Any) -> Any:
        try:
            return await method(message, metadata=self._calls.metadata)
        except grpc.RpcError as error:
            raise ServerError(error) from None


def _ids_of(prompt: Any) -> Sequence[int]:
    """The prompt where it is token ids, else nothing."""
    return (
        ()
        if isinstance(prompt, str) or (len(prompt) and isinstance(prompt[0], Mapping))
        else prompt
    )


def _tokenize_message(prompt: Given, special: bool) -> pb.TokenizeRequest:
    message = pb.TokenizeRequest(special=special)
    set_prompt(message, prompt)
    return message


def _abort_message(request_id: str | None) -> pb.AbortRequest:
    return (
        pb.AbortRequest(all=True) if request_id is None else pb.AbortRequest(request_id=request_id)
    )
