"""`ModelConfig`: all that differs between the supported models, as dimensions and specs of the
parts of each layer (`checkpoint.specs`)."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxserve.checkpoint.delta_net import DeltaNetSpec
from jaxserve.checkpoint.generation_config import Sampling
from jaxserve.checkpoint.rope import Rope
from jaxserve.checkpoint.specs import (
    AttentionSpec,
    Declared,
    Dimensions,
    ExpertsSpec,
    LatentAttentionSpec,
    LayerInputSpec,
    MlpSpec,
    Multipliers,
    NormSpec,
)
from jaxserve.settings.schema import ConfigError


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of one layer, in place of those of `Dimensions`."""

    kv_heads: int
    head_dim: int
    d_ff: int

    def share(self, tp: int) -> LayerSizes:
        """Returns the sizes on one of `tp` ranks, rounded up."""
        return replace(self, kv_heads=-(-self.kv_heads // tp), d_ff=-(-self.d_ff // tp))

    def repeated(self, tp: int) -> LayerSizes:
        """Returns the sizes with at least one kv head for each of `tp` ranks."""
        return replace(self, kv_heads=max(self.kv_heads, tp))


MixerSpec = AttentionSpec | LatentAttentionSpec | DeltaNetSpec
FeedForwardSpec = MlpSpec | ExpertsSpec

COLUMNS = 16  # outputs of a tile of quantised weights, see `kernels.quantised`


@dataclass(frozen=True)
class ModelConfig(Dimensions):
    """A decoder: its dimensions, and specs of the parts of each layer.

    family: a key of `families.FAMILIES`. mixers, mlps, ropes, windows: by layer, or one for all
    layers. None among the ropes: no positions. Window w: a token attends to itself and the w - 1
    tokens before it (None: to all). layer_sizes: by layer; () where all have those of `Dimensions`.
    layer_input: what each layer gets of a token besides the hidden states; None: nothing. tied: the
    LM head is the embedding. eos_ids: tokens that end a completion. sampling: recommended values,
    by the names of `SamplingParams`. stored: the type in which a checkpoint holds the weights;
    bfloat16 where it does not say. gguf: tensors have the names and the order of rows of GGUF
    files, see `families.layout`.
    """

    family: str = "llama"
    mixers: tuple[MixerSpec, ...] = (AttentionSpec(),)
    mlps: tuple[FeedForwardSpec, ...] = (MlpSpec(),)
    norms: NormSpec = field(default=NormSpec())
    multipliers: Multipliers = field(default=Multipliers())
    ropes: tuple[Rope | None, ...] = (Rope(),)
    windows: tuple[int | None, ...] = (None,)
    layer_sizes: tuple[LayerSizes, ...] = ()
    layer_input: LayerInputSpec | None = None
    tied: bool = False
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    sampling: Sampling = ()
    stored: str = "bfloat16"
    gguf: bool = False

    def at(self, layer: int) -> ModelConfig:
        """The model as a layer sees it: with all its layers like this one, where they differ in
        size."""
        if not self.layer_sizes:
            return self
        sizes = self.layer_sizes[layer % len(self.layer_sizes)]
        return replace(
            self,
            kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            d_ff=sizes.d_ff,
            mixers=(self.mixer(layer),),
            mlps=(self.mlp(layer),),
            ropes=(self.rope(layer),),
            windows=(self.window(layer),),
            layer_sizes=(),
        )

    def mixer(self, layer: int) -> MixerSpec:
        """Spec of what mixes the tokens of a sequence in a layer."""
        return self.mixers[layer % len(self.mixers)]

    def mlp(self, layer: int) -> FeedForwardSpec:
        """Spec of what follows in a layer, for each token by itself."""
        return self.mlps[layer % len(self.mlps)]

    def rope(self, layer: int) -> Rope | None:
        """RoPE of a layer."""
        return self.ropes[layer % len(self.ropes)]

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer."""
        return self.windows[layer % len(self.windows)]

    @property
    def kinds(self) -> list[MixerSpec | FeedForwardSpec]:
        """All specs of mixers and MLPs, each once."""
        return [*dict.fromkeys(self.mixers), *dict.fromkeys(self.mlps)]

    @property
    def has_states(self) -> bool:
        """Returns True if a layer keeps a state of each sequence in place of keys and values."""
        return not all(spec.has_pages for spec in self.mixers)

    @property
    def has_windows(self) -> bool:
        """Returns True if a layer has a sliding window."""
        return any(window is not None for window in self.windows)

    @property
    def parameters(self) -> int:
        """Number of weights, without padding; a tied head is not counted again."""
        declared = declare(self, range(self.layers))
        if self.tied:
            del declared["head"]
        rows = padded_vocab(self, 1)
        tables = declared.keys() & {"embed", "head", "inputs.embed"}
        padding = sum(declared[name].size for name in tables) * (rows - self.vocab) // rows
        return sum(parameter.size for parameter in declared.values()) - padding

    def block(self, layer: int) -> dict[str, Declared]:
        """Declares the parameters of a layer by path."""
        sizes = self.at(layer)
        declared = {
            **self.norms.declare(sizes),
            **_within("attention", self.mixer(layer).declare(sizes)),
            **_within("mlp", self.mlp(layer).declare(sizes)),
        }
        if self.layer_input is not None:
            declared |= _within("input", self.layer_input.declare_block(sizes))
        return declared

    def parts(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the parts, rows first, that a checkpoint's tensors can consist of."""
        D = self.d_model
        found = {"embed": (self.vocab, D), "head": (self.vocab, D), "norm": (D,)}
        found |= self.norms.parts(self)
        if self.layer_input is not None:
            found |= self.layer_input.parts(self)
        for spec in self.kinds:
            found |= spec.parts(self)
        return found

    def share(self, tp: int) -> ModelConfig:
        """The part of the model on one of `tp` ranks of a lane, as a model; sizes that do not
        divide are rounded up, and each rank has at least one kv head."""
        heads, kv_heads = self.rank_heads(tp)
        return replace(
            self,
            heads=heads,
            kv_heads=kv_heads,
            d_ff=-(-self.d_ff // tp),
            mixers=tuple(spec.share(tp) for spec in self.mixers),
            mlps=tuple(spec.share(tp) for spec in self.mlps),
            layer_sizes=tuple(sizes.share(tp) for sizes in self.layer_sizes),
            vocab=-(-self.vocab // tp),
        )

    def rank_heads(self, tp: int) -> tuple[int, int]:
        """Query and kv heads of one of `tp` ranks."""
        return -(-self.heads // tp), -(-self.kv_heads // tp)

    def layer_weights(self, tp: int = 1) -> int:
        """Elements of the matrices of one layer on one of `tp` ranks, averaged over the layers."""
        return self.dense_weights(tp) + self.expert_weights(tp)

    def dense_weights(self, tp: int = 1) -> int:
        """Elements of those matrices of one layer that every token uses, averaged over the layers;
        on one of `tp` ranks."""
        return self._elements(tp, experts=False)

    def expert_weights(self, tp: int = 1) -> int:
        """Elements of the experts of one layer, averaged over the layers; on one of `tp` ranks."""
        return self._elements(tp, experts=True)

    @property
    def experts(self) -> int:
        """Number of a layer's experts; 0 without."""
        return next((s.count for s in self.mlps if isinstance(s, ExpertsSpec)), 0)

    @property
    def active_experts(self) -> float:
        """Share of a layer's experts that a token uses; 0 without experts."""
        return next((s.active / s.count for s in self.mlps if isinstance(s, ExpertsSpec)), 0.0)

    def _elements(self, tp: int, experts: bool) -> int:
        """Elements of one layer's matrices, of experts or of all else, averaged over the layers."""
        share = self.share(tp)
        elements = 0
        for (*specs, layer), count in layer_kinds(share).items():
            for spec in specs:
                declared = spec.declare(share.at(layer)).items()
                some = [p for name, p in declared if name.startswith("expert_") == experts]
                elements += count * matrix_elements(some)
        return elements // self.layers

    def inner(self, tp: int = 1) -> int:
        """Most inner states of a token in an MLP, on one of `tp` ranks."""
        share = self.share(tp)
        return max(mlp.inner(share.at(layer)) for _, mlp, layer in layer_kinds(share))

    def head_weights(self, tp: int = 1) -> int:
        """Elements of the product with the vocabulary on one of `tp` ranks."""
        return self.d_model * self.share(tp).vocab

    def weight_bytes(self, tp: int = 1, spp: int = 1, itemsize: int = 2) -> int:
        """Bytes of the weights on the device that has most, of `tp` ranks and `spp` stages: some
        are in f32 whatever `itemsize` says, ranks have copies of some, and a tied head is a copy of
        the embedding."""
        rank = self.share(tp)
        stages = [declare(rank, layers).values() for layers in layers_of(rank, spp)]
        dtype = np.dtype(f"V{itemsize}")
        return max(sum(p.size * p.dtype(dtype).itemsize for p in stage) for stage in stages)

    def kv_bytes_per_token(self, itemsize: int = 2) -> int:
        """Bytes of a token's keys and values, over all layers that store some, for numbers of
        `itemsize` bytes."""
        total = 0
        for (mixer, _, layer), count in layer_kinds(self).items():
            sizes = self.at(layer)
            if mixer.stores:
                total += count * sizes.kv_heads * math.prod(sizes.page)
        return itemsize * total

    def state_bytes(self, layers: range | None = None) -> int:
        """Bytes of the states of one sequence, in some or all layers; without the few last inputs
        of convolutions."""
        some = range(self.layers) if layers is None else layers
        specs = [self.mixer(layer) for layer in some]
        return 4 * sum(math.prod(spec.state) for spec in specs if isinstance(spec, DeltaNetSpec))

    @property
    def paged_mixer(self) -> AttentionSpec | LatentAttentionSpec:
        """Spec of the first layer that keeps keys and values on pages."""
        return next(spec for spec in self.mixers if not isinstance(spec, DeltaNetSpec))

    @property
    def page(self) -> tuple[int, int]:
        """Vectors of a token and kv head on a page, and the numbers of each."""
        return self.paged_mixer.page(self)

    def with_tp(self, tp: int, expert_lanes: int = 1, mlp_lanes: int = 1) -> ModelConfig:
        """The config for `tp` ranks: kv heads are repeated if there are fewer than ranks. Others:
        see `over`. Errors: ConfigError if heads, d_ff or experts do not divide, with the degrees
        that work."""
        if max(expert_lanes, mlp_lanes) > 1:
            return self.over(expert_lanes, mlp_lanes).with_tp(tp)
        if not self.splits(tp):
            works = [d for d in range(1, self.heads + 1) if self.splits(d)]
            raise ConfigError(
                "mesh",
                f"tp={tp} cannot split {self.name} "
                f"({self.heads} heads, {self.kv_heads} kv heads, ffn {self.d_ff}, "
                f"{self.experts} experts); "
                f"these can: {', '.join(map(str, works))}",
            )
        return self.repeated(tp)

    def repeated(self, tp: int) -> ModelConfig:
        """Returns the config with at least one kv head for each of `tp` ranks."""
        return replace(
            self,
            kv_heads=max(self.kv_heads, tp),
            layer_sizes=tuple(sizes.repeated(tp) for sizes in self.layer_sizes),
        )

    def over(self, expert_lanes: int = 1, mlp_lanes: int = 1) -> ModelConfig:
        """Returns the config for lanes that share out experts, and MLPs; 1: each has its own."""
        mlps = tuple(spec.over(expert_lanes, mlp_lanes) for spec in self.mlps)
        return replace(self, mlps=mlps)

    def splits(self, tp: int) -> bool:
        """Returns True if `tp` ranks can share the model; kv heads may be repeated."""
        return all(
            spec.splits(self.at(layer), tp) for *specs, layer in layer_kinds(self) for spec in specs
        )


def layer_kinds(model: ModelConfig) -> dict[tuple[MixerSpec, FeedForwardSpec, int], int]:
    """Counts the layers of each kind: those with equal specs and sizes. Keys are the specs, and the
    number of the first such layer, for `ModelConfig.at`."""
    first: dict[Any, int] = {}
    counts: Counter[int] = Counter()
    sizes = model.layer_sizes or (None,)
    for layer in range(model.layers):
        kind = model.mixer(layer), model.mlp(layer), sizes[layer % len(sizes)]
        counts[first.setdefault(kind, layer)] += 1
    return {(model.mixer(layer), model.mlp(layer), layer): n for layer, n in counts.items()}


def declare(model: ModelConfig, layers: range, tp: int = 1) -> dict[str, Declared]:
    """Declares the parameters of a pipeline stage by path, such as 'layers.3.attention.qkv' (layers
    are numbered over the whole model). The stage of the first layer has the embedding, that of the
    last the LM head. model: after `with_tp`."""
    D = model.d_model
    vocab = padded_vocab(model, tp)
    declared = {}
    if layers.start == 0:
        declared["embed"] = Declared((vocab, D), ("vocab", "embed"))
        if model.layer_input is not None:
            declared |= _within("inputs", model.layer_input.declare(model, vocab))
    for number in layers:
        declared |= _within(f"layers.{number}", model.block(number))
    if layers.stop == model.layers:
        declared["norm"] = Declared((D,), ("embed",), wide=True)
        declared["head"] = Declared((D, vocab), ("embed", "vocab"), inputs=1)
    return declared


def matrix_elements(declared: Iterable[Declared]) -> int:
    """Elements of the parameters that are matrices of products."""
    return sum(p.size for p in declared if p.inputs)


def padded_vocab(model: ModelConfig, tp: int) -> int:
    """Vocabulary size, rounded up so that each of `tp` ranks has whole tiles of columns."""
    return -(-model.vocab // (tp * COLUMNS)) * tp * COLUMNS


def layers_of(model: ModelConfig, spp: int) -> list[range]:
    """Splits the layers into `spp` contiguous stages whose sizes differ by at most one. Errors:
    ConfigError for more stages than layers."""
    if not 1 <= spp <= model.layers:
        raise ConfigError(
            "mesh",
            f"spp={spp} must be from 1 to {model.layers}, the number of layers of {model.name}",
        )
    return split(range(model.layers), spp)


def split(layers: range, parts: int) -> list[range]:
    """Splits layers into `parts` contiguous ranges whose sizes differ by at most one."""
    ends = [layers.start + len(layers) * part // parts for part in range(parts + 1)]
    return [range(a, b) for a, b in itertools.pairwise(ends)]


def _within(prefix: str, declared: Mapping[str, Declared]) -> dict[str, Declared]:
    return {f"{prefix}.{name}": parameter for name, parameter in declared.items()}
