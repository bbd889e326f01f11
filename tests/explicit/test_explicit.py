"""Arrays that carry their type: what they print, values and gradients on ranks beside one device, and refusals."""

import random
import re

import pytest
import torch
import torch.nn.functional as F
from beside_jax import splits
from problems import drawn
from refused import evaluated, named, read_table, refused

from scaling import auto, explicit
from scaling.algebra.layouts import DimAxes
from scaling.explicit import arrays, functions
from scaling.mesh import AbstractMesh, Mesh
from scaling.spec import ShardingError

plain = arrays.call_typed
MESH, ONE, OTHER = AbstractMesh({"X": 4, "Y": 2}), Mesh({"X": 1, "Y": 1}), Mesh({"Y": 1, "X": 1})


def array(x, type, mesh=ONE):
    return explicit.array(x, type, mesh)


def abstract(shape, type, dtype=torch.float32):
    return array(torch.empty(shape, dtype=dtype), type, MESH)


def test_the_books_example():
    x = abstract((8, 2), "[8_X, 2_Y]")
    assert str(x.type) == "float32[8_X, 2_Y]" == str((x * 2).type)
    assert x.local.shape == (2, 1)
    In = abstract((8, 2048), "In[B_X, D_Y]", torch.bfloat16)
    W = abstract((2048, 8192), "bfloat16[2048_Y, 8192]", torch.bfloat16)
    Out = torch.einsum("bd,df->bf", In * In, W)
    assert Out.type == "bfloat16[8_X, 8192] {U_Y}"
    assert explicit.reshard(Out, "[8_X, 8192_Y]").type == "bfloat16[8_X, 8192_Y]"
    for out in ("bfloat16[8_X, 8192_Y]", "bfloat16[8_X, 8192]"):
        assert explicit.einsum("bd,df->bf", In * In, W, out=out).type == out


def test_a_call_is_planned_once_for_its_shapes_and_types(monkeypatch):
    """Also on four axes, whose many layouts are looked at once."""
    mesh, planned = AbstractMesh({"P": 2, "X": 2, "Y": 2, "Z": 2}), []
    monkeypatch.setattr(functions, "plan", lambda *args, plan=functions.plan: planned.append(args) or plan(*args))
    a, b = (explicit.array(torch.empty(40, 40), type, mesh) for type in ("[40_X, 40_P]", "[40, 40_Y]"))
    types = [explicit.einsum("ij,jk->ik", a, b, out=out).type for out in ("[40_XYZ, 40]",) * 2]
    assert (types, len(planned)) == (["float32[40_XYZ, 40]"] * 2, 1)


def test_what_needs_no_values_is_had_of_the_whole_array():
    x = abstract((8, 4, 16), "[8_X, 4, 16_Y]")
    assert (x.shape, x.ndim, x.numel(), len(x)) == ((8, 4, 16), 3, 512, 8)
    assert (x.size(), x.size(1)) == ((8, 4, 16), 4)
    assert not hasattr(x, "nothing")  # it has a tensor's attributes alone
    assert x.sum(()).type == explicit.sum(x).type == "float32[] {U_XY}"
    assert explicit.reshard(x, "[8, 4, 16]").amax().type == explicit.amax(x, out="[]").type == "float32[]"


# calls of a[8_X, 16_Y], b[16_Y, 8] and of u[8_X, 16] {U_Y}, by what rule
REFUSED = named("""
call                                    rule
u.exp()                                 is not the sum of exp
u + 1                                   once for each device along Y
u * u                                   a product of sums
u + explicit.reshard(u, '[8_X, 16]')    would count once for each device along Y
a / u                                   linear in its first operand
2 / u                                   not the sum of rdiv
u.to(torch.int32)                       not the sum of to
torch.div(u, 2, rounding_mode='floor')  not the sum of div
torch.rsub(u, 5, alpha=0)               once for each device along Y
torch.rsub(u, 5, 0)                     once for each device along Y
# each device's int8 terms have wrapped around by themselves
w.float()                               not the sum of float
w.to(torch.int64)                       not the sum of to
w / 2                                   not the sum of truediv
# which is int64
w.sum(0)                                not the sum of sum
a @ a.mT                                case 4
explicit.reshard(a, '[8_X, 16]') @ b    case 2
torch.softmax(a, -1)                    needs the whole dim
a.amax(0)                               needs the whole dim
a[0]                                    needs the whole dim
a.flatten()                             interleaved
a.reshape(2, 4, 16)                     cuts no block
""")


