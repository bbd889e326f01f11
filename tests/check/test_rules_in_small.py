"""Each rule on programs in small: what must be refused, by which rule, and what must pass."""

import textwrap

import pytest

from scaling.check import check_source

HEAD = """
import torch
import torch.nn.functional as F
from typing import NamedTuple
from torch.func import grad, vjp
from scaling import optim, tree
from scaling.collectives import all_gather, all_reduce, einsum, reduce_scatter, shard, wait
from scaling.models.pointwise import act, rms_norm
from scaling.strategies import axes

REDUCE = "C[I, K] {U_X} -> C[I, K]"
AXIS = "X"

class Grads(NamedTuple):
    dIn: object
    dW: object
"""
SPECS = """
SPECS = {"In": "In[B_X, D]", "W": "W[D, F]", "V": "V[D, F]", "Out": "Out[B_X, F]"}
"""
PARTIAL = '    u = einsum("A[I, J_X] * B[J_X, K] -> C[I, K] {U_X}", a, b)\n'
WHOLE = '    w = all_reduce("C[I, K] {U_X} -> C[I, K]", u, mesh)\n'


def found(body: str, head: str = HEAD) -> list[str]:
    return [finding.rule for finding in check_source(head + body)]


def of_partial(rest: str) -> list[str]:
    """Rules broken by lines that follow a product u[I, K] {U_X}."""
    return found("def f(a, b, mesh, params, fn):\n" + PARTIAL + textwrap.indent(textwrap.dedent(rest), "    "))


NONLINEAR = [
    "torch.relu(u)", "F.gelu(u)", "u.relu_()", "u.norm()", "u.max(0)", "u.amax(-1)", "torch.maximum(u, a)", "u.exp()",
    'act(u, "gelu")', "rms_norm(u)", "F.softmax(u, -1)", "F.layer_norm(u, (4,))", "F.cross_entropy(u, a)", "u ** 2",
    "F.mse_loss(u, a)", "u + 1", "1 - u", "u.add(1.0)", "u / u.sum()", "1 / u", "u.clamp(min=0)", "abs(u)", "u % 2",
    "torch.where(u > 0, u, 0)", "u.abs()", "u.sigmoid()", "F.dropout(u, 0.5)", "u.square().sum()", "u.std()",
    "u.var(0)", "torch.sqrt(u)", "u.sort(0)", "u.argmax(0)", "u.topk(2)", "torch.logsumexp(u, 0)", "u.pow(2)",
    "u.round()", "torch.special.erf(u)", "fn(u)", "u.prod(0)", "u.cumprod(0)", "F.normalize(u)", "u.tanh_()",
    "torch.linalg.norm(u)", "u.sign()", "u // 2", "u.median()", "torch.nan_to_num(u)", "max(u, a)",
]  # fmt: skip


@pytest.mark.parametrize("expression", NONLINEAR)
def test_a_nonlinear_function_of_partial_sums(expression):
    assert "nonlinear" in of_partial(f"y = {expression}\nreturn y"), expression


LINEAR = [
    "-u", "u * 2", "2.0 * u", "u / 4", "u - u", "u.clone()", "u.to(torch.float32)", "u.t()", "u.T", "u.view(2, -1)",
    "u[0]", "u[:, :2]", "u.sum(0)", "u.reshape(-1)", "torch.stack([u, u])", "torch.cat([u, u])", "u.float()",
    "u.contiguous()", "u + torch.zeros_like(u)", "u.mul(0.5)", "u.add(u)", "u.chunk(2)", "u.flatten()", "u.mean(0)",
    "torch.where(a > 0, u, 0)", "torch.add(u, u)", "sum([u, u])", "u.detach()", "u.unsqueeze(0)", "0 + u", "u * a[0]",
    "tree.map(lambda x: x * 2, {'u': u})", "u.permute(1, 0)", "u.roll(1, 0)", "u.lerp(u, 0.5)", "u.cpu()",
    "torch.einsum('ik->ki', u)", "(u, u.shape, u.dtype)", "print(u)", "u.double() if len(a) else u",
]  # fmt: skip


@pytest.mark.parametrize("expression", LINEAR)
def test_a_linear_function_of_partial_sums_is_no_fault(expression):
    assert of_partial(f"y = {expression}\nreturn y") == [], expression


BIASES = [
    "params['b_out']",
    "params['c']",
    "bias",
    "b_out",
    "b2",
    "self.bias",
    "W['b_O']",
    "torch.ones(4)",
    "w",
    "w[0]",
]


