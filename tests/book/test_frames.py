"""Rings frame by frame, beside scaling.collectives.rings; and chunks streamed through a core, as 02_tpus draws them."""

import itertools

import pytest

from scaling.book import frames
from scaling.collectives import rings
from scaling.show import bars


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


@pytest.fixture
def streamed(chapter):
    return chapter("02_tpus").names["streamed"]


@pytest.mark.parametrize("times", [(3.0, 1.0, 0.5), (1.0, 3.0, 0.5), (1.0, 1.0, 1.0)])
@pytest.mark.parametrize("chunks", [1, 2, 7])
def test_one_buffer_adds_up_and_two_overlap(streamed, times, chunks):
    load, compute, store = times
    runs = [streamed(chunks, *times, buffers=n, first=2.0) for n in (1, 2)]
    serial, double = map(bars.end_of, runs)
    assert serial == pytest.approx(2 + chunks * sum(times))
    assert max(2 + chunks * (load + store), chunks * compute) <= double <= serial
    for run in runs:
        busy = bars.busy(run, "HBM"), bars.busy(run, "core")
        assert busy == pytest.approx((2 + chunks * (load + store), chunks * compute))
    if load > compute:  # HBM is never idle but for the last panel's product
        assert double == pytest.approx(2 + chunks * (load + store) + max(0, compute - (chunks > 1) * store))
    if compute > load + store:  # nor is the core, once it has begun
        assert double == pytest.approx(2 + load + chunks * compute + store)


def test_a_chunk_waits_for_its_place_and_each_unit_does_one_thing_at_a_time(streamed):
    run = streamed(6, 1.0, 2.0, 0.5, buffers=2)
    by_name = {bar.label: bar for bar in run}
    for chunk in range(6):
        load, compute, store = (by_name[f"{kind}{chunk}"] for kind in "LCS")
        assert load.end <= compute.start
        assert compute.end <= store.start
        assert chunk < 2 or load.start >= by_name[f"C{chunk - 2}"].end
    for unit in ("HBM", "core"):
        works = sorted((bar for bar in run if bar.row == unit), key=lambda bar: bar.start)
        assert all(a.end <= b.start for a, b in itertools.pairwise(works))


def test_streams_drawn(streamed):
    wanted = ["HBM  |L0--L1--....S0......S1|", "core |....C0------C1------..|"]
    assert bars.text(streamed(2, 2.0, 4.0, 1.0, buffers=2), 22).splitlines() == wanted
