"""shard_map beside JAX's (numbers stored by tests/oracles/jax_answers.py), under torch's transforms, and compiled; and
what it and its collectives would cut off, widen or write through to the caller: refused, or made right."""

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from beside_jax import close, filling
from machine import on_ranks
from problems import drawn
from programs import TABLES, evaluate
from refused import named, refused
from torch.func import grad, jvp, vjp, vmap

from scaling import shard_map as manual
from scaling import trace
from scaling.mesh import AbstractMesh, Mesh
from scaling.shard_map import all_gather, axis_index, pcast, pmax, pmean, psum, psum_scatter, pvary, shard_map, vma
from scaling.shard_map.types import Marks, marks
from scaling.spec import ShardingError

TABLE, TYPED = (json.loads(path.read_text()) for path in TABLES)
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # of torch's own, at the first jvp
MESH = AbstractMesh({"X": 4, "Y": 2})


A, W, R = drawn((8, 6), (6, 5), (8, 5))


def here(fn, in_specs, out_specs):
    return shard_map(fn, MESH, in_specs, out_specs, in_process=True)


# torch's functions, and ours, under the names that programs use
LIB = SimpleNamespace(**vars(torch) | vars(torch.func) | vars(manual), stop=torch.detach)


def partition(spec, unreduced=()) -> str:
    entries = [repr(tuple(axes) or None) for axes in spec]
    return f"P({', '.join(entries + ([f'unreduced={ {*unreduced} }'] if unreduced else []))})"


def tensor(shape, seed: int) -> torch.Tensor:
    return torch.tensor(filling(shape, seed), dtype=torch.float64).reshape(shape)


def is_jaxs(row: dict, mesh, in_process: bool) -> bool:
    """Whether value and cotangents are JAX's, or both refuse."""
    inputs = [tensor(i["shape"], n) for n, i in enumerate(row["inputs"])]
    specs = tuple(partition(i["spec"]) for i in row["inputs"])
    out_spec = partition(row["out_spec"], row.get("unreduced", ()))
    program = shard_map(lambda *shards: evaluate(row, shards, LIB), mesh, specs, out_spec, in_process=in_process)
    try:
        out, pull = vjp(program, *inputs)
    except ShardingError:
        return "refused" in row
    found = [out, *pull(tensor(out.shape, 99))]
    return list(out.shape) == row.get("shape") and close([x.flatten().tolist() for x in found], row["digests"])


def with_every_step(rows) -> list:
    """A few of the programs, in which all steps occur that occur in any."""
    steps = [{what for what, *_ in row["steps"]} for row in rows]
    chosen, missing = [], set().union(*steps)
    while missing:
        most = max(range(len(rows)), key=lambda i: len(steps[i] & missing))
        chosen.append(rows[most])
        missing -= steps[most]
    return chosen


product = here(lambda A, W: psum(A @ W, "Y"), ("A[B_X, D_Y]", "W[D_Y, F]"), "Out[B_X, F]")


@pytest.mark.parametrize("table", [TABLE, TYPED], ids=["JAX's older steps", "unreduced and reduced"])
@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=pytest.mark.sweep) for n in (1, 2))])
def test_programs_are_jax_s_in_one_process(table, part):
    """Every third one, and some with every step."""
    some = [*table[part::3], *(with_every_step(table) if part == 0 else ())]
    assert [row for row in some if not is_jaxs(row, AbstractMesh(row["mesh"]), True)] == []
    assert sum("refused" in row for row in table) == (4 if table is TABLE else 12)


@on_ranks({"X": 8})
def test_programs_are_jax_s_on_ranks(mesh):
    """Each program on a mesh of its own sizes, of the same eight ranks."""
    rows = with_every_step(TABLE + TYPED)
    meshes = {sizes: Mesh(dict(sizes)) for sizes in dict.fromkeys(tuple(row["mesh"].items()) for row in rows)}
    assert [row for row in rows if not is_jaxs(row, meshes[tuple(row["mesh"].items())], False)] == []


