"""What a line may say: every rule of the collectives and of einsum, by lines that keep it and lines that break it."""

import itertools

import pytest
import torch  # noqa: F401  of a line below
from array_types import meta, types
from refused import evaluated, named, refused

from scaling import collectives as c
from scaling.algebra import matmul  # noqa: F401  of a line below
from scaling.algebra.law import check_product, result_type
from scaling.algebra.rules import CALLS, collective_steps
from scaling.collectives import op
from scaling.collectives.op import dual_line
from scaling.mesh import AbstractMesh
from scaling.spec import ShardingError, Spec, format_axes, parse_line

STEPS = {  # a call: the steps that it takes, as "axes over which: type after"
    "AllGather: A[I_YX] -> A[I]": ["YX: A[I]"],
    "AllGather: A[I_X, J_Y] -> A[I, J]": ["X: A[I, J_Y]", "Y: A[I, J]"],
    "AllGather: W[D_{data,model}] -> W[D_data]": ["{model}: W[D_{data}]"],
    "ReduceScatter: A[I, J] {U_XYZ} -> A[I_X, J_Y] {U_Z}": ["X: A[I_X, J] {U_YZ}", "Y: A[I_X, J_Y] {U_Z}"],
    "AllToAll: A[I_X, J_Y] {U_Z} -> A[I, J_YX] {U_Z}": ["X: A[I, J_YX] {U_Z}"],
}


def test_the_steps_of_a_line():
    found = {call: [f"{format_axes(s.axes)}: {s.after}" for s in collective_steps(*call.split(": "))] for call in STEPS}
    assert found == STEPS


MINOR = "the minor (last) axes of a dim; otherwise the blocks would be interleaved"
ILLEGAL = {
    "AllGather: A[I_X] * B[J] -> C[I]": "a collective has one operand; einsum multiplies",
    "AllGather: A[I_X, J] -> A[J, I]": "does not change or reorder the dims",
    "AllGather: A[I_XY] -> A[I_Y]": MINOR,
    "AllGather: A[I_X, J] -> A[I, J_X]": "fix: use all_to_all",
    "AllGather: A[I] -> A[I]": "no dim changes",
    "AllGather: A[I_X] {U_Y} -> A[I]": "neither adds up partial sums nor makes any",
    "AllGather: A[I_X] -> A[I] {U_Y}": "fix: use reshard, which makes the terms of a sum over Y",
    "Slice: A[I_X] -> A[I_YX]": MINOR,
    "Slice: A[I] {U_X} -> A[I_X]": "fix: use reduce_scatter",
    "ReduceScatter: A[I] -> A[I_X]": "fix: use shard; or write {U_X} on the operand",
    "ReduceScatter: A[I] {U_X} -> A[I_Y]": "the same axes leave {U} and enter one dim",
    "ReduceScatter: A[I] {U_X} -> A[I]": "fix: use all_reduce",
    "ReduceScatter: A[I_Y] {U_X} -> A[I_XY]": "dim I goes from Y to XY",
    "AllReduce: A[I] {U_X} -> A[I] {U_X}": "nothing is reduced",
    "AllReduce: A[I] {U_X} -> A[I] {U_Y}": "Y goes from no dim to {U}",
    "AllReduce: A[I] {U_X} -> A[I_X]": "AllReduce only removes axes from {U}",
    "AllToAll: A[I_X, J] -> A[I, J_Y]": "fix: use all_gather",
    "AllToAll: A[I_X, J_Y] -> A[I_Y, J_X]": "the minor axes of one dim",
    "AllToAll: A[I_X, J, K_Y] -> A[I, J_XY, K]": "use reshard",
    "Broadcast: A[I] {U_X} -> A[I] {U_Y}": "only the root's part counts",
    "Reduce: A[I] {U_X} -> A[I]": "only the root's part counts",
    "Scatter: A[I, J] {U_XY} -> A[I_X, J_Y]": "has one root, and so changes one dim",
    "Gather: A[I_X] -> A[I]": "Gather is A[I_X] -> A[I] {U_X}",
}


@pytest.mark.parametrize("call", ILLEGAL)
def test_illegal_collectives_are_refused_with_the_rule(call):
    with pytest.raises(ShardingError) as error:
        collective_steps(*call.split(": "))
    message = str(error.value)
    assert message.startswith(f"{call}\n")
    assert ILLEGAL[call] in message
    assert "\n  rule: " in message


