"""Profiles measured beside other work: found, said, and measured again while no request runs; and
those that are right, which stay as they are. Steps and the clock are stood in for."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import random
from collections.abc import Callable

import numpy as np
import pytest

from jaxserve.cache import CacheManager
from jaxserve.engine.build import build
from jaxserve.engine.profiling import other_work, profile_file
from jaxserve.engine.profiling.measure import MeasuredStep, MeasurePoint, batch_of
from jaxserve.engine.profiling.other_work import OtherWork
from jaxserve.engine.profiling.profile_file import MeasuredProfile, points_of
from jaxserve.engine.profiling.repair import (
    ProfileRepair,
    ProfileTrust,
    distance,
    profile_again,
    trust_of,
)
from jaxserve.engine.profiling.repeats import Measured, measuring
from jaxserve.scheduling import Scheduler
from jaxserve.scheduling.assembly import ReplicaProfile
from jaxserve.scheduling.events import StepRead
from jaxserve.settings.schema import (
    CacheConfig,
    EngineConfig,
    MeshConfig,
    ModelSource,
    SchedulerConfig,
)
from tests.engine.harness import Runner, assert_empty, engine

MAX_LEN = 300
NOISE = 0.03  # of each time, without a neighbour


class World:
    """A machine of two cores. neighbour: the share of them that another process has at a second;
    steps that run meanwhile take 1 / (1 - share) times as long."""

    def __init__(self, worker, neighbour: Callable[[float], float] = lambda second: 0.0):
        self.now = 0.0
        self.neighbour = neighbour
        self.speed = 1.0
        self.pages = np.arange(worker.plan.pages)
        self.watched = True
        self.cores = 2
        self.measured = 0
        self._plan = worker.plan
        self._uncompiled = worker.uncompiled
        self._random = random.Random(0)
        self._taken = 0.0  # by others since they were last looked at
        self._looked = 0.0

    def seconds(self, point: MeasurePoint) -> float:
        """Seconds of a step that has the machine to itself."""
        tokens = point.decodes + point.chunks * point.new
        return self.speed * (0.01 + 2e-4 * tokens + 2e-7 * point.pairs() + 0.002 * point.sample)

    def pass_by(self, seconds: float) -> None:
        self._taken += seconds * self.neighbour(self.now)
        self.now += seconds

    def measure(self, point: MeasurePoint) -> MeasuredStep:
        took = self.seconds(point) / (1 - self.neighbour(self.now))
        took *= 1 + NOISE * self._random.uniform(-1, 1)
        self.pass_by(4 * took)
        self.measured += 1
        batch = batch_of(point, 1, self._plan.block_size)
        shape = self._plan.shape_for(self._plan.demand(batch), but=self._uncompiled)
        return MeasuredStep(point, batch, shape, took)

    def use(self, pages: np.ndarray) -> None:
        self.pages = pages

    def share(self) -> float:
        share = self._taken / max(self.now - self._looked, 1e-9)
        self._taken = 0.0
        self._looked = self.now
        return share

    def is_stretch(self) -> bool:
        return self.now - self._looked >= 0.5


@pytest.fixture(scope="module")
def real():
    config = EngineConfig(
        ModelSource("random:tiny", max_model_len=MAX_LEN),
        MeshConfig(),
        CacheConfig(pages=80),
        SchedulerConfig(max_seqs=4, chunk_tokens=32, min_chunk=8, policy="fcfs"),
        profile="none",
    )
    return build(config, progress=False, warm_up=False)


def all_measured(world: World, worker, rounds: int = 2) -> Measured:
    """Measures all points without a wait for quiet."""
    steps = measuring(world, points_of(worker, MAX_LEN), rounds, world)
    answer = None
    while True:
        try:
            answer = False if steps.send(answer) is None else None
        except StopIteration as end:
            return end.value


def profile_of(measured: Measured, worker) -> ReplicaProfile:
    return profile_file.fitted(worker.plan, {}, measured, True).profile


class Repairing:
    """A repairer of a profile in a world. files: what it wrote."""

    def __init__(self, world: World, real, profile: ReplicaProfile):
        config = real.config
        cache = CacheManager(config.cache, 1, config.scheduler.max_seqs)
        self.scheduler = Scheduler(
            config.scheduler, cache, config.mesh, MAX_LEN, costs=profile.costs
        )
        self.world = world
        self.real = real
        self.files: list[MeasuredProfile] = []
        self.repairer = ProfileRepair(
            self.scheduler,
            profile,
            world,
            world,
            lambda: points_of(real.worker, MAX_LEN),
            lambda found, was: profile_again(was, found, real.worker.plan, True, self.files.append),
            lambda: world.now,
        )

    def idle(self, seconds: float) -> None:
        """Passes seconds without a request."""
        until = self.world.now + seconds
        while self.world.now < until:
            if not self.repairer.work():
                if self.repairer.fitting is not None:
                    self.repairer.fitting.join()
                self.world.pass_by(0.5)

    def serve(self, steps: int, slower: float = 1.0) -> None:
        """Passes steps of one decode that take `slower` times what the machine gives."""
        point = MeasurePoint(decodes=1, context=1)
        batch = batch_of(point, 1, self.real.worker.plan.block_size)
        predictor = self.scheduler.predictor
        for _ in range(steps):
            seconds = slower * self.world.seconds(point)
            self.world.pass_by(seconds)
            batch = dataclasses.replace(batch, seconds=predictor.seconds(batch))
            self.scheduler.bus.publish(StepRead(batch, self.world.now, seconds, True))

    def error(self) -> float:
        """Factor by which steps are off what is predicted, on average, at most."""
        predictor = self.scheduler.predictor
        steps = [
            dataclasses.replace(self.world.measure(point), seconds=self.world.seconds(point))
            for point in points_of(self.real.worker, MAX_LEN)
        ]
        return distance(predictor.costs, predictor.mesh, steps)[0]


def beginning(seconds: float) -> Callable[[float], float]:
    """A neighbour that has one of two cores at first."""
    return lambda second: 0.5 if second < seconds else 0.0


def test_a_profile_without_a_neighbour_is_in_no_doubt(real):
    world = World(real.worker)
    measured = all_measured(world, real.worker)
    assert not measured.doubt
    assert world.measured == 2 * len(measured.steps), "no further round was needed"
    for step in measured.steps:
        assert step.seconds == pytest.approx(world.seconds(step.point), rel=NOISE)


def test_a_neighbour_in_one_round_is_left_out_of_the_times(real):
    """It has a core for the first round: further rounds, once it is gone, give the right times."""
    world = World(real.worker)
    first = sum(4 * world.seconds(point) for point in points_of(real.worker, MAX_LEN))
    world.neighbour = beginning(first)
    steps = measuring(world, points_of(real.worker, MAX_LEN), 2, world)
    asked = 0
    answer = None
    while True:
        try:
            answer = True if steps.send(answer) is None else None
            asked += answer is True
        except StopIteration as end:
            measured = end.value
            break
    assert asked and not measured.doubt
    for step in measured.steps:
        assert step.seconds == pytest.approx(world.seconds(step.point), rel=2 * NOISE)


def test_a_neighbour_that_stays_is_named(real):
    doubt = all_measured(World(real.worker, lambda second: 0.5), real.worker).doubt
    assert doubt == "other processes kept 1.0 of 2 cores busy while it was measured"


def test_times_that_differ_are_found_where_no_one_sees_the_cores(real):
    """A machine elsewhere slows every other second: its work is not in the counts of this one."""
    world = World(real.worker)
    slow = random.Random(1)
    plain = world.seconds
    world.seconds = lambda point: plain(point) * math.exp(slow.uniform(0, 1.5))
    assert "other times when repeated" in all_measured(world, real.worker).doubt


def test_a_doubtful_profile_is_said_and_repaired_without_a_restart(real, caplog):
    caplog.set_level(logging.INFO)
    busy = World(real.worker, beginning(1e9))
    profile = profile_of(all_measured(busy, real.worker), real.worker)
    world = World(real.worker, beginning(25.0))
    repaired = Repairing(world, real, profile)
    assert repaired.error() > 1.8, "this profile is of the machine with the neighbour"
    assert "predicted times cannot be trusted: other processes kept 1.0 of 2" in caplog.text
    assert repaired.repairer.doubt
    repaired.idle(20.0 - world.now)
    assert repaired.repairer.doubt and not repaired.files, "the neighbour is still there"
    assert "not measured again yet: other processes are at work" in caplog.text
    repaired.idle(120.0)
    assert not repaired.repairer.doubt
    assert repaired.error() < 1.1
    assert len(repaired.files) == 1 and not repaired.files[0].profile.doubt
    assert "predicted times can be trusted again" in caplog.text
    before = world.measured
    repaired.idle(10_000.0)
    assert world.measured == before, "what is right is not measured again"


def test_steps_that_stay_off_have_the_profile_measured_again(real, caplog):
    """The profile is from when the machine was slower; nothing in it says so."""
    caplog.set_level(logging.INFO)
    world = World(real.worker)
    world.speed = 2.0
    profile = profile_of(all_measured(world, real.worker), real.worker)
    world.speed = 1.0
    repaired = Repairing(world, real, profile)
    repaired.serve(300)
    assert not repaired.repairer.doubt, "not for long yet"
    repaired.serve(6000)
    assert "off its times by a factor of 2.0" in repaired.repairer.doubt
    repaired.idle(60.0)
    assert not repaired.repairer.doubt and len(repaired.files) == 1
    assert repaired.error() < 1.1
    repaired.serve(8000)
    assert not repaired.repairer.doubt
    assert "take 0.50 of what was predicted" in caplog.text


def test_a_right_profile_is_not_touched(real, caplog):
    """Right steps leave it alone, and so do steps that something else slows: these are said to be
    off, and what is measured then agrees with the profile."""
    caplog.set_level(logging.INFO)
    world = World(real.worker)
    profile = profile_of(all_measured(world, real.worker), real.worker)
    repaired = Repairing(world, real, profile)
    before = world.measured
    repaired.serve(8000)
    repaired.idle(600.0)
    assert world.measured == before and not repaired.repairer.doubt
    repaired.serve(8000, slower=2.0)
    assert repaired.repairer.doubt
    repaired.idle(60.0)
    assert world.measured > before
    assert repaired.scheduler.predictor.costs is profile.costs
    assert repaired.repairer.profile is profile and not repaired.files
    assert "which stays as it is" in caplog.text


def measure_all_again(real) -> ProfileRepair:
    """Has an engine measure real steps again, in a world where others leave the cores alone."""
    doubtful = ReplicaProfile(real.scheduler.predictor.costs, {}, doubt="it is to be measured")
    repairer = trust_of(
        real.config, real.worker, real.scheduler, doubtful, real.steps.sampled_elsewhere
    )
    repairer.others = World(real.worker)
    second = [0.0]
    repairer.clock = lambda: second[0]
    real.trust = repairer
    for _ in range(20):
        second[0] += 5.0
        real.measure_again()
    real.trust = None
    return repairer


@pytest.mark.parametrize("mesh", ["", "spp=2"])
def test_measuring_again_leaves_kept_blocks_and_tokens_as_they_are(mesh):
    """An engine measures real steps before its first request and after one, on pages that hold
    nothing: the same prompt finds its blocks, and its tokens are those of another engine."""
    sizes = dict(chunk=32, seqs=4, pages=80, max_len=MAX_LEN)
    plain = Runner(engine("random:tiny", **sizes))
    plain.submit(range(1, 80), "r", max_tokens=8, ignore_eos=True)
    plain.run()
    real = engine("random:tiny", mesh, **sizes)
    measure_all_again(real)
    for _ in range(2):
        runner = Runner(real)
        runner.submit(range(1, 80), "r", max_tokens=8, ignore_eos=True)
        runner.run()
        assert runner.ids("r") == plain.ids("r")
        kept = real.scheduler.cache.counts()
        assert kept.cached
        repairer = measure_all_again(real)
        assert real.scheduler.cache.counts() == kept
        assert len(repairer.timer.pages) == kept.free
    assert_empty(real)


def test_a_doubt_is_on_the_live_page_and_in_the_metrics(real):
    def gauge() -> float | None:
        return real.metrics_registry.get_sample_value("jaxserve:predictions_doubtful")

    assert not real.view()["doubt"] and not real.view()["timed"], "nothing was measured"
    assert gauge() == 0
    doubtful = ReplicaProfile(real.scheduler.predictor.costs, {}, doubt="others had the cores")
    real.trust = ProfileTrust(real.scheduler, doubtful)
    assert real.view()["doubt"] == "others had the cores" and gauge() == 1
    real.trust = None


def test_a_doubt_is_kept_in_the_file_and_earlier_files_have_none(real, tmp_path):
    measured = all_measured(World(real.worker, lambda second: 0.5), real.worker)
    found = profile_file.fitted(real.worker.plan, {}, measured, True)
    identity = profile_file.identity_of(real.worker, MAX_LEN)
    file = tmp_path / "profile.json"
    profile_file.write(file, identity, found)
    assert profile_file.read(file, identity).doubt == measured.doubt != ""
    earlier = json.loads(file.read_text())
    del earlier["doubt"]
    file.write_text(json.dumps(earlier))
    assert profile_file.read(file, identity).doubt == ""


def test_the_work_of_others_is_what_cores_do_beside_this_process(tmp_path, monkeypatch):
    """Two cores of which only these two count; one has a second of others, and half of one is taken
    by another machine."""
    stat = tmp_path / "stat"
    clock = {"wall": 0.0, "own": 0.0}

    def write(first: list[int], second: list[int]) -> None:
        rows = [
            f"cpu{core} {' '.join(map(str, ticks))}" for core, ticks in enumerate((first, second))
        ]
        stat.write_text(
            "\n".join(["cpu 9 9 9 9 9 9 9 9", *rows, "cpu2 999 0 0 0 0 0 0 0", "intr 1"])
        )

    monkeypatch.setattr(other_work, "STAT", stat)
    monkeypatch.setattr(other_work.os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(other_work.os, "sysconf", lambda name: 100)
    monkeypatch.setattr(other_work.time, "perf_counter", lambda: clock["wall"])
    monkeypatch.setattr(other_work.time, "process_time", lambda: clock["own"])
    write([0, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0])
    others = OtherWork()
    clock.update(wall=2.0, own=1.5)
    assert others.is_stretch()
    write([100, 50, 0, 40, 10, 0, 0, 0], [50, 0, 50, 50, 0, 0, 0, 50])
    # 3 seconds at work in all, 1.5 of them its own, of 4
    assert others.share() == pytest.approx(1.5 / 4)
    assert others.share() == 0.0
    stat.unlink()
    assert not OtherWork().watched and OtherWork("gpu").share() == 0.0