def test_under_every_transform():
    """Values, gradients inside and outside, forward mode, vmap and second derivatives, beside one device."""
    dense = lambda A, W: A @ W  # noqa: E731
    for f in (product, lambda A, W: vmap(product, (0, None))(torch.stack([A, -A]), W)[0]):
        ours, theirs = (grad(lambda A, W, f=f: (f(A, W).sin() * R).sum(), (0, 1))(A, W) for f in (f, dense))
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(jvp(product, (A, W), (A, W))[1], 2 * A @ W, rtol=1e-12, atol=1e-12)

    def inside(w, x):  # w is invariant, so that its gradient is summed: no collective is written
        return grad(lambda w: (x @ w).sin().sum())(w)

    gradient = here(inside, ("w[D]", "x[B_XY, D]"), "dw[D]")
    one = lambda w, x: grad(lambda w: (x @ w).sin().sum())(w)  # noqa: E731
    (w,) = drawn((6,), seed=3)
    for f in (lambda g: g(w, A), lambda g: grad(lambda w: g(w, A).square().sum())(w), lambda g: vjp(g, w, A)[1](w)):
        torch.testing.assert_close(f(gradient), f(one), rtol=1e-12, atol=1e-12)
    with pytest.raises(NotImplementedError, match="pmax over X is not differentiated"):
        grad(lambda A: here(lambda x: pmax(x, "X"), "A[B_X, D]", "A[B, D]")(A).sum())(A)


@on_ranks({"X": 2, "Y": 2})
def test_gradient_and_collectives_on_ranks(mesh):
    product = shard_map(lambda A, W: psum(A @ W, "Y"), mesh, ("A[B_X, D_Y]", "W[D_Y, F]"), "Out[B_X, F]")
    over = grad(lambda W: (shard_map(lambda A: A @ W, mesh, "A[B_XY, D]", "Out[B_XY, F]")(A) * R).sum())
    torch.testing.assert_close(over(W), A.T @ R, rtol=1e-12, atol=1e-12)  # W is no argument: all devices have it
    with trace.trace() as log:
        found = grad(lambda W: (product(A, W) * R).sum())(W)
    torch.testing.assert_close(found, A.T @ R, rtol=1e-12, atol=1e-12)
    # operands are cut, one AllReduce inside, the result is gathered; then back: a sum over X where W became varying
    ops = [event.op for event in log.events]
    assert (ops.count("AllReduce"), ops.count("ReduceScatter")) == (2, 0)


@pytest.mark.compile
@on_ranks({"X": 2, "Y": 1})
def test_under_compile(mesh):
    """The gradient of a program of a tree to a list."""
    program = shard_map(
        lambda p, x: (psum(x @ p["W"], "Y"), [all_gather(x, "Y", axis=1, tiled=True)]),
        mesh, ({"W": "W[D_Y, F]"}, "A[B_X, D_Y]"), ("P('X')", "P('X', 'Y')"),
    )  # fmt: skip
    eager = grad(lambda W: (program({"W": W}, A)[0].sin() * R).sum())
    found = torch.compile(eager, backend="aot_eager", fullgraph=True)(W)
    torch.testing.assert_close(found, eager(W), rtol=1e-12, atol=1e-12)


def test_types_are_what_jax_says():
    seen = {}

    def program(x, w):
        seen.update(
            x=vma(x), w=vma(w), both=vma(x * w), summed=vma(psum(x, "X")), place=vma(axis_index("Y")),
            gathered=vma(all_gather(x, "X")), grad=vma(grad(lambda w: (w * x).sum())(w)), zeros=vma(torch.zeros(2)),
            rows=vma(vmap(lambda row: row + w)(x)), cast=vma(pvary(w, "Y")),
        )  # fmt: skip
        return w

    here(program, ("x[B_X, D]", "w[D]"), "w[D]")(A, *drawn((6,)))
    over = {"X": {"x", "both", "gathered", "rows"}, "Y": {"place", "cast"}}
    assert seen == {name: {axis for axis, names in over.items() if name in names} for name in seen}


