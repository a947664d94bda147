"""Facts of the compiled programs: what crosses lanes does not depend on context, pages are never
copied, and nothing is compiled late."""

from __future__ import annotations

import contextlib
import math
import re
import subprocess
import sys
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from jaxserve.engine.engine import Engine
from jaxserve.engine.programs import keep_compiled
from jaxserve.engine.stage_programs import graph_options
from jaxserve.engine.step_shapes import StepShape
from jaxserve.settings.schema import ConfigError
from tests.engine.harness import Runner, assert_empty, engine, fresh

CONTEXTS = (1024, 65536)
BYTES = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "bf16": 2,
    "f16": 2,
    "s32": 4,
    "u32": 4,
    "f32": 4,
    "s64": 8,
    "u64": 8,
    "f64": 8,
}
COLLECTIVES = (
    "all-gather|all-to-all|collective-permute|collective-broadcast|all-reduce|reduce-scatter"
    "|ragged-all-to-all"
)


def build(mesh: str, context: int, **more) -> Engine:
    """An engine whose every lane holds `context` tokens, with its programs of layers compiled."""
    real = engine(
        "random:tiny", mesh, chunk=32, seqs=2, pages=context // 16, max_len=context, **more
    )
    for name, lower in real.worker.stages.programs.all():
        if name.startswith("layers_"):
            real.worker.stages.programs.get(name, lower)
    return real


@pytest.fixture(scope="module")
def lanes() -> list[Engine]:
    return [build("kvp=2", context) for context in CONTEXTS]


@pytest.fixture(scope="module")
def ring_q() -> list[Engine]:
    return [build("kvp=2", context, exchange="pass_q") for context in CONTEXTS]


@pytest.fixture(scope="module")
def ring_kv() -> list[Engine]:
    ring = dict(exchange="pass_kv", decode_exchange="pass_q")
    return [build("kvp=2", context, **ring) for context in CONTEXTS]


@pytest.fixture(scope="module")
def alone() -> list[Engine]:
    return [build("", context) for context in CONTEXTS]


@pytest.fixture(scope="module")
def small_floats() -> list[Engine]:
    return [build("", context, dtype="bfloat16", kv_cache_dtype="fp8") for context in CONTEXTS]


def program_of(real: Engine, shape: StepShape):
    return real.worker.stages.programs.compiled[f"layers_0_{shape}"]


def collectives(program) -> list[tuple[str, int]]:
    """Kind and bytes of the result of each collective in a program, in the order they are
    written."""
    found = []
    for types, kind in re.findall(rf"= (.*?) ({COLLECTIVES})(?:-start)?\(", program.as_text()):
        arrays = re.findall(r"(\w+)\[([\d,]*)\]", types)
        found.append(
            (
                kind,
                sum(
                    BYTES[dtype] * math.prod(map(int, filter(None, dims.split(","))))
                    for dtype, dims in arrays
                ),
            )
        )
    return found


def test_what_crosses_lanes_does_not_depend_on_the_context(lanes):
    short, long = lanes
    for shape in short.worker.plan.shapes:
        crossed = collectives(program_of(short, shape))
        assert crossed == collectives(program_of(long, shape)), shape
        if shape.spread:
            model = short.worker.plan.model
            tokens = sum(rows * width for rows, width in shape.spread)
            # q, k, v; partials
            per_token = (
                model.layers
                * 4
                * model.head_dim
                * (2 * (model.heads + 2 * model.kv_heads) + 2 * model.heads)
            )
            assert 0.9 < sum(size for _, size in crossed) / (tokens * per_token) < 1.3, shape


def test_shapes_without_spread_rows_need_no_other_lane(lanes):
    for real in lanes:
        shapes = [shape for shape in real.worker.plan.shapes if not shape.spread]
        assert len(shapes) > 3
        for shape in shapes:
            assert collectives(program_of(real, shape)) == []


@pytest.mark.parametrize(
    "which",
    [
        "alone",
        "small_floats",
        "lanes",
        *(pytest.param(which, marks=pytest.mark.matrix) for which in ("ring_kv", "ring_q")),
    ],
)
def test_pages_are_donated_and_never_copied_in_any_shape(which, request):
    small, large = request.getfixturevalue(which)
    held = lambda real: (
        sum(pool.nbytes for pool in jax.tree.leaves(real.worker.stages.stages[0].caches))
        // real.config.mesh.kvp
    )
    one = held(small)
    other = held(large)
    for shape in small.worker.plan.shapes:
        for real, pools in ((small, one), (large, other)):
            assert program_of(real, shape).memory_analysis().alias_size_in_bytes >= pools
        temporary = [
            program_of(real, shape).memory_analysis().temp_size_in_bytes for real in (small, large)
        ]
        assert temporary[1] - temporary[0] < (other - one) / small.worker.plan.model.layers / 10, (
            f"{shape}: {temporary} for pools of {one}, {other}"
        )


def test_pages_stay_where_they_are_while_steps_run(alone):
    real = fresh(alone[0], "grow")
    places = lambda: [
        pool.addressable_shards[0].data.unsafe_buffer_pointer()
        for pool in jax.tree.leaves(real.worker.stages.stages[0].caches)
    ]
    runner = Runner(real)
    runner.submit(range(3, 10), max_tokens=1)
    runner.run()  # the first step begins with pages of its own
    before = places()
    pools = jax.tree.leaves(real.worker.stages.stages[0].caches)
    runner.submit(range(3, 100), max_tokens=5)
    runner.submit(range(3, 20), max_tokens=5)
    runner.run()
    assert places() == before
    assert all(pool.is_deleted() for pool in pools)


