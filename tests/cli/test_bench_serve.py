import json

import numpy as np
import pytest

from jaxserve.cli import main as cli
from jaxserve.cli.bench.serve import Sent, figures, plan, report
from jaxserve.cli.own_server import flag
from tests.server.fakes import FakeReplica


def test_arrivals_are_poisson_and_repeatable():
    first, second = (
        plan(5.0, 4000, [(10, 20), (3, 3)], np.random.default_rng(1)) for _ in range(2)
    )
    gaps = np.diff([s.planned for s in first])
    assert first == second
    assert abs(gaps.mean() - 0.2) < 0.01 and abs(gaps.std() - 0.2) < 0.02
    assert {s.prompt for s in first} == set(range(10, 21)) and {s.output for s in first} == {3}


def test_figures_count_from_the_planned_moment():
    sent = [
        Sent(planned=1.0, prompt=10, output=5, sent=1.5, first=2.0, last=4.0, tokens=5),
        Sent(planned=1.0, prompt=10, output=5, sent=1.0, status="RESOURCE_EXHAUSTED"),
    ]
    found = figures(sent)
    assert (
        found["ttft_ms"]["p50"] == 1000
        and found["tpot_ms"]["p50"] == 500
        and found["e2e_ms"]["p99"] == 3000
    )
    assert found["lag_ms"]["p50"] == 250 and found["refused"] == {"RESOURCE_EXHAUSTED": 1}
    assert found["output_tokens_per_s"] == pytest.approx(5 / 3) and found[
        "requests_per_s"
    ] == pytest.approx(1 / 3)
    assert "1000/1000/1000" in report([(2.0, sent)])


def test_figures_of_nothing_are_zero():
    assert figures([Sent(1.0, 1, 1, 1.0, status="UNAVAILABLE")])["output_tokens_per_s"] == 0


def test_a_running_server_is_measured(serve, capsys, tmp_path):
    served = serve(FakeReplica(step_seconds=0.001))
    out = tmp_path / "out.json"
    code = cli.main(
        [
            "bench",
            "serve",
            f"--target={served.target}",
            "--rates=50,200",
            "--requests=20",
            "--prompt_len=3:9",
            "--output_len=4",
            f"--json={out}",
        ]
    )
    shown = capsys.readouterr().out
    runs = json.loads(out.read_text())["runs"]
    assert code == 0 and "TTFT ms" in shown and len(shown.splitlines()) == 6
    assert [r["done"] for r in runs] == [20, 20] and not served.engine.requests
    assert all(s["tokens"] == 4 and s["status"] == "OK" for r in runs for s in r["requests"])


@pytest.mark.parametrize(
    "flag, message",
    [
        ("--rates=0", "--rates: '0'"),
        ("--rates=1,x", "--rates: 'x'"),
        ("--prompt_len=9:3", "--prompt_len: '9:3'"),
        ("--output_len=-1", "--output_len: '-1'"),
        ("--mesh=x", "--mesh: 'x'"),
    ],
)
def test_mistakes_are_named(capsys, flag, message):
    assert cli.main(["bench", "serve", flag]) == 2
    assert message in capsys.readouterr().err


def test_lengths_beyond_the_model_are_refused(serve, capsys):
    assert cli.main(["bench", "serve", f"--target={serve().target}", "--prompt_len=5000"]) == 2
    assert "the model's limit is 4096" in capsys.readouterr().err


def test_flags_are_handed_on():
    assert [flag("a", v) for v in (True, False, 3, "x")] == ["--a", "--noa", "--a=3", "--a=x"]