@pytest.mark.parametrize("bias", BIASES)
def test_a_replicated_bias_added_to_partial_sums(bias):
    rule = "nonlinear" if "ones" in bias else "partial-plus-whole"
    for line in (f"y = u + {bias}", f"y = {bias} + u", f"y = u.add({bias})", f"y = u\n    y += {bias}"):
        body = "def f(a, b, mesh, params, bias, b_out, b2, self, W):\n" + PARTIAL
        body += (WHOLE if "w" in bias[0] else "") + f"    {line}\n    return y\n"
        assert found(body) == [rule], line


@pytest.mark.parametrize(
    ("rest", "rules"),
    [
        ("return u * u", ["product-of-sums"]),
        ("return u.mul(u)", ["product-of-sums"]),
        ("return u @ u", ["product-of-sums"]),
        ("return torch.mm(u, u)", ["product-of-sums"]),
        ('return all_reduce("C[I, K] {U_X} -> C[I, K]", u, mesh, op="mean")', ["how-reduced"]),
        ('return all_reduce("C[I, K] {U_X} -> C[I, K]", u, mesh, op="max")', ["how-reduced"]),
        ("return shard('C[I, K] -> C[I_X, K]', u, mesh)", ["unreduced"]),
        ("p = all_reduce(REDUCE, u, mesh, async_op=True)\nreturn a", ["never-waited"]),
        ("all_reduce(REDUCE, u, mesh, async_op=True)\nreturn a", ["never-waited"]),
        ("p = all_reduce(REDUCE, u, mesh, async_op=True)\nreturn p + 1", ["pending"]),
        ("p = all_reduce(REDUCE, u, mesh, async_op=True)\nreturn torch.relu(p)", ["pending"]),
        ("p = all_reduce(REDUCE, u, mesh, async_op=True)\nreturn wait(p) + 1", []),
        ("p = all_reduce(REDUCE, u, mesh, async_op=True)\nq = p\nreturn q.wait() + 1", []),
        ("w = all_reduce(REDUCE, u, mesh, donate=True)\nreturn w + u", ["donated"]),
        ("u = all_reduce(REDUCE, u, mesh, donate=True)\nreturn u", []),
        ('return all_reduce(f"C[I, K] {{U_{AXIS}}} -> C[I_X, K]", u, mesh)', ["illegal-line"]),
        ('return all_reduce(f"C[I, K] {{U_{AXIS}}} -> C[I, K]", u, mesh)', []),
        ('return axes.all_reduce("C[I, J] {U_X} -> C[I, J]", u, mesh)', ["dims"]),
        ('g = axes.all_reduce\nreturn g("C[I, K_X] -> C[I, K]", u, mesh)', ["illegal-line"]),
        ("u = all_reduce(REDUCE, u, mesh)\nu = all_reduce(REDUCE, u, mesh)\nreturn u", ["reduced-twice"]),
        ('opt = optim.sgd(0.1)\np, s = opt.update({"W": u}, {}, params)\nreturn p', ["gradient"]),
        ("opt = optim.sgd(0.1)\np, s = opt.update(Grads(None, u), {}, params)\nreturn p", ["gradient"]),
        ("opt = optim.sgd(0.1)\np, s = opt.update([u], {}, params)\nreturn p", ["gradient"]),
        ("n = params\nopt = optim.sgd(0.1)\np, s = opt.update({}, {}, n, donate=True)\nreturn n, u", ["donated"]),
        ("optim.clip_by_global_norm({'W': u}, {}, mesh, 1.0)", ["gradient"]),
    ],
)
def test_what_may_be_done_with_partial_sums(rest, rules):
    assert of_partial(rest) == rules


def listing(backward: str, forward: str = 'return einsum("In[B_X, D] * W[D, F] -> Out[B_X, F]", In, params["W"]), In'):
    head = HEAD + SPECS + f"def forward(params, In, mesh):\n    {forward}\n"
    body = 'def backward(dOut, saved, params, mesh):\n    dW = einsum("In[B_X, D] * dOut[B_X, F] -> dW[D, F] {U_X}", '
    body += 'saved, dOut)\n    dIn = einsum("dOut[B_X, F] * W[D, F] -> dIn[B_X, D]", dOut, params["W"])\n'
    return found(head + body + textwrap.indent(textwrap.dedent(backward), "    "), "")


LINE = 'all_reduce("dW[D, F] {U_X} -> dW[D, F]", dW, mesh)'


