"""The demo of a pool: what its table says of reads and copies, and of answers that differ."""

import asyncio

from jaxserve.cli.own_server import OwnServer
from jaxserve.lab.cli.demo import document
from jaxserve.lab.cli.demo_pool import USERS, Answer, Outcome, Reads, same, talk
from tests.server.fakes import FakeReplica


def test_all_users_get_an_answer_and_the_table_says_how_fast(serve, capsys):
    served = serve(FakeReplica(step_seconds=0.01, chunk=2000))
    server = OwnServer(0, served.target, "http://127.0.0.1:9")  # no live page: nothing is read
    outcome = asyncio.run(talk(server, {"long": 500, "max_tokens": 3}, document))
    shown = capsys.readouterr().out
    assert f"user {USERS} | [done: 3 tokens]" in " ".join(shown.split())
    row = outcome.row("name")
    assert row[0] == "name" and float(row[1]) > 0 and row[2].endswith(" s")
    assert not outcome.failed and len(outcome.answers) == USERS


def test_reads_are_summed_by_lane_and_copies_are_the_most_seen():
    reads = Reads()
    for view in ({}, {"reads": [6, 0], "copied": [0, 0]}, {"reads": [3, 3], "copied": [4, 4]}, {}):
        reads.add(view)
    assert reads.shares() == "75 % / 25 %" and reads.copied == 8


def test_a_failed_answer_and_one_that_differs_are_seen():
    right, wrong = Answer("a", ids=[1, 2]), Answer("a", ids=[1, 3])
    assert same(Outcome([right], Reads()), Outcome([right], Reads()))
    assert not same(Outcome([right], Reads()), Outcome([wrong], Reads()))
    assert Outcome([right], Reads()).failed and Outcome([right], Reads()).row("x")[1] == "-"