class Anything:
    """A guide that rules nothing out."""

    done = False

    def matcher(self) -> Anything:
        return self

    def fill(self, row: np.ndarray) -> None:
        row[:] = -1

    def push(self, token: int) -> None:
        pass


def requests(runner: Runner, length: int) -> None:
    """A few of all kinds."""
    ids = np.random.default_rng(length).integers(3, 512, length)
    kinds = [
        dict(),
        dict(temperature=1.0),
        dict(temperature=0.5, logprobs=3),
        dict(prompt_logprobs=2),
        dict(n=3, temperature=1.0, top_p=0.9),
        dict(frequency_penalty=1.0),
        dict(stop_token_ids=[9], min_tokens=1),
        dict(rest={"guide": Anything()}),
    ]
    runner.submit(ids, max_tokens=2, ignore_eos=True, **kinds[length % len(kinds)])


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """Grows with every compile by JAX, whoever asks for it."""
    events: list[str] = []
    listen = lambda event, seconds, **_: "backend_compile" in event and events.append(event)
    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


def test_nothing_is_compiled_after_warm_up_whatever_is_asked(lanes, compiled):
    base = lanes[0]
    names = []
    base.worker.warm_up(names.append)
    programs = base.worker.stages.programs
    assert sorted(names) == sorted(programs.compiled) and programs.compiles == len(names)
    compiled.clear()
    for placement in ("grow", "random"):
        real = fresh(base, placement)
        runner = Runner(real)
        for length in range(2, 201, 3):
            requests(runner, length)
            if length % 15 == 2:  # alone, in pairs, in crowds
                runner.run(chunks=(1, 5, 32) if length % 2 else ())
        runner.run()
        # a long prefix hit
        again = runner.submit(np.random.default_rng(200).integers(3, 512, 200), max_tokens=2)
        runner.run()
        assert runner.completion(again).finished.usage.cached >= 176
        assert_empty(real)
        assert len(runner.events) == 68
    assert not compiled
    assert programs.compiles == len(names)
    assert base.worker.compiles == len(names)


def test_every_program_has_a_name_of_its_own(lanes):
    names = [name for name, _ in lanes[0].worker.stages.programs.all()]
    assert len(set(names)) == len(names)
    assert len({str(shape) for shape in lanes[0].worker.plan.shapes}) == len(
        lanes[0].worker.plan.shapes
    )


def test_a_compile_cache_that_others_can_write_is_refused(tmp_path, give_away):
    before = jax.config.jax_compilation_cache_dir
    for mode in (0o777, 0o770, 0o702):
        folder = tmp_path / oct(mode)
        folder.mkdir()
        folder.chmod(mode)
        with pytest.raises(ConfigError, match="compile_cache"):
            keep_compiled(str(folder))
    (tmp_path / "mine").mkdir(mode=0o700)
    give_away(tmp_path / "mine")
    with pytest.raises(ConfigError, match="another user"):
        keep_compiled(str(tmp_path / "mine"))
    assert jax.config.jax_compilation_cache_dir == before


def test_a_compile_cache_is_made_for_its_owner_alone(tmp_path, monkeypatch):
    asked = {}
    monkeypatch.setattr(jax.config, "update", asked.__setitem__)
    monkeypatch.setenv("JAXSERVE_CACHE", str(tmp_path / "cache"))
    keep_compiled("")
    assert not asked
    keep_compiled(None)
    assert asked["jax_compilation_cache_dir"] == str(tmp_path / "cache" / "xla")
    assert (tmp_path / "cache" / "xla").stat().st_mode & 0o777 == 0o700


COMPILES = """
import sys, time
import jax
import jax.numpy as jnp
from jaxserve.engine.programs import Programs, keep_compiled

def program(number):
    def step(x):
        for _ in range(40):
            x = jnp.sin(x @ x) + number
        return x
    return lambda: jax.jit(step).lower(jax.ShapeDtypeStruct((8, 8), jnp.float32))

found = []
jax.monitoring.register_event_listener(lambda name, **_: found.append(name))
keep_compiled(sys.argv[1])
print(flush=True)
sys.stdin.readline()
Programs().warm_up({str(number): program(number) for number in range(4)}, print)
print(found.count("/jax/compilation_cache/cache_misses"))
"""


def test_processes_that_start_at_once_compile_each_program_once(tmp_path):
    command = [sys.executable, "-c", COMPILES, str(tmp_path / "cache")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(subprocess.Popen(command, **pipes)) for _ in range(3)]
        for process in processes:
            process.stdout.readline()
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        misses = [int(process.communicate()[0].split()[-1]) for process in processes]
    assert sum(misses) == 4, misses


def test_graphs_of_gpus_hold_loops_branches_and_collectives_unless_xla_flags_choose(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    (held,) = graph_options().values()
    assert {"COLLECTIVES", "WHILE", "CONDITIONAL", "CUSTOM_CALL"} <= set(held.split(","))
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer=FUSION")
    assert graph_options() == {}
