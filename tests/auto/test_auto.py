"""Programs on whole arrays: their listings, and what is refused; random ones, in explicit mode too, beside JAX's
answers: types, values, gradients, and what is sent.

What a plan is priced at is what it sends: pairs of types on two meshes."""

import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from array_types import meta
from beside_jax import MESH, close, filling, programs, written
from refused import evaluated, refused

from scaling import auto, explicit
from scaling.algebra import reshard
from scaling.algebra.layouts import spec_of
from scaling.algebra.planner import all_layouts
from scaling.book.arrays import largest
from scaling.collectives.plans import run_step
from scaling.mesh import AbstractMesh, Mesh
from scaling.spec import ShardingError
from scaling.trace import trace

ABSTRACT = AbstractMesh(MESH)
ROWS = ("x[B_X, D]",)


def lowered(fn, in_types, out, *arguments):
    """Of arguments, or their shapes."""
    return auto.jit(fn, ABSTRACT, in_types, out).lower(*(meta(*x) if isinstance(x, tuple) else x for x in arguments))


def test_the_books_program():
    def matmul_square(In, W):
        return torch.einsum("bd,df->bf", In * In, W)

    arguments = meta(8, 2048, dtype=torch.bfloat16), meta(2048, 8192, dtype=torch.bfloat16)
    program = lowered(matmul_square, ("In[B_X, D_Y]", "W[D_Y, F]"), "Out[B_X, F]", *arguments)
    assert program.listing.splitlines() == [
        "1. T1[B_X, D_Y] = mul(In[B_X, D_Y], In[B_X, D_Y])",
        "2. Out[B_X, F] {U_Y} = T1[B_X, D_Y] *_D W[D_Y, F]",
        "3. Out[B_X, F] = AllReduce_Y(Out[B_X, F] {U_Y})",
    ]
    assert program.wire_bytes == 2 * 2 * 8192 * 2 / 2
    sizes = lowered(matmul_square, ("[8_X, 2048_Y]", "[2048_Y, 8192]"), "[8_X, 8192_Y]", *arguments)
    assert [str(step) for step in sizes.steps] == ["T2[I_X, L_Y] = ReduceScatter_Y(T2[I_X, L] {U_Y})"]


def test_fsdp_and_tensor_parallelism_are_found():
    """From the types of the weights and of what goes in and out alone: the book's algorithm, line by line."""
    program = lowered(
        lambda In, W: In + F.gelu(In @ W["in"]) @ W["out"],
        ("In[B_X, D_Y]", {"in": "W_in[D_X, F_Y]", "out": "W_out[F_Y, D_X]"}), "Out[B_X, D_Y]",
        (128, 64), {"in": meta(64, 256), "out": meta(256, 64)},
    )  # fmt: skip
    assert program.listing.splitlines() == [
        "1. In[B_X, D] = AllGather_Y(In[B_X, D_Y])",
        "2. W_in[D, F_Y] = AllGather_X(W_in[D_X, F_Y])",
        "3. T1[B_X, F_Y] = In[B_X, D] *_D W_in[D, F_Y]",
        "4. T2[B_X, F_Y] = gelu(T1[B_X, F_Y])",
        "5. W_out[F_Y, D] = AllGather_X(W_out[F_Y, D_X])",
        "6. T3[B_X, D] {U_Y} = T2[B_X, F_Y] *_F W_out[F_Y, D]",
        "7. T3[B_X, D_Y] = ReduceScatter_Y(T3[B_X, D] {U_Y})",
        "8. Out[B_X, D_Y] = add(In[B_X, D_Y], T3[B_X, D_Y])",
    ]


def test_a_type_asked_for_is_taken():
    """`reshard` inside the program: JAX's with_sharding_constraint, the book's example."""

    def matmul(x, W_in, W_out):
        hidden = torch.einsum("bd,df->bf", x, W_in)
        hidden = explicit.reshard(hidden, "hidden[B_X, F_Y]")
        return torch.einsum("bf,df->bd", hidden, W_out)

    program = lowered(matmul, ("x[B_X, D]", "W_in[D, F]", None), "Out[B_X, D]", (8, 16), (16, 32), (16, 32))
    assert [step.op for step in program.steps] == ["AllReduce"]
    assert "T1[B_X, F_Y]: as asked for" in program.listing
    assert torch.equal(matmul(x := torch.ones(2, 2), x, x), torch.full((2, 2), 4.0))  # on one device it is nothing


