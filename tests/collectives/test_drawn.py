"""Calls drawn at random, right and wrong, beside what their types mean (tests/misuse/typed.py), on every kind of mesh;
and the ways that data takes on NCCL, taken over gloo, which has the same calls. And some cases of the rooms above the
collectives: tests/sweeps/fuzz.py runs ten thousand. Every dtype through every collective, product and derivative:
float64's value, or an error."""

import itertools
from collections import Counter
from functools import partial

import pytest
import torch
from array_types import types
from machine import on_ranks
from misuse import rooms, typed
from misuse.entries import AsOnNccl
from misuse.typed import CALLS, is_legal
from torch.func import jvp, vjp, vmap

from scaling import collectives as c
from scaling.mesh import AbstractMesh, Mesh
from scaling.spec import ShardingError

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


SPOILED = {
    "decode": 60,
    "serve": 30,
    "sampling": 200,
    "attention": 100,
    "experts": 100,
    "loss": 25,
    "training": 25,
    "": 120,
}


@pytest.mark.slow
@pytest.mark.parametrize("room", SPOILED)
def test_no_argument_that_is_spoiled_gives_a_wrong_number(room):
    """Arrays, params and numbers are drawn, of one room or of any. Right calls equal `misuse.plain`, and all others
    are refused with their fix."""
    outcomes, failures = rooms.spoiled(room, SPOILED[room])
    assert not failures, "\n\n".join(failures)
    for said in ("right", "refused"):
        assert sum(count for outcome, count in outcomes.items() if said in outcome) > SPOILED[room] / 10


FLOATS = [torch.float32, torch.bfloat16]
SCALED = [torch.float8_e4m3fn, torch.float8_e5m2]
OTHERS = [torch.complex64, torch.int8, torch.int16, torch.int64]  # as they are: derivatives are of floats
GATHER, SUM = "A[I_X, J] -> A[I, J]", "A[I, J] {U_X} -> A[I, J]"
TYPED = {
    "all_gather": partial(c.all_gather, GATHER),
    "reduce_scatter": partial(c.reduce_scatter, "A[I, J] {U_X} -> A[I_X, J]"),
    **{f"all_reduce, {op}": partial(c.all_reduce, SUM, op=op) for op in ("sum", "mean", "max", "min")},
    "all_to_all": partial(c.all_to_all, "A[I_X, J] -> A[I, J_X]"),
    "ppermute": lambda x, mesh: c.ppermute("A[I, J]", x, mesh, "X", [(0, 1)]),
    "shard": partial(c.shard, "A[I, J] -> A[I_X, J]"),
    "broadcast": partial(c.broadcast, SUM),
    "reduce": partial(c.reduce, "A[I, J] {U_X} -> A[I, J] {U_X}"),
    "scatter": partial(c.scatter, "A[I, J] {U_X} -> A[I_X, J]"),
    "gather": partial(c.gather, "A[I_X, J] -> A[I, J] {U_X}"),
}
PRODUCTS = {line: partial(c.einsum, line) for line in ("A[I, J] * B[J, K] -> C[I, K]", "A[I, J] * B[I, J] -> C[I, J]")}
SUMS = {line: partial(c.einsum, line) for line in ("A[I, J] -> C[J]", "A[I, J] -> A[J, I]")}


def derived(f, x, how):
    """What a derivative gives of f at x, along a tangent or cotangent of ones."""
    if how == "value":
        return f(x)
    if how == "vmap":
        return vmap(f)(torch.stack([x, x]))[1]
    if how == "jvp":
        return jvp(f, (x,), (torch.ones_like(x),))[1]
    if how == "vjp":
        y, pull = vjp(f, x)
        return pull(torch.ones_like(y))[0]
    y = f(leaf := x.detach().requires_grad_())
    return torch.autograd.grad(y, leaf, torch.ones_like(y))[0]


def outcome(f, x, wanted, how):
    try:
        found = derived(f, x, how)
    except (ShardingError, RuntimeError) as error:
        return type(error).__name__
    same = found.is_meta or torch.equal(found.to(torch.complex128), wanted.to(torch.complex128))
    return "right" if same and found.dtype == x.dtype else f"wrong: {found.tolist()}, not {wanted.tolist()}"


@pytest.mark.slow
@on_ranks({"X": 2})
def test_a_result_equals_float64_s_or_is_refused(mesh):
    seen = Counter()
    x = torch.tensor([[1.0, 2, 1, 4], [2, 1, 4, 2], [1, 1, 2, 1], [4, 2, 1, 1]]) * (1 + mesh.coord["X"])
    for name, call in TYPED.items():
        f = partial(call, mesh=mesh)
        for how in ("value", "vmap", "jvp", "vjp", "leaf"):
            wanted = derived(f, x.double(), how)
            for dtype in FLOATS + SCALED + OTHERS * (how == "value"):
                found = outcome(f, x.to(dtype), wanted, how)
                assert not found.startswith("wrong"), (name, how, dtype, found)
                assert found == "right" or dtype not in FLOATS, (name, how, dtype, found)
                seen[dtype in SCALED, how, found] += 1
    assert seen[True, "leaf", "ShardingError"] >= 2 * 5  # all that add, and the transposes of those that copy
    assert seen[True, "leaf", "right"] >= 2 * 3  # what only moves


@pytest.mark.parametrize("line", [*PRODUCTS, *SUMS])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_product_without_its_scales_is_refused_and_a_transpose_is_not(line, device):
    x = torch.tensor([[1.0, 2], [4, 1]], device=device)
    for how, dtype in itertools.product(("value", "vjp", "leaf"), FLOATS + SCALED):
        f = (lambda x: SUMS[line](x)) if line in SUMS else (lambda x: PRODUCTS[line](x, x))
        found = outcome(f, x.to(dtype), derived(f, x.double(), how), how)
        moved = line == "A[I, J] -> A[J, I]"
        assert found == ("right" if dtype in FLOATS or moved else "ShardingError"), (how, dtype)
