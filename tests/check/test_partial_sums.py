"""What may be done with an unreduced value, by JAX's typing rules of lax (0.10) and what torch has beside them.

Each primitive has a row: the expressions that mean it here, and whether the sum of its values on the parts is its value
on the sum. `u` and `v` are partial sums over X, `a` is whole, `i` whole numbers.
"""

import pytest

from scaling.check import check_source

HEAD = """
import operator
import torch
import torch.nn.functional as F
import optree
from scaling import optim, tree
from scaling.collectives import all_gather, all_reduce, einsum, reduce_scatter, shard, wait

def f(x, W, a, i, mesh, params, flag, xs, name):
    a = all_gather("a[I_X, K] -> a[I, K]", a, mesh)
    u = einsum("x[I, J_X] * W[J_X, K] -> u[I, K] {U_X}", x, W)
    v = einsum("x[I, J_X] * W[J_X, K] -> u[I, K] {U_X}", x, W)
"""


def table(rows: dict[str, str]) -> list[tuple[str, str]]:
    return [(primitive, expression) for primitive, row in rows.items() for expression in row.split("; ")]


def rules(*lines: str) -> list[str]:
    return [found.rule for found in check_source(HEAD + "".join(f"    {line}\n" for line in lines))]


LINEAR = {
    "neg": "-u; u.neg(); torch.negative(u); +u",
    "add": "u + v; torch.add(u, v); u.add(v); u.add_(v); operator.add(u, v)",
    "sub": "u - v; torch.sub(u, v, alpha=2); u.sub(v)",
    "mul by what is whole": "u * a; a * u; torch.mul(u, a); 2 * u; u.mul_(0.5)",
    "div by what is whole": "u / a; u / 4; torch.div(u, a); u.div(2)",
    "dot_general with what is whole": (
        "u @ a.T; torch.matmul(u, a.T); torch.einsum('ik,jk->ij', u, a); F.linear(u, a)"
    ),
    "convert_element_type to floats": "u.float(); u.to(torch.float64); u.bfloat16(); u.type(torch.float32); u.to(a)",
    "select_n": (
        "torch.where(a > 0, u, v); torch.where(a > 0, u, 0); u.masked_fill(a > 0, 0); u.masked_fill_(a > 0, 0.0)"
    ),
    "reduce_sum, cumsum": "u.sum(0); u.mean(-1); u.cumsum(0)",
    "reshape, transpose, broadcast, squeeze": (
        "u.view(-1); u.T; u.permute(1, 0); u.expand(2, 3, 4); u[None]; u.squeeze(0)"
    ),
    "slice, gather": "u[0]; u[:, 1:]; u[i]; u.index_select(0, i); u.gather(0, i); u.narrow(0, 0, 1)",
    "concatenate, pad, rev": (
        "torch.cat([u, v]); torch.stack([u, v]); F.pad(u, (0, 1)); F.pad(u, (0, 1), value=0); u.flip(0)"
    ),
    "scatter_add": "torch.zeros(4, 4).index_add(0, i, u); u.index_add(0, i, v); u.scatter_add(0, i, v)",
    "copy, real, imag": "u.clone(); u.detach(); u.real; torch.imag(u); u.contiguous()",
    "addmm of parts": "torch.addmm(u, x, u); torch.addcmul(u, a, v)",
    "what only looks": "u.shape; u.isfinite().all(); torch.equal(u, v); torch.allclose(u, v); len(u); u is None",
}

