"""`ModelConfig`: all that differs between the supported models, as dimensions and specs of a
block's parts.

Each spec declares the parameters of its part. Whatever depends on their number or size (modules of
the decoder, loading, memory, costs) asks these declarations.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from jaxserve.checkpoint.rope import Rope
from jaxserve.settings.schema import ConfigError


@dataclass(frozen=True)
class Declared:
    """A parameter without values: its global shape and the logical axis name of each dimension
    (None: replicated). inputs: leading dimensions that a matrix product sums over; 0: it is no
    matrix of a product."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    inputs: int = 0

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class AttentionSpec:
    """Attention with grouped queries. qk_norm: RMSNorm of queries and keys, '' for none, 'head' for
    each head by itself (Qwen 3), 'all' over all heads (OLMo 2). scale: factor on q k; None is
    head_dim ** -0.5."""

    qkv_bias: bool = False
    qk_norm: str = ""
    scale: float | None = None

    def declare(self, model: ModelConfig) -> dict[str, Declared]:
        """`qkv` has the G query heads, key and value of each kv head side by side, so that
        splitting the kv heads over tensor-parallel ranks splits all three."""
        D = model.d_model
        K = model.kv_heads
        G = model.heads // model.kv_heads
        H = model.head_dim
        declared = {"qkv": Declared((D, K, G + 2, H), ("embed", "kv_heads", None, None), inputs=1)}
        if self.qkv_bias:
            declared["qkv_bias"] = Declared((K, G + 2, H), ("kv_heads", None, None))
        if self.qk_norm == "head":
            declared |= {name: Declared((H,), (None,)) for name in ("q_norm", "k_norm")}
        if self.qk_norm == "all":
            declared["q_norm"] = Declared((K, G, H), ("kv_heads", None, None))
            declared["k_norm"] = Declared((K, 1, H), ("kv_heads", None, None))
        declared["o_proj"] = Declared((K, G, H, D), ("kv_heads", None, None, "embed"), inputs=3)
        return declared


@dataclass(frozen=True)
class MlpSpec:
    """Gated MLP: activation(gate) * up, then down (Shazeer, 2020). activation: a key of
    `models.layers.ACTIVATIONS`."""

    activation: str = "silu"

    def declare(self, model: ModelConfig) -> dict[str, Declared]:
        """`gate_up` has both projections, side by side."""
        D = model.d_model
        F = model.d_ff
        return {
            "gate_up": Declared((D, 2, F), ("embed", None, "ffn"), inputs=1),
            "down": Declared((F, D), ("ffn", "embed"), inputs=1),
        }


@dataclass(frozen=True)
class NormSpec:
    """RMSNorms of a block, before and after attention and MLP, and their epsilon. less_one:
    checkpoints store the weights less 1."""

    eps: float = 1e-5
    before: bool = True
    after: bool = False
    less_one: bool = False

    def declare(self, model: ModelConfig) -> dict[str, Declared]:
        """Declares the weights of the norms."""
        names: list[str] = []
        if self.before:
            names += ["attn_norm", "mlp_norm"]
        if self.after:
            names += ["attn_post_norm", "mlp_post_norm"]
        return {name: Declared((model.d_model,), ("embed",)) for name in names}


@dataclass(frozen=True)
class Multipliers:
    """Factors on the embedding and on what attention and MLP add to the residual; the divisor of
    the logits."""

    embedding: float = 1.0
    residual: float = 1.0
    logits_divisor: float = 1.0


