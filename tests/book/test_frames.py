"""Rings frame by frame, beside scaling.collectives.rings; and chunks streamed through a core, as 02_tpus draws them."""

import itertools

import pytest

from scaling.book import frames
from scaling.collectives import rings
from scaling.show import bars


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_everything_arrives_by_as_much_as_travels_over_the_links(n):
    everything, V = set(range(n)), 2 * n  # shards of V scalars
    loads = {(name, ways): busiest for name, ways, _, busiest in rings.ring_counts(n, V)}
    for ways, hops in ((1, n - 1), (2, n // 2)):
        gathered = frames.all_gather(n, ways)
        assert gathered[-1] == [everything] * n
        assert len(gathered) == hops + 1
        pairs = [pair for a, b in itertools.pairwise(gathered) for pair in zip(a, b, strict=True)]
        assert all(before < after for before, after in pairs)
        arrived = sum(map(len, gathered[-1])) - n
        assert ways == 2 or arrived * V == n * loads["AllGather", 1]
    scattered = frames.reduce_scatter(n)
    assert scattered[-1] == [(d, frozenset(everything)) for d in range(n)]
    assert [len(frame[0][1]) for frame in scattered] == list(range(1, n + 1))
    assert (len(scattered) - 1) * V == loads["ReduceScatter", 1]
    exchanged = frames.all_to_all(n)
    assert [(set(kept), passing) for kept, passing in exchanged[-1]] == [
        ({(i, d) for i in range(n)}, ()) for d in range(n)
    ]
    passed = sum(len(passing) for frame in exchanged[:-1] for _, passing in frame)
    assert passed * V == n * n * loads["AllToAll", 1]  # chunks of V/n scalars


def test_drawn():
    text = frames.draw(frames.all_gather(4, 1), lambda held: frames.draw_shards(held, 4))
    assert text.splitlines()[2] == "device 0  A...      A..D   A.CD   ABCD"
    assert frames.partial_sum((2, frozenset({0, 3}))) == "C: 0+3"
    assert frames.draw_chunks((((0, 0), (3, 0)), ((3, 1),))) == "a0 d0 | d1"
    assert frames.draw_chunks((((0, 0),), ())) == "a0"


@pytest.mark.parametrize("times", [(3.0, 1.0, 0.5), (1.0, 3.0, 0.5), (1.0, 1.0, 1.0), (1.0, 2.0, 0.5)])
@pytest.mark.parametrize("chunks", [1, 2, 7])
def test_chunks_wait_for_their_place_in_one_buffer_and_overlap_in_two(chapter, chunks, times):
    (load, compute, store), streamed = times, chapter("02_tpus").names["streamed"]
    ends = []
    for buffers in (1, 2):
        run = streamed(chunks, *times, buffers=buffers, first=2.0)
        named = {bar.label: bar for bar in run}
        for chunk in range(chunks):
            L, C, S = (named[f"{kind}{chunk}"] for kind in "LCS")
            assert L.end <= C.start <= C.end <= S.start
            assert chunk < buffers or L.start >= named[f"C{chunk - buffers}"].end
        for unit, busy in (("HBM", 2 + chunks * (load + store)), ("core", chunks * compute)):
            works = sorted((bar for bar in run if bar.row == unit), key=lambda bar: bar.start)
            assert all(a.end <= b.start for a, b in itertools.pairwise(works)), "one thing at a time"
            assert bars.busy(run, unit) == pytest.approx(busy)
        ends.append(bars.end_of(run))
    serial, double = ends
    assert serial == pytest.approx(2 + chunks * sum(times))
    assert max(2 + chunks * (load + store), chunks * compute) <= double <= serial
    if load > compute:  # HBM is never idle but for the last panel's product
        assert double == pytest.approx(2 + chunks * (load + store) + max(0, compute - (chunks > 1) * store))
    if compute > load + store:  # nor is the core, once it has begun
        assert double == pytest.approx(2 + load + chunks * compute + store)


def test_streams_drawn(chapter):
    wanted = ["HBM  |L0--L1--....S0......S1|", "core |....C0------C1------..|"]
    run = chapter("02_tpus").names["streamed"](2, 2.0, 4.0, 1.0, buffers=2)
    assert bars.text(run, 22).splitlines() == wanted
