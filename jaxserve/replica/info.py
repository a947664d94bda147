"""The facts of a replica: fixed from its start to its end, and plain enough to be sent
elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxserve.api.sampling import SamplingParams
from jaxserve.cache.hashes import BlockHashes, CacheIdentity, root_key
from jaxserve.settings.schema import MeshConfig


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """The facts that callers of a replica may rely on.

    served_name: by which requests name the model; other_names: these too. model: the architecture's
    own name. d_model: size of hidden states, and so of embeddings. kv_bytes_per_token: bytes of KV
    that a token has on pages, over all layers that keep some. eos_ids: ids that end a completion.
    max_model_len: most tokens of a sequence, its output included. pages_per_lane: pages of KV cache
    on each lane, of `block_size` tokens, that each page group can have where all have as many.
    max_seqs: sequences that run at once; max_queue: requests that may wait. class_names: of request
    classes, see `SchedulerConfig.classes`. settings: all that was configured, group by group,
    without secrets.
    role: prefill, decode or mixed: what a conductor has it do.
    sampling_defaults: sampling parameters, by name, of requests that do not state them.
    cache_fingerprint, cache_dtype, cache_layout: what the keys of its blocks of KV cover besides
    tokens and salt, see `cache.hashes.CacheIdentity`. page_windows: of its page groups behind the
    first, see `checkpoint.page_groups`. prefill: of what its predictions of prefills are made, see
    `scheduling.prefill_facts`; {} where it is not known what its steps cost.
    """

    served_name: str
    model: str
    vocab: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    d_model: int
    kv_bytes_per_token: int
    bos_id: int | None
    eos_ids: tuple[int, ...]
    max_model_len: int
    mesh: MeshConfig
    dtype: str
    kv_dtype: str
    platform: str
    block_size: int
    pages_per_lane: int
    max_seqs: int
    max_queue: int
    chunk_tokens: int
    class_names: tuple[str, ...]
    settings: Mapping[str, Any]
    role: str = "mixed"
    cache_fingerprint: str = ""
    cache_dtype: str = ""
    cache_layout: str = ""
    page_windows: tuple[int, ...] = ()
    other_names: tuple[str, ...] = ()
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    prefill: Mapping[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """All names by which requests may call the model."""
        return tuple(dict.fromkeys((self.served_name, *self.other_names, self.model)))

    def sampling(self, **stated: Any) -> SamplingParams:
        """Makes the sampling parameters of a request, of any protocol: those that it states (which
        are not None), and the model's defaults. Errors: RequestError."""
        given = {name: value for name, value in stated.items() if value is not None}
        return SamplingParams.make(**{**self.sampling_defaults, **given})

    def block_hashes(self, prompt: np.ndarray, salt: str) -> BlockHashes:
        """The hashes by which the replica's cache knows the blocks of a prompt [tokens] int32; see
        `CacheManager.block_hashes`."""
        identity = CacheIdentity(self.cache_fingerprint, self.cache_dtype, self.cache_layout)
        root = root_key(identity, self.block_size, salt)
        return BlockHashes(root, self.block_size, lambda first, last: prompt[first:last])

    def moved_bytes(self, tokens: int) -> float:
        """Estimates the bytes of KV that go to a replica which lacks the first `tokens` tokens of a
        prompt: through windows, only what the next token sees."""
        seen = sum(min(tokens, window) for window in self.page_windows)
        return self.kv_bytes_per_token * (tokens + seen) / (1 + len(self.page_windows))

    @property
    def capacity_tokens(self) -> int:
        """Tokens of KV that all lanes hold together."""
        return self.pages_per_lane * self.block_size * self.mesh.kvp

    def summary(self) -> dict[str, Any]:
        """Returns plain values by name, for operators."""
        return {
            "model": self.model,
            "mesh": str(self.mesh),
            "dtype": self.dtype,
            "kv_dtype": self.kv_dtype,
            "devices": self.mesh.devices,
            "platform": self.platform,
            "max_model_len": self.max_model_len,
            "pages_per_lane": self.pages_per_lane,
            "block_size": self.block_size,
            "capacity_tokens": self.capacity_tokens,
            "max_seqs": self.max_seqs,
        }
