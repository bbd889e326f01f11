"""Calls drawn at random, right and wrong, beside what their types mean (tests/misuse/typed.py), on every kind of mesh;
and the ways that data takes on NCCL, taken over gloo, which has the same calls. And some cases of the rooms above the
collectives: tests/sweeps/fuzz.py runs ten thousand."""

import itertools

import pytest
import torch
from array_types import types
from machine import on_ranks
from misuse import rooms, typed
from misuse.entries import AsOnNccl, Draw, tried
from misuse.typed import CALLS, is_legal
from torch.func import vjp

from scaling import collectives as c
from scaling.mesh import AbstractMesh, Mesh

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's own tracers


@pytest.mark.parametrize(
    ("mesh", "on_nccl", "cases"),
    [
        ({"X": 1, "Y": 1}, False, 200),
        ({"X": 2, "Y": 2}, False, 300),
        ({"X": 2, "Y": 2}, True, 200),
        ({"X": 2, "Y": 4}, False, 100),  # an order of blocks that is not its own inverse
        ({"P": 2, "X": 2, "Y": 2}, True, 100),
    ],
    ids=str,
)
def test_no_number_is_wrong_without_an_error(mesh, on_nccl, cases):
    outcomes, failures = typed.run(AsOnNccl(mesh.sizes) if on_nccl else mesh, cases, 1)
    assert not failures, "\n\n".join(failures)
    for said in (": right", "refused"):
        assert sum(count for outcome, count in outcomes.items() if said in outcome) > cases / 4


@on_ranks({"X": 2, "Y": 2})
def test_a_derivative_of_any_resharding_is_its_transpose(mesh):
    def case(number):
        draw = Draw.on(mesh, "", f"reshard {number}")
        draw.dtypes, draw.modes, draw.sizes = (torch.float64,), ["leaf", "vjp"], [2, 4]
        return typed.collective(draw, ["reshard"])

    outcomes, failures = tried(case, 60)
    assert not failures, "\n\n".join(failures)
    assert outcomes["right, leaf"] + outcomes["right, vjp"] > 30, outcomes


def test_every_legal_line_gives_the_shape_of_its_type_and_on_one_device_the_identity():
    mesh, sizes = AbstractMesh({"X": 32, "Y": 16}, {"X": 31, "Y": 3}), {"I": 4096, "J": 8192}
    one, whole = Mesh({"X": 1, "Y": 1}, checked=True), torch.randn(16, 8)
    lines = [
        (kind, f"{before} -> {after}", before, after)
        for before, after, kind in itertools.product(types("XY"), types("XY"), CALLS)
        if is_legal(kind, f"{before} -> {after}", before, after)
    ]
    assert len(lines) > 100
    for kind, line, before, after in lines:
        x, call = torch.empty(before.local_shape(sizes, mesh), device="meta", dtype=torch.bfloat16), getattr(c, kind)
        y, pull = vjp(lambda x: call(line, x, mesh), x)  # noqa: B023
        later = call(line, x, mesh) if kind == "shard" else call(line, x, mesh, async_op=True).wait()
        for result in (y, later):
            found = result.device.type, result.dtype, result.shape
            assert found == ("meta", x.dtype, after.local_shape(sizes, mesh)), line
        assert pull(y)[0].shape == x.shape, line
        same, pull = vjp(lambda x: call(line, x, one), whole)  # noqa: B023
        assert torch.equal(same, whole), line
        assert torch.equal(pull(whole)[0], whole), line
    assert torch.equal(c.ppermute("A[I_X, J]", whole, one, "X", []), torch.zeros(16, 8))


@pytest.mark.slow
def test_no_number_is_wrong_without_an_error_in_the_rooms_above_the_collectives():
    outcomes, failures = rooms.spoiled("", 120, 1)
    assert not failures, "\n\n".join(failures)
    assert sum(count for outcome, count in outcomes.items() if "right" in outcome) > 20
    assert sum(count for outcome, count in outcomes.items() if "refused" in outcome) > 50
