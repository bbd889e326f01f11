import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scaling import cost
from scaling.hardware import Chip, Measured, chip
from scaling.hardware.torus import Torus, slice_of

V4P, V5E, V5P = chip("v4p"), chip("v5e"), chip("v5p")
shapes = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)


@st.composite
def tori(draw):
    shape = draw(shapes)
    return Torus(shape, tuple(draw(st.booleans()) for _ in shape))


@settings(deadline=None, max_examples=40, derandomize=True)
@given(tori())
def test_all_to_all_equals_the_fullest_link_of_the_routed_one(torus):
    big = Chip("own", "tpu", axes=3, link_bw=1e9, wrap="none")
    routed = torus.all_to_all_seconds(1e12, 1e9)
    assert cost.all_to_all(1e12, big, torus.shape, torus.wrap, exact=True) == pytest.approx(routed, rel=1e-9)


@settings(deadline=None, max_examples=40, derandomize=True)
@given(tori())
def test_hops_are_the_diameter(torus):
    slow = Chip("own", "tpu", axes=3, link_bw=1e9, wrap="none")
    assert cost.all_gather(0, slow, torus.shape, torus.wrap) == pytest.approx(torus.diameter * 1e-6)


@pytest.mark.slow
@settings(deadline=None, max_examples=25, derandomize=True)
@given(tori())
def test_torus_links_and_distances(torus):
    for a in torus.chips():
        assert all(torus.distance(a, b) == 1 or torus.size == 1 for b in torus.neighbours(a))
    distances = [torus.distance(a, b) for a in torus.chips() for b in torus.chips()]
    assert max(distances) == torus.diameter
    assert sum(distances) / torus.size**2 == pytest.approx(torus.mean_distance)
    loads = torus.all_to_all_loads()
    assert sum(loads.values()) == pytest.approx(sum(distances))  # every hop is on some link
    assert set(loads) <= set(torus.links())


def test_torus_numbers():
    ring, line = Torus((16,), (True,)), Torus((16,), (False,))
    assert (ring.diameter, line.diameter) == (8, 15)
    assert (ring.bisection_links, line.bisection_links) == (2, 1)
    pod = slice_of(V5P, (16, 20, 28))
    assert (pod.size, pod.diameter, pod.bisection_links) == (8960, 32, 640)
    corner = slice_of(V5E, (4, 4))
    assert len(corner.neighbours((0, 0))) == 2
    assert corner.distance((0, 0), (3, 3)) == 6
    assert len(slice_of(V4P, (4, 4, 4)).neighbours((0, 0, 0))) == 6


def test_all_gather_forms():
    V = 1e9
    assert cost.all_gather(V, V5P, 4) == V / 1.8e11  # a ring: whatever its length
    assert cost.all_gather(V, V5P, (4, 8, 4)) == pytest.approx(V / 5.4e11)
    assert cost.all_gather(V, V5P, 8, exact=True) == pytest.approx(7 / 8 * V / 1.8e11)
    assert cost.all_gather(V, V5E, 8) == pytest.approx(7 / 8 * V / 4.5e10)  # a line
    assert cost.all_gather(V, V5E, (8, 16)) == pytest.approx(V / (3 * 4.5e10))  # one line, one ring
    assert cost.all_gather(V, V5E, (1, 16)) == cost.all_gather(V, V5E, 16)
    assert cost.all_gather(V, V5E, 1) == 0
    assert cost.all_to_all(V, V5P, (8, 4), wrap=True) == pytest.approx(V * 8 / (4 * 32 * 1.8e11))
    assert cost.all_to_all(V, V5P, (8, 4), wrap=False) == pytest.approx(2 * V * 8 / (4 * 32 * 1.8e11))
    assert cost.reduce_scatter(V, V5P, 4) == cost.all_gather(V, V5P, 4)
    assert cost.all_reduce(V, V5P, 4) == 2 * cost.all_gather(V, V5P, 4)


def test_latency_and_bandwidth_meet():
    limit = cost.latency_bound_bytes(V5E, 16)
    assert limit == pytest.approx(16 * 45e3)
    assert cost.all_gather(limit, V5E, 16) == pytest.approx(8e-6)
    assert cost.all_gather(limit / 2, V5E, 16) == pytest.approx(8e-6)
    assert cost.all_gather(2 * limit, V5E, 16) == pytest.approx(16e-6)


def test_point_to_point():
    assert cost.point_to_point(0, V5E, 6, 2) == pytest.approx(6e-6)
    assert cost.point_to_point(16_777_216, V5E, 6, 2) == pytest.approx(192.4e-6, rel=1e-4)
    assert cost.permute(9e10, V5P) == pytest.approx(1 + 1e-6)


def test_by_name():
    for op, f in (("AllGather", cost.all_gather), ("AllReduce", cost.all_reduce), ("AllToAll", cost.all_to_all)):
        assert cost.seconds(op, 1e8, V5P, (4, 4)) == f(1e8, V5P, (4, 4))
    assert cost.seconds("CollectivePermute", 1e8, V5P, 4) == cost.permute(1e8, V5P)
    for op in ("Gather", "Scatter"):  # the root has all blocks but its own on the two links of its ring
        assert 0.75e8 / (2 * V5P.need("link_bw")) <= cost.seconds(op, 1e8, V5P, 4) <= 1e8 / (2 * V5P.need("link_bw"))


def test_a_measured_chip_uses_its_measurements():
    box = Chip("box", "cpu", measured=(Measured("AllGather", 2, 1e-4, 1e9),))
    assert cost.seconds("AllGather", 1e9, box, 2) == pytest.approx(1.0001)
    assert cost.seconds("AllGather", 1e9, box, 1) == 0
    with pytest.raises(ValueError, match=r"AllToAll over 2 ranks was not measured \(there is: AllGather over 2\)"):
        cost.seconds("AllToAll", 1e9, box, 2)
