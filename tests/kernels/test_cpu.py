"""The kernels for CPUs: all types that they have, products with few rows and many, the choice of an
instruction set, and what happens without one. That attention is dense attention in f32 is
in test_attend.py."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.benchmarks.gpu.cases import truth
from jaxserve.kernels import ops
from jaxserve.kernels.cpu import library, linear
from jaxserve.kernels.cpu.build import (
    INSTRUCTION_SETS,
    Compiler,
    Processor,
    library_name,
    processor,
)
from jaxserve.kernels.cpu.library import best_instruction_set
from jaxserve.kernels.kv_pages import KVPages
from tests.kernels.test_attend import VALUES, Shape, make_case

ROOT = Path(__file__).parents[2]
needs_kernels = pytest.mark.skipif(
    library.unsupported() is not None, reason=f"no kernels for CPUs: {library.unsupported()}"
)
RUNNABLE = [known.name for known in INSTRUCTION_SETS if processor().runs(known)]
SHAPES = [
    Shape(1),
    Shape(1, K=1, G=1, H=64, C=256, W=3),
    Shape(1, K=3, G=16, H=80, window=40),
    Shape(5, G=7, H=32),
    Shape(5, K=1, G=71, C=4, W=90, window=7),
    Shape(64, K=3, H=64),
    *VALUES,
]


@functools.cache
def compiled(out, window, value_dim):
    return jax.jit(
        functools.partial(
            ops.attend,
            scale=0.3,
            window=window,
            value_dim=value_dim,
            dtype=out,
            implementation="cpu",
        )
    )


def attend(case, dtype, quantized, out, window):
    f = compiled(out, window, case.value_dim)
    return tuple(map(np.asarray, f(*case.arguments(dtype, quantized))))


@needs_kernels
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("quantized", [False, True], ids=["pages", "fp8-pages"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_numbers_of_every_type_are_widened_exactly(shape, quantized, dtype):
    """Against dense attention in f64 over the rounded numbers: what is lost is lost by storing."""
    for seed in range(2):
        case = make_case(shape, seed)
        right_out, right_lse = truth(case.rounded(dtype, quantized), 0.3, shape.window)
        out, lse = attend(case, dtype, quantized, jnp.float32, shape.window)
        np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(right_lse))
        np.testing.assert_allclose(lse, right_lse, rtol=3e-5, atol=3e-5)
        np.testing.assert_allclose(out, right_out, rtol=3e-5, atol=3e-5)


@needs_kernels
@pytest.mark.parametrize("T", [1, 5])
def test_results_in_bf16_are_those_in_f32_rounded(T):
    case = make_case(Shape(T), 1)
    wide, lse = attend(case, "bfloat16", False, jnp.float32, None)
    out, same_lse = attend(case, "bfloat16", False, jnp.bfloat16, None)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out, wide.astype(jnp.bfloat16))
    np.testing.assert_array_equal(lse, same_lse)


@needs_kernels
def test_all_256_numbers_of_fp8_are_widened_as_numpy_does():
    every = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn)
    finite = np.where(np.isnan(every.astype(np.float32)), 0, every).astype(jnp.float8_e4m3fn)
    values = finite.reshape(16, 1, 1, 1, 16)  # a page for each 16 of them
    kv = np.stack([np.zeros_like(values), values], 3)[:, :, 0]  # keys of 0: weights are 1
    pages = KVPages(kv.reshape(16, 1, 2, 1, 16), np.ones((16, 1, 2, 1), jnp.bfloat16))
    table = np.stack([np.arange(16, dtype=np.int32)[:, None], np.zeros((16, 1), np.int32)])
    out, _ = ops.attend(
        np.ones((16, 1, 1, 1, 16), np.float32),
        np.zeros((16, 1), np.int32),
        jax.tree.map(jnp.asarray, pages),
        table,
        np.arange(16, dtype=np.int32),
        np.ones(16, np.int32),
        scale=1.0,
        implementation="cpu",
    )
    np.testing.assert_array_equal(np.asarray(out).reshape(-1), finite.astype(np.float32))


@needs_kernels
def test_a_head_dim_that_does_not_fit_is_refused_with_the_reason():
    case = make_case(Shape(1, H=8), 0)
    with pytest.raises(NotImplementedError, match="head dim 8"):
        ops.attend(*case.arguments(), scale=1.0, implementation="cpu")
    pages = case.arguments()[2]
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (case.q, pages.kv)]
    assert ops.choose("cpu", *shapes) == "xla"
    case = make_case(Shape(1, vectors=1, value_dim=10), 0)
    with pytest.raises(NotImplementedError, match="value dim 10"):
        ops.attend(*case.arguments(), scale=1.0, value_dim=10, implementation="cpu")


# --- products


@needs_kernels
@given(
    st.sampled_from([1, 2, 7, 16, 17, 40, 300]),
    st.integers(1, 70) | st.sampled_from([385, 800]),
    st.integers(1, 70) | st.sampled_from([96, 200]),
    st.sampled_from(["float32", "bfloat16"]),
)
def test_products_are_those_in_f64(T, K, N, dtype):
    rng = np.random.default_rng([T, K, N])
    x = rng.standard_normal((T, K)).astype(dtype)
    w = rng.standard_normal((K, N)).astype(dtype)
    y = np.asarray(linear.linear(jnp.asarray(x), jnp.asarray(w)))
    right = x.astype(np.float64) @ w.astype(np.float64)
    assert y.dtype == x.dtype
    sums = np.abs(x.astype(np.float64)) @ np.abs(w.astype(np.float64))
    limit = sums * K * 2.0**-24 + (np.abs(right) * 2.0**-8 if dtype == "bfloat16" else 0)
    assert (np.abs(y.astype(np.float64) - right) <= limit + 1e-30).all()


@needs_kernels
def test_a_row_gives_the_same_whatever_other_rows_are_beside_it():
    """Batches must not change what a request says: within few rows, and within many."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((40, 576)), jnp.float32)
    w = jnp.asarray(rng.standard_normal((576, 200)), jnp.float32)
    few = np.asarray(linear.linear(x[:16], w))
    np.testing.assert_array_equal(few[3:4], linear.linear(x[3:4], w))
    many = np.asarray(linear.linear(x, w))
    np.testing.assert_array_equal(many[3:23], linear.linear(x[3:23], w))


