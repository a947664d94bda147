"""What goes into a batch.

Decodes go first and every one that can runs. Then prefill chunks, in the order of the policy, out
of what is left of the step's time and of its tokens: sequences that are partly prefilled get the
next chunk, waiting ones are admitted while there is a slot and, as `admission` says, there are
pages. A prompt that cannot be finished in this step leaves a share of its time to much shorter
ones, the more the closer those are to their deadlines (prefill-prefill batching, medha.md M9), and
takes what they leave.

When a decode finds no page, the youngest prefilling sequence leaves, else the youngest decode after
it: nothing more of it is issued, its tokens in flight still count, and once it is out of flight its
pages go back and it waits again. Its output then is part of what it prefills, so nothing is sent
twice and, sampling being a function of the position, nothing changes. The oldest decode can make
all others leave, and no request is accepted that does not fit alone: something always runs.

With P stages a batch takes one P-th of the decodes, those issued longest ago, and none whose last
token is still on its way through the stages, unless there is nothing else to do: so P batches in
flight fill the stages, and prefill chunks the gaps.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

import numpy as np

from jaxserve.api.batch import Batch
from jaxserve.cache import CacheManager
from jaxserve.costs.predictor import Predictor
from jaxserve.scheduling.budget import CHUNKING, StepBudget
from jaxserve.scheduling.page_admission import PageAdmission
from jaxserve.scheduling.policies import relative_slack
from jaxserve.scheduling.prefill_order import PrefillOrder
from jaxserve.scheduling.sequence import NO_SLOT, PlanPart, Sequence
from jaxserve.scheduling.slots import DECODE, LEAVING, SlotTable
from jaxserve.settings.schema import MeshConfig, SchedulerConfig

SHORTER = 1 / 8  # of the work of a prompt that needs several steps: at most that have its guests
GUESTS = 64  # prompts that are considered beside it
# share of its time that a guest has used up when it gets all that guests may have
PRESSING = 1 / 32
NOT_NOW = 1e6  # seconds that a lane without room in this step seems to be busy
MISSES = 4  # of them in a row for which there was no room: no more are asked


class ChunkCandidate(NamedTuple):
    """Where a chunk would run: its home lane, the blocks held per lane if it is spread, its first
    token, and for a sequence that waits the pages that hold its first blocks already."""

    home: int
    blocks_per_lane: list[int] | None
    start: int
    pages: np.ndarray | None


class PrefillChunk(NamedTuple):
    """A prefill chunk that was given pages; `admitted`: the first of its sequence."""

    slot: int
    start: int
    stop: int
    admitted: bool


class Planner(Protocol):
    """Says which lanes compute which part of a prompt."""

    def arrived(self, now: float) -> None:
        """Notes a request."""

    def __call__(self, pending: list[float], start: int, target: int) -> tuple[PlanPart, ...]:
        """A plan for tokens `start` to before `target`; pending: seconds of prefill that each lane
        has to do first."""


class BatchPacker:
    def __init__(
        self,
        config: SchedulerConfig,
        mesh: MeshConfig,
        cache: CacheManager,
        slots: SlotTable,
        predictor: Predictor,
        admission: PageAdmission,
        planner: Planner | None = None,
    ):
        self.config = config
        self.mesh = mesh
        self.cache = cache
        self.slots = slots
        self.predictor = predictor
        self.admission = admission
        self.planner = planner

    def pack(self, number: int, now: float) -> tuple[Batch, list[PrefillChunk]] | None:
        """Batch `number` and its prefill chunks, issued as far as the slots go; None where
        nothing can run."""
        decodes = self._decodes(number)
        room = self._room(decodes)
        chunks = self._prefills(now, room)
        if not chunks and not decodes.size and self.mesh.spp > 1:
            decodes = self._decodes(number, hurry=True)
            room = self._room(decodes)
        return (
            (self._batch(number, decodes, chunks, max(room.pace)), chunks)
            if chunks or decodes.size
            else None
        )

    def _room(self, decodes: np.ndarray) -> StepBudget:
        """What a step with these decodes has room for. A token passes all stages, so a step may
        take its objective's P-th part."""
        cache = self.cache
        lanes = self.predictor.decodes(
            self.slots.issued[decodes],
            cache.home[decodes],
            cache.spread[decodes],
            cache.blocks_per_lane[decodes],
        )
        running = (self.slots.phase == DECODE) & (self.slots.issued < self.slots.max_positions)
        long = self.config.step_time
        stages = self.mesh.spp
        target = float(self.slots.tpot[running].min()) if running.any() else long
        return StepBudget(
            self.predictor,
            lanes,
            self.config.chunk_tokens,
            self.config.tile,
            target / stages,
            long / stages,
        )

    def _batch(
        self, number: int, decodes: np.ndarray, chunks: list[PrefillChunk], seconds: float
    ) -> Batch:
        slots = self.slots
        cache = self.cache
        slot = decodes
        fed = decodes.size
        if chunks:
            slot = np.concatenate([decodes, np.array([chunk.slot for chunk in chunks], np.intp)])
        start = slots.issued[slot]
        length = np.ones(slot.size, np.int32)
        feed = np.ones(slot.size, bool)
        tokens = owner = np.empty(0, np.int32)
        if chunks:
            start[fed:] = [chunk.start for chunk in chunks]
            length[fed:] = [chunk.stop - chunk.start for chunk in chunks]
            feed[fed:] = False
            tokens = np.concatenate(
                [slots.by_slot[chunk.slot].history(chunk.start, chunk.stop) for chunk in chunks]
            )
            far = [
                chunk
                for chunk in chunks
                if cache.spread[chunk.slot] and chunk.stop - chunk.start > 1
            ]
            if far:
                size = cache.block_size
                owner = np.concatenate(
                    [
                        cache.lanes_of(chunk.slot, chunk.start // size, cache.blocks(chunk.stop))
                        for chunk in far
                    ]
                )
        slots.issued[decodes] += 1
        slots.in_flight[slot] += 1
        slots.last_batch[slot] = number
        return Batch(
            number=number,
            seq=slots.number[slot],
            slot=slot.astype(np.int32),
            lane=cache.home[slot],
            start=start,
            length=length,
            is_decode=feed,
            sample=slots.phase[slot] == DECODE,
            spread=cache.spread[slot],
            blocks_per_lane=cache.blocks_per_lane[slot],
            block_lane=owner,
            tokens=tokens,
            moves=cache.take_moves(),
            table_updates=cache.take_table_updates(),
            seconds=seconds,
            admitted=tuple(row for row, chunk in enumerate(chunks, fed) if chunk.admitted),
        )

    def _decodes(self, number: int, hurry: bool = False) -> np.ndarray:
        """Slots whose next token is decoded, each with a page for it. In a `hurry` also those whose
        last token is on its way."""
        slots = self.slots
        stages = self.mesh.spp
        ready = np.flatnonzero((slots.phase == DECODE) & (slots.issued < slots.max_positions))
        share = -(-ready.size // stages)
        if stages > 1 and not hurry:
            ready = ready[
                (slots.last_batch[ready] <= number - stages) | (slots.in_flight[ready] == 0)
            ]
        elif hurry:
            ready = ready[slots.in_flight[ready] < 2]
        short = ready[slots.issued[ready] == self.cache.capacity[ready]]
        if short.size and short.size <= self.cache.available:
            for slot in short.tolist():
                self.cache.extend(slot, 1)
        elif short.size:
            for slot in short[np.argsort(slots.number[short])].tolist():
                if slots.phase[slot] == DECODE:  # else it has left for an older one
                    self._claim(slot)
            ready = ready[
                (slots.phase[ready] == DECODE) & (slots.issued[ready] < self.cache.capacity[ready])
            ]
        return (
            ready
            if stages == 1
            else np.sort(ready[np.argsort(slots.last_batch[ready], kind="stable")[:share]])
        )

    def _claim(self, slot: int) -> None:
        """A page for a decode, if need be from a sequence that leaves for it; none while pages are
        on their way back."""
        slots = self.slots
        while not self.cache.available and not slots.draining:
            younger = np.flatnonzero((slots.phase == DECODE) & (slots.number > slots.number[slot]))
            if slots.prefilling:
                slots.withdraw(slots.prefilling[-1], LEAVING)
            elif younger.size:
                slots.withdraw(slots.by_slot[younger[np.argmax(slots.number[younger])]], LEAVING)
            else:
                return
        if self.cache.available:
            self.cache.extend(slot, 1)

    # --- prefill

    def _prefills(self, now: float, room: StepBudget) -> list[PrefillChunk]:
        """Chunks of prefilling and of newly admitted sequences, in the order of the policy."""
        slots = self.slots
        if not (slots.prefilling or (slots.queue and slots.free)):
            return []
        turn = PrefillPacker(self, room, now, int(np.count_nonzero(slots.phase == DECODE)))
        if not turn.reserve:
            self._clear_way()
        return turn.pack(PrefillOrder(self.config.policy, now, slots, self.admission))

    def _clear_way(self) -> None:
        """Without decodes the oldest prefilling sequence must go on: the youngest leave until there
        is a page for it."""
        slots = self.slots
        line = self.slots.prefilling
        while len(line) > 1 and not self.fitting(line[0], 1, 0) and not slots.draining:
            slots.withdraw(line[-1], LEAVING)

    def fitting(self, sequence: Sequence, most: int, reserve: int) -> int:
        """Length of the sequence's next chunk, 0 where there are no pages."""
        spare = max(self.cache.available - reserve, 0)
        start = int(self.slots.issued[sequence.slot])
        room = int(self.cache.capacity[sequence.slot])
        return min(sequence.prefill_len - start, most, room + spare * self.cache.block_size - start)

    def issue(self, sequence: Sequence, length: int) -> PrefillChunk:
        """Gives the sequence's next tokens pages and counts them as issued."""
        slot = sequence.slot
        slots = self.slots
        cache = self.cache
        start = int(slots.issued[slot])
        chunk = PrefillChunk(slot, start, start + length, slot in slots.unannounced)
        slots.unannounced.discard(slot)
        if sequence.plan and (lanes := sequence.plan_at(start).lanes) != cache.group(slot):
            cache.regroup(slot, lanes)  # where there is no room it goes on as it was
        cache.extend(slot, cache.blocks(chunk.stop) - len(cache.tables[slot]))
        slots.issued[slot] = chunk.stop
        if chunk.stop < sequence.prefill_len:
            sequence.prefill_seconds_left = slots.work(chunk.stop, sequence.prefill_len)
        else:
            sequence.prefill_seconds_left = 0.0
            slots.phase[slot] = DECODE
            slots.prefilling.remove(sequence)
        return chunk


class PrefillPacker:
    """The prefill part of one batch while it is being packed.

    `reserve` pages are kept for decodes; `pending` is seconds of prefill per home lane.
    """

    def __init__(self, packer: BatchPacker, room: StepBudget, now: float, reserve: int):
        self.packer = packer
        self.room = room
        self.now = now
        self.reserve = reserve
        self.config = packer.config
        self.cache = packer.cache
        self.slots = packer.slots
        self.pending = [0.0] * packer.mesh.kvp
        for sequence in self.slots.prefilling:
            self._expect(
                sequence,
                int(self.cache.home[sequence.slot]),
                int(self.slots.issued[sequence.slot]),
            )
        self.chunks: list[PrefillChunk] = []
        self.admission = packer.admission
        self.admission.begin(reserve)
        self.out_of_pages = False  # whether a prefilling sequence found no page

    def _expect(self, sequence: Sequence, home: int, start: int) -> None:
        """Counts what is left of a prompt as work of the lanes that will do it."""
        lanes = sequence.plan_at(start).lanes or (home,)
        for lane in lanes:
            self.pending[lane] += sequence.prefill_seconds_left / len(lanes)

    def pack(self, order: PrefillOrder) -> list[PrefillChunk]:
        """Fills the room. The first prompt that cannot be finished shares the step with those after
        it, then takes the rest."""
        for first in order.ranked():
            place = self._place(first)
            if place is None:
                continue
            length = self._length(
                first, place, self.room.long if place.pages is None else self.room.target
            )
            if self.config.chunking == "adaptive" and length < first.prefill_len - place.start:
                self._admit(first, place)
                place = self._place(first) or place._replace(pages=None)
                self._share(first, place, order)
                self._give(first, place, self._length(first, place, self.room.long), force=True)
                break
            self._give(first, place, length, force=True)
            if self.out_of_pages or not any(self.room.tokens_left):
                break
        return self.chunks

    def _share(self, host: Sequence, place: ChunkCandidate, order: PrefillOrder) -> None:
        """Others in the host's step: on other lanes all, for all of its time; then, on its lane,
        much shorter ones for a share of it."""
        if len(self.room.lanes) > 1 and place.blocks_per_lane is None:
            self._ask(host, place, order.ranked())
        self._ask(host, place, order.ranked(SHORTER * host.prefill_seconds_left))

    def _ask(self, host: Sequence, place: ChunkCandidate, guests: Iterable[Sequence]) -> None:
        missed = asked = 0
        shorter = SHORTER * host.prefill_seconds_left
        for guest in guests:
            own = self._place(guest)
            if own is None:
                continue
            asked += 1
            apart = own.home != place.home and place.blocks_per_lane is None
            if apart or guest.prefill_seconds_left <= shorter:
                length = self._length(
                    guest, own, self.room.until(own.home, 1.0 if apart else self._share_of(guest))
                )
                missed = 0 if self._give(guest, own, length) else missed + 1
            if missed == MISSES or asked == GUESTS or self.out_of_pages:
                break

    def _share_of(self, guest: Sequence) -> float:
        """The part of the host's step that a guest may use."""
        slack = float(
            relative_slack(
                self.now, guest.request.arrival, guest.ttft_deadline, guest.prefill_seconds_left
            )
        )
        return self.config.sharing * min(1.0, max(0.0, 1 - slack) / PRESSING)

    def _place(self, sequence: Sequence) -> ChunkCandidate | None:
        """Where the sequence's next chunk would run; None where it cannot."""
        slot = sequence.slot
        cache = self.cache
        room = self.room
        if slot != NO_SLOT:
            home = int(cache.home[slot])
            held = cache.blocks_per_lane[slot].tolist() if cache.spread[slot] else None
            return (
                ChunkCandidate(home, held, int(self.slots.issued[slot]), None)
                if room.tokens_left[home]
                else None
            )
        lanes = [lane for lane, left in enumerate(room.tokens_left) if left]
        pages = self.admission.match(sequence) if self.admission.open and lanes else None
        if pages is None:
            return None
        start = len(pages) * cache.block_size
        if self.packer.planner is not None:
            queues = [
                seconds if left else seconds + NOT_NOW
                for seconds, left in zip(self.pending, room.tokens_left)
            ]
            plan = self.packer.planner(queues, start, sequence.prefill_len)
            # one lane for all of it: the one that has its blocks
            sequence.plan = plan if len(plan[-1].lanes) > 1 else ()
            if sequence.plan:
                open_lanes = [lane for lane in plan[0].lanes if room.tokens_left[lane]]
                return ChunkCandidate(open_lanes[0], None, start, pages) if open_lanes else None
        need = cache.blocks(min(start + self.config.chunk_tokens, sequence.prefill_len)) - len(
            pages
        )
        home = cache.choose_home(pages, lanes, need, self.pending)
        return ChunkCandidate(home, None, start, pages)

    def _length(self, sequence: Sequence, place: ChunkCandidate, until: float) -> int:
        most = min(
            sequence.plan_at(place.start).stop - place.start, self.room.tokens_left[place.home]
        )
        return (
            CHUNKING[self.config.chunking](
                self.room, place.home, place.blocks_per_lane, place.start, most, until
            )
            if most > 0
            else 0
        )

    def _give(
        self, sequence: Sequence, place: ChunkCandidate, length: int, force: bool = False
    ) -> bool:
        """The sequence's next chunk, of so many tokens; by `force`, if it is the first of the
        batch, of a tile at least."""
        if not length and force and not self.chunks:
            length = min(
                self.config.tile,
                sequence.plan_at(place.start).stop - place.start,
                self.room.tokens_left[place.home],
            )
        if length and place.pages is None:
            length = self.packer.fitting(sequence, length, self.reserve)
            self.out_of_pages = not length
        if not length:
            return False
        self._admit(sequence, place)
        self.room.take(place.home, place.blocks_per_lane, place.start, length)
        self.chunks.append(self.packer.issue(sequence, length))
        return True

    def _admit(self, sequence: Sequence, place: ChunkCandidate) -> None:
        """Gives a waiting sequence its slot and the pages that hold its first blocks; nothing for
        one that has them."""
        if place.pages is None:
            return
        self.admission.admit(sequence, place.pages, place.home)
        if place.start:
            sequence.prefill_seconds_left = self.slots.work(place.start, sequence.prefill_len)
        self._expect(sequence, place.home, place.start)
        if sequence.started_at is None:
            sequence.started_at = self.now
            sequence.cached_tokens = place.start
