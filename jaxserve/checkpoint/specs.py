"""Specs of the parts of a decoder block. Each declares the parameters of its part, and the parts of
a checkpoint that these are assembled of.

Whatever depends on the number or the size of parameters (modules of the decoder, loading, memory,
costs) asks these declarations. A new kind of attention or MLP is a spec here, a module in `models`,
and the assembly of its parameters in `weights.assemble`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np


@dataclass(frozen=True)
class Declared:
    """A parameter without values: its global shape and the logical axis name of each dimension
    (None: replicated). inputs: leading dimensions that a matrix product sums over; 0: it is no
    matrix of a product. wide: it stays f32, whatever the type of the weights. exact: its type, if
    it is an array of a quantised parameter."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    inputs: int = 0
    wide: bool = False
    exact: np.dtype | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def dtype(self, weights: np.dtype) -> np.dtype:
        """Returns the type of the parameter among weights of a type."""
        if self.exact is not None:
            return self.exact
        return np.dtype(np.float32) if self.wide else weights


@dataclass(frozen=True)
class Dimensions:
    """Sizes of a decoder. d_ff: inner states of a dense MLP. max_len: most tokens of a sequence."""

    name: str
    layers: int
    d_model: int
    heads: int
    kv_heads: int
    head_dim: int
    d_ff: int
    vocab: int
    max_len: int


@dataclass(frozen=True)
class AttentionSpec:
    """Attention with grouped queries. qkv_bias, o_bias: biases of the projections. qk_norm: RMSNorm
    of queries and keys, '' for none, 'head' for each head by itself (Qwen 3), 'all' over all heads
    (OLMo 2). scale: factor on q k; None is head_dim ** -0.5. softcap: bound of the logits, see
    `kernels.reference` (Gemma 2); 0: none. sinks: every query sees a key without a value, whose
    logit is a parameter of the head (gpt-oss). gate: a head's output is multiplied by the sigmoid
    of as many numbers (Qwen3-Next). value_norm: RMSNorm of values, without weights. projected: what
    the layer makes of hidden states: 'qkv'; 'qk', whose keys before their norm are the values too;
    'q', of a layer that attends to the pages of another one, see `page_groups.source` (Gemma 4)."""

    has_pages: ClassVar[bool] = True

    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: str = ""
    scale: float | None = None
    softcap: float = 0.0
    sinks: bool = False
    gate: bool = False
    value_norm: bool = False
    projected: str = "qkv"

    @property
    def stores(self) -> bool:
        """Returns whether the layer writes keys and values to pages."""
        return self.projected != "q"

    def declare(self, sizes: Dimensions) -> dict[str, Declared]:
        """`qkv` has the G query heads, their gates, key and value of each kv head side by side, so
        that splitting the kv heads over tensor-parallel ranks splits all of them."""
        D = sizes.d_model
        K = sizes.kv_heads
        G = sizes.heads // sizes.kv_heads
        H = sizes.head_dim
        rows = self.query_rows * G + len(self.projected) - 1
        declared = {"qkv": Declared((D, K, rows, H), ("embed", "kv_heads", None, None), inputs=1)}
        if self.qkv_bias:
            declared["qkv_bias"] = Declared((K, rows, H), ("kv_heads", None, None))
        if self.qk_norm == "head":
            names = ("q_norm", "k_norm") if "k" in self.projected else ("q_norm",)
            declared |= dict.fromkeys(names, Declared((H,), (None,), wide=True))
        if self.qk_norm == "all":
            axes = ("kv_heads", None, None)
            declared["q_norm"] = Declared((K, G, H), axes, wide=True)
            declared["k_norm"] = Declared((K, 1, H), axes, wide=True)
        if self.sinks:
            declared["sinks"] = Declared((K, G), ("kv_heads", None), wide=True)
        declared["o_proj"] = Declared((K, G, H, D), ("kv_heads", None, None, "embed"), inputs=3)
        if self.o_bias:
            declared["o_bias"] = Declared((D,), ("embed",))
        return declared

    @property
    def query_rows(self) -> int:
        """Rows of a query head in `qkv`, each of a head's size: the query, and its gate."""
        return 1 + self.gate

    def parts(self, sizes: Dimensions) -> dict[str, tuple[int, ...]]:
        """Shapes of the parts, rows first, that the parameters are assembled of; `q` has each
        head's query, then its gate."""
        D = sizes.d_model
        queries = sizes.heads * sizes.head_dim
        keys = sizes.kv_heads * sizes.head_dim
        norms = (queries, keys) if self.qk_norm == "all" else (sizes.head_dim,) * 2
        projected = {
            "q": (self.query_rows * queries, D),
            "k": (keys, D),
            "v": (keys, D),
        }
        return {part: projected[part] for part in self.projected} | {
            "o": (D, queries),
            "q_bias": (self.query_rows * queries,),
            "k_bias": (keys,),
            "v_bias": (keys,),
            "o_bias": (D,),
            "q_norm": norms[:1],
            "k_norm": norms[1:],
            "sinks": (sizes.heads,),
        }

    def splits(self, sizes: Dimensions, tp: int) -> bool:
        """Returns True if `tp` ranks can share the heads; kv heads may be repeated."""
        return heads_split(sizes, tp)

    def share(self, tp: int) -> AttentionSpec:
        """Returns the spec of one of `tp` ranks: sizes are those of `Dimensions`."""
        return self

    def page(self, sizes: Dimensions) -> tuple[int, int]:
        """Vectors of a token and kv head on a page, and the numbers of each."""
        return 2, sizes.head_dim

    def value_dim(self, sizes: Dimensions) -> int:
        """Numbers of a head's output."""
        return sizes.head_dim

    def attended_dims(self, sizes: Dimensions) -> tuple[int, int]:
        """Numbers of a head's query, and of its result, in attention over pages."""
        return sizes.head_dim, sizes.head_dim


