"""jaxserve as the rollout engine of Tunix, a library for training by reinforcement learning: it
generates, and takes the trainer's weights after each step.

  rollout = functools.partial(JaxserveRollout, model="FOLDER", mesh="tp=2")
  ClusterConfig(rollout_engine=rollout, ...)

FOLDER is the checkpoint that the trainer began with, with its tokenizer. Source: Tunix 0.1.7,
tunix.rl.rollout.base_rollout. Dense models whose loader Tunix has; of others, `to_hf` says how
their parameters become arrays by Hugging Face names. Adapters (LoRA) of the trainer are not taken
over.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax.numpy as jnp
import numpy as np
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput

from jaxserve.api.sampling import SamplingParams
from jaxserve.integrations.tunix_weights import hugging_face_arrays
from jaxserve.llm import LLM
from jaxserve.text.output import Completion
from jaxserve.weights import open_checkpoint

ToHf = Callable[[Any], Mapping[str, Any]]


class JaxserveRollout(BaseRollout):
    """A rollout engine in the trainer's process. rollout_actor: Tunix's model of the same
    checkpoint. to_hf: gives a model's parameters as arrays by Hugging Face names; None: as Tunix's
    loader of the actor's family says. settings: those of `LLM`. mesh: that of Tunix is not used,
    but `llm_mesh` is. Errors: ConfigError."""

    def __init__(
        self,
        rollout_actor: Any = None,
        tokenizer: Any = None,
        mesh: Any = None,
        rollout_config: RolloutConfig | None = None,
        *,
        model: str,
        llm_mesh: str = "",
        to_hf: ToHf | None = None,
        **settings: Any,
    ):
        self.llm = LLM(model, llm_mesh, progress=False, **settings)
        self._actor = rollout_actor
        self._tokenizer = tokenizer
        self._to_hf = to_hf or _to_hf_of(rollout_actor, model)
        self._seeds = itertools.count()

    def close(self) -> None:
        """Ends the engine."""
        self.llm.close()

    def generate(
        self, prompts: list[str], rollout_config: RolloutConfig, **kwargs: Any
    ) -> RolloutOutput:
        """Completes prompts, each by itself: equal ones may have different completions."""
        assert self.llm.tokenizer is not None, "the model has no tokenizer"
        ids = [list(self.llm.tokenizer.encode(prompt)) for prompt in prompts]
        sampling = [self._sampling(rollout_config) for _ in prompts]
        completions = self.llm.generate(ids, sampling)
        width = max(rollout_config.max_prompt_length, *map(len, ids))
        return RolloutOutput(
            text=[one.text for one in completions],
            logits=None,
            tokens=[np.array(one.ids, np.int32) for one in completions],
            left_padded_prompt_tokens=_left_padded(ids, width, self.pad_id()),
            logprobs=[_logprobs(one) for one in completions],
        )

    def _sampling(self, config: RolloutConfig) -> SamplingParams:
        seed = None
        if config.seed is not None:
            first = int(np.asarray(config.seed).ravel()[-1])
            seed = (first + next(self._seeds)) % 2**63
        return SamplingParams.make(
            temperature=config.temperature,
            top_p=1.0 if config.top_p is None else config.top_p,
            top_k=config.top_k if config.top_k and config.top_k > 0 else 0,
            max_tokens=config.max_tokens_to_generate,
            seed=seed,
            stop_token_ids=tuple(config.eos_tokens or ()),
            logprobs=0,
        )

    def get_per_token_logps(self, prompt_tokens: Any, completion_tokens: Any) -> Any:
        """Returns log-probabilities [rows, completion tokens] f32 of completions by the weights
        that are served; 0 at padding. prompt_tokens [rows, P] are padded on the left,
        completion_tokens [rows, C] on the right."""
        rows = []
        completions = np.asarray(completion_tokens)
        pad = self.pad_id()
        for prompt, completion in zip(np.asarray(prompt_tokens), completions):
            begin = int(np.argmax(prompt != pad))
            count = int(np.max(np.flatnonzero(completion != pad), initial=-1)) + 1
            rows.append((prompt[begin:].tolist(), completion[:count].tolist()))
        scoring = SamplingParams.make(temperature=0, max_tokens=1, prompt_logprobs=0)
        scored = self.llm.generate([prompt + completion for prompt, completion in rows], scoring)
        logps = np.zeros(completions.shape, np.float32)
        for row, (prompt, completion), one in zip(logps, rows, scored):
            entries = (one.prompt_logprobs or ())[len(prompt) :]
            row[: len(completion)] = [0.0 if each is None else each.chosen for each in entries]
        return jnp.asarray(logps)

    def update_params(self, params: Any, filter_types: Any = None) -> None:
        """Takes the trainer's weights; what is being generated finishes with those of before.
        Errors: RequestError, ValueError where they are of another model."""
        with ThreadPoolExecutor(1) as thread:  # Tunix forbids its own to move arrays
            thread.submit(lambda: self.llm.update_weights(self._to_hf(params))).result()

    def pad_id(self) -> int:
        """The id of padding."""
        return self.eos_id() if self._tokenizer is None else int(self._tokenizer.pad_id())

    def eos_id(self) -> int:
        """The id that ends a completion."""
        return int(self.llm.engine.info.eos_ids[0])

    def model(self) -> Any:
        """Tunix's model, as it was given."""
        return self._actor


def _to_hf_of(actor: Any, model: str) -> ToHf:
    """Returns the inverse of Tunix's loader of an actor's family."""
    package = type(actor).__module__.rpartition(".")[0]
    for name in ("params_safetensors", "params"):
        try:
            loader = importlib.import_module(f"{package}.{name}")
        except ModuleNotFoundError:
            continue
        if hasattr(loader, "_get_key_and_transform_mapping"):
            mapping = loader._get_key_and_transform_mapping(actor.config)
            tensors = open_checkpoint(model).tensors()
            shapes = {key: shape for key, (shape, _) in tensors.items()}
            return lambda params: hugging_face_arrays(params, mapping, shapes)
    raise ValueError(f"Tunix has no loader of safetensors for {type(actor)}: give to_hf")


def _left_padded(ids: Sequence[Sequence[int]], width: int, pad: int) -> np.ndarray:
    padded = np.full((len(ids), width), pad, np.int32)
    for row, some in zip(padded, ids):
        row[width - len(some) :] = some
    return padded


def _logprobs(one: Completion) -> np.ndarray:
    return np.array([each.chosen for each in one.logprobs or ()], np.float32)