@pytest.mark.parametrize("returned", ["dIn, {{'W': {}}}", "dIn, {}, {}", "dIn, ({}, {})", "Grads(dIn, {})"])
def test_gradients_that_are_returned_unreduced(returned):
    assert set(listing("return " + returned.format("dW", "dW"))) == {"result"}
    assert listing(f"dW = {LINE}\nreturn " + returned.format("dW", "dW")) == []


def test_a_wrong_key_of_params():
    assert listing(f"return dIn, {{'W': {LINE}}}", 'return einsum("In[B_X, D] * W[D, F] -> Out[B_X, F]", In, '
                   'params["V"]), In') == ["wrong-name"]  # fmt: skip


@pytest.mark.parametrize(
    ("loss", "rules"),
    [
        ('return all_reduce("L[] {U_X} -> L[]", out.square().sum(), mesh)', ["loss"]),
        ("return out.square().sum()", []),
        ('return all_reduce("L[] {U_X} -> L[]", out.square().mean(), mesh)', ["how-reduced", "loss"]),
    ],
)
def test_a_loss_is_differentiated_unreduced(loss, rules):
    body = f"""
def step(W, x, mesh):
    def loss(W):
        out = einsum("In[B_X, D] * W[D, F] -> Out[B_X, F]", x, W)
        {loss}
    g = grad(loss)(W)
    return g
"""
    assert sorted(set(found(body))) == rules


def test_microbatches():
    body = """
def step(a, b, mesh, many):
    total = torch.zeros(3)
    for x in many:
        u = einsum("A[I, J_X] * B[J_X, K] -> C[I, K] {{U_X}}", x, b)
        total = total + {}
    return all_reduce("C[I, K] {{U_X}} -> C[I, K]", total, mesh)
"""
    assert found(body.format("u")) == []
    assert found(body.format("all_reduce(REDUCE, u, mesh)")) == ["reduced-twice"]


SUM = 'einsum("A[I, J_X] * B[J_X, K] -> C[I, K] {U_X}", a, b)'


@pytest.mark.parametrize(
    "lines",
    [
        [f"return {SUM} if p is None else p"],
        [f"return p if p is not None else {SUM}"],
        ["if p is None:", f"    p = {SUM}", "return p"],
        ["if p is None:", f"    return {SUM}", "return p"],
        ["if p is not None:", "    return p", f"return {SUM}"],
        [f"u = {SUM}", "if p is not None:", "    return p", "return u"],
    ],
)
def test_an_argument_that_is_given_is_not_made(lines):
    """What a helper makes where it is given nothing is not what it returns where it is given something."""
    helper = "\n    ".join(["def helper(a, b, p=None):", *lines]) + "\n"
    head = helper + "def f(a, b, mesh):\n    w = all_reduce(REDUCE, " + SUM + ", mesh)\n    return "
    assert found(head + "all_reduce(REDUCE, helper(a, b), mesh), helper(a, b, w)") == []
    assert found(head + "all_reduce(REDUCE, helper(a, b, w), mesh), w") == ["reduced-twice"]
    assert found(head + "torch.relu(helper(a, b)), w") == ["nonlinear"]


@pytest.mark.parametrize(
    ("says", "rules"),
    [
        ("C[I, K], whole.", []),
        ("C[I, K] of a[I, J_X] and more.", []),
        ("C[I, K] of a[I, J_X], b[J_X, K].", []),
        ("C[I, K] {U_X} of a[I, J_X].", ["result"]),
        ("C[I, K_X]: a block.", ["result"]),
        ("C[I, K] of a[I_X, J].", ["split"]),
        ("C[0] is the first.", []),
    ],
)
def test_a_docstring_that_begins_with_what_is_returned(says, rules):
    body = "def f(a, b, mesh):\n    'C'\n" + PARTIAL + WHOLE + "    return w\n"
    assert found(body.replace("'C'", f"'{says}'")) == rules


def test_a_comment_that_names_the_rule_silences_it():
    fault = "return torch.relu(u)"
    assert of_partial(f"{fault}  # scaling: ignore[nonlinear]") == []
    assert of_partial(f"{fault}  # scaling: ignore[nonlinear, branches]") == []
    assert of_partial(f"{fault}  # scaling: ignore[pending]") == ["nonlinear"]
    assert sorted(of_partial(f"{fault}  # scaling: ignore")) == ["ignore", "nonlinear"]
    assert sorted(of_partial(f"{fault}  # scaling: ignore[linear]")) == ["ignore", "nonlinear"]