@dataclass(frozen=True)
class LatentAttentionSpec:
    """Multi-head latent attention (DeepSeek-V2, 2024). A page holds for each token one latent of
    `kv_rank` numbers, which all heads share, and a rotated key of `head_dim` numbers (see
    `Dimensions`); ranks hold copies. The products that would expand latents to keys and values are
    absorbed into queries and outputs.

    q_rank: numbers of the latent of queries; None: there is none. plain, value: numbers of a head
    that are not rotated, and of its value. scale: factor on q k.
    """

    has_pages: ClassVar[bool] = True
    stores: ClassVar[bool] = True

    q_rank: int | None
    kv_rank: int
    plain: int
    value: int
    scale: float

    def declare(self, sizes: Dimensions) -> dict[str, Declared]:
        """Each of the K copies of a latent has G query heads."""
        D = sizes.d_model
        K = sizes.kv_heads
        G = sizes.heads // K
        query = (K, G, self.plain + sizes.head_dim)
        heads = ("kv_heads", None, None)
        declared = {}
        if self.q_rank is not None:
            declared["q_a"] = Declared((D, self.q_rank), ("embed", None), inputs=1)
            declared["q_a_norm"] = Declared((self.q_rank,), (None,), wide=True)
        inputs: tuple[int, str | None] = (D, "embed")
        if self.q_rank is not None:
            inputs = (self.q_rank, None)
        declared |= {
            "q_b": Declared((inputs[0], *query), (inputs[1], *heads), inputs=1),
            "kv_a": Declared((D, self.kv_rank + sizes.head_dim), ("embed", None), inputs=1),
            "kv_a_norm": Declared((self.kv_rank,), (None,), wide=True),
            "k_up": Declared((K, G, self.plain, self.kv_rank), (*heads, None), inputs=3),
            "v_up": Declared((K, G, self.kv_rank, self.value), (*heads, None), inputs=3),
            "o_proj": Declared((K, G, self.value, D), (*heads, "embed"), inputs=3),
        }
        return declared

    def parts(self, sizes: Dimensions) -> dict[str, tuple[int, ...]]:
        """Shapes of the parts, rows first, that the parameters are assembled of."""
        D = sizes.d_model
        queries = sizes.heads * (self.plain + sizes.head_dim)
        found = {
            "kv_a": (self.kv_rank + sizes.head_dim, D),
            "kv_a_norm": (self.kv_rank,),
            "kv_b": (sizes.heads * (self.plain + self.value), self.kv_rank),
            "k_b": (sizes.heads * self.kv_rank, self.plain),
            "v_b": (sizes.heads * self.value, self.kv_rank),
            "o": (D, sizes.heads * self.value),
        }
        if self.q_rank is None:
            return found | {"q": (queries, D)}
        return found | {
            "q_a": (self.q_rank, D),
            "q_a_norm": (self.q_rank,),
            "q_b": (queries, self.q_rank),
        }

    def splits(self, sizes: Dimensions, tp: int) -> bool:
        """Returns True if `tp` ranks can share the heads; each has a copy of the latents."""
        return heads_split(sizes, tp)

    def share(self, tp: int) -> LatentAttentionSpec:
        """Returns the spec of one of `tp` ranks: sizes are those of `Dimensions`."""
        return self

    def page(self, sizes: Dimensions) -> tuple[int, int]:
        """Vectors of a token and kv head on a page, and the numbers of each."""
        return 1, self.kv_rank + sizes.head_dim

    def value_dim(self, sizes: Dimensions) -> int:
        """Numbers of a head's output."""
        return self.value

    def attended_dims(self, sizes: Dimensions) -> tuple[int, int]:
        """Numbers of a head's query, and of its result, in attention over pages: those of latents,
        before results are expanded."""
        return self.kv_rank + sizes.head_dim, self.kv_rank


