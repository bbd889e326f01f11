"""Arrays that carry their type: what they print, values and gradients on ranks beside one device, and refusals."""

import random
import re

import pytest
import torch
import torch.nn.functional as F
from typings import splits

from scaling import explicit
from scaling.algebra.layouts import DimAxes
from scaling.book.largest import largest
from scaling.collectives import all_reduce
from scaling.explicit import arrays, planning
from scaling.mesh import AbstractMesh, Mesh
from scaling.spec import ShardingError

plain = arrays.call_typed
MESH = AbstractMesh({"X": 4, "Y": 2})


def abstract(shape, type, dtype=torch.float32):
    return explicit.array(torch.empty(shape, dtype=dtype), type, MESH)


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
    monkeypatch.setattr(planning, "plan", lambda *args, plan=planning.plan: planned.append(args) or plan(*args))
    a, b = (explicit.array(torch.empty(40, 40), type, mesh) for type in ("[40_X, 40_P]", "[40, 40_Y]"))
    types = [explicit.einsum("ij,jk->ik", a, b, out=out).type for out in ("[40_XYZ, 40]", "[40, 40_Z]") * 2]
    assert types == ["float32[40_XYZ, 40]", "float32[40, 40_Z]"] * 2
    assert len(planned) == 2


def test_what_needs_no_values_is_had_of_the_whole_array():
    x = abstract((8, 4, 16), "[8_X, 4, 16_Y]")
    assert (x.shape, x.ndim, x.numel(), len(x)) == ((8, 4, 16), 3, 512, 8)
    assert (x.size(), x.size(1)) == ((8, 4, 16), 4)
    assert x.sum(()).type == explicit.sum(x).type == "float32[] {U_XY}"
    assert explicit.reshard(x, "[8, 4, 16]").amax().type == explicit.amax(x, out="[]").type == "float32[]"


REFUSED = [  # what is wrong, by the rule
    (lambda a, b, u: u.exp(), "is not the sum of exp"),
    (lambda a, b, u: u + 1, "not the sum of add"),
    (lambda a, b, u: u * u, "a product of sums"),
    (lambda a, b, u: u + explicit.reshard(u, "[8_X, 16]"), "would count once for each device along Y"),
    (lambda a, b, u: a / u, "linear in its first operand"),
    (lambda a, b, u: 2 / u, "not the sum of rdiv"),
    (lambda a, b, u: u.to(torch.int32), "not the sum of to"),
    (lambda a, b, u: torch.div(u, 2, rounding_mode="floor"), "not the sum of div"),
    (lambda a, b, u: a @ a.mT, "case 4"),
    (lambda a, b, u: explicit.reshard(a, "[8_X, 16]") @ b, "case 2"),
    (lambda a, b, u: torch.softmax(a, -1), "needs the whole dim"),
    (lambda a, b, u: a.amax(0), "needs the whole dim"),
    (lambda a, b, u: a[0], "needs the whole dim"),
    (lambda a, b, u: a.flatten(), "interleaved"),
    (lambda a, b, u: a.reshape(2, 4, 16), "cuts no block"),
]


@pytest.mark.parametrize(("f", "rule"), REFUSED)
def test_what_has_no_type_is_refused_with_a_line_that_is_then_accepted(f, rule, monkeypatch):
    a, b = abstract((8, 16), "[8_X, 16_Y]"), abstract((16, 8), "[16_Y, 8]")
    u = torch.einsum("ij,jk->ik", a, abstract((16, 16), "[16_Y, 16]"))
    calls = []
    monkeypatch.setattr(arrays, "call_typed", lambda *call: calls.append(call) or plain(*call))
    with pytest.raises(ShardingError, match=re.escape(rule)) as refusal:
        f(a, b, u)
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


def operands():
    generator = torch.Generator().manual_seed(1)
    shapes = {"W_in": (6, 8), "W_out": (8, 6), "x": (4, 6), "y": (4, 6)}
    return {name: torch.randn(s, generator=generator, dtype=torch.float64) for name, s in shapes.items()}


