"""Offline inference: a model in this process, prompts in, completions out.

llm = LLM("smollm2-135m", mesh="spp=2,tp=3")
for completion in llm.generate(["Once upon a time"], SamplingParams(max_tokens=20)):
    print(completion.text)
"""

from __future__ import annotations

import functools
import itertools
import queue
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from jaxserve.api.errors import RequestError
from jaxserve.api.events import Event, Finished
from jaxserve.api.request import Request, Slo
from jaxserve.api.sampling import SamplingParams
from jaxserve.checkpoint.generation_config import sampling_defaults
from jaxserve.replica.adapters import LocalAdapters, NoAdapters, not_loaded
from jaxserve.replica.protocol import Replica
from jaxserve.replica.weights import PARTS, Mode, WeightSource
from jaxserve.settings.options import make
from jaxserve.settings.schema import EngineConfig, MeshConfig
from jaxserve.store.peers import PeerBlocks
from jaxserve.text import Tokenizer
from jaxserve.text.output import (
    Completion,
    CompletionCollector,
    Delta,
    Detokenizer,
    NoText,
    OutputProcessor,
)
from jaxserve.text.structured_output import Guided, Guides

Prompt = str | Sequence[int] | np.ndarray | Sequence[Mapping[str, str]]
Watch = Callable[[int, Delta], None]


def open_engine(
    config: EngineConfig,
    progress: bool = True,
    warm_up: bool = True,
    peers: PeerBlocks | None = None,
) -> tuple[Replica, Tokenizer | None]:
    """Builds an engine, without starting it; returns it with its model's tokenizer, None for a
    random model.

    A known name or hub id that is not cached is downloaded. warm_up: compile all
    programs now, not each when it is first needed. peers: other replicas, which are asked for
    blocks. Errors: ConfigError.
    """
    from jaxserve.checkpoint.fetch import local_files
    from jaxserve.engine.build import build  # JAX is imported when it is needed, not before

    source = config.source.model
    sampling_defaults(config.source)  # refuses a wrong folder before weights are read
    if source.startswith("random:"):
        return build(config, progress, warm_up, peers=peers), None
    tokenizer = Tokenizer.load(local_files(source, progress, config.source.revision))
    return build(config, progress, warm_up, peers=peers), tokenizer


class PromptError(RequestError):
    """A mistake in one of several prompts. number: which one, from 0."""

    def __init__(self, number: int, error: RequestError):
        super().__init__("", str(error), error.status)
        self.number = number
        self.field = error.field


