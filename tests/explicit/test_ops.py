"""Ops of the table: their types beside what JAX's explicit mode says of 3,045 cases (tests/oracles/jax_answers.py); and
in every layout on X=2, Y=2, the shards together beside one device."""

import contextlib
import itertools
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from beside_jax import Case, called, cases, written
from machine import on_ranks
from refused import named
from torch.distributed.tensor import Partial, Replicate, Shard

from scaling import auto, explicit
from scaling.algebra.law import Illegal
from scaling.algebra.layouts import DimAxes, spec_of
from scaling.algebra.ops import OP_KINDS, function_name, op_kind
from scaling.algebra.planner import all_layouts
from scaling.explicit.functions import LocalPlan, each_call, read_call
from scaling.mesh import AbstractMesh
from scaling.spec import ShardingError, parse

SAME = "the same"
UNREDUCED = "JAX calls it ambiguous: here the result is {U}"
SILENT_SUM = "JAX reduces without a word: here the result is {U}"
SILENT_MAX = "JAX reduces a maximum without a word: here a reshard is asked for"
CASE_2 = "JAX communicates without a word where one operand of a contraction is split: here case 2 is refused"
BATCH = "JAX takes the left operand's batch dim, and gathers the right one's: here the left one is sliced"
MERGED = "JAX moves data to merge dims whose blocks are interleaved: here a reshape sends nothing"
RESPLIT = "JAX knows one split or merge at a time: here any that keeps the order of each device's elements"


def reason(case: Case, got: str, unreduced: tuple, theirs: str) -> str:
    """The difference that is to be expected of a case, from its typing alone."""
    if got == theirs and not unreduced:
        return SAME
    split = {axis for dims in case.typing for axes in dims for axis in axes}
    if case.kind == "einsum":
        left, right, kept = re.split("->|,", case.detail[0])
        axes = [(d, case.typing[0][left.index(d)], case.typing[1][right.index(d)]) for d in left if d in right]
        summed = [(a, b) for d, a, b in axes if d not in kept]
        batch = [(a, b) for d, a, b in axes if d in kept]
        if any(a != b for a, b in summed):
            assert (got, "!" in theirs) == ("!", False)
            return CASE_2
        if any(not a and b for a, b in batch) and theirs != "!":
            assert got == "!" or got.split(",")[0] == written([case.typing[1][0]]) != theirs.split(",")[0]
            return BATCH
        assert theirs == "!"
        assert {*unreduced} == {axis for a, _ in summed for axis in a} != set()
        return UNREDUCED
    if case.kind in ("sum", "amax"):
        over = {axis for i in case.detail for axis in case.typing[0][i]}
        assert theirs == written([axes for i, axes in enumerate(case.typing[0]) if i not in case.detail])
        assert over
        assert (got, {*unreduced}) == ((theirs, over) if case.kind == "sum" else ("!", set()))
        return SILENT_SUM if case.kind == "sum" else SILENT_MAX
    assert case.kind == "reshape"
    assert split
    assert (got == "!") != (theirs == "!")
    return MERGED if got == "!" else RESPLIT


COUNTS = {SAME: 1768, CASE_2: 942, SILENT_SUM: 96, SILENT_MAX: 96, UNREDUCED: 91, BATCH: 26, RESPLIT: 17, MERGED: 9}


def test_types_are_jaxs_or_differ_for_a_reason():
    found = Counter()
    for _, some, answers in cases():
        func, args = called(some[0], torch, [torch.empty(shape, device="meta") for shape in some[0].shapes])
        op = read_call(func, args, {}, is_tensor).op
        for case, theirs in zip(some, answers, strict=True):
            given = [DimAxes(dims) for dims in case.typing], case.shapes, case.mesh
            try:
                _, result = op.infer(*given)
                ours = written(result.dims), result.unreduced
            except Illegal:
                ours = "!", ()
            found[reason(case, *ours, theirs)] += 1
    assert found == COUNTS