@dataclass(frozen=True)
class ModelConfig:
    """A decoder: its dimensions, and specs of the parts of a block.

    family: a key of `families.FAMILIES`. max_len: most tokens of a sequence. ropes, windows: by
    layer, or one for all layers. None among the ropes: no positions. Window w: a token attends to
    itself and the w - 1 tokens before it (None: to all). tied: the LM head is the embedding.
    eos_ids: tokens that end a completion. stored: the type in which a checkpoint holds the weights;
    bfloat16 where it does not say.
    """

    name: str
    layers: int
    d_model: int
    heads: int
    kv_heads: int
    head_dim: int
    d_ff: int
    vocab: int
    max_len: int
    family: str = "llama"
    attention: AttentionSpec = AttentionSpec()
    mlp: MlpSpec = MlpSpec()
    norms: NormSpec = NormSpec()
    multipliers: Multipliers = Multipliers()
    ropes: tuple[Rope | None, ...] = (Rope(),)
    windows: tuple[int | None, ...] = (None,)
    tied: bool = False
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    stored: str = "bfloat16"

    def rope(self, layer: int) -> Rope | None:
        """RoPE of a layer."""
        return self.ropes[layer % len(self.ropes)]

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer."""
        return self.windows[layer % len(self.windows)]

    @property
    def has_windows(self) -> bool:
        """Returns True if a layer has a sliding window."""
        return any(window is not None for window in self.windows)

    @property
    def parameters(self) -> int:
        """Number of weights; a tied head is not counted again."""
        declared = declare(self, range(self.layers))
        return sum(p.size for path, p in declared.items() if not (self.tied and path == "head"))

    def block(self) -> dict[str, Declared]:
        """Declares the parameters of a block by path."""
        return {
            **self.norms.declare(self),
            **_within("attention", self.attention.declare(self)),
            **_within("mlp", self.mlp.declare(self)),
        }

    def share(self, tp: int) -> ModelConfig:
        """The part of the model on one of `tp` ranks, as a model; sizes that do not divide are
        rounded up, and each rank has at least one kv head."""
        heads, kv_heads = self.rank_heads(tp)
        return replace(
            self,
            heads=heads,
            kv_heads=kv_heads,
            d_ff=-(-self.d_ff // tp),
            vocab=-(-self.vocab // tp),
        )

    def rank_heads(self, tp: int) -> tuple[int, int]:
        """Query and kv heads of one of `tp` ranks."""
        return -(-self.heads // tp), -(-self.kv_heads // tp)

    def layer_weights(self, tp: int = 1) -> int:
        """Elements of the matrices of one layer on one of `tp` ranks."""
        return matrix_elements(self.share(tp).block().values())

    def head_weights(self, tp: int = 1) -> int:
        """Elements of the product with the vocabulary on one of `tp` ranks."""
        return self.d_model * self.share(tp).vocab

    def weight_bytes(self, itemsize: int = 2) -> int:
        """Bytes of the matrices of all layers, the embedding and the head; a tied head is a copy of
        the embedding."""
        return itemsize * (self.layers * self.layer_weights() + 2 * self.head_weights())

    def kv_bytes_per_token(self, itemsize: int = 2) -> int:
        """Bytes of KV cache per token, over all layers, for numbers of `itemsize` bytes."""
        return itemsize * kv_elements(self.layers, self.kv_heads, self.head_dim)

    def with_tp(self, tp: int) -> ModelConfig:
        """The config for `tp` ranks: kv heads are repeated if there are fewer than ranks. Errors:
        ConfigError if heads or d_ff do not divide, with the degrees that work."""
        if not self.splits(tp):
            works = [d for d in range(1, self.heads + 1) if self.splits(d)]
            raise ConfigError(
                "mesh",
                f"tp={tp} cannot split {self.name} "
                f"({self.heads} heads, {self.kv_heads} kv heads, ffn {self.d_ff}); "
                f"these can: {', '.join(map(str, works))}",
            )
        return replace(self, kv_heads=max(self.kv_heads, tp))

    def splits(self, tp: int) -> bool:
        """Returns True if `tp` ranks can share the model; kv heads may be repeated."""
        heads = self.kv_heads % tp == 0 or (tp % self.kv_heads == 0 and self.heads % tp == 0)
        return heads and self.d_ff % tp == 0


def declare(model: ModelConfig, layers: range, tp: int = 1) -> dict[str, Declared]:
    """Declares the parameters of a pipeline stage by path, such as 'layers.3.attention.qkv' (layers
    are numbered over the whole model). The stage of the first layer has the embedding, that of the
    last the LM head. model: after `with_tp`."""
    D = model.d_model
    vocab = padded_vocab(model, tp)
    block = model.block()
    declared = {}
    if layers.start == 0:
        declared["embed"] = Declared((vocab, D), ("vocab", "embed"))
    for number in layers:
        declared |= _within(f"layers.{number}", block)
    if layers.stop == model.layers:
        declared["norm"] = Declared((D,), ("embed",))
        declared["head"] = Declared((D, vocab), ("embed", "vocab"), inputs=1)
    return declared


def matrix_elements(declared: Iterable[Declared]) -> int:
    """Elements of the parameters that are matrices of products."""
    return sum(p.size for p in declared if p.inputs)


def kv_elements(layers: int, kv_heads: int, head_dim: int) -> int:
    """Numbers that the KV cache holds per token: a key and a value per layer and kv head."""
    return 2 * layers * kv_heads * head_dim


def padded_vocab(model: ModelConfig, tp: int) -> int:
    """Vocabulary size, rounded up to a multiple of `tp`."""
    return -(-model.vocab // tp) * tp


def layers_of(model: ModelConfig, spp: int) -> list[range]:
    """Splits the layers into `spp` contiguous stages whose sizes differ by at most one. Errors:
    ConfigError for more stages than layers."""
    if not 1 <= spp <= model.layers:
        raise ConfigError(
            "mesh",
            f"spp={spp} must be from 1 to {model.layers}, the number of layers of {model.name}",
        )
    ends = [model.layers * s // spp for s in range(spp + 1)]
    return [range(a, b) for a, b in itertools.pairwise(ends)]


def _within(prefix: str, declared: Mapping[str, Declared]) -> dict[str, Declared]:
    return {f"{prefix}.{name}": parameter for name, parameter in declared.items()}