def test_a_program_with_a_type_has_a_plan():
    assert lowered(lambda x: x.reshape(2, 64), ROWS, "y[B, D_X]", (8, 16)).wire_bytes > 0
    y = auto.jit(lambda x: x.sum(0), ABSTRACT, "x[B_X, D]")(explicit.array(torch.ones(8, 16), "[8_X, 16]", ABSTRACT))
    assert y.type in ("float32[16_X]", "float32[16_YX]")  # the least: a ReduceScatter, and maybe a slice


ELSEWHERE = explicit.array(torch.ones(8, 16), "[8_X, 16]", AbstractMesh(ABSTRACT.sizes))
STRUCTURE = "are a tree of the same structure as what they type"
REFUSED = {
    "lowered(lambda x: x, ('x[B, D_XY]',), 'y[B, D]', (8, 20))": "does not divide into 8 blocks",
    "lowered(lambda x: x, ROWS, 'y[B, D, E]', (8, 20))": "3 dims",
    "lowered(lambda x: x, ROWS * 2, 'y[B, D]', (8, 20))": f"in_types {STRUCTURE}",
    "lowered(lambda x: (x, x), ROWS, ('y[B, D]',), (8, 20))": f"out_types {STRUCTURE}",
    "lowered(torch.trace, ROWS, None, (8, 20))": "trace: not a function whose sharding is known",
    "lowered(lambda x: x + torch.ones(8, 20), ROWS, None, (8, 20))": "fix: give it as an argument",
    "lowered(lambda x: x.add_(1), ROWS, None, (8, 20))": "add_: changes its argument",
    "auto.jit(lambda x: x, ABSTRACT, ROWS)(ELSEWHERE)": "an array is on another mesh",
}
test_refused = refused(evaluated(REFUSED, globals()), ShardingError)


def tensor(shape, seed: int) -> torch.Tensor:
    return torch.tensor(filling(shape, seed), dtype=torch.float64).view(shape)


def in_auto_mode(program, mesh):
    return auto.jit(partial(program.run, torch.einsum, torch.tanh), mesh, tuple(program.in_types), program.types[-1])


def in_explicit_mode(program):
    return partial(program.run, explicit.einsum, torch.tanh, reshard=explicit.reshard)


def arguments(program, mesh) -> list[explicit.Array]:
    given = enumerate(zip(program.shapes, program.in_types, strict=True))
    return [explicit.array(tensor(shape, i), type, mesh) for i, (shape, type) in given]


def derivatives(program, run, mesh) -> list[explicit.Array]:
    """The value, and a cotangent of each argument."""
    y, pull = explicit.vjp(run, *arguments(program, mesh))
    return [y, *pull(explicit.array(tensor(y.shape, 50), program.types[-1], mesh))]


@pytest.mark.slow
def test_it_never_moves_more_than_xla():
    """Most programs move less: XLA gathers what a ReduceScatter or an AllToAll would do."""
    less = 0
    for number, program in enumerate(programs()):
        sent = in_auto_mode(program, ABSTRACT).lower(*(meta(*shape) for shape in program.shapes)).wire_bytes
        assert sent <= program.xla_bytes, number
        less += sent < program.xla_bytes
    assert less >= 40


@pytest.mark.slow
def test_gradients_have_jaxs_types_with_the_reduction_left_to_the_caller():
    """Dims are split as JAX says: over the other axes JAX has reduced the gradient, and here it is still unreduced."""
    for program in programs()[:12]:
        y, *grads = derivatives(program, in_explicit_mode(program), ABSTRACT)
        assert [written(x.layout.dims) for x in (y, *grads)] == [dims for dims, _ in program.derivatives]
        assert (y.layout.unreduced, {frozenset(x.layout.used) for x in grads}) == ((), {frozenset(MESH)})


