"""Forecasts when slots, pages and first tokens come, for admission control.

`LoadModel` makes a `LoadForecast` of what runs now: how fast prompts are prefilled beside the
decodes, when decodes end and slots come free. From that it works out when each of a queue of
prompts would have its first token. What costs do not cover is learnt: how much prefill a step gets
done in the time that it has for it, how long steps take, and how many tokens completions put out.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from jaxserve.api.batch import Batch
from jaxserve.cache import CacheManager
from jaxserve.costs.predictor import Predictor
from jaxserve.policies import PromptView
from jaxserve.scheduling.completion_lengths import CompletionLengths
from jaxserve.scheduling.pacing import MIN_PREFILL_SHARE
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.slots import DECODE, SlotTable
from jaxserve.settings.schema import SchedulerConfig

CURVE_POINTS = 9  # numbers of decodes for which a step's time is predicted; in between, by a line
MAX_DECODE_SHARE = 0.9  # share of the objective per token that decodes alone may take
MIN_PREFILL_RATE = 1e-3  # seconds of prefill done per second, where a forecast finds next to none
SMOOTHING = 0.1  # weight of the last step in `prefill_yield` and in the mean time of steps
MIN_YIELD, MAX_YIELD = 0.05, 4.0  # limits of what one step tells of `prefill_yield`
MAX_STEP_RATIO = 1.25  # a step is predicted to take at most this many times the recent mean


class LoadForecast(NamedTuple):
    """The forecast of the work that runs, in seconds from now."""

    tpot: float  # the tightest objective per token
    decodes: int
    prefills: int  # sequences that are partly prefilled
    step: float  # of a step with these decodes and prompts, through all stages
    prefill_per_step: float  # seconds of prefill that such a step does
    prefill_rate: np.ndarray  # [slots + 1] seconds of prefill per second, by number of decodes
    decode_step: np.ndarray  # [slots + 1] of a step in one stage, by number of decodes alone
    decode_ends: np.ndarray  # [decodes] when they end, soonest first
    slot_free: np.ndarray  # [at most slots] when slots come free, soonest first
    completion: float  # how long a completion that begins later takes
    most_decodes: int  # that this objective allows
    yielded: int = 0  # pages of sequences that make way


class LoadModel:
    """Predicts by costs and by what was learnt of the steps so far."""

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheManager,
        slots: SlotTable,
        predictor: Predictor,
        lengths: CompletionLengths,
    ):
        self.config = config
        self.cache = cache
        self.slots = slots
        self.predictor = predictor
        # seconds of prefill alone that a step does in a second that it has for prefill
        self.prefill_yield = 1.0
        self._mixed_step = math.inf  # mean seconds in a stage of steps with decodes and prompts
        self._lengths = lengths
        self._counts = np.unique(np.linspace(0, config.max_seqs, CURVE_POINTS).astype(int))
        self._current: LoadForecast | None = None
        self._all = np.ones(config.max_seqs, bool)

    # --- what runs

    def current(self) -> LoadForecast:
        """The forecast of what runs since the last batch came or went."""
        if self._current is None:
            prefilling = [sequence.prefill_len for sequence in self.slots.prefilling]
            tokens = np.concatenate([prefilling, self.slots.queue.tokens])
            context = float(tokens.mean()) if tokens.size else 0.0
            self._current = self._forecast(math.inf, context)
        return self._current

    def beside(self, sequence: Sequence) -> tuple[LoadForecast, bool]:
        """The forecast of what runs, as it is for `sequence`: without sequences of tenants whose
        turn comes later, which make way; and whether its objective per token is tighter than those
        of all that run, so that it sets the time of steps."""
        stays = self._stays(sequence)
        forecast = self.current()
        if not stays.all():
            forecast = self._forecast(math.inf, sequence.prefill_len, stays)
        tighter = sequence.tpot < forecast.tpot
        if tighter:
            forecast = self._forecast(sequence.tpot, sequence.prefill_len, stays)
        tokens = min(sequence.max_new_tokens - 1, self._lengths.remaining)
        return forecast._replace(completion=tokens * forecast.step), tighter

    def most_decodes(self, tpot: float) -> int:
        """The most decodes that take little enough of an objective of `tpot` seconds per token."""
        return self._most_decodes(self.current().decode_step, tpot)

    def _most_decodes(self, decode_step: np.ndarray, tpot: float) -> int:
        limit = MAX_DECODE_SHARE * (tpot / self.predictor.mesh.spp)
        return int(np.searchsorted(decode_step, limit, side="right")) - 1

    def _stays(self, sequence: Sequence) -> np.ndarray:
        """Returns which slots [slots] do not make way for a sequence."""
        shares = self.slots.shares
        if len(shares) < 2:
            return self._all
        return shares.turns[self.slots.tenant] <= shares.turns[sequence.tenant]

    def _forecast(
        self, tpot: float, context: float, stays: np.ndarray | None = None
    ) -> LoadForecast:
        """Makes a forecast with a tightest objective of at most `tpot`; decodes to come have
        `context` tokens. stays: slots [slots] whose sequences go on; default: all."""
        slots = self.slots
        stages = self.predictor.mesh.spp
        stays = self._all if stays is None else stays
        running = (slots.phase == DECODE) & stays
        prefilling = [sequence for sequence in slots.prefilling if stays[sequence.slot]]
        tpot = slots.tightest(tpot, stays)
        decodes = int(np.count_nonzero(running))
        decode_step = self._decode_steps(slots.issued[running], context)
        pace = min(tpot, slots.tightest_gap(stays))
        step, prefill_share = self._mixed_steps(decode_step, pace / stages)
        rate = np.maximum(prefill_share * self.prefill_yield, MIN_PREFILL_RATE)
        period = min(float(step[decodes]), MAX_STEP_RATIO * self._mixed_step) * stages
        remaining = self._lengths.remaining
        ends = np.minimum(slots.max_positions - slots.issued, remaining) * period
        busy = np.where(running, ends, 0.0)
        for sequence in prefilling:
            tokens = min(sequence.max_positions - sequence.prefill_len, remaining)
            busy[sequence.slot] = sequence.prefill_seconds_left / rate[decodes] + tokens * period
        most = self._most_decodes(decode_step, tpot)
        return LoadForecast(
            tpot=tpot,
            decodes=decodes,
            prefills=len(prefilling),
            step=period,
            prefill_per_step=period / stages * float(rate[decodes]),
            prefill_rate=rate,
            decode_step=decode_step,
            decode_ends=np.sort(ends[running]),
            slot_free=np.sort(busy)[len(busy) - max(1, most) :],
            completion=0.0,
            most_decodes=most,
            yielded=0 if stays is self._all else int(self._pages(~stays).sum()),
        )

    def _pages(self, which: np.ndarray) -> np.ndarray:
        """Pages of each of these slots [slots]; 0 of others."""
        cache = self.cache
        return np.where(which, cache.capacity // cache.block_size * cache.needs.per_block, 0)

    def _mixed_steps(self, decode_step: np.ndarray, target: float) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of a step in a stage while prompts wait [slots + 1], by number of decodes, and
        the share of it that is the prompts'."""
        config = self.config
        if config.chunking == "static":
            chunk = self.predictor.prefill(0, config.chunk_tokens, config.chunk_tokens)
            chunk = min(chunk, self.slots.backlog or chunk)
            return decode_step + chunk, chunk / (decode_step + chunk)
        if target == math.inf:
            target = config.step_time / self.predictor.mesh.spp
        step = np.where(target > decode_step, target, (1 + MIN_PREFILL_SHARE) * decode_step)
        return step, 1 - decode_step / step

    def _decode_steps(self, contexts: np.ndarray, context: float) -> np.ndarray:
        """Seconds of a step in a stage [slots + 1], by number of decodes alone: first those that
        run, of these `contexts`, then others of `context` tokens."""
        mesh = self.predictor.mesh
        lanes = mesh.kvp * mesh.spp
        running = len(contexts)
        mean = float(contexts.mean()) if running else 0.0
        longest = float(contexts.max()) if running else context
        seconds = [0.0]
        for count in self._counts[1:].tolist():
            tokens = mean * min(count, running) + context * max(count - running, 0)
            per_lane = -(-count // lanes)
            load = self.predictor.lane_costs.decodes_ahead(
                per_lane, tokens / lanes, tokens / count, longest
            )
            seconds.append(self.predictor.lane(load))
        numbers = np.arange(self.config.max_seqs + 1)
        return np.interp(numbers, self._counts, np.maximum.accumulate(seconds))

    # --- first tokens

    def first_tokens(
        self, prompts: PromptView, waits: np.ndarray, forecast: LoadForecast
    ) -> np.ndarray:
        """Predicts seconds [n] to the first tokens of prompts that are prefilled in this order.

        waits: [n] bool, for a slot. A prompt is prefilled when it has a slot and pages and the
        prefill before it is done, at the rate that decodes leave. Those ahead of it are decodes by
        then, and some of those that run have ended.
        """
        work = prompts.work
        ready = self._slots_ready(waits, forecast)
        ready = np.maximum(ready, self._pages_ready(prompts.tokens, waits, forecast))
        rate = forecast.prefill_rate
        about = np.maximum(ready, np.cumsum(work) * (1 / float(rate[forecast.decodes])))
        ended = np.searchsorted(forecast.decode_ends, about)
        ended += np.searchsorted(about + forecast.completion, about)
        decodes = np.maximum(forecast.decodes + np.arange(len(waits)) - ended, 0)
        seconds = work / rate[np.minimum(decodes, len(forecast.slot_free))]
        lane_work = seconds
        kvp = self.predictor.mesh.kvp
        if kvp > 1:  # lanes share the work of several prompts, and of one only where they meet
            lane_work = seconds * self.cache.prompt_lanes.meeting(prompts.tokens)
        work_before = (np.cumsum(lane_work) - lane_work) / kvp
        return np.maximum.accumulate(ready - work_before) + work_before + seconds

    def _slots_ready(self, waits: np.ndarray, forecast: LoadForecast) -> np.ndarray:
        """Predicts when each prompt has a slot [n]: every slot comes free, and again after each
        completion."""
        rounds = np.arange(1 + len(waits) // len(forecast.slot_free))
        free = (forecast.slot_free + forecast.completion * rounds[:, None]).ravel()
        return np.where(waits, free[np.cumsum(waits) - 1], 0.0)

    def _pages_ready(
        self, tokens: np.ndarray, waits: np.ndarray, forecast: LoadForecast
    ) -> np.ndarray | float:
        """Predicts when there are pages for each prompt [n]; 0 if there are enough for all."""
        cache = self.cache
        promised = sum(
            cache.needs.left(cache.layouts[sequence.slot], sequence.prefill_len)
            for sequence in self.slots.prefilling
        )
        spare = cache.available - promised + forecast.yielded
        pages = cache.needs.of(tokens)
        if pages.sum() <= spare:
            return 0.0
        short = np.cumsum(np.where(waits, pages, 0.0)) - max(spare, 0)
        # pages come back evenly until the last slot is free
        last = float(forecast.slot_free[-1]) or forecast.completion
        return np.maximum(short, 0.0) * (last / max(cache.total - cache.available, 1))

    # --- what is learnt

    def learn_step(self, batch: Batch, backlog: float) -> None:
        """Learns from a batch that was packed how much a step gets done if it has more than it can
        do. backlog: seconds of prefill that were left to do before it."""
        self._current = None
        backlog_left = self.slots.backlog
        fed = ~batch.is_chunk
        if fed.all() or not 0 < backlog_left < backlog:
            return
        decode_seconds = 0.0
        if fed.any():
            self._learn_mixed_step(batch.seconds)
            lanes = self.predictor.lane_costs.decodes(
                batch.start[fed], batch.lane[fed], batch.group_size[fed], batch.blocks_per_lane[fed]
            )
            decode_seconds = self.predictor.stage(lanes)
        seconds = batch.seconds - decode_seconds
        if seconds > 0:
            lengths = batch.length[~fed]
            lanes_each = (lengths * batch.group_size[~fed]).sum() / lengths.sum()
            done = (backlog - backlog_left) * lanes_each / self.predictor.mesh.kvp / seconds
            done = min(max(done, MIN_YIELD), MAX_YIELD)
            self.prefill_yield += SMOOTHING * (done - self.prefill_yield)

    def _learn_mixed_step(self, seconds: float) -> None:
        if self._mixed_step == math.inf:
            self._mixed_step = seconds
        else:
            self._mixed_step += SMOOTHING * (seconds - self._mixed_step)

    def changed(self) -> None:
        """Drops the forecast: tokens came, so that less is left to do."""
        self._current = None