@pytest.mark.parametrize(("call", "rule"), REFUSED.items())
def test_what_has_no_type_is_refused_with_a_line_that_is_then_accepted(call, rule, monkeypatch):
    a, b = abstract((8, 16), "[8_X, 16_Y]"), abstract((16, 8), "[16_Y, 8]")
    u = torch.einsum("ij,jk->ik", a, abstract((16, 16), "[16_Y, 16]"))
    w = abstract((8, 16), "[8_X, 16] {U_Y}", torch.int8)
    calls = []
    monkeypatch.setattr(arrays, "call_typed", lambda *call: calls.append(call) or plain(*call))
    with pytest.raises(ShardingError, match=re.escape(rule)) as refusal:
        eval(call, {"torch": torch, "explicit": explicit, "a": a, "b": b, "u": u, "w": w})
    text = str(refusal.value)
    assert "  rule: " in text
    fixes = re.findall(r'reshard\((it|operand \d), "([^"]*)"\), [\w, ]+: [\d,]+ bytes sent', text)
    assert fixes
    func, args, kwargs = calls[-1]
    places, args = [i for i, x in enumerate(args) if isinstance(x, explicit.Array)], list(args)
    for which, type in fixes:
        i = places[0 if which == "it" else int(which.split()[1]) - 1]
        args[i] = explicit.reshard(args[i], type)
    wanted = re.search(r"the result is (.*); or give", text)[1]
    assert plain(func, tuple(args), kwargs).type == wanted
    whole = "[" + ", ".join(str(n) for n in plain(func, tuple(args), kwargs).shape) + "]"
    assert plain(func, calls[-1][1], kwargs, whole).type == wanted.split("[")[0] + whole


def test_several_ways_to_ask_for_gradients():
    """Their types, and their values where an axis has one device: those on more are in test_ops and beside JAX's."""
    types, whole = ("[D, F_Y]", "[F_Y, D]", "[B_X, D]"), drawn((6, 8), (8, 6), (4, 6), seed=1)
    W, V, x = map(array, whole, types)

    def loss(W, V, x=x):
        return (F.gelu(x @ W) @ V).sum()

    def on_whole(*weights):  # torch's own grad, of tensors
        return explicit.reshard(loss(*map(array, weights, types)), "[] {U_XY}").local

    wanted = torch.func.grad(lambda W, V: loss(W, V, whole[2]), (0, 1))(*whole[:2])
    grads = explicit.grad(loss, (0, 1))(W, V)
    reduced = explicit.grad(lambda *weights: explicit.reshard(loss(*weights), "[]"), (0, 1))(W, V)
    of_dict = explicit.grad(lambda p: loss(**p))({"W": W, "V": V})
    for found in (grads, [of_dict["W"], of_dict["V"]]):
        assert [g.type for g in found] == ["float64[6, 8_Y] {U_X}", "float64[8_Y, 6] {U_X}"]
    ways = [[g.whole() for g in found] for found in (grads, reduced, of_dict.values())]
    for found in (*ways, torch.func.grad(on_whole, (0, 1))(*whole[:2])):
        torch.testing.assert_close([*found], [*wanted], rtol=1e-12, atol=1e-14)


TABLE = """
call with the result's type given                 its arrays, or their shapes                    the result's shape
explicit.einsum('bij,bjk->bki', x, y, out=out)    ((4, 8, 4), (4, 4, 8))                         (4, 8, 8)
explicit.matmul(x, x, out=out)                    ((8, 8),)                                      (8, 8)
explicit.reshape(x, (4, 16), out=out)             ((8, 8),)                                      (4, 16)
explicit.amax(x, 0, out=out)                      ((8, 8),)                                      (8,)
explicit.mean(x, (0, 2), out=out)                 ((4, 8, 4),)                                   (8,)
explicit.take(x, y, 0, out=out)                   ((4, 8), torch.tensor([3, 0, 2, 2]))           (4, 8)
explicit.broadcast_to(x, (4, 4, 8), out=out)      ((4, 8),)                                      (4, 4, 8)
"""
WITH_OUT = read_table(TABLE, globals(), ("call with the result's type given",))


