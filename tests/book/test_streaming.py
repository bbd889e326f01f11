"""Chunks streamed through a core, as 02_tpus simulates and draws them."""

import itertools

import pytest

from scaling.show import bars

pytestmark = pytest.mark.slow


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


def test_drawn(streamed):
    wanted = ["HBM  |L0--L1--....S0......S1|", "core |....C0------C1------..|"]
    assert bars.text(streamed(2, 2.0, 4.0, 1.0, buffers=2), 22).splitlines() == wanted