def gradients(mesh):
    """The loss and its gradients, by several ways to ask for them."""
    types, whole = {"W_in": "[D, F_Y]", "W_out": "[F_Y, D]", "x": "[B_X, D]", "y": "[B_X, D]"}, operands()
    given = {name: explicit.array(x, types[name], mesh) for name, x in whole.items()}

    def loss(W_in, W_out):
        z = F.gelu(torch.einsum("bd,df->bf", given["x"], W_in))
        out = explicit.reshard(torch.einsum("bf,fd->bd", z, W_out), "[B_X, D]")
        return (torch.softmax(out, -1) * given["y"]).sum()

    params = given["W_in"], given["W_out"]
    grads = explicit.grad(loss, (0, 1))(*params)
    assert [g.type for g in grads] == ["float64[6, 8_Y] {U_X}", "float64[8_Y, 6] {U_X}"]
    reduced = explicit.grad(lambda *Ws: explicit.reshard(loss(*Ws), "[]"), (0, 1))(*params)  # counts once
    of_dict = explicit.grad(lambda p: loss(**p))({"W_in": params[0], "W_out": params[1]})
    assert {name: g.type for name, g in of_dict.items()} == {"W_in": grads[0].type, "W_out": grads[1].type}

    def on_whole(W):  # torch's own grad, of a tensor that every rank has: each rank's terms of the loss
        return explicit.reshard(loss(explicit.array(W, "[D, F_Y]", mesh), params[1]), "[] {U_XY}").local

    terms = all_reduce("dW[D, F] {U_XY} -> dW[D, F]", torch.func.grad(on_whole)(whole["W_in"]), mesh)
    ways = [[g.whole() for g in found] for found in (grads, reduced, of_dict.values())]
    return loss(*params).whole(), [*ways, [terms, ways[0][1]]]


def test_values_and_gradients_are_one_devices(ranks):
    whole = operands()

    def loss(W_in, W_out):
        return (torch.softmax(F.gelu(whole["x"] @ W_in) @ W_out, -1) * whole["y"]).sum()

    params = whole["W_in"], whole["W_out"]
    wanted = torch.func.grad(loss, (0, 1))(*params)
    for value, ways in [*ranks(gradients, {"X": 2, "Y": 2}), gradients(Mesh({"X": 1, "Y": 1}))]:
        torch.testing.assert_close([value, *ways], [loss(*params), *[[*wanted]] * 4], rtol=1e-12, atol=1e-14)


WITH_OUT = (  # functions with the result's type given, and the shapes that they take
    (lambda out, a, b: explicit.einsum("ij,jk->ik", a, b, out=out), ((8, 4), (4, 8)), (8, 8)),
    (lambda out, a, b: explicit.einsum("bij,bjk->bki", a, b, out=out), ((4, 8, 4), (4, 4, 8)), (4, 8, 8)),
    (lambda out, a: explicit.matmul(a, a, out=out), ((8, 8),), (8, 8)),
    (lambda out, a: explicit.reshape(a, (4, 16), out=out), ((8, 8),), (4, 16)),
    (lambda out, a: explicit.amax(a, 0, out=out), ((8, 8),), (8,)),
    (lambda out, a: explicit.mean(a, (0, 2), out=out), ((4, 8, 4),), (8,)),
)


def with_out(mesh):
    """The functions on random typings of operands and result: how far each is from one device's."""
    rng, generator, off = random.Random(2), torch.Generator().manual_seed(2), []
    for f, shapes, after in WITH_OUT * 3:
        whole = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
        types = [DimAxes(rng.choice(splits(s, mesh.sizes))) for s in shapes]
        arrays = [explicit.array(x, at, mesh) for x, at in zip(whole, types, strict=True)]
        wanted = DimAxes(rng.choice(splits(after, mesh.sizes)))
        got = f(wanted, *arrays)
        assert got.layout == wanted
        off.append(float((got.whole() - f(None, *whole)).abs().max()))
    return off


def test_a_result_is_had_in_any_type(ranks):
    for off in ranks(with_out, {"X": 2, "Y": 2}):
        assert largest(off) < 1e-13