@pytest.mark.parametrize(("call", "shapes", "after"), WITH_OUT, ids=[call for call, *_ in WITH_OUT])
def test_a_result_is_had_in_any_type(call, shapes, after):
    """Of random typings of operands; values on more devices are those of planned programs."""
    rng, generator = random.Random(2), torch.Generator().manual_seed(2)
    f = eval(f"lambda out, x, y=None: {call}", {"explicit": explicit})
    for _ in range(3):
        whole = [torch.randn(s, generator=generator) if isinstance(s, tuple) else s for s in shapes]
        for mesh in (ONE, MESH):
            types = [DimAxes(rng.choice(splits(x.shape, mesh.sizes))) for x in whole]
            wanted = DimAxes(rng.choice(splits(after, mesh.sizes)))
            got = f(wanted, *(explicit.array(x, at, mesh) for x, at in zip(whole, types, strict=True)))
            assert got.layout == wanted
            if mesh is ONE:
                torch.testing.assert_close(got.whole(), f(None, *whole))


# What an explicit array or a program in auto mode would take for something else: refused with its fix, or right

WHOLE = torch.arange(32.0).view(8, 4) / 7
X, SQUARE = array(WHOLE, "[8_X, 4_Y]"), array(torch.ones(4, 4), "[4_X, 4]")


def traced(use, *types, mesh=ONE):
    """A program of auto mode of the whole array, and of what else it is given."""
    return lambda *more: auto.jit(use, mesh, ("[8_X, 4]", *types))(WHOLE, *more)


def pulled(dy):
    return explicit.vjp(lambda x: x * 2, X)[1](dy)


CALLS = [
    # an array decides nothing in Python
    "bool(X)", "1 if X.sum() > 0 else 2", "float(X.sum())", "int(X.sum())", "range(X.sum())",
    "X.sum().item()", "X.tolist()", "X.numpy()",
    "traced(lambda x: x * (1 if x.sum() > 0 else 2))()", "traced(lambda x: x * x.sum().item())()",
    # a cotangent is like the result
    "pulled(None)", "pulled(WHOLE)", "pulled(array(WHOLE[:1], '[1, 4]'))",
    "pulled(array(WHOLE.double(), '[8_X, 4]'))", "pulled(array(WHOLE, '[8_X, 4]', OTHER))",
    # what an array, a type, a gradient and a program are made of
    "X.view(torch.int32)", "X.sum(9)", "X @ X", "X[9]",
    "array(X, '[8, 4]')", "array(3.0, '[]')", "array(WHOLE, '[8, 4]', {'X': 1})",
    "array(WHOLE.numpy(), '[8, 4]')", "array(WHOLE.to_sparse(), '[8, 4]')", "array(WHOLE.to('meta'), '[8, 4]')",
    "explicit.reshard(X, None)", "explicit.reshard(WHOLE, '[9, 4]')", "explicit.reshard('x', '[1]')",
    "explicit.grad(lambda x: x.sum())(array(WHOLE.int(), '[8_X, 4]'))",
    "explicit.grad(lambda x: x.sum(), 5)(X)", "explicit.grad(lambda x: x.sum(), '0')(X)",
    "traced(lambda x, y: x * y, None)(2.0)", "traced(lambda x, y: x, None)(None)",
    "traced(lambda x: None)()", "traced(lambda x: x, mesh={'X': 1})()",
]  # fmt: skip
# words of the error
TYPES = """
call                                 words of its error
abstract((8, 3), '[8_X, 3_Y]')       dim 3 of size 3 does not divide
abstract((8, 2), '[4_X, 2_Y]')       says 4 where the array
abstract((8, 2), '[8_X]')            1 dims
abstract((8, 2), 'float64[8_X, 2]')  fix: convert it, x.to(torch.float64)
abstract((8, 2), '[8_Z, 2]')         unknown mesh axis Z
X + torch.ones(8, 4)                 fix: explicit.array(x, type, mesh)
X + array(WHOLE, '[8, 4]', OTHER)    the arrays are on two meshes
torch.rand_like(SQUARE)              rand_like: not a function whose sharding is known
torch.kron(SQUARE, SQUARE)           kron: not a function whose sharding is known
torch.where(SQUARE)                  where: not a function whose sharding is known
"""
test_calls_without_a_result_are_refused = refused(evaluated(dict.fromkeys(CALLS, ""), globals()))
test_types_that_do_not_fit_are_refused = refused(evaluated(TYPES, globals()), ShardingError)


def test_an_array_has_memory_of_its_own_and_a_plain_tensor_passes_where_its_type_fits():
    given = WHOLE.clone()
    array(given, "[8, 4]").local.add_(1)
    auto.jit(lambda x: x, ONE, ("[8, 4]",))(given).add_(1)
    assert torch.equal(given, WHOLE)
    for type in ("[8_X, 4]", "float32[I_X, J]"):
        assert explicit.reshard(given, type) is given
