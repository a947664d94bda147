"""gRPC clients: `Client` for threads and scripts, `AsyncClient` for asyncio. Both speak jaxserve.v1
and raise `ServerError`.

Both take the same keyword arguments: `api_key`, if the server requires one; `root_certificates`,
the authorities of the server's certificate; and for a server that requires client certificates,
`certificate` and `private_key`. These are PEM bytes, and any of them, or `tls=True` with the
system's authorities, turns TLS on.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxserve.api.sampling import SamplingParams
from jaxserve.server import jaxserve_pb2 as pb
from jaxserve.server import jaxserve_pb2_grpc as rpc
from jaxserve.server.grpc.errors import ServerError
from jaxserve.server.grpc.proto import PromptArgument, generate_message, output_of, set_prompt
from jaxserve.text.output import Completion, CompletionCollector, Output

# keepalive pings during minutes of prefill, no more often than the server permits
CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]


Read = Callable[[Any], Any]  # returns what callers get of an answer


@dataclasses.dataclass(frozen=True)
class Credentials:
    """Keys and certificates by which client and server trust each other; see the module."""

    api_key: str | None = dataclasses.field(default=None, repr=False)
    tls: bool = False
    root_certificates: bytes | None = None
    certificate: bytes | None = None
    private_key: bytes | None = dataclasses.field(default=None, repr=False)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return () if self.api_key is None else (("authorization", f"Bearer {self.api_key}"),)

    def channel(self, module: Any, target: str) -> Any:
        """A channel to a server. module: grpc or grpc.aio."""
        if not (self.tls or self.root_certificates or self.certificate or self.private_key):
            return module.insecure_channel(target, CHANNEL_OPTIONS)
        credentials = grpc.ssl_channel_credentials(
            self.root_certificates, self.private_key, self.certificate
        )
        return module.secure_channel(target, credentials, CHANNEL_OPTIONS)


class _Calls:
    """Calls with one answer, as both clients have them: `Client` returns what they document,
    `AsyncClient` an awaitable of it. Errors: ServerError."""

    def __init__(self, module: Any, target: str, credentials: Mapping[str, Any]):
        identity = Credentials(**credentials)
        self.channel = identity.channel(module, target)
        self._metadata = identity.metadata
        self._inference = rpc.InferenceStub(self.channel)
        self._control = rpc.ControlStub(self.channel)

    def tokenize(self, prompt: PromptArgument, special: bool = True, model: str = "") -> Any:
        """Returns the token ids of a prompt, list[int]. special: as for `prompts.Text`. model: its
        name, here and below, which servers of several need."""
        message = pb.TokenizeRequest(special=special, model=model)
        set_prompt(message, prompt)
        return self._call(self._inference.Tokenize, message, lambda answer: list(answer.ids))

    def detokenize(self, ids: Sequence[int], skip_special: bool = True, model: str = "") -> Any:
        """Returns the text of token ids, str."""
        message = pb.DetokenizeRequest(ids=ids, skip_special=skip_special, model=model)
        return self._call(self._inference.Detokenize, message, lambda answer: answer.text)

    def abort(self, request_id: str | None = None) -> Any:
        """Aborts one request, or all of the caller's if no id is given; returns how many, int."""
        message = pb.AbortRequest(all=True)
        if request_id is not None:
            message.request_id = request_id
        return self._call(self._control.Abort, message, lambda answer: answer.aborted)

    def model_info(self, model: str = "") -> Any:
        """Returns pb.GetModelInfoResponse."""
        return self._call(self._control.GetModelInfo, pb.GetModelInfoRequest(model=model))

    def server_info(self, model: str = "") -> Any:
        """Returns pb.GetServerInfoResponse."""
        return self._call(self._control.GetServerInfo, pb.GetServerInfoRequest(model=model))

    def load(self, model: str = "") -> Any:
        """Returns pb.GetLoadResponse."""
        return self._call(self._control.GetLoad, pb.GetLoadRequest(model=model))

    def _call(self, method: Any, message: Any, read: Read = lambda answer: answer) -> Any:
        raise NotImplementedError

    def _generating(
        self,
        prompt: PromptArgument,
        sampling: SamplingParams | None,
        timeout: float | None,
        fields: Mapping[str, Any],
    ) -> Any:
        message = generate_message(prompt, sampling, **fields)
        return self._inference.Generate(message, timeout=timeout, metadata=self._metadata)