PRODUCTS = [
    "A[I_X, J] * B[J, K_Y] -> C[I_X, K_Y]",  # case 1
    "A[I_X, J_Y] * B[J_Y, K] -> C[I_X, K] {U_Y}",  # case 3
    "A[I, J] * B[J, K] -> C[K, I]",
    "A[B_X, I] * B[B_X, J] -> C[B_X, I, J]",  # a dim that both have and that stays
    "A[I_X] -> C[] {U_X}",
    "A[I, J] {U_X} * B[J, K_Y] -> C[I, K_Y] {U_X}",
    "A[I, J_Y] {U_X} * B[J_Y, K] -> C[I, K] {U_XY}",
    "A[I, J] *_J B[J, K] -> C[I, K]",
]


@pytest.mark.parametrize("line", PRODUCTS)
def test_legal_products(line):
    assert str(result_type(line)) == str(check_product(line).result) == line.split(" -> ")[1]


KINDS = {kind: getattr(c, name) for name, kind in CALLS.items()}
TRANSPOSED = "AllGather", "ReduceScatter", "AllReduce", "AllToAll"
SIZES, ABSTRACT = {"I": 12, "J": 24}, AbstractMesh({"X": 2, "Y": 3})


def may(kind, before: Spec, after: Spec) -> bool:
    """The rules once more: whether a collective may lead from one type to the other."""
    changed = [(a, b) for (_, a), (_, b) in zip(before.dims, after.dims, strict=True) if a != b]
    lost = [a[len(b) :] for a, b in changed if a[: len(b)] == b]  # the minor axes of a dim
    got = [b[len(a) :] for a, b in changed if b[: len(a)] == a]
    gone, come = {*before.unreduced} - {*after.unreduced}, {*after.unreduced} - {*before.unreduced}
    match kind:
        case "AllGather":
            return 0 < len(changed) == len(lost) and not gone | come
        case "Slice":
            return 0 < len(changed) == len(got) and not gone | come
        case "ReduceScatter" | "Scatter":
            one = kind == "ReduceScatter" or len(changed) == 1
            return one and 0 < len(changed) == len(got) and gone == {*itertools.chain(*got)} and not come
        case "Gather":
            return 1 == len(changed) == len(lost) and come == {*lost[0]} and not gone
        case "AllReduce" | "Broadcast":
            return not changed and bool(gone) and not come
        case "Reduce":
            return not changed and bool(before.unreduced) and not gone | come
        case "AllToAll":
            return len(changed) == 2 and len(lost) == len(got) == 1 and lost == got and not gone | come
    return False


def said(step, kind: str):
    dims = {"AllToAll": (step.dim, step.to), "AllReduce": (), "Broadcast": (), "Reduce": ()}.get(kind, step.dim)
    return step.before, step.after, step.axes, step.splits, dims


@pytest.mark.parametrize("kind", KINDS)
def test_a_line_is_refused_or_has_the_shape_of_its_type_and_a_legal_transpose(kind):
    """Every pair of types of a matrix over two axes. By the law of cotangents: the transposed types, unreduced where
    the array was replicated, and replicated over the axes of partial sums that stay, keep the rules too."""
    for before, after in itertools.product(types("XY"), repeat=2):
        line = f"{before} -> {after}"
        try:
            steps = collective_steps(kind, line)
        except ShardingError as error:
            assert str(error).startswith(f"{kind}: {line}\n")  # noqa: PT017
            assert not may(kind, before, after), line
            continue
        assert may(kind, before, after), line
        assert steps[0].before.same_sharding(before)
        assert steps[-1].after.same_sharding(after)
        assert all(a.after == b.before for a, b in itertools.pairwise(steps))
        stacked = collective_steps(kind, line.replace("A[", "A[L, "))
        assert [said(step.stacked("L"), kind) for step in steps] == [said(step, kind) for step in stacked]
        shape = before.local_shape(SIZES, ABSTRACT)
        assert KINDS[kind](line, meta(*shape), ABSTRACT).shape == after.local_shape(SIZES, ABSTRACT)
        for step in steps if kind in TRANSPOSED else ():
            given, gives = (spec.cotangent(step.axes) for spec in (step.after, step.before))
            assert dual_line(f"{step.before} -> {step.after}", step.axes) == f"{given} -> {gives}"
            (back,) = collective_steps(op.KINDS[kind].dual, f"{given} -> {gives}")
            assert back.axes == step.axes


