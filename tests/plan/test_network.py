import math
from functools import partial

import pytest

from scaling.cost import gpu
from scaling.cost.lanes import AxisSpan, exchange, gather_price, join_spans
from scaling.hardware import chip
from scaling.plan.job import AXES
from scaling.plan.network import Unplaced, book, placements, slice_shape, torus, torus_meshes, tree

V5P, H100 = chip("v5p"), chip("h100")
approx = partial(pytest.approx, rel=1e-9, abs=0)  # seconds a byte are below the usual absolute tolerance


def sizes(**given):
    return dict.fromkeys(AXES, 1) | given


def test_slices():
    given = {8960: (16, 20, 28), 4096: (16, 16, 16), 7: (1, 1, 7)}
    assert {chips: slice_shape(V5P, chips) for chips in given} == given
    with pytest.raises(ValueError, match="8,950 chips are not a slice of a 16x20x28 pod of v5p; fix: take 8,"):
        slice_shape(V5P, 8950)


def test_half_of_a_ring_is_a_line_and_its_rest_is_slow():
    """Of whole axes an AllGather is the book's, whose forms stand in cost/test_cost.py."""
    inner, outer = AxisSpan(0, 8, 1, False, False), AxisSpan(0, 2, 8, True, False)
    assert gather_price(V5P, [inner])[0] == approx(7 / 8 / 9e10)  # links one way
    assert gather_price(V5P, [outer])[0] == approx(8 / 1.8e11)  # eight groups share each link
    assert join_spans([inner, outer]) == (AxisSpan(0, 16, 1, True, True),)
    rest = AxisSpan(1, 20, 1, True, True)
    assert gather_price(V5P, [outer, rest]) == approx(((2 / 40) * 8 / 1.8e11 + 1 / 1.8e11, 18e-6))  # the least
    mixed = [AxisSpan(0, 16, 1, True, True), AxisSpan(1, 4, 1, False, True)]
    assert exchange(chip("v5e"), mixed)[0] == approx(16 / 4 / (2 * chip("v5e").link_bw))  # the ring's hops are longest


def test_placements_lie_on_the_torus():
    axes, limits = ("fsdp", "tensor"), (8960, 64)
    found = placements(V5P, (16, 20, 28), axes, limits)
    for placed in found:
        for axis, limit in zip(axes, limits, strict=True):
            spans = placed.get(axis, ())
            assert math.prod(s.size for s in spans) <= limit
            assert sum(not s.whole for s in spans) <= 1
        for i, length in enumerate((16, 20, 28)):
            here = sorted((s for spans in placed.values() for s in spans if s.torus == i), key=lambda s: s.stride)
            assert math.prod(s.size for s in here) == length
            assert [s.stride for s in here] == [1, here[0].size][: len(here)]
    lengths = {math.prod(s.size for s in placed.get("tensor", ())) for placed in found}
    dividing = {d for d in range(1, 65) if any(L % d == 0 for L in (16, 20, 28))}
    assert lengths == dividing | {32, 40, 48, 56, 60, 64} & lengths
    ((mesh, placed),) = torus_meshes(V5P, 7, 1, ("fsdp",), (7,))
    assert (mesh, placed) == ({"fsdp": 7}, {"fsdp": (AxisSpan(placed["fsdp"][0].torus, 7, 1, False, True),)})


def test_lanes_of_a_torus():
    placed = {
        "fsdp": (AxisSpan(0, 16, 1, True, True), AxisSpan(1, 16, 1, True, True)),
        "tensor": (AxisSpan(2, 4, 1, False, False),),
    }
    network = torus(V5P, sizes(fsdp=256, tensor=4), 3, placed)
    assert network.lanes["weights"].seconds(1e9) == approx(1e9 / 3.6e11)
    assert 2 * network.lanes["tensor"].seconds(1e9) == approx(2e9 * 3 / 4 / 9e10)
    assert network.lanes["weights"].seconds(1.0) == approx(16e-6)  # hops
    assert network.lanes["weights"].links == (True, True, False, False)
    pods = torus(V5P, sizes(pod=2, fsdp=256, tensor=4), 3, placed)
    assert 2 * pods.lanes["pod"].seconds(1e9) == approx(2e9 / 6.25e9)
    ideal = book(V5P, sizes(fsdp=256, tensor=4), {"fsdp": 2, "tensor": 1})
    assert ideal.lanes["tensor"].seconds(1e9) == approx(1e9 / 1.8e11)


def test_lanes_of_a_tree():
    network = tree(H100, sizes(pipe=2, fsdp=4, tensor=8), 3)
    assert network.lanes["tensor"].seconds(1e9) == approx(1e9 * 7 / 8 / 450e9)
    assert network.lanes["weights"].seconds(1e9) == approx(8e9 * 3 / 4 / 400e9)  # 8 groups, one node
    assert network.lanes["pipe"].seconds(1e9) == approx(1e9 / 50e9)
    assert network.lanes["tensor"].links[0]
    assert network.lanes["weights"].links[1]
    with pytest.raises(Unplaced, match="groups of 6 GPUs lie across nodes of 8"):
        tree(H100, sizes(data=4, tensor=6), 1)
    tree(H100, sizes(tensor=6), 1)  # all there is: 6 of a node's GPUs


def test_experts_over_nodes_send_a_token_once_to_each():
    tokens, D, copies = 4096, 7168, 8
    inside = tree(H100, sizes(expert=8), 1, copies=8).lanes["expert"]
    assert inside.seconds(2 * tokens * D) == approx(2 * tokens * D * 8 * 7 / 8 / 450e9)
    meshed = tree(chip("mi300x"), sizes(expert=2, tensor=2), 1, copies=2).lanes["expert"]  # four GPUs, no switches
    assert meshed.seconds(1e9) == approx(2e9 / 2 / (3 * 64e9))
    across = tree(H100, sizes(expert=64), 1, copies, groups=64).lanes["expert"]
    layer = gpu.expert_layer(64 * tokens, D, 2048, 64, copies, H100)
    assert 2 * across.seconds(2 * tokens * D) == approx(layer.comms)
    limited = tree(H100, sizes(expert=64), 1, copies, groups=4).lanes["expert"]
    assert limited.per_byte == approx(across.per_byte / 2)
