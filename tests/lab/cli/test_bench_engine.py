"""`jaxserve bench engine`: its arithmetic by hand, its figures on a tiny model."""

import json
from types import SimpleNamespace

import pytest

from jaxserve.cli import main as cli
from jaxserve.engine.command import CommandCodec, StepCommand
from jaxserve.lab.cli.bench import engine as bench_engine
from jaxserve.lab.cli.bench import host_time, speed
from jaxserve.lab.cli.bench.speed import Runner, Speed, SpeedPoint
from jaxserve.observe import machine
from jaxserve.scheduling.events import StepFinished, StepIssued

TINY = [
    "bench",
    "engine",
    "--model=random:tiny",
    "--max_model_len=256",
    "--chunk_tokens=32",
    "--compile_cache=",
]


class Timed(Runner):
    """Seconds as given: 1 for a prompt, and 0.25 for each further token."""

    compiles = 3

    def __init__(self):
        self.asked = []

    def seconds(self, sequences, prompt, tokens):
        self.asked.append((sequences, prompt, tokens))
        return 1 + 0.25 * (tokens - 1)


def test_prefill_counts_the_prompt_over_the_time_to_one_token():
    runner = Timed()
    assert runner.rate(SpeedPoint("prefill", 512)) == 512
    assert runner.asked == [(1, 512, 1)]


def test_decode_counts_what_64_more_tokens_take():
    runner = Timed()
    assert runner.rate(SpeedPoint("decode", 8)) == 8 * 64 / (64 * 0.25)
    assert runner.asked == [(8, 128, 1), (8, 128, 1), (8, 128, 65)]


def test_the_first_round_does_not_count():
    found, late = speed.measure(
        Timed(), [SpeedPoint("prefill", 4), SpeedPoint("decode", 1)], 2, lambda name: None
    )
    assert [(str(s.point), len(s.rates)) for s in found] == [
        ("prefill 4", 2),
        ("decode x1", 2),
    ] and late == 0
    assert Speed(SpeedPoint("prefill", 4), (1.0, 5.0, 3.0)).record() == {
        "name": "prefill 4",
        "kind": "prefill",
        "size": 4,
        "best": 5.0,
        "median": 3.0,
        "tokens_per_s": [1.0, 5.0, 3.0],
    }


def test_host_times_are_split_into_parts_that_add_up():
    plan = SimpleNamespace(codec=lambda: CODEC)
    watch = host_time.Stopwatch(SimpleNamespace(worker=SimpleNamespace(plan=plan)))
    for _ in range(host_time.WARM + 4):
        command = StepCommand(number=1)
        watch.step_issued(StepIssued(None, command, 0.0, "", 1e-6, 2e-6, 3e-6))
        watch.finished.append(StepFinished(None, 7e-6, 0.0))
    assert {part: x.round(6).tolist() for part, x in watch.micros().items()} == {
        "schedule": [1] * 4,
        "arrays": [2] * 4,
        "dispatch": [3] * 4,
        "total": [6] * 4,
        "finish": [7] * 4,
        "events": [0] * 4,
    }
    assert set(watch.bytes) == {len(CODEC.encode(command))}


CODEC = CommandCodec([], lanes=1, block_size=16)


def test_a_tiny_model_is_measured_shown_and_written(capsys, tmp_path):
    file = tmp_path / "speed.json"
    code = cli.main(
        [
            *TINY,
            "--prefill=16",
            "--decode=2",
            "--rounds=2",
            f"--json={file}",
            "--contexts=100,5000",
            "--seqs=8",
            "--steps=4",
        ]
    )
    out, err = capsys.readouterr()
    assert code == 0, err
    report = json.loads(file.read_text())
    assert out.strip() == bench_engine.shown(report)
    assert [row["name"] for row in report["speed"]] == ["prefill 16", "decode x2"]
    assert (
        all(len(row["tokens_per_s"]) == 2 and row["best"] > 0 for row in report["speed"])
        and report["compiles_while_measuring"] == 0
    )
    short, long = report["host"]
    assert (short["context"], long["context"], short["steps"]) == (100, 5000, 4)
    # nothing that is sent knows how long a context is
    assert short["bytes_per_step"] == long["bytes_per_step"]
    assert all(
        row["micros"][part]["p50"] > 0
        for row in (short, long)
        for part in ("schedule", "arrays", "dispatch", "finish")
    )
    assert "prefill 16" in out and "8 x 5000" in out and machine.described(report["machine"]) in out


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--prefill=1x"], "--prefill: '1x' is not a list of whole numbers"),
        (["--decode=0"], "--decode: '0' is not a list"),
        (["--decode=9"], "--decode: 9 sequences are above max_seqs, which is 8"),
        (
            ["--prefill=256", "--decode="],
            "--prefill: prefill 256 needs sequences of 257 tokens; the limit is 256",
        ),
        (["--json=/no/such/folder/file"], "--json: /no/such/folder/file: No such file"),
    ],
)
def test_errors_name_the_flag(capsys, flags, message):
    assert cli.main([*TINY, *flags]) == cli.USAGE
    assert message in capsys.readouterr().err
