"""Coefficients of steps' times, of one model, on one kind of device, at one degree of tp."""

from __future__ import annotations

import dataclasses
import math

from jaxserve.lanes.load import LaneLoad
from jaxserve.lanes.rates import ExchangeRates, Link
from jaxserve.lanes.work import Heads

# of the norm of reading and using weights: of those tried, the one whose fits have the least error
# on held-out products of each device; `python -m experiments.profiles.exponents` prints them
LINEAR_POWER = 2.5


@dataclasses.dataclass(frozen=True)
class ShapeCost:
    """A compiled shape of a step and its time: decodes, and rows of `width` prefill tokens each;
    `seconds` per layer for all but attention."""

    decodes: int
    rows: int
    width: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class SpreadShape:
    """A compiled shape of steps with spread chunks, on groups of `group_size` lanes that meet by
    `exchange`. Per lane: decodes, rows of prefill tokens, and all tokens, padding included."""

    group_size: int
    exchange: str
    decodes: int
    rows: int
    tokens: int


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds of one model, on one kind of device, at one degree of tp. All but `launch`, `head`
    and `hop` are per layer.

    Linear parts of n tokens: the norm (`smooth_max`) of `linear_floor` (weights are read) and
    `linear_base + linear_token n` (they are used); with experts both grow by `expert_floor` and
    `expert_base` times the share of the experts that n tokens use, 1 - (1 - `active_experts`)^n.
    Where lanes share experts out, they get the tokens of all, in messages. Attention of a chunk of
    new tokens after cached ones: the greater of `pair (cached + new / 2) new` and `read (cached +
    new)`, plus `chunk` and `chunk_token new`. Of decodes: `decode` once, `decode_seq` each,
    `decode_kv` per token of context. In a share `windowed` of the layers that attend, a token sees
    no more than `window` tokens. In a batch with both, `mixed` times the smaller of the two is
    added (below 0: they overlap).
    """

    layers: int
    launch: float = 0.0  # a step in one stage, whatever it does
    linear_floor: float = 0.0
    linear_base: float = 0.0
    linear_token: float = 0.0
    expert_floor: float = 0.0
    expert_base: float = 0.0
    active_experts: float = 0.0  # share of a layer's experts that a token uses
    expert_lanes: int = 1  # that share experts out
    experts_sent: float = 0.0  # tokens to experts on other lanes and back: once, and per token
    experts_sent_token: float = 0.0
    chunk: float = 0.0
    chunk_token: float = 0.0  # per new token: tiles on the diagonal, queries and outputs
    pair: float = 0.0
    read: float = 0.0
    decode: float = 0.0
    decode_seq: float = 0.0
    decode_kv: float = 0.0
    window: int = 0  # tokens
    windowed: float = 0.0
    mixed: float = 0.0
    head: float = 0.0  # final norm, projection to the vocabulary and sampling, in the last stage
    head_token: float = 0.0  # per sampled token
    tp: float = 0.0  # both sums over ranks: once, and per token
    tp_token: float = 0.0
    kvp: float = 0.0  # both exchanges between lanes: once, and per spread token
    kvp_token: float = 0.0
    hop: float = 0.0  # from stage to stage: once, and per token
    hop_token: float = 0.0
    # shapes measured of an engine, cheapest first; a step costs as its shape does
    shapes: tuple[ShapeCost, ...] = ()
    tile: int = 1  # tokens of a prefill row of these shapes, where there are several rows
    spread_shapes: tuple[SpreadShape, ...] = ()  # of steps with spread chunks, cheapest first
    # what a token of padding in a step with spread chunks takes, as a share of any other: 1 where
    # devices compute what is compiled, 0 where kernels skip it
    padding: float = 1.0
    # share of its work for which a lane waits for each other one at work: 0 where each has devices
    # of its own; costs are those of lanes that are all at work
    shared: float = 0.0
    longest: bool = False  # decodes cost as if all of the shape's had the longest context of them
    layer_groups: int = 1  # programs as which the layers run, for all of which `launch` is

    def linear(self, tokens: float) -> float:
        """Seconds of one layer's linear parts and the sums over ranks."""
        used = 0.0
        if self.active_experts:
            used = 1 - (1 - self.active_experts) ** (tokens * self.expert_lanes)
        read = self.linear_floor + used * self.expert_floor
        return (
            smooth_max(
                read, self.linear_base + used * self.expert_base + self.linear_token * tokens
            )
            + self.tp
            + self.tp_token * tokens
            + self.experts_sent
            + self.experts_sent_token * tokens
        )

    def compiled(self, load: LaneLoad) -> ShapeCost | None:
        """The cheapest shape that holds what a lane does; None where none does."""
        for shape in self.shapes:
            if load.decodes <= shape.decodes and (
                load.tiles <= shape.rows
                if shape.rows != 1
                else load.chunks <= 1 and load.tokens <= shape.width
            ):
                return shape
        return None

    def layer(self, load: LaneLoad, messages: float) -> float:
        """Seconds of one layer on one lane. messages: of these, those that no attention is part
        of."""
        shape = self.compiled(load) if self.shapes else None
        exchanged = load.exchanged
        if exchanged is not None and self.spread_shapes:
            layer = self._spread(load, exchanged.strategy, exchanged.chunks.group_size)
        elif shape is not None:
            layer = shape.seconds
        else:
            layer = self.linear(load.decodes + load.tokens)
        context = load.context
        if self.longest:
            context = load.longest * (shape or load).decodes
        layer += self.attention(
            load.attention + load.spread_seconds, self.attend_decodes(load.decodes, context)
        )
        layer += messages
        if exchanged is not None and self.shared:
            layer *= self.crowd(len(exchanged.chunks.busy), len(exchanged.chunks.sums))
        return layer

    def _spread(self, load: LaneLoad, exchange: str, group_size: int) -> float:
        """Seconds of one layer's linear parts in a step with spread chunks, in its compiled shape
        if there is one that holds what the lane does."""
        used = load.decodes + load.tokens
        for shape in self.spread_shapes:
            if (
                shape.exchange == exchange
                and shape.group_size >= group_size
                and shape.decodes >= load.decodes
                and shape.rows >= load.tiles
            ):
                return self.linear(used + self.padding * max(0, shape.tokens - used))
        return self.linear(used)

    def crowd(self, busy: int, lanes: int) -> float:
        """Factor of the time of work with `busy` of `lanes` lanes at work, beside that with all."""
        return (1 + self.shared * (busy - 1)) / (1 + self.shared * (lanes - 1))

    def attend_chunk(self, cached: float, new: int, part: float | None = None) -> float:
        """Seconds of one layer's attention of `new` tokens after `cached` ones. On a lane that
        holds a share of a spread context, `cached` and `part` are its shares of the tokens before
        and of the new ones."""
        if part is None:
            part = new
        attended = self.attended((cached + part / 2) * new, cached + part, new)
        return self.chunk + self.chunk_token * new + attended

    def attend(self, pairs: float, read: float, queries: float) -> float:
        """Seconds of one layer's attention of `queries` new tokens in `pairs` pairs of query and
        key, over `read` tokens of KV."""
        return self.chunk + self.chunk_token * queries + self.attended(pairs, read, queries)

    def attended(self, pairs: float, read: float, queries: float) -> float:
        """Seconds of one layer's pairs of query and key, or of reading `read` tokens of KV for
        them, whichever takes longer."""
        everywhere = max(self.pair * pairs, self.read * read)
        if not self.windowed:
            return everywhere
        near = max(
            self.pair * min(pairs, self.window * queries),
            self.read * min(read, self.window + queries),
        )
        return everywhere + self.windowed * (near - everywhere)

    def attend_decodes(self, count: int, context: float) -> float:
        """Seconds of one layer's attention of `count` decodes over `context` tokens together."""
        if not count:
            return 0.0
        if self.windowed:
            context += self.windowed * min(self.window * count - context, 0)
        return self.decode + self.decode_seq * count + self.decode_kv * context

    def attention(self, prefill: float, decode: float) -> float:
        """Seconds of both kinds of attention in one step."""
        return prefill + decode + self.mixed * min(prefill, decode)

    def chunks(self, steps: int, new: float, context: float, part: float) -> float:
        """Seconds of one layer in `steps` steps with a chunk each, of `new` tokens together.
        context: tokens that they attend over on average; part: tokens of a chunk that the lane
        computes."""
        layer = steps * (self.linear(math.ceil(part)) + self.chunk) + self.chunk_token * new
        each = new / steps
        return layer + steps * self.attended(context * each, context + part / 2, each)

    def gathered(self, tokens: float, times: int = 1) -> float:
        """Seconds of one layer's messages in `times` steps that gather queries of `tokens` spread
        tokens together."""
        return times * self.kvp + self.kvp_token * tokens

    def exchange_rates(self, heads: Heads) -> ExchangeRates:
        """Rates that agree with the costs of attention and of messages between lanes. What costs
        nothing is infinitely fast."""
        per = lambda amount, seconds: amount / seconds if seconds > 0 else math.inf
        token = heads.query_bytes + heads.new_kv_bytes + heads.partial_bytes
        link = Link(self.kvp / 2, per(token, self.kvp_token))
        return ExchangeRates(
            per(heads.pair_flops, self.pair),
            per(heads.kv_bytes, max(self.read, self.decode_kv)),
            self.chunk,
            link,
            link,
            link,
        )


def smooth_max(a: float, b: float) -> float:
    """The greater of two times, with a smooth change from one to the other: their norm of
    `LINEAR_POWER`, 32 % above where they are equal."""
    if a > b:
        a, b = b, a
    if b <= 0:
        return 0.0
    return b * (1 + (a / b) ** LINEAR_POWER) ** (1 / LINEAR_POWER)


# where nothing was measured: work is counted in tokens
NOMINAL = Costs(layers=1, linear_token=1e-4)