NO_PRODUCTS = named(
    """
line                                            words
A[I, J_X] * B[J, K] -> C[I, K]
    ["case 2", "dim J is split over X in one operand and not at all in the other"]
A[I, J] * B[J_X, K] -> C[I, K]
    ["case 2", "dim J is split not at all in one operand and over X in the other"]
A[I, J_X] * B[J_Y, K] -> C[I, K]                ["case 2", "over X in one operand and over Y in the other"]
A[I, J_X] * B[J_X, K] -> C[I, K]
    ["case 3", "fix: write C[I, K] {U_X}, then reduce_scatter or all_reduce"]
A[I, J_XY] * B[J_XY, K] -> C[I, K] {U_X}        ["case 3", "along Y", "write C[I, K] {U_XY}"]
A[I_X, J] * B[J, K_X] -> C[I_X, K]              ["case 4", "two dims of the operands are split over X"]
A[I_X, J] * B[J, K_X] -> C[I, K]
    ["case 4", "diagonal blocks", "fix: all_gather one operand over X first"]
A[I, J] {U_X} * B[J, K] -> C[I, K]              ["a product with a partial sum is a partial sum", "write C[I, K] {U_X}"]
A[I, J] {U_X} * B[J, K] {U_X} -> C[I, K] {U_X}  ["a product of sums is not the sum of the products"]
A[I, J] {U_X} * B[J, K_X] -> C[I, K_X]          ["one operand is unreduced over X, over which the other is split"]
A[I, J] * B[J, K] -> C[I, K] {U_X}              ["the product of these operands is C[I, K]", "einsum sends nothing"]
A[I_X, J] * B[J, K] -> C[I, K]                  ["the product of these operands is C[I_X, K]"]
A[I, J] * B[J, K] -> C[I, M]                    ["dim M is in no operand"]
A[I, J] *_K B[J, K] -> C[I, K]                  ["*_K says that K is contracted"]
A[I] * B[I] * C[I] -> D[I]                      ["einsum multiplies two operands at a time"]
""",
    globals(),
)


@pytest.mark.parametrize("line", NO_PRODUCTS)
def test_illegal_products_are_refused_with_the_case(line):
    with pytest.raises(ShardingError) as error:
        c.einsum(line, None, None)  # before an operand is looked at
    for words in [str(parse_line(line)), *NO_PRODUCTS[line]]:
        assert words in str(error.value)


MESH = AbstractMesh({"X": 4, "Y": 2})
MISUSED = r"""
call                                                      words of its error
c.all_gather('A[I_Z] -> A[I]', meta(2), MESH)             unknown mesh axis Z: the mesh has X=4, Y=2
c.send('A[I]', meta(2), MESH, 'X', 0)                     must be another one of 0..3
c.recv('A[I]', meta(2), MESH, 'X', 4)                     must be another one of 0..3
c.ppermute('A[I]', meta(2), MESH, 'X', [(0, 1), (2, 1)])
    rule: sources are distinct, targets are distinct, and all lie in 0..3
c.ppermute('A[I]', meta(2), MESH, 'Y', [(0, 2)])          all lie in 0..1
c.broadcast('A[I] {U_X} -> A[I]', meta(2), MESH, root=4)  root 4 is not in 0..3
c.reduce_scatter('A[I] {U_X} -> A[I_X]', meta(6), MESH)
    dim I of this shard has size 6, which does not divide into 4 blocks over X
c.all_to_all('A[I_X, J] -> A[I, J_X]', meta(2, 6), MESH)  dim J of this shard
c.all_gather('A[I_X] -> A[I]', torch.ones(2), MESH)
    the operand is on cpu\n  fix: give it tensors on the meta device
c.all_gather(meta(2), 'A[I_X] -> A[I]', MESH)             written as a string
c.einsum('A[I, J] * B[J, K] -> C[I, K]', meta(2, 3), meta(6, 4))
    shards of shapes [(2, 3), (6, 4)]: they differ in the size of dim J
c.einsum('A[I, J] * B[J, K] -> C[I, K]', meta(2, 3))      shapes [(2, 3)]
c.einsum('A[I, J] -> C[I]', meta(2, 3), meta(2))          shapes [(2, 3), (2,)]
matmul('A[I, J]', 'B[J, K]', cost=len)                    without a result the rules decide, not a cost
"""
test_misuse_is_refused_before_anything_is_sent = refused(evaluated(MISUSED, globals()), ShardingError, "")
