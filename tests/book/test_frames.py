"""Rings frame by frame: everything arrives, and as many things travel as scaling.collectives.rings sends for real."""

import itertools

import pytest

from scaling.book import frames
from scaling.collectives import rings


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_everything_arrives(n):
    everything = set(range(n))
    for ways, hops in ((1, n - 1), (2, n // 2)):
        gathered = frames.all_gather(n, ways)
        assert gathered[-1] == [everything] * n
        assert len(gathered) == hops + 1
        pairs = [pair for a, b in itertools.pairwise(gathered) for pair in zip(a, b, strict=True)]
        assert all(before < after for before, after in pairs)
    scattered = frames.reduce_scatter(n)
    assert scattered[-1] == [(d, frozenset(everything)) for d in range(n)]
    assert [len(terms) for frame in scattered for _, terms in frame[:1]] == list(range(1, n + 1))
    exchanged = frames.all_to_all(n)
    assert [(set(kept), passing) for kept, passing in exchanged[-1]] == [
        ({(i, d) for i in range(n)}, ()) for d in range(n)
    ]


@pytest.mark.parametrize("n", [4, 8])
def test_as_much_travels_as_over_the_links(n):
    loads = {(name, ways): busiest for name, ways, _, busiest in rings.ring_counts(n, 2 * n)}  # shards of 2n scalars
    arrived = {ways: sum(len(held) for held in frames.all_gather(n, ways)[-1]) - n for ways in (1, 2)}
    assert arrived[1] * 2 * n == n * loads["AllGather", 1]
    passed = sum(len(passing) for frame in frames.all_to_all(n)[:-1] for _, passing in frame)
    assert passed * 2 == n * loads["AllToAll", 1]  # chunks of 2 scalars
    hops = len(frames.reduce_scatter(n)) - 1
    assert hops * 2 * n == loads["ReduceScatter", 1]


def test_drawn():
    text = frames.draw(frames.all_gather(4, 1), lambda held: frames.draw_shards(held, 4))
    assert text.splitlines()[2] == "device 0  A...      A..D   A.CD   ABCD"
    assert frames.partial_sum((2, frozenset({0, 3}))) == "C: 0+3"
    assert frames.draw_chunks((((0, 0), (3, 0)), ((3, 1),))) == "a0 d0 | d1"
    assert frames.draw_chunks((((0, 0),), ())) == "a0"