REFUSED = {
    "add of what is whole": "u + a; a + u; u + 1; torch.add(u, a); u.add(1); operator.add(u, a); u + params['b']",
    "sub of what is whole": "u - a; a - u; u - 1; 1 - u; torch.sub(u, a); torch.rsub(u, a); u.sub_(a)",
    "mul of two": "u * v; u * u; torch.mul(u, v); u.mul(v); operator.mul(u, v); u.square()",
    "div by partial sums": "a / u; u / v; 1 / u; torch.div(a, u); a.div(u); u.reciprocal(); a // u; u // a",
    "rem, pow": "u % 2; a % u; u ** 2; a ** u; torch.remainder(u, a); torch.pow(u, 2); u.fmod(a)",
    "dot_general of two": "u @ v.T; torch.matmul(u, v.T); torch.einsum('ik,jk->ij', u, v); F.linear(u, v)",
    "max, min, clamp": (
        "torch.maximum(u, a); torch.minimum(u, v); u.max(); u.amin(0); u.clamp(min=0); torch.fmax(u, a)"
    ),
    "relu and the like": (
        "torch.relu(u); F.relu(u); F.gelu(u); F.silu(u); u.sigmoid(); u.tanh(); F.softplus(u); u.erf()"
    ),
    "exp, log, sin, sqrt": (
        "u.exp(); u.log(); torch.sin(u); u.sqrt(); u.rsqrt(); u.logsumexp(0); u.softmax(0); u.expm1()"
    ),
    "abs, sign, round, floor": "u.abs(); abs(u); u.sign(); u.round(); torch.floor(u); u.trunc(); u.frac()",
    "convert_element_type to integers": (
        "u.int(); u.long(); u.bool(); u.to(torch.int32); u.type(torch.int64); u.to(dtype=torch.bool)"
    ),
    "comparisons": "u > 0; a < u; u == a; u != 0; torch.eq(u, a); u.gt(0); torch.ge(u, a)",
    "and, or, not, shifts": "u & 1; u | v; u ^ a; ~u; u << 1; torch.logical_not(u); torch.bitwise_and(u, v)",
    "select_n by partial sums, or of what is whole": (
        "torch.where(u, a, a); torch.where(a > 0, u, a); torch.where(a > 0, u, 1.0); u.masked_fill(a > 0, 1); "
        "u.where(a > 0, a)"
    ),
    "slice, gather by partial sums": (
        "a[u]; a.index_select(0, u); a.gather(0, u); F.embedding(u, a); torch.take(a, u)"
    ),
    "pad by what is not zero": "F.pad(u, (0, 1), value=1.0); F.pad(u, (0, 1), 'constant', 2)",
    "concatenate with what is whole": "torch.cat([u, a]); torch.stack([a, u]); torch.hstack([u, a])",
    "reduce_max, reduce_prod, argmax, sort": (
        "u.amax(0); u.prod(0); u.argmax(0); u.sort(); u.topk(2); u.cummax(0); u.var(); u.norm()"
    ),
    "reduce_and, reduce_or": "u.any(); u.all(); u.count_nonzero(); u.nonzero()",
    "addmm to what is whole": (
        "torch.addmm(a, u, a); torch.addmm(u, a, a); F.linear(u, a, a[0]); torch.addcmul(u, a, a)"
    ),
    "normalization": "F.layer_norm(u, (4,)); F.rms_norm(u, (4,)); F.normalize(u); F.group_norm(u, 1); F.dropout(u)",
    "losses": "F.mse_loss(u, a); F.cross_entropy(u, i); F.cosine_similarity(u, a)",
}


@pytest.mark.parametrize(("primitive", "expression"), table(LINEAR))
def test_linear(primitive, expression):
    assert rules(f"y = {expression}", "return y, u, v") == [], primitive


@pytest.mark.parametrize(("primitive", "expression"), table(REFUSED))
def test_refused(primitive, expression):
    assert rules(f"y = {expression}", "return y, u, v"), primitive