def test_the_names_of_spmd_types_in_the_notation():
    """Its table of cotangents: the type's placement has the name that stands beside it, and so has its cotangent's."""
    lines = (Path(__file__).parents[2] / "notation.md").read_text().split("`spmd_types` |")[1].splitlines()[2:5]
    placed = {Shard(0): "S(0)", Replicate(): "R", Partial(): "P"}
    for line in lines:
        text, name, cotangent, dual = re.findall(r"`([^`]*)`", line)
        spec, mesh = parse(text), {"X": 4}
        assert spec.cotangent(mesh) == parse(cotangent)
        for each, of in ((spec, name), (spec.cotangent(mesh), dual)):
            assert placed[each.placements(mesh)[0]] == of


# The shards together

MESH, AXES = AbstractMesh({"X": 2, "Y": 2}), ("X", "Y")
INDEX, MASK = torch.tensor([3, 0, 2, 2]), torch.arange(32).view(4, 8) % 3 > 0
CASES = named(
    """
call                                                          arrays, or their shapes
torch.split(x, 3, 1)                                          [(4, 8)]
x.sort(0)                                                     [(4, 8)]
x.argsort()                                                   [(4, 8)]
F.pad(x, (1, 3))                                              [(4, 8)]
F.pad(x, (0, 0, 2, 2), value=3.0)                             [(4, 8)]
x.select(1, 2)                                                [(4, 8)]
x.narrow(1, 2, 4)                                             [(4, 8)]
x.roll(1, 1)                                                  [(4, 8)]
x.roll(1)                                                     [(4, 8)]
x.repeat_interleave(2, 0)                                     [(4, 8)]
x.repeat_interleave(2)                                        [(4, 8)]
x.argmax(1)                                                   [(4, 8)]
x.var(0)                                                      [(4, 8)]
x.var(False)                                                  [(4, 8)]
x.cumsum(1)                                                   [(4, 8)]
torch.zeros_like(x)                                           [(4, 8)]
torch.ones_like(x)                                            [(4, 8)]
(9 * x).int()                                                 [(4, 8)]
x[..., ...]                                                   [(4, 8)]
x / 2                                                         [(4, 8)]
x / torch.tensor(2.0, dtype=torch.float64)                    [(4, 8)]
2 - x                                                         [(4, 8)]
torch.add(x, 0, alpha=2)                                      [(4, 8)]
x + 1                                                         [(4, 8)]
-x                                                            [(4, 8)]
x > 0                                                         [(4, 8)]
F.gelu(x)                                                     [(4, 8)]
torch.softmax(x, 1)                                           [(4, 8)]
torch.logsumexp(x, 1)                                         [(4, 8)]
x.mean(0)                                                     [(4, 8)]
x.mean()                                                      [(4, 8)]
x.unsqueeze(1)                                                [(4, 8)]
x.float().mean(0, dtype=torch.float64)                        [(4, 8)]
x.max()                                                       [(4, 8)]
x.norm(dim=1)                                                 [(4, 8)]
torch.rsub(x, 5, alpha=2)                                     [(4, 8)]
x.unbind(-1)                                                  [(4, 2)]
x.topk(4, 0)                                                  [(8, 4)]
x.expand(4, -1, 8)                                            [(4, 1)]
torch.stack([x, y], 1)                                        [(4, 8), (4, 8)]
torch.add(x, y, alpha=2)                                      [(4, 8), (4, 8)]
torch.max(x, y)                                               [(4, 8), (4, 8)]
torch.lerp(x, y, 0.3)                                         [(4, 8), (4, 8)]
torch.cat([x, y], 1)                                          [(4, 8), (4, 2)]
x.index_select(0, y)                                          [(4, 8), INDEX]
x.mv(y)                                                       [(4, 8), (8,)]
x.dot(y)                                                      [(8,), (8,)]
x.movedim((0, 1), (1, 2))                                     [(4, 2, 8)]
x[..., None, 1::2, :4]                                        [(4, 2, 8)]
x.mT                                                          [(4, 2, 8)]
x.diagonal(0, 0, 2)                                           [(4, 4, 4)]
x[1, ..., 0]                                                  [(4, 8, 4)]
x * y                                                         [(4, 8), (4, 1)]
torch.where(x, y, 0.0)                                        [MASK, (4, 8)]
x.sum((0, 2), keepdim=True)                                   [(4, 2, 4)]
torch.einsum('bcd->dc', x)                                    [(4, 2, 4)]
x.flatten(0, 1)                                               [(4, 2, 4)]
torch.einsum('bij,jk->bik', x, y)                             [(2, 4, 4), (4, 8)]
x.reshape(2, 8, 4)                                            [(8, 8)]
""",
    globals(),
)
KEEP = {  # the kinds of op whose result may be unreduced
    "linear", "adds", "multiplies", "divides", "sums", "contracts", "permutes", "reshapes", "broadcasts", "scans",
    "takes", "picks", "chooses", "joins", "parts", "zeros",
}  # fmt: skip
NUMBERS = (
    "F.pad(x, (0, 0, 2, 2), value=3.0)",
    "2 - x",
    "x + 1",
    "torch.rsub(x, 5, alpha=2)",
)  # the number is added once, and not on each device
ALL_WHOLE = "x.max()", "x.roll(1)", "x.repeat_interleave(2)", "x.var(False)"  # whose operand has one type
NO_GRADIENT = "(9 * x).int()", "x.argsort()", "x.argmax(1)", "x > 0"
TWO_CALLS = "(9 * x).int()", "x / torch.tensor(2.0, dtype=torch.float64)", "x.float().mean(0, dtype=torch.float64)"


