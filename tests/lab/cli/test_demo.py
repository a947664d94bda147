import asyncio
import re

from jaxserve.lab.cli.demo import Talk, compared, summary, talk
from tests.server.fakes import FakeReplica


def asked(served, **values):
    return asyncio.run(talk(served.target, values))


def test_the_demo_talks_to_a_server_and_ends_with_a_table(serve, capsys):
    served = serve(FakeReplica(step_seconds=0.05, chunk=500))
    talks = asked(served, long=2000, short=2, max_tokens=6)
    shown = capsys.readouterr().out
    # a busy machine merges some of them
    assert re.search(r"long    \| \[prefilled (500|1000|1500|2000) of 2\d\d\d tokens", shown)
    assert "short 2 | [done: 6 tokens" in shown
    rows = [line.split()[0] for line in summary(talks).splitlines() if line.endswith("length")]
    assert rows == ["long", "short", "short"]
    assert all(len(each.ids) == 6 for each in talks)


def test_a_request_that_fails_is_shown_and_the_others_go_on(serve, capsys):
    talks = asked(serve(), long=5000, short=1, max_tokens=3)
    assert "long" in (shown := capsys.readouterr().err) and "> 4095" in shown
    lines = summary(talks).splitlines()
    assert [line.split()[-1] for line in lines if line.endswith(("failed", "length"))] == [
        "failed", "length",
    ]  # fmt: skip


def test_answers_are_the_same_where_one_is_how_the_other_begins():
    first = [Talk("a", "", ids=[1, 2, 3]), Talk("b", "", ids=[4])]
    assert "the same: all 3 that both gave" in compared(
        first, [Talk("a", "", ids=[1, 2]), first[1]]
    )
    other = [Talk("a", "", ids=[1, 3]), first[1]]
    assert compared(first, other) == "THE TOKENS DIFFER: a"
