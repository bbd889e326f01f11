import itertools

import pytest

from scaling.book.streaming import draw_stream, stream_chunks


@pytest.mark.parametrize("times", [(3.0, 1.0, 0.5), (1.0, 3.0, 0.5), (1.0, 1.0, 1.0)])
@pytest.mark.parametrize("chunks", [1, 2, 7])
def test_one_buffer_adds_up_and_two_overlap(times, chunks):
    load, compute, store = times
    serial, double = (stream_chunks(chunks, *times, buffers=n, first=2.0) for n in (1, 2))
    assert serial.seconds == pytest.approx(2 + chunks * sum(times))
    assert max(2 + chunks * (load + store), chunks * compute) <= double.seconds <= serial.seconds
    for run in (serial, double):
        assert (run.busy("HBM"), run.busy("core")) == pytest.approx((2 + chunks * (load + store), chunks * compute))
    if load > compute:  # HBM is never idle but for the last panel's product
        assert double.seconds == pytest.approx(2 + chunks * (load + store) + max(0, compute - (chunks > 1) * store))
    if compute > load + store:  # nor is the core, once it has begun
        assert double.seconds == pytest.approx(2 + load + chunks * compute + store)


def test_a_chunk_waits_for_its_place_and_each_unit_does_one_thing_at_a_time():
    run = stream_chunks(6, 1.0, 2.0, 0.5, buffers=2)
    by_name = {(work.kind, work.chunk): work for work in run.works}
    for chunk in range(6):
        load, compute, store = (by_name[kind, chunk] for kind in ("load", "compute", "store"))
        assert load.end <= compute.start
        assert compute.end <= store.start
        assert chunk < 2 or load.start >= by_name["compute", chunk - 2].end
    for unit in ("HBM", "core"):
        works = sorted((work for work in run.works if work.unit == unit), key=lambda work: work.start)
        assert all(a.end <= b.start for a, b in itertools.pairwise(works))
    with pytest.raises(ValueError, match="one or more of each"):
        stream_chunks(0, 1.0, 1.0, 1.0)


def test_drawn():
    wanted = ["HBM  |L0--L1--....S0......S1|", "core |....C0------C1------..|"]
    assert draw_stream(stream_chunks(2, 2.0, 4.0, 1.0, buffers=2), 22).splitlines() == wanted
