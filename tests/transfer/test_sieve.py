"""SIEVE eviction beside the paper's own list and hand."""

from hypothesis import given
from hypothesis import strategies as st

from jaxserve.transfer.sieve import Sieve


class Paper:
    """The algorithm as printed: a queue, newest at the head, and a hand that goes from its tail to
    its head; the object at the hand goes unless it was visited."""

    def __init__(self):
        self.queue = []  # oldest first
        self.visited = set()
        self.hand = None

    def evict(self):
        at = self.queue.index(self.hand) if self.hand in self.queue else 0
        while self.queue[at] in self.visited:
            self.visited.discard(self.queue[at])
            at = (at + 1) % len(self.queue)
        key = self.queue.pop(at)
        self.hand = self.queue[at] if at < len(self.queue) else None
        return key


@given(st.lists(st.one_of(st.tuples(st.just("use"), st.integers(0, 30)), st.just(("evict", 0)))))
def test_it_evicts_what_the_paper_does(steps):
    ours, paper = Sieve(), Paper()
    fresh = 100
    for what, key in steps:
        if what == "use" and key in paper.queue:
            ours.use(key)
            paper.visited.add(key)
        elif what == "use":
            fresh += 1
            paper.queue.append(key)
            ours.add(key)
        elif paper.queue:
            assert ours.evict(lambda key: True) == paper.evict()
    assert sorted(ours.keys()) == sorted(paper.queue)


def test_what_may_not_go_stays():
    sieve = Sieve()
    for key in "abc":
        sieve.add(key)
    assert sieve.evict(lambda key: key == "b") == "b"
    assert sieve.evict(lambda key: False) is None
    sieve.use("a")
    assert sieve.evict(lambda key: True) == "c"
    assert sieve.evict(lambda key: True) == "a"
    assert sieve.evict(lambda key: True) is None and len(sieve) == 0
