"""Pieces of fetches wait for their turn on the devices, in bounded number, and never for ever."""

from __future__ import annotations

import threading

from jaxserve.engine.fetched_pieces import Arrival, FetchedPieces
from jaxserve.engine.group_fetches import GroupFetches
from tests.waiting import eventually


def in_thread(run) -> tuple[threading.Thread, list]:
    found: list = []
    thread = threading.Thread(target=lambda: found.append(run()), daemon=True)
    thread.start()
    return thread, found


def test_the_fetch_that_began_first_has_a_place_whatever_others_took():
    """Else two processes, of which each waits for the other's piece of another fetch, would wait
    for ever."""
    pieces = FetchedPieces(2)
    for ticket in (4, 5, 6):
        pieces.begin(ticket)
    assert pieces.wait(5) and pieces.wait(6)
    thread, found = in_thread(lambda: pieces.wait(5))
    assert pieces.wait(4)
    assert pieces.put(4, 0, None)
    assert thread.is_alive() and not found
    pieces.take(4, 0, last=True)
    pieces.take(6, 0, last=False)
    eventually(lambda: found == [True])
    assert len(pieces) == 2


def test_a_fetch_that_is_over_waits_no_longer_and_keeps_nothing():
    pieces = FetchedPieces(1)
    pieces.begin(1)
    assert pieces.wait(1) and pieces.put(1, 0, None)
    thread, found = in_thread(lambda: pieces.wait(1))
    pieces.take(1, 0, last=True)
    eventually(lambda: found == [False])
    assert not pieces.put(1, 1, None) and not len(pieces)
    assert pieces.take(1, 1, last=True) is None


def test_a_piece_has_arrived_once_all_processes_have_it():
    fetches = GroupFetches(2)
    fetches.begin(7)
    assert fetches.arrived(0, Arrival(7, 0, 4, False)) is None
    assert fetches.arrived(0, Arrival(7, 1, 2, True)) is None
    assert fetches.arrived(1, Arrival(7, 0, 4, False)) == Arrival(7, 0, 4, False)
    assert fetches.arrived(1, Arrival(7, 1, 2, True)) == Arrival(7, 1, 2, True)


def test_what_one_process_does_not_find_ends_the_fetch_for_all():
    fetches = GroupFetches(2)
    fetches.begin(7)
    fetches.arrived(1, Arrival(7, 0, 1, True))
    assert fetches.arrived(0, Arrival(7, 0, 4, False)) == Arrival(7, 0, 1, True)
    assert fetches.arrived(0, Arrival(7, 1, 4, True)) is None  # it came before this was known
    fetches.begin(8)
    fetches.end(8)
    assert fetches.arrived(0, Arrival(8, 0, 4, True)) is None