@needs_kernels
@given(st.lists(st.integers(-1, 1), min_size=1, max_size=300), st.sampled_from([40, 500]))
def test_padding_changes_no_other_row(positions, K):
    rng = np.random.default_rng(len(positions))
    x = rng.standard_normal((len(positions), K)).astype(np.float32)
    w = jnp.asarray(rng.standard_normal((K, 50)), jnp.float32)
    rows = np.array(positions, np.int32)
    whole = np.asarray(linear.linear(jnp.asarray(x), w))
    x[rows < 0] = np.nan if (rows < 0).all() else 1.0
    y = np.asarray(linear.linear(jnp.asarray(x), w, jnp.asarray(rows)))
    np.testing.assert_array_equal(y[rows >= 0], whole[rows >= 0])
    assert np.isfinite(y).all()


@needs_kernels
def test_other_types_are_left_to_xla():
    x, w = jnp.ones((2, 16), jnp.float16), jnp.ones((16, 4), jnp.float16)
    with pytest.raises(NotImplementedError, match="float16"):
        linear.linear(x, w)
    assert (ops.linear(x, w) == 16).all()


# --- writing to pages


@needs_kernels
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), min_size=1, unique=True))
def test_tokens_are_written_to_their_pages_and_nowhere_else(dtype, places):
    rng = np.random.default_rng(len(places))
    pool = jnp.asarray(rng.standard_normal((1, 5, 2, 2, 4, 16)), dtype)  # page 5 is out of range
    values = jnp.asarray(rng.standard_normal((len(places), 2, 2, 16)), dtype)
    page, offset = np.array(places, np.int32).T
    right = np.array(pool)
    for token, (p, c) in enumerate(places):
        if p < 5:
            right[0, p, :, :, c] = values[token]
    written = jax.jit(ops.write, donate_argnums=0)(pool, page, offset, values)
    np.testing.assert_array_equal(np.asarray(written), right)


# --- which library


def intel(*without: str) -> Processor:
    features = frozenset().union(*(known.needs for known in INSTRUCTION_SETS if known.vendors))
    return Processor("x86_64", "GenuineIntel", features - set(without))


@pytest.mark.parametrize(
    "found, best",
    [
        (Processor("x86_64", "AuthenticAMD", intel().features), "avx512_bf16"),
        (intel(), "avx512"),  # its processors multiply pairs of bf16 more slowly than f32
        (intel("avx512_bf16"), "avx512"),
        (intel("avx512vl"), "avx2"),
        (intel("avx512f", "fma"), None),
        (Processor("aarch64", "", frozenset({"asimd"})), "neon"),
        (Processor("ppc64le", "", frozenset()), None),
    ],
)
def test_the_best_instruction_set_of_the_processor_is_taken(found, best):
    assert best_instruction_set(found) == best


def test_a_chosen_instruction_set_is_taken_only_where_the_processor_has_it():
    assert best_instruction_set(intel(), "avx2") == "avx2"
    assert best_instruction_set(intel(), "avx512_bf16") == "avx512_bf16"
    assert best_instruction_set(intel("avx512f"), "avx512") is None
    assert best_instruction_set(intel(), "neon") is None


