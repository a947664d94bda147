"""A device that can be checked by hand, and a replica around it.

The device's KV of a position is a hash of all tokens up to it, so that a page which was reused too
early, a wrong prefix hit or a wrong table row shows as a wrong hash. The token sampled after a
position is a function of that hash and of the completion's index.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict, deque

import numpy as np

from jaxserve.api.batch import PageStores
from jaxserve.api.errors import RequestError
from jaxserve.api.events import Event, Finished, Progress, Token
from jaxserve.api.request import Request
from jaxserve.api.sampling import SamplingParams
from jaxserve.cache import CacheIdentity, CacheManager, LaneRules
from jaxserve.cache.block_events import Medium
from jaxserve.cache.hashes import is_block
from jaxserve.cache.tier_events import TierEvents
from jaxserve.cache.tiers import Fetch
from jaxserve.costs.coefficients import NOMINAL, Costs
from jaxserve.drafts.drafter import EachAlone
from jaxserve.drafts.lookup import Proposal
from jaxserve.lanes.groups import group_around, group_sizes
from jaxserve.lanes.planner import LanePlanner
from jaxserve.scheduling import Batch, Scheduler
from jaxserve.scheduling.batch_reader import StepResults
from jaxserve.scheduling.pool.interface import PoolScheduler
from jaxserve.scheduling.sequence import Sequence
from jaxserve.settings.schema import CacheConfig, MeshConfig, SchedulerConfig

VOCAB = 12
ADAPTERS = ("a@1", "b@1", "c@1")
EOS = 5
CONFIG = SchedulerConfig(max_seqs=4)
CACHE = CacheConfig(block_size=4, pages=100)
ONE_DEVICE = MeshConfig()


def kv(before: int, token: int) -> int:
    return hash((before, token))


def sampled(after: int, index: int) -> int:
    return hash((after, index)) % VOCAB


def expected(prompt: list[int], index: int, sampling: SamplingParams) -> tuple[list[int], str]:
    """All tokens of a completion and the reason it ends."""
    state = 0
    output = []
    for token in prompt:
        state = kv(state, token)
    while len(output) < sampling.max_tokens:
        output.append(sampled(state, index))
        state = kv(state, output[-1])
        ends = output[-1] in sampling.stop_token_ids or (
            output[-1] == EOS and not sampling.ignore_eos
        )
        if ends and len(output) >= sampling.min_tokens:
            return output, "stop"
    return output, "length"


class Device:
    """Runs batches in the order they are given, and asserts that each finds in its pages what it
    must: in those of page groups with windows what these see. has_states: sequences have states,
    which each must find in its slot too."""

    def __init__(
        self,
        block_size: int,
        sequences: dict[int, Sequence],
        windows: tuple[int, ...] = (),
        has_states: bool = False,
    ):
        self.block_size = block_size
        self.sequences = sequences
        self.windows: tuple[float, ...] = (math.inf, *windows)
        # lane, slot: index: block, and its page in each page group
        self.table: dict[tuple[int, int], dict[int, tuple[int, list[int]]]] = defaultdict(dict)
        # lane, page: offset: page group, kv
        self.pages: dict[tuple[int, int], dict[int, tuple[int, int]]] = defaultdict(dict)
        self.has_states = has_states
        self.states: dict[tuple[int, int], int] = {}  # lane, slot: kv of the newest token
        self.restored = 0  # states
        self.last: dict[int, int] = {}  # slot: token sampled last
        self.index: dict[int, int] = {}  # slot: completion
        self.truth: dict[int, list[int]] = defaultdict(list)  # sequence: kv by position
        self.moved = 0  # pages, from lane to lane
        self.right = 0  # proposed tokens
        self.proposed = 0  # tokens at most, whose pages a sequence keeps where they were wrong

    def run(self, batch: Batch) -> np.ndarray:
        """Sampled tokens [n]; -1 where none is."""
        self._check_shape(batch)
        for lane, slot, index, page, block, *further in batch.table_updates.tolist():
            self.table[lane, slot][index] = block, [page, *further]
        self._move(batch.moves.tolist())
        self._restore(batch.restores.tolist())
        for row in batch.admitted:
            self.index[int(batch.slot[row])] = self.sequences[int(batch.seq[row])].index
        written = [
            self._compute(batch, row, tokens) for row, tokens in enumerate(self._tokens(batch))
        ]
        self._check_writes(batch, written)
        self._save(batch)
        out = [-1] * len(batch.seq)
        wrong: set[int] = set()  # sequences of which a proposed token is wrong
        for row in np.flatnonzero(batch.sample).tolist():
            seq, slot = int(batch.seq[row]), int(batch.slot[row])
            out[row] = self._sample(batch, row)
            if row in batch.drafts:
                token = int(batch.tokens[row - batch.drafts.start])
                if seq in wrong or token != self.last[slot]:
                    wrong.add(seq)
                    del self.truth[seq][int(batch.start[row]) :]
                    continue
                self.right += 1
            self.last[slot] = out[row]
        return np.array(out)

    def _move(self, moves: list[list[int]]) -> None:
        """Copies pages: all are read before any is written."""
        assert len({(lane, page) for _, _, lane, page in moves}) == len(moves), "written twice"
        read = [dict(self.pages[lane, page]) for lane, page, _, _ in moves]
        for (_, _, lane, page), content in zip(moves, read):
            self.pages[lane, page] = content
        self.moved += len(moves)

    def _restore(self, copies: list[list[int]]) -> None:
        for lane, slot, *pages in copies:
            (state,) = {value for page in pages for _, value in self.pages[lane, page].values()}
            parts = [[part for part, _ in self.pages[lane, page].values()] for page in pages]
            assert parts == [[-1 - part] * self.block_size for part in range(len(pages))]
            self.states[lane, slot] = state
            self.restored += 1

    def _save(self, batch: Batch) -> None:
        used = {place for row in range(len(batch.seq)) for place in self.used(batch, row)}
        for lane, slot, *pages in batch.saves.tolist():
            assert used.isdisjoint((lane, page) for page in pages), "states go to pages in use"
            for part, page in enumerate(pages):
                state = -1 - part, self.states[lane, slot]
                self.pages[lane, page] = dict.fromkeys(range(self.block_size), state)

    def _check_shape(self, batch: Batch) -> None:
        own = np.delete(batch.slot, batch.drafts).tolist()
        assert len(set(own)) == len(own), "a slot twice in a batch"
        assert set(batch.slot[batch.drafts].tolist()) <= set(batch.slot[batch.is_decode].tolist())
        assert sorted(batch.is_decode.tolist(), reverse=True) == batch.is_decode.tolist(), (
            "chunks that feed come first"
        )
        rows = [tuple(delta[:3]) for delta in batch.table_updates.tolist()]
        assert len(set(rows)) == len(rows), "a table entry twice in a batch"

    def _tokens(self, batch: Batch) -> list[list[int]]:
        ids = batch.tokens.tolist()
        out = []
        for slot, length, feed in zip(
            batch.slot.tolist(), batch.length.tolist(), batch.is_decode.tolist()
        ):
            out.append([self.last[slot]] if feed else ids[:length])
            ids = ids if feed else ids[length:]
        assert not ids, "tokens of no chunk"
        return out

    def blocks(self, batch: Batch, row: int, group: int = 0) -> dict[int, tuple[int, int]]:
        """Block -> lane and page of a chunk's sequence in a page group, as its table rows say: of
        those blocks of which the chunk's tokens see any."""
        first = max(0, int(batch.start[row]) - self.windows[group] + 1) // self.block_size
        every = self._entries(batch, row, group)
        return {block: place for block, place in every.items() if block >= first}

    def used(self, batch: Batch, row: int) -> set[tuple[int, int]]:
        """Lanes and pages that a chunk reads or writes, of all page groups."""
        groups = range(len(self.windows))
        return {place for group in groups for place in self.blocks(batch, row, group).values()}

    def _entries(self, batch: Batch, row: int, group: int) -> dict[int, tuple[int, int]]:
        found: dict[int, tuple[int, int]] = {}
        for lane, held in enumerate(batch.blocks_per_lane[row].tolist()):
            entries = [self.table[lane, int(batch.slot[row])][index] for index in range(held)]
            numbers = [block for block, _ in entries]
            ascends = batch.group_size[row] == 1 or not self.moved or len(self.windows) > 1
            assert numbers == sorted(set(numbers)) or (
                not ascends and len(set(numbers)) == len(numbers)
            ), f"row of lane {lane} is not ascending: {numbers}"
            found |= {block: (lane, pages[group]) for block, pages in entries}
        stop = int((batch.start + batch.length)[batch.seq == batch.seq[row]].max())
        assert sorted(found) == list(range(len(found))), f"blocks {sorted(found)}"
        least, most = (-(-end // self.block_size) for end in (stop, stop + self.proposed))
        assert least <= len(found) <= most, f"{len(found)} blocks for {stop} tokens"
        lanes = group_around(int(batch.lane[row]), int(batch.group_size[row]))
        assert all(lane in lanes for lane, _ in found.values())
        return found

    def _compute(self, batch: Batch, row: int, tokens: list[int]) -> set[tuple[int, int]]:
        """Checks what the pages hold of the tokens before, adds the chunk's own; pages written."""
        start = int(batch.start[row])
        seq = int(batch.seq[row])
        size = self.block_size
        history = self.sequences[seq].history
        truth = self.truth[seq]
        written = set()
        while len(truth) < start:  # after a prefix hit
            truth.append(kv(truth[-1] if truth else 0, int(history(len(truth), len(truth) + 1)[0])))
        place = int(batch.lane[row]), int(batch.slot[row])
        if self.has_states and start:
            assert self.states[place] == truth[start - 1], f"sequence {seq}: another's state"
        every = [self.blocks(batch, row, group) for group in range(len(self.windows))]
        for group, (blocks, window) in enumerate(zip(every, self.windows)):
            for position in range(max(0, start - window + 1), start):
                found = self.pages[blocks[position // size]].get(position % size)
                assert found == (group, truth[position]), (
                    f"sequence {seq}, page group {group}: wrong KV at position {position}"
                )
        for position, token in enumerate(tokens, start):
            state = kv(truth[position - 1] if position else 0, token)
            assert truth[position : position + 1] in ([], [state]), (
                f"sequence {seq}: another token at position {position} than before"
            )
            truth[position : position + 1] = [state]
            for group, blocks in enumerate(every):
                self.pages[blocks[position // size]][position % size] = group, state
                written.add(blocks[position // size])
        self.states[place] = truth[start + len(tokens) - 1]
        return written

    def _check_writes(self, batch: Batch, written: list[set[tuple[int, int]]]) -> None:
        for row, pages in enumerate(written):
            for other in range(len(written)):
                apart = batch.seq[other] != batch.seq[row]
                shared = pages & self.used(batch, other) if apart else set()
                assert not shared, f"chunks {row} and {other} meet on pages {shared}"

    def _sample(self, batch: Batch, row: int) -> int:
        slot = int(batch.slot[row])
        last = int(batch.start[row] + batch.length[row]) - 1
        page = self.blocks(batch, row)[last // self.block_size]
        _, state = self.pages[page][last % self.block_size]
        return sampled(state, self.index[slot])


class Seer:
    """Proposes the right tokens of a completion, and now and then a wrong one."""

    def __init__(self, replica: Replica, output: list[int]):
        self._output = output
        sequences = replica.scheduler.sequences.values()
        (sequence,) = (one for one in sequences if one.output is output)
        request = sequence.request
        free = dataclasses.replace(request.sampling, ignore_eos=True, stop_token_ids=())
        self._right, _ = expected(request.prompt.tolist(), sequence.index, free)
        self._sure = np.random.default_rng(sequence.number)

    def propose(self, count: int) -> Proposal:
        first = len(self._output)
        tokens = np.array(self._right[first : first + count], np.int32)
        tokens[self._sure.random(len(tokens)) < 0.2] += 1
        return Proposal(tokens % VOCAB, int(self._sure.integers(1, 4)))


class Tier:
    """Host memory for what leaves the devices, with the content of its pages. hidden: what it holds
    without being able to give it, as what is damaged."""

    outlasts = False
    shared = False

    def __init__(self, most_locked: int = 8):
        self.most_locked = most_locked
        self.content: dict[bytes, dict[int, tuple[int, int]]] = {}
        self.hidden: set[bytes] = set()
        self.events = TierEvents(lambda tier: self.content if tier is Medium.HOST else ())
        self.reads = Counter[bool]()  # pages, by whether they are of blocks

    def holds(self, key: bytes) -> bool:
        return key in self.content or key in self.hidden

    def seconds(self, keys: list[bytes]) -> float:
        return 0.0

    def keep(self, keys: list[bytes], retention: int) -> None:
        pass

    def lock(self, key: bytes) -> None:
        pass

    def unlock(self, key: bytes) -> None:
        pass

    def read(self, key: bytes) -> dict[int, tuple[int, int]] | None:
        """Returns what a page held; None, and forgets it, where that is not to be had."""
        self.hidden.discard(key)
        self.reads[is_block(key)] += key in self.content
        return self.content.get(key)


class Replica:
    """A scheduler, a device, the batches in flight between them, and what the callers heard."""

    def __init__(
        self,
        config: SchedulerConfig = CONFIG,
        cache: CacheConfig = CACHE,
        mesh: MeshConfig = ONE_DEVICE,
        placement: str = "grow",
        max_len: int = 1000,
        costs: Costs = NOMINAL,
        planner: PoolScheduler | LanePlanner | None = None,
        windows: tuple[int, ...] = (),
        state_pages: int = 0,
        tier: Tier | None = None,
    ):
        self.tier = tier
        self.fetches: list[Fetch] = []
        self.cache = CacheManager(
            dataclasses.replace(cache, placement=placement),
            mesh.kvp,
            config.max_seqs,
            CacheIdentity("model", "float32"),
            tier,
            rules=LaneRules(
                most_moves=2 * (1 + len(windows)),
                ascending=bool(windows),
                has_states=state_pages > 0,
                windows=windows,
                state_pages=state_pages,
            ),
        )
        self.scheduler = Scheduler(config, self.cache, mesh, max_len, {EOS}, costs, planner)
        numbers = {name: number for number, name in enumerate(ADAPTERS, 1)}
        self.scheduler.slots.adapters.numbers |= numbers
        self.adapters: dict[int, int] = {}  # number of the adapter in each place
        drafting = self.scheduler.packer.drafting
        if drafting is not None:
            drafting.drafter = EachAlone(3, lambda prompt, output: Seer(self, output))
        self.device = Device(cache.block_size, self.scheduler.sequences, windows, state_pages > 0)
        self.device.proposed = config.draft_tokens if drafting is not None else 0
        self.flight: deque[tuple[Batch, np.ndarray, set]] = deque()
        self.requests: dict[str, Request] = {}
        self.heard: dict[str, list[Event]] = defaultdict(list)
        self.now = 0.0

    def add(
        self,
        prompt: list[int],
        id: str | None = None,
        deadline: float | None = None,
        salt: str = "",
        bypass: bool = False,
        adapter: str = "",
        session: str = "",
        tenant: str = "",
        **sampling,
    ) -> str:
        id = id or f"r{len(self.requests)}"
        request = Request.make(
            id,
            prompt,
            SamplingParams.make(**sampling),
            vocab=VOCAB,
            max_len=self.scheduler.max_len,
            arrival=self.now,
            deadline=deadline,
            cache_salt=salt,
            bypass_prefix_cache=bypass,
            adapter=adapter,
            session=session,
            tenant=tenant,
        )
        self.heard[id] = self.scheduler.add(request)
        self.requests[id] = request
        return id

    def start(self) -> Batch | None:
        batch = self.scheduler.start(self.now)
        self._move(self.cache.stores.take() if batch is None else batch.stores)
        if batch is not None:
            tokens = self.device.run(batch)
            used = {
                (page, seq)
                for row, seq in enumerate(batch.seq.tolist())
                for page in self.device.used(batch, row)
            }
            self._check_fresh(batch, used)
            self._check_adapters(batch)
            self._check_limits(batch)
            self.flight.append((batch, tokens, used))
        self.scheduler.check()
        return batch

    def _move(self, stores: PageStores) -> None:
        """Stores what leaves its pages, and begins fetches."""
        if self.tier is None:
            return
        for lane, page, key in zip(stores.lanes.tolist(), stores.pages.tolist(), stores.keys):
            self.tier.content[key] = dict(self.device.pages[lane, page])
            self.tier.hidden.discard(key)
        self.fetches += self.cache.below.take_fetches()

    def arrive(self, number: int, pages: int) -> None:
        """Brings the next pages of a fetch, at most as many, to the devices."""
        fetch = self.fetches.pop(number)
        if not self.scheduler.fetches.awaited(fetch.ticket):
            return
        assert self.tier is not None
        self._move(self.cache.stores.take())
        came = 0
        for key, (lane, page) in zip(fetch.keys[:pages], fetch.places.tolist()):
            content = self.tier.read(key)
            if content is None:
                break
            self.device.pages[lane, page] = dict(content)
            came += 1
        rest = fetch._replace(keys=fetch.keys[came:], places=fetch.places[came:])
        last = came < pages or not rest.keys
        self.scheduler.fetches.arrived(fetch.ticket, came, last, self.now)
        if not last:
            self.fetches.insert(number, rest)
        self.scheduler.check()

    def _check_adapters(self, batch: Batch) -> None:
        """Each row is computed with the adapter of its sequence, which is on the devices."""
        self.adapters.update(batch.adapter_loads.tolist())
        numbers = self.scheduler.slots.adapters.numbers
        for place, seq in zip(batch.adapters.tolist(), batch.seq.tolist(), strict=True):
            adapter = self.scheduler.sequences[seq].request.adapter
            assert (self.adapters[place] == numbers[adapter]) if adapter else place < 0

    def _check_fresh(self, batch: Batch, used: set) -> None:
        """No page is written that a batch in flight uses for another sequence, but one from which a
        block of that has gone to another page: batches are computed in their order."""
        size = self.device.block_size
        lanes = self.cache.pages.per_lane
        place = {
            sequence.number: {divmod(page, lanes) for page in self.cache.layouts[slot].held()}
            for slot, sequence in self.scheduler.slots.by_slot.items()
        }
        for row, (seq, start) in enumerate(zip(batch.seq.tolist(), batch.start.tolist())):
            new = {
                page
                for group in range(len(self.device.windows))
                for block, page in self.device.blocks(batch, row, group).items()
                if (block + 1) * size > start
            }
            for earlier, _, others in self.flight:
                met = [
                    other
                    for page, other in others
                    if page in new and other != seq and page in place.get(other, new)
                ]
                assert not met, (
                    f"batch {batch.number} writes on pages that {earlier.number} uses for {met}"
                )

    def _check_limits(self, batch: Batch) -> None:
        config = self.scheduler.config
        lanes = self.cache.pages.lanes
        chunks = np.flatnonzero(batch.is_chunk).tolist()
        singles = np.bincount(batch.lane[batch.length == 1], minlength=1)
        assert singles.max() <= config.decode_rows, f"lanes decode {singles} tokens"
        assert np.bincount(batch.lane[batch.sample], minlength=1).max() <= config.decode_rows
        for size in group_sizes(lanes):  # what must be computed in a group: of others its last row
            tiles = Counter[int]()
            for row in chunks:
                home = int(batch.lane[row])
                over = batch.dealt.get(row) or group_around(home, int(batch.group_size[row]))
                tiles[home // size] += 1
                if len(over) <= size:
                    tiles[over.start // size] += -(-int(batch.length[row]) // config.tile) - 1
            assert max(tiles.values(), default=0) <= config.tiles * size, (
                f"lanes in groups of {size} get {tiles} rows"
            )
        for seq, stop in zip(batch.seq.tolist(), (batch.start + batch.length).tolist()):
            assert stop <= self.scheduler.sequences[seq].max_positions, (
                f"sequence {seq} is issued beyond its end"
            )

    def finish(self) -> list[tuple[str, Event]]:
        batch, tokens, _ = self.flight.popleft()
        events = self.scheduler.finish(batch, StepResults(tokens), self.now)
        self.hear(events)
        return events

    def fail(self) -> None:
        """The newest batch in flight fails, and all pages are lost."""
        batch, _, _ = self.flight[-1]
        self.flight.clear()
        self.device.pages.clear()
        self.adapters.clear()
        self.hear(
            self.scheduler.reset(
                lambda sequence: sequence.number in batch.seq,
                self.now,
                RequestError("", "a step failed", "INTERNAL"),
            )
        )

    def hear(self, events: list[tuple[str, Event]]) -> None:
        for id, event in events:
            self.heard[id].append(event)
        self.scheduler.check()

    def step(self) -> Batch:
        """One batch from start to finish."""
        batch = self.start()
        assert batch is not None, "nothing to do"
        while self.flight:
            self.finish()
        return batch

    def drain(self, ahead: int = 1) -> int:
        """Runs until nothing is left, with `ahead` further batches in flight; number of batches."""
        count = 0
        while self.scheduler.sequences:
            batch = self.start() if len(self.flight) <= ahead else None
            count += batch is not None
            if self.fetches:
                self.arrive(0, 1)
                continue
            assert batch or self.flight, "stuck"
            assert count < 10_000, "no end"
            if batch is None or len(self.flight) > ahead:
                self.finish()
            self.now += 1
        while self.flight:
            self.finish()
        self.check_empty()
        return count

    def check_empty(self) -> None:
        slots = self.scheduler.slots
        assert not self.scheduler.sequences and slots.running == slots.waiting == 0
        free, cached, held = self.cache.counts()
        assert held == 0 and free + cached == self.cache.total

    def tokens(self, id: str, index: int = 0) -> list[int]:
        return [
            event.id
            for event in self.heard[id]
            if isinstance(event, Token) and event.index == index
        ]

    def finished(self, id: str) -> list[Finished]:
        return sorted(
            (event for event in self.heard[id] if isinstance(event, Finished)),
            key=lambda event: event.index,
        )

    def check_answers(self) -> None:
        """Every completion ended once, nothing came after its end, no token is missing, doubled or
        wrong."""
        for id, request in self.requests.items():
            ends = self.finished(id)
            assert [end.index for end in ends] == list(range(request.sampling.n)), (
                f"{id}: ends {ends}"
            )
            for end in ends:
                own = [
                    event
                    for event in self.heard[id]
                    if isinstance(event, (Token, Progress, Finished)) and event.index == end.index
                ]
                assert own[-1] is end, f"{id}: an event after the end"
                tokens, reason = expected(request.prompt.tolist(), end.index, request.sampling)
                heard = self.tokens(id, end.index)
                assert (
                    end.usage.completion == len(heard)
                    and end.usage.prompt == len(request.prompt) > end.usage.cached
                )
                if end.reason in ("stop", "length"):
                    assert (heard, end.reason) == (tokens, reason), (
                        f"{id}: heard {heard}, expected {tokens}"
                    )
                else:
                    assert heard == tokens[: len(heard)], f"{id}: heard {heard}, expected {tokens}"


def chunks(batch: Batch) -> list[tuple[int, int, int, str]]:
    """(sequence, start, length, kind) of a batch, for reading; kind: decode, prefill, or last (of
    the prefill chunks)."""
    kinds = [
        "decode" if feed else "last" if sample else "prefill"
        for feed, sample in zip(batch.is_decode.tolist(), batch.sample.tolist())
    ]
    return list(zip(batch.seq.tolist(), batch.start.tolist(), batch.length.tolist(), kinds))
