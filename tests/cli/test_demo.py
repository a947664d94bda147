import asyncio
import re

from jaxserve.cli.demo import talk
from tests.server.fakes import FakeReplica


def test_the_demo_talks_to_a_server_and_ends_with_a_table(serve, capsys):
    served = serve(FakeReplica(step_seconds=0.05, chunk=500))
    assert asyncio.run(talk(served.target, long=2000, short=2, max_tokens=6)) == 0
    shown = capsys.readouterr().out
    # a busy machine merges some of them
    assert re.search(r"long    \| \[prefilled (500|1000|1500|2000) of 2\d\d\d tokens", shown)
    assert "short 2 | [done: 6 tokens" in shown
    assert [line.split()[0] for line in shown.splitlines() if line.endswith("length")] == [
        "long",
        "short",
        "short",
    ]


def test_a_request_that_fails_is_shown_and_the_others_go_on(serve, capsys):
    assert asyncio.run(talk(serve().target, long=5000, short=1, max_tokens=3)) == 1
    shown = capsys.readouterr()
    assert "long" in shown.err and "the limit is 4095" in shown.err
    assert [
        line.split()[-1] for line in shown.out.splitlines() if line.endswith(("failed", "length"))
    ] == ["failed", "length"]