def test_a_cotangent_of_what_is_reduced_is_unreduced():
    """And the other way round, also where a transform ends, and in a transform of a transform."""
    seen = {}

    def program(x, w):
        same = pcast(w, "X", to="reduced")
        loss = lambda w: pcast((x * w).sin().sum(), "X", to="unreduced")  # noqa: E731
        terms = grad(loss)(same)
        seen.update(terms=terms, rows=vmap(lambda row: row + row)(terms), back=grad(squares)(terms), view=terms.mT[:1])
        seen.update(tangent=jvp(lambda w: w + w, (terms,), (terms,))[1], product=terms * same)
        seen.update(twice=grad(lambda w: squares(grad(loss)(w)))(same))
        seen.update({name: marks(value) for name, value in seen.items()})
        return psum(terms, "X")

    squares = lambda w: psum(w, "X").square().sum()  # noqa: E731
    (w,) = drawn((2, 6), seed=3)
    gradient = here(program, ("x[B_X, D]", "w[I, D]"), "dw[I, D]")(A, w)
    wanted = grad(lambda w: (A.view(4, 2, 6) * w).sin().sum())(w)
    torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-12)
    assert seen.pop("back") == Marks(reduced=frozenset("X"))
    assert set(seen.values()) == {Marks(unreduced=frozenset("X"))}


def test_one_spec_for_all_a_mesh_by_its_sizes_and_terms_of_a_sum_in_the_books_notation():
    terms = here(lambda x: x.sum(0), "x[B_XY, D]", "s[D] {U_XY}")
    torch.testing.assert_close(terms(A), A.sum(0), rtol=1e-12, atol=1e-12)
    both = shard_map(lambda x, y: psum(x * y, "X"), {"X": 2}, "P('X')", "P()", in_process=True)
    torch.testing.assert_close(both(A, A), (A * A).view(2, 4, 6).sum(0), rtol=1e-12, atol=1e-12)
    planned = shard_map(lambda x: psum(x, "X"), MESH, "x[B, D]", "x[B, D]")
    assert planned(A.to("meta")).shape == A.shape


SQUARE, WHOLE = {"X": 2, "Y": 2}, torch.arange(16.0).view(4, 4)


def mapped(fn, *args, into="A[I_X, J_Y]", out="A[I_X, J_Y]", mesh=SQUARE):
    return shard_map(fn, mesh, into, out, in_process=True)(*(args or (WHOLE.clone(),)))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float64])
def test_a_sum_keeps_its_dtype(dtype):
    x = (WHOLE * 7).to(dtype)
    blocks = x.view(2, 2, 4)
    found = mapped(lambda v: psum(v, "X"), x, out="A[I, J_Y]")
    assert found.dtype == dtype
    assert torch.equal(found, blocks[0] + blocks[1]), "whole numbers wrap around, as on ranks"
    scattered = mapped(lambda v: psum_scatter(v, "X", tiled=True), x)
    assert torch.equal(scattered, blocks[0] + blocks[1])
    mean = mapped(lambda v: pmean(v, "X"), x, out="A[I, J_Y]")
    assert torch.equal(mean, (blocks.double().sum(0) / 2).to(mean.dtype)), "which does not wrap around"


def test_neither_the_program_nor_its_caller_writes_through():
    for into in ("A[I_X, J]", "A[I, J]"):
        given = WHOLE.clone()
        for change in (lambda v: v.add_(1), lambda v: v.__setitem__(0, 1.0), lambda v: torch.add(v, 1, out=v)):
            with pytest.raises(ShardingError, match=r"arguments are not changed(.|\n)*fix:"):
                mapped(change, given, into=into, out=into)
        result = mapped(lambda v: v, given, into=into, out=into)
        result += 1
        assert torch.equal(given, WHOLE)
    assert torch.equal(mapped(lambda v: v.clone().add_(1)), WHOLE + 1)


NOT_DIMS = (5, -3, None, "0", 1.0)
# to a call, what it does not take
GIVEN = named(
    """
call                                                       what it does not take
psum(x, given)                                             ("Z", None, 3, True, ("X", "X"), ("X", 3), "")
x + axis_index(given)                                      ("Q", None)
all_gather(x, 'X', axis=given, tiled=True)                 NOT_DIMS
psum_scatter(x, 'X', scatter_dimension=given, tiled=True)  NOT_DIMS
all_to_all(x, 'X', given, 0, tiled=True)                   NOT_DIMS
dynamic_slice_in_dim(x, 0, 1, given)                       NOT_DIMS
dynamic_slice_in_dim(x, 0, given)                          (5, -1, None, "1", 1.0)
dynamic_slice_in_dim(x, given, 1)                          (None, "0", 0.5, torch.ones(2).long())
all_gather(x, 'X', to=given)                               ("x", None)
ppermute(x, 'X', given)                                    ([(0.5, 1)], [("0", "1")], [(0,)], 3, None, "01")
pmax(torch.complex(x, x), given).real                      ("X",)
pmin(x.to(torch.float8_e4m3fn), given).float()             ("X",)
psum(x.to(torch.float8_e4m3fn), given).float()             ("X",)
psum(given, 'X')                                           ("a",)
given                                                      ("a",)
""",
    globals(),
)


