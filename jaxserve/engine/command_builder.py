"""Writes step commands: what a batch means for the devices.

The builder keeps what earlier commands set: which version of the sampled tokens has each slot's
last token, and how each slot samples. It picks the cheapest compiled shape that has the batch's
exchanges between lanes, and fills its rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

import numpy as np

from jaxserve.api.batch import DEFAULT_EXCHANGE, NO_STORES, Batch, PageStores
from jaxserve.cache.tiers import Fetch
from jaxserve.engine import sampling_rows, token_masks
from jaxserve.engine.command import NO_SAMPLING, NO_STEP, SAMPLE_LATER, StepCommand
from jaxserve.engine.fetched_pieces import Arrival
from jaxserve.engine.results import InFlightBatch, pool_rows, score_rows
from jaxserve.engine.sampling_rows import VARIANTS, SamplingAdmission
from jaxserve.engine.stage_plan import StagePlan
from jaxserve.engine.step_demand import StepDemand
from jaxserve.engine.step_rows import StepRows
from jaxserve.engine.step_shapes import StepShape
from jaxserve.replica.registry import Registry
from jaxserve.scheduling import Scheduler
from jaxserve.scheduling.batch_reader import Events

GREEDY, DRAWN, FULL, LOGPROBS, GUIDED = range(len(VARIANTS))


class CommandBuilder:
    """Writes commands for workers with this plan. uncompiled: returns the shapes that no step may
    have yet."""

    def __init__(
        self,
        plan: StagePlan,
        scheduler: Scheduler,
        registry: Registry,
        uncompiled: Callable[[], Set[StepShape]] = frozenset,
    ):
        self._plan = plan
        self._scheduler = scheduler
        self._registry = registry
        self._uncompiled = uncompiled
        self._shape_index = {shape: index for index, shape in enumerate(plan.shapes)}
        self._begins = True  # the first command has the devices forget what they did before
        self._version = 0  # of the tokens that were sampled last
        # per slot: the version with its last token, and what its sampling needs (of VARIANTS)
        self._sampled_at = np.zeros(plan.slots, np.int64)
        self._variant = np.zeros(plan.slots, np.int8)

    def reset(self) -> StepCommand:
        """Makes the command after which the devices hold nothing."""
        self._version = 0
        self._sampled_at[:] = 0
        return StepCommand(number=-1, reset=True)

    def skip(self, count: int) -> None:
        """Counts what the devices sampled by `count` commands from elsewhere, while no sequence had
        a slot."""
        if not self._begins:  # else they forget it
            self._version += count

    def step(
        self,
        batch: Batch,
        fetches: Sequence[Fetch] = (),
        computed: PageStores = NO_STORES,
        groups: int = 0,
    ) -> tuple[StepCommand, InFlightBatch]:
        """Makes the command of a batch, and what reads its result. fetches: to begin. computed:
        pages that others want as soon as the batch has filled them. groups: of layers, if others
        follow by `go_on`; 0: all. Guided sampling is left for a later command: masks are made while
        the devices compute."""
        lanes = self._plan.mesh.kvp
        admissions = [launch for row in batch.admitted for launch in self._admissions(batch, row)]
        variant = self._sampling_of(batch)
        later = variant == GUIDED
        demand = self._plan.demand(batch)
        shape = self._shape(demand, batch)
        # a table that is updated late, by layers that run late, could lose what others wrote since
        plan = self._plan
        arrays = StepRows(
            batch, demand, shape, plan.block_size, groups > 0, plan.page_groups
        ).arrays()
        scores, pending = score_rows(self._scheduler, batch, arrays, lanes)
        pools, embeddings = pool_rows(self._scheduler, batch, arrays, lanes)
        command = StepCommand(
            number=batch.number,
            shape=self._shape_index[shape],
            reads=int(self._sampled_at[batch.slot[batch.is_decode]].max(initial=0)),
            variant=SAMPLE_LATER if later else variant,
            groups=groups,
            reset=self._begins,
            admissions=tuple(admissions),
            adapter_loads=batch.adapter_loads,
            stores=batch.stores,
            computed=computed,
            fetches=tuple(fetches),
            table_updates=arrays.early_updates,
            restores=batch.restores,
            saves=batch.saves,
            rows=arrays.rows,
            scores=scores,
            pools=pools,
        )
        self._begins = False
        if not groups:
            self._note_sampling(batch, variant)
        return command, InFlightBatch(batch, arrays, pending, embeddings, sample_later=later)

    def go_on(self, batch: Batch, last: bool) -> StepCommand:
        """Makes the command that runs the next group of a batch's layers, the last one or
        another."""
        if last:
            self._note_sampling(batch, self._sampling_of(batch))
        return StepCommand(number=batch.number, groups=1)

    def moves(self, stores: PageStores, fetches: Sequence[Fetch]) -> StepCommand:
        """Makes the command that only reads pages, and begins fetches."""
        return self._between(stores=stores, fetches=tuple(fetches))

    def load(self, arrival: Arrival, stores: PageStores) -> StepCommand:
        """Makes the command that writes a piece of a fetch to its pages, after what is on pages
        that are given away was read."""
        return self._between(stores=stores, loads=np.array([arrival], np.int32))

    def drop(self, arrival: Arrival) -> StepCommand:
        """Makes the command that writes nothing of a piece, and lets nothing more of its fetch
        come."""
        row = arrival._replace(blocks=0, last=True)
        return self._between(loads=np.array([row], np.int32))

    def _between(self, **parts: Any) -> StepCommand:
        """Makes a command of no step."""
        command = StepCommand(number=NO_STEP, reset=self._begins, **parts)
        self._begins = False
        return command

    def masked_sampling(
        self, flight: InFlightBatch, unread: Iterable[Batch], now: float
    ) -> tuple[StepCommand | None, Events]:
        """The command that samples a batch whose masks had to wait, and the ends of sequences whose
        guide cannot be followed. None while a guide needs a token of `unread` batches first."""
        batch = flight.batch
        if token_masks.behind(batch, unread):
            return None, []
        words = self._plan.mask_words
        extent = self._plan.mesh.kvp, flight.arrays.shape.samples, words
        masks, ends = token_masks.masks(self._scheduler, batch, flight.arrays.sampled, extent, now)
        self._note_sampled(batch)
        flight.sample_later = False
        return StepCommand(number=batch.number, variant=GUIDED, masks=masks), ends

    def _shape(self, demand: StepDemand, batch: Batch) -> StepShape:
        """Picks the cheapest compiled shape with the batch's exchanges; if none fits, with the
        default for decodes, for chunks, or for both."""
        but = self._uncompiled()
        for exchange, of_decodes in itertools.product(
            dict.fromkeys((batch.exchange, DEFAULT_EXCHANGE)),
            dict.fromkeys((batch.decode_exchange, DEFAULT_EXCHANGE)),
        ):
            shape = self._plan.shape_for(demand, exchange, of_decodes, but)
            if shape is not None:
                return shape
        raise AssertionError(f"no compiled shape holds {demand}")

    def _note_sampling(self, batch: Batch, variant: int) -> None:
        """Notes what the devices sample when all layers of a batch have run."""
        if variant not in (NO_SAMPLING, GUIDED):
            self._note_sampled(batch)

    def _note_sampled(self, batch: Batch) -> None:
        self._version += 1
        self._sampled_at[batch.slot[batch.sample]] = self._version

    def _sampling_of(self, batch: Batch) -> int:
        if not batch.sample.any():
            return NO_SAMPLING
        return int(self._variant[batch.slot[batch.sample]].max())

    def _admissions(self, batch: Batch, row: int) -> list[SamplingAdmission]:
        """Lists what sets the sampling of a row's sequence, which has just got its slot; nothing
        for one that does not sample."""
        sequence = self._scheduler.sequences[int(batch.seq[row])]
        if sequence.request.embed:
            return []
        params = sequence.request.sampling
        slot = int(batch.slot[row])
        if sequence.matcher is not None:
            self._variant[slot] = GUIDED
        elif params.logprobs is not None:
            self._variant[slot] = LOGPROBS
        elif params.adjusts_logits:
            self._variant[slot] = FULL
        else:
            self._variant[slot] = GREEDY if params.greedy else DRAWN
        seed = sampling_rows.fold_seed(self._registry[sequence.id].seed, sequence.index)
        return sampling_rows.admissions(
            params,
            int(batch.lane[row]),
            slot,
            sequence.request.prompt,
            sequence.output,
            seed,
            self._plan.model.eos_ids,
        )
