"""Arrays that carry their type: what they print, values and gradients on ranks beside one device, and refusals."""

import random
import re

import pytest
import torch
import torch.nn.functional as F
from typings import splits

from scaling import explicit
from scaling.algebra.layouts import DimAxes
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
    types = [explicit.einsum("ij,jk->ik", a, b, out=out).type for out in ("[40_XYZ, 40]",) * 2]
    assert (types, len(planned)) == (["float32[40_XYZ, 40]"] * 2, 1)


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


ONE = Mesh({"X": 1, "Y": 1})


def test_several_ways_to_ask_for_gradients():
    """Their types, and their values where an axis has one device: those on more are in test_ops and beside JAX's."""
    generator = torch.Generator().manual_seed(1)
    types = {"W": "[D, F_Y]", "V": "[F_Y, D]", "x": "[B_X, D]"}
    whole = [torch.randn(s, generator=generator, dtype=torch.float64) for s in ((6, 8), (8, 6), (4, 6))]
    W, V, x = (explicit.array(value, type, ONE) for value, type in zip(whole, types.values(), strict=True))

    def loss(W, V, x=x):
        z = torch.einsum("bf,fd->bd", F.gelu(torch.einsum("bd,df->bf", x, W)), V)
        return (torch.softmax(explicit.reshard(z, "[B_X, D]"), -1) * x).sum()

    def on_whole(W, V):  # torch's own grad, of tensors
        arrays = explicit.array(W, types["W"], ONE), explicit.array(V, types["V"], ONE)
        return explicit.reshard(loss(*arrays), "[] {U_XY}").local

    wanted = torch.func.grad(lambda W, V: loss(W, V, whole[2]), (0, 1))(*whole[:2])
    grads = explicit.grad(loss, (0, 1))(W, V)
    assert [g.type for g in grads] == ["float64[6, 8_Y] {U_X}", "float64[8_Y, 6] {U_X}"]
    reduced = explicit.grad(lambda *Ws: explicit.reshard(loss(*Ws), "[]"), (0, 1))(W, V)
    of_dict = explicit.grad(lambda p: loss(**p))({"W": W, "V": V})
    assert {name: g.type for name, g in of_dict.items()} == {"W": grads[0].type, "V": grads[1].type}
    ways = [[g.whole() for g in found] for found in (grads, reduced, of_dict.values())]
    for found in (*ways, torch.func.grad(on_whole, (0, 1))(*whole[:2])):
        torch.testing.assert_close([*found], [*wanted], rtol=1e-12, atol=1e-14)


WITH_OUT = (  # functions with the result's type given, the shapes (or the index) that they take, the result's
    (lambda out, a, b: explicit.einsum("bij,bjk->bki", a, b, out=out), ((4, 8, 4), (4, 4, 8)), (4, 8, 8)),
    (lambda out, a: explicit.matmul(a, a, out=out), ((8, 8),), (8, 8)),
    (lambda out, a: explicit.reshape(a, (4, 16), out=out), ((8, 8),), (4, 16)),
    (lambda out, a: explicit.amax(a, 0, out=out), ((8, 8),), (8,)),
    (lambda out, a: explicit.mean(a, (0, 2), out=out), ((4, 8, 4),), (8,)),
    (lambda out, a, i: explicit.take(a, i, 0, out=out), ((4, 8), torch.tensor([3, 0, 2, 2])), (4, 8)),
    (lambda out, a: explicit.broadcast_to(a, (4, 4, 8), out=out), ((4, 8),), (4, 4, 8)),
)


def test_a_result_is_had_in_any_type():
    """Of random typings of operands; values on more devices are those of planned programs."""
    rng, generator = random.Random(2), torch.Generator().manual_seed(2)
    for f, shapes, after in WITH_OUT * 3:
        whole = [torch.randn(s, generator=generator) if isinstance(s, tuple) else s for s in shapes]
        for mesh in (ONE, MESH):
            types = [DimAxes(rng.choice(splits(x.shape, mesh.sizes))) for x in whole]
            wanted = DimAxes(rng.choice(splits(after, mesh.sizes)))
            got = f(wanted, *(explicit.array(x, at, mesh) for x, at in zip(whole, types, strict=True)))
            assert got.layout == wanted
            if mesh is ONE:
                torch.testing.assert_close(got.whole(), f(None, *whole))
