"""Attention is compared with the reference before a replica depends on it."""

from __future__ import annotations

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.engine import attention_check, build
from jaxserve.engine.attention_check import cases, checked, find_fault
from jaxserve.engine.sizing import make_plan, split_model
from jaxserve.kernels import ops
from jaxserve.settings.options import make
from jaxserve.settings.schema import ConfigError, EngineConfig
from jaxserve.weights import open_checkpoint
from tests.engine.harness import Runner
from tests.models.test_families import write_model


def config(model="random:tiny", **settings) -> EngineConfig:
    given = {"model": model, "pages": 64, "max_seqs": 2, "profile": "none", "chunk_tokens": 32}
    return make(EngineConfig, given | {"max_model_len": 256} | settings)


def plan(model="random:tiny", **settings):
    made = config(model, **settings)
    return make_plan(made, split_model(made, open_checkpoint(model, None).config))


def wrong(attend, change):
    """An implementation whose results are changed."""

    @functools.wraps(attend)
    def changed(*arguments, **options):
        return change(*attend(*arguments, **options))

    return changed


FAULTS = {
    "off by a tenth": lambda out, lse: (out * 1.1, lse),
    "log-sums of another base": lambda out, lse: (out, lse * 1.44),
    "one head of another": lambda out, lse: (jnp.roll(out, 1, 2), lse),
    "a number that is none": lambda out, lse: (out.at[0, 0, 0, 0, 0].set(jnp.nan), lse),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_kernel_that_is_wrong_is_found_named_and_replaced(monkeypatch, caplog, fault):
    made = plan()
    ours = ops.choose("cpu", *shapes(cases(made)[0]))
    monkeypatch.setitem(ops.ATTEND, ours, wrong(ops.ATTEND[ours], FAULTS[fault]))
    expected = "reference" if ours == "xla" else "xla"
    assert checked(made, fails_over=True).attention == expected
    assert "differ by up to" in caplog.text and "rows of 1 tokens" in caplog.text


def shapes(case):
    q, _, pages, *_ = case.arguments()
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, pages.kv)]


@pytest.mark.parametrize("what", ["queries", "pages"])
def test_a_write_before_attention_that_is_wrong_is_found(monkeypatch, caplog, what):
    plain = ops.WRITE_QKV["xla"]

    def changed(*arguments):
        q, pages = plain(*arguments)
        wrong = pages._replace(kv=jnp.roll(pages.kv, 1, -2))
        return (q * 1.1, pages) if what == "queries" else (q, wrong)

    monkeypatch.setattr(ops, "choose_write_qkv", lambda *shapes: "changed")
    monkeypatch.setitem(ops.WRITE_QKV, "changed", changed)
    assert checked(plan(), fails_over=True).attention == "xla"
    assert f"{what} differ by up to" in caplog.text and "the write of 1 tokens" in caplog.text


def test_a_kernel_that_fails_is_replaced(monkeypatch, caplog):
    made = plan()
    ours = ops.choose("cpu", *shapes(cases(made)[0]))

    def broken(*arguments, **options):
        raise NotImplementedError("no such instruction")

    monkeypatch.setitem(ops.ATTEND, ours, broken)
    assert checked(made, fails_over=True).attention in attention_check.SLOWER
    assert "no such instruction" in caplog.text


def test_processes_that_must_run_the_same_program_do_not_replace_it(monkeypatch):
    made = plan()
    ours = ops.choose("cpu", *shapes(cases(made)[0]))
    monkeypatch.setitem(ops.ATTEND, ours, wrong(ops.ATTEND[ours], FAULTS["off by a tenth"]))
    with pytest.raises(ConfigError, match=r"attention: .* differ by up to"):
        checked(made, fails_over=False)


def test_a_kernel_asked_for_by_name_is_refused_where_it_is_wrong_or_cannot_be(monkeypatch):
    with pytest.raises(ConfigError, match="mosaic is not possible here: it needs a Hopper GPU"):
        checked(plan(attention="mosaic"), fails_over=True)
    with pytest.raises(ConfigError, match="triton is not possible here: it needs an NVIDIA GPU"):
        checked(plan(attention="triton"), fails_over=True)
    monkeypatch.setitem(ops.ATTEND, "xla", wrong(ops.ATTEND["xla"], FAULTS["off by a tenth"]))
    with pytest.raises(ConfigError, match="xla is wrong on this device"):
        checked(plan(attention="xla"), fails_over=True)


def test_a_kernel_that_does_not_end_is_said(monkeypatch):
    monkeypatch.setattr(attention_check, "HANG_SECONDS", 0.2)
    ends = threading.Event()

    def hangs(*arguments, **options):
        out, lse = ops.ATTEND["reference"](*arguments, **options)
        slept = jax.pure_callback(lambda x: ends.wait(30) and x, jax.typeof(lse), lse)
        return out, lse + slept * 0

    monkeypatch.setitem(ops.ATTEND, "xla", hangs)
    with pytest.raises(ConfigError, match=r"did not end in 0\.2 s: start with --attention="):
        find_fault("xla", cases(plan())[0])
    ends.set()


FAMILIES = ["gemma2", "gemma3", "gpt_oss", "deepseek_v2", "qwen3_next"]
SMALL = {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}


@pytest.mark.parametrize(
    "family, settings",
    [
        *((family, {}) for family in FAMILIES),
        ("deepseek_v2", SMALL),
        *(
            pytest.param(family, SMALL, marks=pytest.mark.matrix)
            for family in FAMILIES
            if family != "deepseek_v2"
        ),
    ],
)
def test_the_kernels_of_this_machine_pass_with_every_kind_of_layer(tmp_path, family, settings):
    model = str(write_model(tmp_path / family, family))
    made = plan(model, **settings)
    assert {case.width for case in cases(made)} == {1, 32}
    assert checked(made, fails_over=False).attention is None
    assert checked(plan(model, attention="xla", **settings), fails_over=False).attention == "xla"


@pytest.mark.parametrize("attention", ["xla", "reference"])
def test_tokens_are_the_same_with_every_attention(attention):
    tokens = []
    for name in ("auto", attention):
        engine = build.build(config(attention=name), progress=False, warm_up=False)
        runner = Runner(engine)
        number = runner.submit(list(range(50)), max_tokens=6)
        runner.run()
        tokens.append(runner.ids(number))
        engine.worker.close()
    assert np.array_equal(*tokens)