def heads_split(sizes: Dimensions, tp: int) -> bool:
    """Returns True if `tp` ranks can share the heads; kv heads may be repeated."""
    repeats = tp % sizes.kv_heads == 0 and sizes.heads % tp == 0
    return sizes.kv_heads % tp == 0 or repeats


def ffn_axis(lanes: int) -> str:
    """Returns the logical axis of the inner states of an MLP that lanes share out, or one does."""
    return "ffn" if lanes == 1 else "ffn_over_lanes"


@dataclass(frozen=True)
class MlpSpec:
    """Gated MLP: activation(gate) * up, then down (Shazeer, 2020). activation: a key of
    `models.layers.GATES`. lanes: over which it is split besides ranks; each lane then computes its
    part of it for the tokens of all. parts_of_rank: those of a rank of which one device has one, in
    the spec of its share."""

    activation: str = "silu"
    lanes: int = 1
    parts_of_rank: int = 1

    def declare(self, sizes: Dimensions) -> dict[str, Declared]:
        """`gate_up` has both projections, side by side."""
        D = sizes.d_model
        F = -(-sizes.d_ff // self.parts_of_rank)
        axis = ffn_axis(self.lanes)
        return {
            "gate_up": Declared((D, 2, F), ("embed", None, axis), inputs=1),
            "down": Declared((F, D), (axis, "embed"), inputs=1),
        }

    def parts(self, sizes: Dimensions) -> dict[str, tuple[int, ...]]:
        """Shapes of the parts, rows first, that the parameters are assembled of."""
        D = sizes.d_model
        F = sizes.d_ff
        return {"gate": (F, D), "up": (F, D), "down": (D, F)}

    def splits(self, sizes: Dimensions, tp: int) -> bool:
        """Returns True if `tp` ranks of each lane can share the MLP."""
        return sizes.d_ff % (tp * self.lanes) == 0

    def share(self, tp: int) -> MlpSpec:
        """Returns the spec of one of `tp` ranks: sizes are those of `Dimensions`."""
        return replace(self, parts_of_rank=self.lanes)

    def weights_for_others(self, sizes: Dimensions) -> int:
        """Elements by which a device multiplies tokens of other lanes, times these lanes."""
        return (self.lanes - 1) * 3 * sizes.d_model * -(-sizes.d_ff // self.parts_of_rank)

    def over(self, expert_lanes: int, mlp_lanes: int) -> MlpSpec:
        """Returns the spec for lanes that share MLPs out; there are no experts."""
        return replace(self, lanes=mlp_lanes)

    def inner(self, sizes: Dimensions) -> int:
        """Counts the inner states of a token: gate, up and their product; with lanes, also the
        token and the result."""
        states = 3 * -(-sizes.d_ff // self.parts_of_rank)
        return states if self.lanes == 1 else self.lanes * (states + 2 * sizes.d_model)


@dataclass(frozen=True)
class RouterSpec:
    """Rules by which a token's experts are chosen and weighted.

    scores: 'softmax' over all experts, 'chosen' (softmax over the chosen ones, by logits) or
    'sigmoid'. normalised: weights sum to 1 before they are scaled. correction: a parameter is added
    to scores for the choice alone. groups, best_groups: experts are chosen among those of the best
    groups; 1: among all. group_scores: best experts whose scores sum to that of a group.
    """

    scores: str = "softmax"
    normalised: bool = True
    scale: float = 1.0
    bias: bool = False
    correction: bool = False
    groups: int = 1
    best_groups: int = 1
    group_scores: int = 2


@dataclass(frozen=True)
class ExpertsSpec:
    """Mixture of experts in place of the MLP: each token is computed by `active` of `count` gated
    MLPs with `d_ff` inner states each. biases: experts have biases. shared: inner states of an MLP
    that computes every token beside them, 0: there is none; shared_gate: its output has a weight
    for each token. lanes: over which experts are split besides ranks; each lane then computes its
    experts for the tokens of all. shared_lanes: the same of what is shared, 1 or as many. held:
    experts of one device, in the spec of its share; 0: all."""

    count: int
    active: int
    d_ff: int
    router: RouterSpec = field(default=RouterSpec())
    activation: str = "silu"
    biases: bool = False
    shared: int = 0
    shared_gate: bool = False
    lanes: int = 1
    shared_lanes: int = 1
    held: int = 0

    def declare(self, sizes: Dimensions) -> dict[str, Declared]:
        """Experts are split over ranks, or over lanes and ranks; what is shared is split as an MLP
        is."""
        D = sizes.d_model
        E = self.held or self.count
        F = self.d_ff
        experts = "experts"
        if self.lanes > 1:
            experts = "experts_over_lanes"
        axes = (experts, None, None)
        declared = {
            "router": Declared((D, self.count), ("embed", None), inputs=1, wide=True),
            "expert_gate_up": Declared((E, D, 2, F), (experts, "embed", None, None), inputs=1),
            "expert_down": Declared((E, F, D), (experts, None, "embed"), inputs=1),
        }
        if self.router.bias:
            declared["router_bias"] = Declared((self.count,), (None,), wide=True)
        if self.router.correction:
            declared["correction"] = Declared((self.count,), (None,), wide=True)
        if self.biases:
            declared["expert_gate_up_bias"] = Declared((E, 2, F), axes)
            declared["expert_down_bias"] = Declared((E, D), axes[:2])
        if self.shared:
            S = self.shared
            axis = ffn_axis(self.shared_lanes)
            declared["shared_gate_up"] = Declared((D, 2, S), ("embed", None, axis), inputs=1)
            declared["shared_down"] = Declared((S, D), (axis, "embed"), inputs=1)
        if self.shared_gate:
            declared["shared_gate"] = Declared((D, 1), ("embed", None), wide=True)
        return declared

    def parts(self, sizes: Dimensions) -> dict[str, tuple[int, ...]]:
        """Shapes of the parts, rows first, that the parameters are assembled of; those named
        expert_... are of one expert."""
        D = sizes.d_model
        F = self.d_ff
        return {
            "router": (self.count, D),
            "router_bias": (self.count,),
            "correction": (self.count,),
            "expert_gate": (F, D),
            "expert_up": (F, D),
            "expert_down": (D, F),
            "expert_gate_bias": (F,),
            "expert_up_bias": (F,),
            "expert_down_bias": (D,),
            "shared_gate_proj": (self.shared, D),
            "shared_up_proj": (self.shared, D),
            "shared_down_proj": (D, self.shared),
            "shared_gate": (1, D),
        }

    def splits(self, sizes: Dimensions, tp: int) -> bool:
        """Returns True if `tp` ranks of each lane can share the experts."""
        whole = self.shared % (tp * self.shared_lanes) == 0
        return self.count % (tp * self.lanes) == 0 and whole

    def weights_for_others(self, sizes: Dimensions) -> int:
        """Elements of what is shared by which a device multiplies tokens of other lanes, times
        these lanes."""
        return (self.shared_lanes - 1) * 3 * sizes.d_model * self.shared

    def over(self, expert_lanes: int, mlp_lanes: int) -> ExpertsSpec:
        """Returns the spec for lanes that share experts, and what is shared, out."""
        return replace(self, lanes=expert_lanes, shared_lanes=mlp_lanes)

    def share(self, tp: int) -> ExpertsSpec:
        """Returns the spec of one of `tp` ranks of a lane."""
        held = -(-self.count // (tp * self.lanes))
        return replace(self, held=held, shared=-(-self.shared // (tp * self.shared_lanes)))

    def inner(self, sizes: Dimensions) -> int:
        """Counts the inner states of a token: for each of its experts the token, gate, up, their
        product and the result, and those of what is shared."""
        each = 3 * self.d_ff + 2 * sizes.d_model
        return self.lanes * self.active * each + self.shared_lanes * 3 * self.shared


@dataclass(frozen=True)
class ExpertsBesideMlpSpec(ExpertsSpec):
    """Experts and a gated MLP, each computing every token, side by side: the MLP of the block's
    normed hidden states, the experts of the same ones under a norm of their own. Their outputs have
    a norm each and are summed. The router has a norm without weights, a factor for each number of
    hidden states, and one for the weight of each expert (Gemma 4)."""

    mlp: MlpSpec = field(default=MlpSpec())

    def declare(self, sizes: Dimensions) -> dict[str, Declared]:
        """Parameters of both, and those that join them."""
        return {**super().declare(sizes), **self.mlp.declare(sizes), **self._joining(sizes)}

    def _joining(self, sizes: Dimensions) -> dict[str, Declared]:
        names = ("router_scale", "mlp_out_norm", "experts_norm", "experts_out_norm")
        declared = dict.fromkeys(names, Declared((sizes.d_model,), ("embed",), wide=True))
        return declared | {"expert_scale": Declared((self.count,), (None,), wide=True)}

    def parts(self, sizes: Dimensions) -> dict[str, tuple[int, ...]]:
        """Shapes of the parts, rows first, that the parameters are assembled of."""
        joining = {name: declared.shape for name, declared in self._joining(sizes).items()}
        return {**super().parts(sizes), **self.mlp.parts(sizes), **joining}

    def splits(self, sizes: Dimensions, tp: int) -> bool:
        """Returns True if `tp` ranks of each lane can share both."""
        return super().splits(sizes, tp) and self.mlp.splits(sizes, tp)

    def weights_for_others(self, sizes: Dimensions) -> int:
        """Elements of the MLP by which a device multiplies tokens of other lanes, times these
        lanes."""
        return self.mlp.weights_for_others(sizes)

    def over(self, expert_lanes: int, mlp_lanes: int) -> ExpertsBesideMlpSpec:
        """Returns the spec for lanes that share experts, and the MLP, out."""
        return replace(self, lanes=expert_lanes, mlp=self.mlp.over(expert_lanes, mlp_lanes))

    def share(self, tp: int) -> ExpertsBesideMlpSpec:
        """Returns the spec of one of `tp` ranks of a lane."""
        held = -(-self.count // (tp * self.lanes))
        return replace(self, held=held, mlp=self.mlp.share(tp))

    def inner(self, sizes: Dimensions) -> int:
        """Counts the inner states of a token in both."""
        return super().inner(sizes) + self.mlp.inner(sizes)


@dataclass(frozen=True)
class LayerInputSpec:
    """Inputs of layers besides the hidden states (Gemma 3n, Gemma 4): for each token and layer
    `size` numbers of a table, joined with a projection of the token's embedding. A block multiplies
    them by a gated projection of its hidden states, and adds a projection of the products.
    activation: of the gate."""

    size: int
    activation: str = "gelu_pytorch_tanh"

    def declare(self, sizes: Dimensions, vocab: int) -> dict[str, Declared]:
        """Parameters beside the embedding, of all layers. vocab: rows of the table."""
        L = sizes.layers
        P = self.size
        return {
            "embed": Declared((vocab, L * P), ("vocab", None)),
            "proj": Declared((sizes.d_model, L, P), ("embed", None, None), inputs=1),
            "norm": Declared((P,), (None,), wide=True),
        }

    def declare_block(self, sizes: Dimensions) -> dict[str, Declared]:
        """Parameters of a block."""
        D = sizes.d_model
        return {
            "gate": Declared((D, self.size), ("embed", None), inputs=1),
            "proj": Declared((self.size, D), (None, "embed"), inputs=1),
            "norm": Declared((D,), ("embed",), wide=True),
        }

    def parts(self, sizes: Dimensions) -> dict[str, tuple[int, ...]]:
        """Shapes of the parts, rows first, that the parameters are assembled of."""
        D = sizes.d_model
        P = self.size
        return {
            "inputs_embed": (sizes.vocab, sizes.layers * P),
            "inputs_proj": (sizes.layers * P, D),
            "inputs_norm": (P,),
            "input_gate": (P, D),
            "input_proj": (D, P),
            "input_norm": (D,),
        }


@dataclass(frozen=True)
class NormSpec:
    """RMSNorms of a block, before and after attention and MLP, and their epsilon. less_one:
    checkpoints store the weights less 1. scalar: what a block gives is multiplied by a parameter
    (Gemma 4)."""

    eps: float = 1e-5
    before: bool = True
    after: bool = False
    less_one: bool = False
    scalar: bool = False

    def declare(self, sizes: Dimensions) -> dict[str, Declared]:
        """Declares the weights of the norms."""
        names: list[str] = []
        if self.before:
            names += ["attn_norm", "mlp_norm"]
        if self.after:
            names += ["attn_post_norm", "mlp_post_norm"]
        declared = {name: Declared((sizes.d_model,), ("embed",), wide=True) for name in names}
        if self.scalar:
            declared["layer_scalar"] = Declared((1,), (None,), wide=True)
        return declared

    def parts(self, sizes: Dimensions) -> dict[str, tuple[int, ...]]:
        """Shapes of the stored weights."""
        return {name: declared.shape for name, declared in self.declare(sizes).items()}


@dataclass(frozen=True)
class Multipliers:
    """Factors on the embedding and on what attention and MLP add to the residual; the divisor of
    the logits, and their bound c in c tanh(logits / c) (0: none)."""

    embedding: float = 1.0
    residual: float = 1.0
    logits_divisor: float = 1.0
    logits_softcap: float = 0.0