class LLM:
    """A model on a mesh, for offline inference; a context manager, which closes it at the end.

    Settings are those of `EngineConfig`, by the names of the flags.
    """

    def __init__(
        self,
        model: str = "smollm2-135m",
        mesh: str | MeshConfig = "",
        *,
        progress: bool = True,
        warm_up: bool = False,
        **settings: Any,
    ):
        """Loads the model. warm_up: compile all programs now, not each when it is first needed.

        Errors: ConfigError for settings or a checkpoint that cannot be used.
        """
        given = {"mesh": mesh} if mesh else {}
        config = make(EngineConfig, {"model": model, **given, **settings})
        self.engine, self.tokenizer = open_engine(config, progress, warm_up)
        info = self.engine.info
        self._guides = Guides(self.tokenizer, info.vocab, info.eos_ids)
        self.engine.start()
        self._numbers = itertools.count()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the engine; running requests are dropped."""
        self._guides.close()
        self.engine.close()

    def update_weights(
        self, source: WeightSource, version: str | None = None, mode: Mode = "finish"
    ) -> str:
        """Replaces the weights by others of the same model, and returns their version.

        source: a folder or file that `model` could name, or arrays (NumPy's or JAX's) by their
        Hugging Face names. version: a name; None counts up. mode: what becomes of requests that
        have begun: finish or abort. Errors: RequestError, after which the weights are those of
        before, unless it says that there are none.
        """
        return self.engine.weights.update(source, version, mode)

    def sleep(self, level: int = 1, mode: Mode = "abort") -> None:
        """Frees the devices' memory of KV and weights. level: 1 keeps the weights in host memory, 2
        does not: they must be updated before `wake_up`. mode: what becomes of requests that have
        begun: abort, finish, or, with level 1, keep. Errors: RequestError."""
        self.engine.weights.sleep(level, mode)

    def wake_up(self, tags: Collection[str] = PARTS) -> None:
        """Brings back what sleeps. tags: weights, kv_cache or both; requests go on once all is
        there. Errors: RequestError."""
        self.engine.weights.wake_up(tags)

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the sampling parameters that the model's makers recommend; see the setting
        `generation_config`. The name is vLLM's."""
        return self.engine.info.sampling()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        guided: Guided | Sequence[Guided | None] | None = None,
        class_name: str | Sequence[str | None] | None = None,
        tenant: str | Sequence[str] = "",
        adapter: str | Sequence[str] = "",
        progress: bool = False,
        watch: Watch | None = None,
    ) -> list[Completion]:
        """Completes all prompts; returns n completions for each, in order.

        prompts: one or several; a prompt is text, token ids, or chat messages (dicts of role and
        content). sampling, guided (constraints on outputs), class_name (of the setting `classes`),
        tenant (of `tenant_shares`) and adapter (a name in `lora_modules`, or that `load_adapter`
        was given): one for all prompts, or a list with one for each; without `sampling` those of
        `get_default_sampling_params`. watch: called with a prompt's number and its next tokens, as
        they come.

        Errors: PromptError, before anything runs, where a prompt or its sampling is at fault;
        RequestError where the engine fails.
        """
        listed = _listed(prompts)
        count = len(listed)
        if sampling is None:
            sampling = self.get_default_sampling_params()
        each = {
            "sampling": _for_each("sampling", sampling, SamplingParams, count),
            "guided": _for_each("guided", guided, Guided | None, count),
            "class_name": _for_each("class_name", class_name, str | None, count),
            "tenant": _for_each("tenant", tenant, str, count),
            "adapter": _for_each("adapter", adapter, str, count),
        }
        options = [dict(zip(each, some)) for some in zip(*each.values())]
        requests = self._requests(listed, options)
        streams = [self._stream(prompt, request) for prompt, request in zip(listed, requests)]
        with tqdm(total=len(requests), desc="prompts", disable=not progress) as bar:
            return _Run(self.engine, requests, streams, watch).completions(bar.update)

    def load_adapter(self, name: str, folder: str) -> None:
        """Reads an adapter (LoRA) that PEFT saved, for `generate`. Errors: RequestError."""
        adapters = self.engine.adapters
        assert isinstance(adapters, (LocalAdapters, NoAdapters)), "its engine is in this process"
        adapters.load_given(name, folder)

    def unload_adapter(self, name: str) -> None:
        """Forgets an adapter. Errors: RequestError for an unknown name."""
        self.engine.adapters.unload(name)

    def _requests(self, prompts: list[Prompt], options: list[dict[str, Any]]) -> list[Request]:
        """Makes the requests of prompts, each with options of `_request`. Errors: PromptError."""
        now = self.engine.now()
        requests = []
        for number, (prompt, given) in enumerate(zip(prompts, options)):
            try:
                requests.append(self._request(prompt, now, **given))
            except RequestError as error:
                raise PromptError(number, error) from None
        return requests

    def _request(
        self,
        prompt: Prompt,
        now: float,
        sampling: SamplingParams,
        guided: Guided | None,
        class_name: str | None,
        tenant: str,
        adapter: str,
    ) -> Request:
        sampling.check()
        identity = ""
        if adapter:
            found = self.engine.adapters.by_name.get(adapter)
            if found is None:
                raise not_loaded(adapter)
            identity = found.identity
        if sampling.stop and self.tokenizer is None:
            raise RequestError("stop", "stop strings need text, and this model has no tokenizer")
        info = self.engine.info
        return Request.make(
            f"llm-{next(self._numbers)}",
            self._ids(prompt),
            sampling,
            vocab=info.vocab,
            max_len=info.max_model_len,
            classes=info.class_names,
            arrival=now,
            slo=Slo(class_name=class_name),
            guide=None if guided is None else self._guides.compile(guided),
            tenant=tenant,
            adapter=identity,
        )

    def _ids(self, prompt: Prompt) -> Any:
        if not isinstance(prompt, str) and not _is_chat(prompt):
            return prompt
        if self.tokenizer is None:
            raise RequestError("prompt", "this model has no tokenizer: give token ids")
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        return self.tokenizer.chat(prompt)  # type: ignore[arg-type]

    def _stream(self, prompt: Prompt, request: Request) -> Callable[[], Detokenizer]:
        """Makes detokenizers of outputs, which continue the prompt's text unless that is a chat."""
        if self.tokenizer is None:
            return NoText
        before = () if _is_chat(prompt) else request.prompt.tolist()
        return functools.partial(self.tokenizer.stream, prompt=before)