def function_of(call: str):
    return eval(f"lambda x, y=None: {call}", {"torch": torch, "F": torch.nn.functional})


class Recorded(torch.overrides.TorchFunctionMode):
    """The calls of a function on meta tensors, which `read_call` then reads."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.call = func, args, kwargs or {}
        return func(*args, **(kwargs or {}))


def is_tensor(x) -> bool:
    return isinstance(x, torch.Tensor)


def check_devices(call, xs: list, wanted, local: LocalPlan) -> None:
    """What each device alone makes of its shards is its part of the whole result, or the terms of all add up to it; of
    a sum over an axis the first device has a quarter, the second three: a number else than in the law."""
    spec = spec_of(local.result)
    found = torch.zeros(call.shape, dtype=wanted.dtype)
    for coord in map(MESH.coord_of, range(4)):
        if any(coord[axis] for axis in AXES if axis not in local.result.used):
            continue  # a copy
        shards = []
        for x, given in zip(xs, local.needed, strict=True):
            part = x[spec_of(given).slices(tuple(x.shape), MESH, coord)].contiguous()
            for axis in given.unreduced:
                part = part * (0.25, 0.75)[coord[axis]]
            shards.append(part)
        found[spec.slices(call.shape, MESH, coord)] += call.run(call.op, shards, local).to(wanted.dtype)
    torch.testing.assert_close(found, wanted.detach().clone(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", [case for case in CASES if case not in TWO_CALLS])
def test_shards_are_what_the_types_say(case):
    fn, arrays = function_of(case), arrays_of(CASES[case])
    whole, calls, legal, unreduced = fn(*arrays), [], 0, 0
    wholes, metas = [whole] if is_tensor(whole) else whole, [x.to("meta") for x in arrays]
    with Recorded() as seen:
        fn(*metas)
    each_call(calls.append, read_call(*seen.call, is_tensor))
    assert len(calls) == len(wholes)
    every = [all_layouts(x.shape, MESH.sizes, AXES, AXES if x.dtype.is_floating_point else ()) for x in arrays]
    for at in itertools.product(*every):
        for call, wanted in zip(calls, wholes, strict=True):
            try:
                needed, result = call.op.infer(at, [x.shape for x in arrays], MESH.sizes)
                local = LocalPlan(needed, result, spec_of(result).local_shape(call.shape, MESH))
            except (Illegal, ShardingError):
                continue
            legal, unreduced = legal + 1, unreduced + bool(local.result.unreduced)
            check_devices(call, arrays, wanted, local)
    assert legal > len(calls) or case in ALL_WHOLE
    assert bool(unreduced) == (op_kind(function_name(seen.call[0])) in KEEP and case not in NUMBERS)


def weighted(results):
    """A loss in which every element has a weight of its own."""
    loss = None
    for y in results if isinstance(results, tuple | list) else [results]:
        if y.dtype.is_floating_point:
            weights = torch.arange(1.0, 1 + y.numel(), dtype=torch.float64).reshape(tuple(y.shape)).sin()
            if isinstance(y, explicit.Array):
                weights = explicit.array(weights, DimAxes(y.layout.dims), y.mesh)
            term = (y * weights).sum()
            loss = term if loss is None else loss + term
    return loss


def arrays_of(given) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [x if is_tensor(x) else torch.randn(x, generator=generator, dtype=torch.float64) for x in given]


def alike(got, wanted) -> bool:
    """Whether a result, or several, is one device's."""
    got, wanted = ([x] if isinstance(x, torch.Tensor | explicit.Array) else x for x in (got, wanted))
    pairs = [(a if is_tensor(a) else a.whole(), b) for a, b in zip(got, wanted, strict=True)]
    return all(a.dtype == b.dtype and torch.allclose(a.double(), b.double(), 1e-10, 1e-10) for a, b in pairs)


