import json

import pytest

from jaxserve.cli import main as cli
from jaxserve.cli.own_server import flag
from tests.server.fakes import FakeReplica


def addresses(served):
    return {"grpc": f"--target={served.target}", "http": f"--url={served.server.url}"}


@pytest.mark.parametrize("transport", ["grpc", "http"])
def test_a_running_server_is_measured(serve, capsys, tmp_path, transport):
    served = serve(FakeReplica(step_seconds=0.001))
    out = tmp_path / "out.jsonl"
    code = cli.main(
        [
            "bench",
            "serve",
            addresses(served)[transport],
            "--qps=50,200",
            "--requests=20",
            "--prompt=3:9",
            "--output=4",
            "--repeats=2",
            "--goodput=ttft:60,tpot:60",
            f"--json={out}",
        ]
    )
    shown = capsys.readouterr().out
    runs = [json.loads(line) for line in out.read_text().splitlines()]
    assert code == 0 and "TTFT ms" in shown and "t-interval at 95%" in shown
    assert [(r["load"]["qps"], r["seed"]) for r in runs] == [(50, 0), (50, 1), (200, 0), (200, 1)]
    for run in runs:
        found = run["figures"]
        assert found["done"] == 20 and found["goodput_share"] == 1
        assert found["ttft"]["count"] == 20 and found["prefix_hit_rate"] == 0
        assert {each["tokens"] for each in run["requests"]} == {4}
        assert {each["prompt"] for each in run["requests"]} <= set(range(3, 10))
        assert run["machine"]["jaxserve"] and run["served"]["max_len"] == 4096
    assert not served.engine.requests


@pytest.mark.parametrize("transport", ["grpc", "http"])
def test_the_share_in_time_is_the_servers_where_no_objectives_are_given(
    serve, capsys, tmp_path, transport
):
    served = serve(FakeReplica(step_seconds=0.001))
    out = tmp_path / "out.jsonl"
    command = ["bench", "serve", addresses(served)[transport], "--qps=100", f"--json={out}"]
    assert cli.main([*command, "--requests=5", "--prompt=4", "--output=4"]) == 0
    shown = capsys.readouterr().out
    assert "in time %" in shown and "goodput tok/s" in shown
    figures = json.loads(out.read_text())["figures"]
    assert figures["goodput_share"] == 1
    assert figures["goodput_per_s"] == figures["requests_per_s"]
    assert figures["goodput_tokens_per_s"] == figures["output_tokens_per_s"]


@pytest.mark.parametrize("transport", ["grpc", "http"])
def test_what_the_server_refuses_is_told_with_the_reason(serve, capsys, transport):
    served = serve(FakeReplica(step_seconds=0.02, max_queue=1))
    command = ["bench", "serve", addresses(served)[transport], "--concurrency=4", "--warmup=0"]
    assert cli.main([*command, "--prompt=4", "--output=8", "--requests=12"]) == 0
    shown = capsys.readouterr().out
    assert "4 at once" in shown and "refused: RESOURCE_EXHAUSTED: " in shown
    assert "1 requests wait already" in shown


def test_the_exit_code_says_that_nothing_was_served(serve, capsys):
    served = serve(FakeReplica(max_queue=0))
    assert cli.main(["bench", "serve", f"--url={served.server.url}", "--qps=100"]) == 1


def test_conversations_are_played_over_http(serve, tmp_path, capsys):
    file = tmp_path / "talks.json"
    talk = [{"from": "human", "value": "How are you?"}, {"from": "gpt", "value": "Fine."}]
    file.write_text(json.dumps([{"conversations": talk}] * 3))
    out = tmp_path / "out.jsonl"
    command = ["bench", "serve", f"--url={serve().server.url}", f"--workload={file}", "--qps=100"]
    assert cli.main([*command, "--requests=3", f"--json={out}"]) == 0
    requests = json.loads(out.read_text())["requests"]
    assert [(r["prompt"], r["tokens"]) for r in requests] == [(12, 5)] * 3


def test_the_distributions_are_drawn(serve, tmp_path, capsys):
    picture = tmp_path / "out.svg"
    target = f"--target={serve().target}"
    assert cli.main(["bench", "serve", target, "--qps=100", f"--plot={picture}"]) == 0
    assert "<svg" in picture.read_text()


@pytest.mark.parametrize(
    "flag, message",
    [
        ("--qps=0", "--qps: '0'"),
        ("--qps=1,x", "--qps: 'x'"),
        ("--prompt=9:3", "prompt: 9 to 3 is no range"),
        ("--output=-1", "output must be a number"),
        ("--workload=nowhere.jsonl", "there is no file nowhere.jsonl"),
        ("--goodput=ttft", "--goodput: 'ttft' is not NAME:SECONDS"),
        ("--plot=out.txt", "--plot: 'out.txt' ends neither"),
        ("--mesh=x", "--mesh: 'x'"),
        ("--url=http://127.0.0.1:9", "--url: http://127.0.0.1:9: "),
    ],
)
def test_mistakes_are_named(capsys, flag, message):
    assert cli.main(["bench", "serve", flag]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and "\n" not in error


def test_two_servers_or_another_transport_are_refused(capsys):
    both = ["--url=http://127.0.0.1:9", "--target=127.0.0.1:9"]
    assert cli.main(["bench", "serve", *both]) == 2
    assert "give either --url or --target" in capsys.readouterr().err
    assert cli.main(["bench", "serve", both[0], "--transport=grpc"]) == 2
    assert "--transport: --url is for http" in capsys.readouterr().err


@pytest.mark.parametrize("transport", ["grpc", "http"])
def test_lengths_beyond_the_model_are_refused(serve, capsys, transport):
    command = ["bench", "serve", addresses(serve())[transport]]
    assert cli.main([*command, "--prompt=5000"]) == 2
    assert "the model's limit is 4096" in capsys.readouterr().err


def test_flags_are_handed_on():
    assert [flag("a", v) for v in (True, False, 3, "x")] == ["--a", "--noa", "--a=3", "--a=x"]