class Client(_Calls):
    """A blocking client; threads may share one.

    with Client("127.0.0.1:8470") as client:
        print(client.complete("Once upon a time")[0].text)
    """

    def __init__(self, target: str, **credentials: Any):
        super().__init__(grpc, target, credentials)
        self._health = health_pb2_grpc.HealthStub(self.channel)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.channel.close()

    def generate(
        self,
        prompt: PromptArgument,
        sampling: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        **fields: Any,
    ) -> Iterator[Output]:
        """Yields outputs as they come: Accepted, Progress, Delta, Finished. The request is sent
        when the first is asked for; closing the iterator aborts it.

        prompt: text, token ids, or chat messages (dicts of role and content). timeout: seconds.
        fields: `guided`, a Guided, and others of GenerateRequest, such as request_id, ids_only, kv.
        Errors: ServerError.
        """
        call = self._generating(prompt, sampling, timeout, fields)
        try:
            for event in call:
                yield output_of(event)
        except grpc.RpcError as error:
            raise ServerError(error) from None
        finally:
            call.cancel()

    def complete(
        self, prompt: PromptArgument, sampling: SamplingParams | None = None, **fields: Any
    ) -> list[Completion]:
        """Returns the n completions at their end. Arguments and errors as for `generate`."""
        collector = CompletionCollector(_prompt_ids(prompt))
        for output in self.generate(prompt, sampling, **fields):
            collector.add(output)
        return collector.completions()

    def healthy(self) -> bool:
        """Returns whether the server accepts requests now; False if nothing answers."""
        try:
            answer = self._health.Check(health_pb2.HealthCheckRequest(), timeout=5)
        except grpc.RpcError:
            return False
        return answer.status == health_pb2.HealthCheckResponse.SERVING

    def wait_ready(self, timeout: float) -> None:
        """Returns once the server accepts requests. timeout: seconds. Errors: TimeoutError."""
        deadline = time.monotonic() + timeout
        while not self.healthy():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the server is not ready after {timeout} s")
            time.sleep(0.05)

    def _call(self, method: Any, message: Any, read: Read = lambda answer: answer) -> Any:
        try:
            return read(method(message, metadata=self._metadata))
        except grpc.RpcError as error:
            raise ServerError(error) from None


class AsyncClient(_Calls):
    """A client like `Client`, on the running event loop."""

    def __init__(self, target: str, **credentials: Any):
        super().__init__(grpc.aio, target, credentials)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self.channel.close()

    async def generate(
        self,
        prompt: PromptArgument,
        sampling: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        **fields: Any,
    ) -> AsyncIterator[Output]:
        """Yields outputs like `Client.generate`. To abort: cancel the task, or `aclose` the
        iterator."""
        call = self._generating(prompt, sampling, timeout, fields)
        try:
            async for event in call:
                yield output_of(event)
        except grpc.RpcError as error:
            raise ServerError(error) from None
        finally:
            call.cancel()

    async def complete(
        self, prompt: PromptArgument, sampling: SamplingParams | None = None, **fields: Any
    ) -> list[Completion]:
        """Returns the n completions at their end, like `Client.complete`."""
        collector = CompletionCollector(_prompt_ids(prompt))
        async for output in self.generate(prompt, sampling, **fields):
            collector.add(output)
        return collector.completions()

    async def _call(self, method: Any, message: Any, read: Read = lambda answer: answer) -> Any:
        try:
            return read(await method(message, metadata=self._metadata))
        except grpc.RpcError as error:
            raise ServerError(error) from None


def _prompt_ids(prompt: Any) -> Sequence[int]:
    """Returns the prompt if it is token ids, else no ids."""
    if isinstance(prompt, str) or (len(prompt) and isinstance(prompt[0], Mapping)):
        return ()
    return prompt