def function_of(text: str, **given):
    return eval(f"lambda x: {text}", vars(manual) | vars(torch.func) | globals() | given)


# of x[B_X, D] -> the result's type: words of the error
PROGRAMS = named("""
program                                                   words of its error
x -> x[B, D]                                              result is invariant
all_gather(x, 'X', tiled=True) -> x[B, D]                 psum or pmean over X
psum(x, ('X', 'Y')) -> x[B, D]                            one type over all the axes
(x if x.sum() > 0 else -x) -> x[B_X, D]                   decides nothing
x + torch.rand(6) -> x[B_X, D]                            draw the whole array outside
x[x > 0] -> x[B_X]                                        one shape
# and no longer invariant
torch.zeros(6).double().add_(x.sum(0)) -> x[D]            x = x + y in place of
(torch.zeros(6) > 0).__ior__(x[0] > 0) -> x[D]            torch.where or torch.cat in place of x[i] = y
x -> x[B_X, D] {U_Y}                                      terms of a sum
pcast(x, 'X', to='unreduced') + 2 -> x[B, D] {U_X}        once for each device
pcast(x, 'X', to='unreduced') + x -> x[B, D] {U_X}        once for each device
pcast(x, 'X', to='unreduced') * x -> x[B, D] {U_X}        may only meet what is replicated
vmap(lambda row: row * row)(pcast(x, 'X', to='unreduced')) -> x[B, D] {U_X}  product of sums
pcast(x[:1], 'Y', to='reduced') + x -> x[B_X, D]          is reduced or varies
pcast(x, 'Y', to='reduced') -> x[B_X, D]                  which no out_spec says
psum(pcast(x, 'Y', to='reduced'), 'Y') -> x[B_X, D]       one type over all
pmax(pcast(x, 'X', to='unreduced'), 'Y') -> x[B]          reduced first
pcast(x, 'X', to='reduced') -> x[B_X, D]                  over all the axes
vjp(torch.neg, pcast(x, 'X', to='unreduced'))[1](x)[0] -> x[B_X, D]  has a reduced one
vjp(torch.sin, axis_index('Y') * 0.0)[1](x[0, 0]) -> x[]  value's type
ppermute(x, 'X', [(0, 1), (2, 1)]) -> x[B_X, D]           from one at most
psum_scatter(x, 'X', tiled=True) -> x[B_X, D]             cut into 4 blocks
x -> x[B_X]                                               a type names each dim
""")

LARGE = {"into": "x[B_X, D]", "mesh": MESH}
SPECS = {"A[B_X]": "dims", "A[B, D_X]": "does not divide", "A[B_Z, D]": "unknown mesh axis", "A[B, D] {U_X}": "U"}
CALLS = {
    f"{call}, given {given!r}": lambda call=call, given=given: mapped(function_of(call, given=given))
    for call, some in GIVEN.items()
    for given in some
}
CALLS |= {f"mesh {mesh!r}": lambda mesh=mesh: mapped(lambda v: v, mesh=mesh) for mesh in (None, 4, "X=2")}
CALLS |= {
    "outside": (lambda: psum(A, "X"), "outside of shard_map"),
    "numbers on a planned mesh": (lambda: shard_map(lambda x: x, MESH, "x[B]", "x[B]")(A[0]), "in_process=True"),
    "a text as operand": lambda: mapped(lambda v: v, "abc"),
    "sparse": lambda: mapped(lambda v: v, WHOLE.to_sparse()),
    "a result without a spec": (partial(mapped, lambda x: (x, x), A, out=("x[B_X, D]",), **LARGE), "are a tree"),
}
for line, words in PROGRAMS.items():
    text, _, out = line.rpartition(" -> ")
    CALLS[line] = partial(mapped, function_of(text), A, out=out, **LARGE), words
for into, words in SPECS.items():
    CALLS[into] = partial(mapped, lambda x: x, A, into=into, out="A[B, D]", mesh=MESH), words
test_refused = refused(CALLS, ShardingError)