def compared(mesh, part: slice) -> tuple[list, list]:
    """Which values and gradients are not JAX's; and, of each program in auto mode, the bytes (sent here, planned)."""
    wrong, sent = [], []
    for number, program in enumerate(programs()[part], part.start or 0):
        jitted, whole = in_auto_mode(program, mesh), [tensor(shape, i) for i, shape in enumerate(program.shapes)]
        with trace() as log:
            result = jitted(*arguments(program, mesh))
        sent.append((log.wire_bytes, jitted.lower(*whole).wire_bytes))
        for mode, run in (("auto", jitted), ("explicit", in_explicit_mode(program))):
            found = [x.whole() for x in derivatives(program, run, mesh)]
            if not close([x.flatten().tolist() for x in found], [stored for _, stored in program.derivatives]):
                wrong.append((number, mode))
        wrong += [] if torch.equal(result.whole(), jitted(*whole)) else [(number, "of whole tensors")]
    return wrong, sent


@pytest.mark.parametrize("part", [slice(3), pytest.param(slice(3, 50), marks=pytest.mark.sweep)], ids=str)
def test_values_and_gradients_are_jaxs_in_both_modes(ranks, part):
    results = ranks(compared, {"X": 2, "Y": 2}, part)
    for wrong, _ in [*results, compared(Mesh({"X": 1, "Y": 1}), slice(3))]:
        assert wrong == []
    for each in zip(*(sent for _, sent in results), strict=True):
        assert max(moved for moved, _ in each) == each[0][1], "in a permutation some ranks send nothing"


MESHES = [{"X": 2, "Y": 4}, {"X": 2, "Y": 2, "Z": 2}]
SHAPE = (64, 128)


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "pairs"), [(MESHES[0], 18**2), (MESHES[1], 92**2)], ids=str)
def test_price_is_what_is_sent(sizes, pairs):
    """Of every pair of layouts, of many some; and never more than `reshard` sends, which leaves idle axes alone;
    explicit mode sends the same. And of each step of these plans, sums that are made included, what a trace sees the
    busiest rank send."""
    mesh, x, steps, less = AbstractMesh(sizes), torch.empty(SHAPE, device="meta"), set(), 0
    drawn = [*itertools.product(all_layouts(SHAPE, sizes, tuple(sizes), tuple(sizes)), repeat=2)]
    assert len(drawn) == pairs
    for src, dst in drawn[:: 1 if pairs < 500 else 29]:
        idle = reshard(spec_of(src), spec_of(dst), SHAPE, mesh, idle=True)
        steps.update(idle.steps)
        if {*dst.unreduced} - {*src.unreduced}:
            continue  # only a product makes partial sums
        program = auto.jit(lambda x: x, mesh, str(spec_of(src)), str(spec_of(dst))).lower(x)
        plain = reshard(spec_of(src), spec_of(dst), SHAPE, mesh).wire_bytes(SHAPE, mesh, 4)
        sent = program.wire_bytes, idle.wire_bytes(SHAPE, mesh, 4)
        assert sent == pytest.approx((program.planned,) * 2), (src, dst)
        assert sent[0] <= plain, (src, dst)
        less += sent[0] < plain
    assert less > 0
    ranks = [AbstractMesh(sizes, mesh.coord_of(rank)) for rank in range(8)]
    for step in steps:
        shard, sent = torch.empty(step.before.local_shape(SHAPE, mesh), device="meta"), []
        for rank in ranks:
            with trace() as log:
                run_step(step, [shard], rank)
            sent.append(sum(event.wire_bytes for event in log.events))
        assert largest(sent) == step.wire_bytes(SHAPE, mesh, x.dtype), step


@pytest.mark.slow
def test_states_are_kept_by_what_their_arrays_still_cost():
    """More states than are kept: kept by what they have sent alone, they led to a plan that sends 17,408 bytes."""

    def attention(x, W_Q, W_K, W_V, W_O):
        Q, K, V = x @ W_Q, x @ W_K, x @ W_V
        return x + torch.einsum("bts,bsh->bth", torch.softmax(torch.einsum("bth,bsh->bts", Q, K), -1), V) @ W_O

    types = ("x[B_Y, T, D_X]", "W_Q[D_Y, F]", "W_K[D, F_Y]", "W_V[D, F_Y]", "W_O[D_YX, F]")
    assert lowered(attention, types, None, (8, 16, 32), *[(32, 32)] * 4).wire_bytes <= 11264