@on_ranks({"X": 2, "Y": 2})
def test_values_gradients_and_planned_programs_are_one_devices(mesh):
    """Of each case the values as a program of auto mode, and a loss and its gradient in a legal layout, each in another
    one."""
    wrong = []
    for number, (case, given) in enumerate(CASES.items()):
        fn = function_of(case)
        first, *others = arrays = arrays_of(given)
        axes = [f"{n}{axis if n > 1 else ''}" for n, axis in zip(first.shape, ("_X", "_Y", ""), strict=False)]
        types = [f"[{', '.join(axes)}]", *(str([*x.shape]) for x in others)]
        if not alike(auto.jit(fn, mesh, types)(*arrays), fn(*arrays)):
            wrong.append(f"{case}, planned")
        if not first.dtype.is_floating_point or case in NO_GRADIENT:
            continue
        gradient, value = torch.func.grad_and_value(lambda *xs, fn=fn: weighted(fn(*xs)))(*arrays)
        layouts = all_layouts(first.shape, mesh.sizes, AXES)  # that of whole arrays, which is always legal, first
        for at in [*layouts[1 + number % len(layouts) :], *layouts[::-1]]:
            rest = [DimAxes(at.dims) if x.shape == first.shape else DimAxes(((),) * x.dim()) for x in others]
            x, *typed = [explicit.array(x, t, mesh) for x, t in zip(arrays, [at, *rest], strict=True)]
            with contextlib.suppress(ShardingError):  # of what must be whole along a dim
                loss, pull = explicit.vjp(lambda x, fn=fn, typed=typed: weighted(fn(x, *typed)), x)
                break
        found = [loss, *pull(explicit.array(torch.ones((), dtype=torch.float64), "[]", mesh))]
        wrong += [] if alike(found, [value, gradient]) else [f"{case} {at}"]
    assert wrong == []


def test_a_name_has_one_kind():
    names = [name for row in OP_KINDS.values() for name in row.names.split()]
    assert len(names) == len({*names})
    assert [op_kind(n) for n in ("__float__", "float", "__add__", "add_", "_softmax", "kron")] == [
        "values", "linear", "adds", "adds", "along", None,
    ]  # fmt: skip