@needs_kernels
@pytest.mark.skipif(not shutil.which("objdump"), reason="no objdump")
def test_the_library_for_avx2_has_no_wider_instructions():
    """An installation on one machine then runs on one with fewer instructions."""
    path = library.FOLDER / library_name("avx2")
    if not path.exists():
        pytest.skip("compiled for another architecture")
    text = subprocess.run(["objdump", "-d", path], capture_output=True, text=True, check=True)
    assert "%ymm" in text.stdout
    assert "%zmm" not in text.stdout and "%k1" not in text.stdout


def in_process_of_its_own(choice: str, code: str, **environment: str) -> str:
    """Runs `code` with this choice of kernels; returns its output."""
    variables = {**os.environ, library.CHOICE: choice, **environment}
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=variables,
        cwd=ROOT,
        timeout=1200,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    return run.stdout


REASON = "from jaxserve.kernels.cpu import library; print(library.unsupported())"


def test_why_there_are_no_kernels_is_said():
    assert "JAXSERVE_CPU_KERNELS=off" in in_process_of_its_own("off", REASON)
    assert "has no sse9" in in_process_of_its_own("sse9", REASON)
    elsewhere = (
        "from pathlib import Path; from jaxserve.kernels.cpu import library; "
        f"library.FOLDER = Path('/'); {REASON}"
    )
    if RUNNABLE:
        assert "not compiled at installation" in in_process_of_its_own(RUNNABLE[-1], elsewhere)


FILES = [f"tests/kernels/test_{name}.py" for name in ("attend", "cpu", "grouped", "quantised")]
OTHERS = "process or library or said or sources"  # tests that are not of products and attention
# what those that are left say of each shape, too, and types whose like is left
LONG = "soft_cap or any_order or ten_million or float32-fp8 or bfloat16-pages"


def this_suite(without: str) -> str:
    """Code that runs these files, but for tests with any of these words in their names."""
    which = f"(cpu or grouped or quantised) and not ({without})"
    arguments = ["-qqs", "-n0", "-p", "no:cacheprovider", *FILES, "-k", which]
    return f"import sys, pytest; sys.exit(pytest.main({arguments}))"


@pytest.mark.parametrize("name", [known.name for known in INSTRUCTION_SETS])
@pytest.mark.parametrize(
    "without",
    [
        pytest.param(f"{OTHERS} or {LONG}", id="short"),
        pytest.param(OTHERS, id="whole", marks=pytest.mark.matrix),
    ],
)
def test_every_instruction_set_passes_in_a_process_of_its_own(without, name):
    """The tests of this process run the one that is chosen by default."""
    if name not in RUNNABLE:
        pytest.skip(f"this processor has no {name}")
    if name == library.instruction_set():
        pytest.skip(f"the other tests of this process run {name}")
    in_process_of_its_own(name, this_suite(without))


@pytest.mark.skipif(not shutil.which("g++"), reason="no g++")
def test_sources_compile_for_the_widest_instruction_set(tmp_path):
    """It has code of its own, and installation may leave it out."""
    widest = INSTRUCTION_SETS[0]
    if processor().machine not in widest.machines:
        pytest.skip("of another architecture")
    if (library.FOLDER / library_name(widest.name)).exists():
        pytest.skip("compiled at installation")
    compiler = Compiler("g++", Path(jax.ffi.include_dir()), ("-fsyntax-only", "-Werror"))
    with ThreadPoolExecutor() as pool:
        for made in compiler.objects(widest, tmp_path, pool):
            made.result()


@pytest.mark.matrix
@pytest.mark.skipif(not RUNNABLE or not shutil.which("g++"), reason="no g++")
def test_sanitizers_find_nothing_in_a_process_of_its_own(tmp_path):
    """Addresses and undefined behaviour, over the whole suite of the kernels."""
    name = RUNNABLE[0]
    found = next(known for known in INSTRUCTION_SETS if known.name == name)
    flags = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O1")
    to = tmp_path / library_name(name)
    include = Path(jax.ffi.include_dir())
    compiler = Compiler("g++", include, flags)
    with ThreadPoolExecutor() as pool:
        compiler.link(compiler.objects(found, tmp_path, pool), to)
    runtimes = ("libasan.so", "libubsan.so", "libstdc++.so")  # before Python's own libraries
    ask = (["g++", f"-print-file-name={name}"] for name in runtimes)
    preload = [subprocess.check_output(command, text=True).strip() for command in ask]
    code = (
        "from pathlib import Path; from jaxserve.kernels.cpu import library; "
        f"library.FOLDER = Path({str(tmp_path)!r}); {this_suite(OTHERS)}"
    )
    in_process_of_its_own(name, code, LD_PRELOAD=" ".join(preload), ASAN_OPTIONS="detect_leaks=0")