KEPT = {
    "a line that is not known": (["y = einsum(name, u, W)"], "y"),
    "a flag that is not known": (['y = einsum("x[I, J_X] * W[J_X, K] -> u[I, K] {U_X}", x, W, defer=flag)'], "y"),
    "an operand in a list": (["pair = [u, a]"], "pair[0]"),
    "a key that is not known": (["d = {}", "d[name] = u"], "d[name]"),
    "a key of a loop": (["d = {}", "for k in xs:", "    d[k] = u"], "d['W']"),
    "dict of pairs": (["d = dict([('W', u)])"], "d['W']"),
    "dict of zip": (["d = dict(zip(xs, [u, v]))"], "d['W']"),
    "spread dict": (["d = {**params, 'W': u}"], "d['W']"),
    "updated dict": (["d = {}", "d.update({'W': u})"], "d['W']"),
    "updated by keyword": (["d = {}", "d.update(W=u)"], "d['W']"),
    "merged dicts": (["d = {'V': v} | {'W': u}"], "d['W']"),
    "extended list": (["y = []", "y.extend([u])"], "y[0]"),
    "added lists": (["y = [v for _ in xs] + [u]"], "y[0]"),
    "list by an index that is not known": (["y = [None, None]", "y[i] = u"], "y[1]"),
    "list of n": (["y = [None] * 4", "y[0] = u"], "y[0]"),
    "a buffer": (["y = torch.zeros(2, 4)", "y[0] = u"], "y"),
    "a buffer that is empty": (["y = torch.empty(2, 4)", "y[:2] = u"], "y"),
    "copied into a buffer": (["y = torch.empty_like(a)", "y.copy_(u)"], "y"),
    "added to a buffer": (["y = torch.zeros(2, 4)", "y[0] += u"], "y"),
    "an attribute": (["class C: pass", "c = C()", "c.y = u"], "c.y"),
    "either branch": (["y = v", "if flag:", "    y = u"], "y"),
    "a branch that is not known": (["y = name()", "if flag:", "    y = u"], "y"),
    "tree.map": (["y = tree.map(lambda g: g * 2, [u for _ in xs])"], "y[0]"),
    "optree": (["y = optree.tree_map(lambda g: g * 2, {'W': u})"], "y['W']"),
    "leaves": (["y = tree.leaves({'W': u})"], "y[0]"),
    "map": (["y = list(map(lambda g, s: g * s, [u], [2]))"], "y[0]"),
    "conditional expression": (["y = u if flag else name()"], "y"),
    "walrus": (["z = (y := u) * 2"], "y + 0 * z"),
    "swapped": (["p, q = a, u", "p, q = q, p"], "p"),
    "starred": (["p, *q = a, u, v"], "q[0]"),
    "default": (["def g(z=u):", "    return z", "y = g()"], "y"),
    "closure": (["def g():", "    return u * 2", "y = g()"], "y"),
    "nested tuples": (["y = ((u, a), (v,))", "(p, _), (q,) = y"], "p + q"),
    "with an array that is not known": (["y = torch.matmul(u, name())"], "y"),
    "by an array that is not known": (["y = name() @ u"], "y"),
    "bmm": (["y = torch.bmm(name(), u)"], "y"),
    "plus an array that is not known": (["y = u + name()"], "y"),
    "stacked with one that is not known": (["y = torch.stack([name(), u])"], "y"),
    "starred operands": (["pair = (u, params)", 'y = einsum("u[I, K] {U_X} * W[K, L] -> y[I, L] {U_X}", *pair)'], "y"),
    "popped": (["d = {'W': u}", "y = d.pop('W')"], "y"),
    "items": (["for _, y in {'W': u}.items():", "    pass"], "y"),
    "reversed and sorted": (["y = list(reversed([u]))"], "y[0]"),
    "enumerate": (["for _, y in enumerate([u]):", "    pass"], "y"),
}


@pytest.mark.parametrize("how", KEPT)
def test_no_way_loses_what_is_unreduced(how):
    lines, held = KEPT[how]
    assert rules(*lines, f"return {held}, u, v") == []
    assert rules(*lines, f"return torch.relu({held}), u, v") == ["nonlinear"]


def test_starred_operands_are_held_against_their_line():
    assert rules("pair = (u, params)", 'return einsum("u[I, K] * W[K, L] -> y[I, L]", *pair), v') == ["unreduced"]


@pytest.mark.parametrize(
    ("lines", "rule"),
    [
        (["d = {}", "for k in xs:", "    d[k] = u", "return optim.sgd(0.1).update(d, {}, params), v"], "gradient"),
        (["return optim.sgd(0.1).update(dict(zip(xs, [u])), {}, params), v"], "gradient"),
        (["u[0] = 1.0", "return u, v"], "nonlinear"),
        (["u[0] = a", "return u, v"], "partial-plus-whole"),
        (["u[:, 0] += a[0]", "return u, v"], "partial-plus-whole"),
        (
            [
                "y = u",
                "if mesh.sizes['X'] > 1:",
                '    y = all_reduce("u[I, K] {U_X} -> u[I, K]", u, mesh)',
                "return y, v",
            ],
            "",
        ),
        (["y = u", "if flag:", '    y = all_reduce("u[I, K] {U_X} -> u[I, K]", u, mesh)', "return y, v"], "branches"),
    ],
)
def test_what_comes_of_it(lines, rule):
    assert rules(*lines) == [rule] * bool(rule)