class _Run:
    """One call of `generate`: submits requests as the engine's queue has room, and collects their
    outputs. streams: of each request, makes its detokenizers."""

    def __init__(
        self,
        engine: Replica,
        requests: list[Request],
        streams: list[Callable[[], Detokenizer]],
        watch: Watch | None,
    ):
        self._engine = engine
        self._requests = requests
        self._watch = watch
        self._events: queue.SimpleQueue[tuple[int, Sequence[Event]]] = queue.SimpleQueue()
        self._processors = [
            OutputProcessor(r, engine.info.eos_ids, stream, functools.partial(engine.stop, r.id))
            for r, stream in zip(requests, streams)
        ]
        self._collectors = [CompletionCollector(r.prompt.tolist()) for r in requests]

    def completions(self, done: Callable[[], object]) -> list[Completion]:
        """Runs all requests; calls `done` as each ends. Errors: RequestError of the engine."""
        submitted = 0
        running = 0
        room = self._engine.info.max_queue
        try:
            while submitted < len(self._requests) or running:
                while submitted < len(self._requests) and running < room:
                    self._submit(submitted)
                    submitted += 1
                    running += 1
                number, events = self._events.get()
                self._take(number, events)
                if not self._processors[number].unfinished:
                    running -= 1
                    done()
        finally:  # after an error or Ctrl-C nothing of this call goes on
            for request, processor in zip(self._requests[:submitted], self._processors):
                if processor.unfinished:
                    self._engine.cancel(request.id)
        return [
            completion for collector in self._collectors for completion in collector.completions()
        ]

    def _submit(self, number: int) -> None:
        self._engine.submit(
            self._requests[number], lambda events: self._events.put((number, events))
        )

    def _take(self, number: int, events: Sequence[Event]) -> None:
        for output in self._processors[number].feed(events):
            if isinstance(output, Finished) and output.error is not None:
                raise output.error
            if isinstance(output, Delta) and self._watch is not None:
                self._watch(number, output)
            self._collectors[number].add(output)


def _for_each(name: str, values: Any, kind: Any, count: int) -> list[Any]:
    """Returns one value for each prompt, from one for all or from a list of them."""
    each = [values] * count if isinstance(values, kind) else list(values)
    if len(each) != count:
        raise RequestError(name, f"has {len(each)} entries for {count} prompts")
    return each


def _is_chat(prompt: Prompt) -> bool:
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _listed(prompts: Any) -> list[Prompt]:
    """Returns a list of prompts, from one or from several."""
    single = isinstance(prompts, str) or (isinstance(prompts, np.ndarray) and prompts.ndim == 1)
    if not single and len(prompts):
        single = isinstance(prompts[0], (int, np.integer, Mapping))
    return [prompts] if single else list(prompts)
