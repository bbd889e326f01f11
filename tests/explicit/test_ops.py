"""Ops of the table in every layout on X=2, Y=2: the shards together beside one device; and what is refused."""

import contextlib
import itertools

import pytest
import torch
from machine import on_ranks

from scaling import auto, explicit
from scaling.algebra.law import Illegal
from scaling.algebra.layouts import DimAxes, spec_of
from scaling.algebra.ops import KINDS, function_name, op_kind
from scaling.algebra.planner import all_layouts
from scaling.explicit.functions import LocalPlan, each_call, read_call
from scaling.mesh import AbstractMesh
from scaling.spec import ShardingError

MESH, AXES = AbstractMesh({"X": 2, "Y": 2}), ("X", "Y")
INDEX, MASK = torch.tensor([3, 0, 2, 2]), torch.arange(32).view(4, 8) % 3 > 0
GROUPS = [  # the shapes of x (and of y), or what it is: calls
    ([(4, 8)], [
        "torch.split(x, 3, 1)", "x.sort(0)", "x.argsort()", "F.pad(x, (1, 3))", "F.pad(x, (0, 0, 2, 2), value=3.0)",
        "x.select(1, 2)", "x.narrow(1, 2, 4)", "x.roll(1, 1)", "x.roll(1)", "x.repeat_interleave(2, 0)",
        "x.repeat_interleave(2)", "x.argmax(1)", "x.var(0)", "x.var(False)", "x.cumsum(1)", "torch.zeros_like(x)",
        "torch.ones_like(x)", "(9 * x).int()", "x[..., ...]", "x / 2", "x / torch.tensor(2.0, dtype=torch.float64)",
        "2 - x", "torch.add(x, 0, alpha=2)", "x + 1", "-x", "x > 0", "F.gelu(x)", "torch.softmax(x, 1)",
        "torch.logsumexp(x, 1)", "x.mean(0)", "x.mean()", "x.unsqueeze(1)",
    ]),
    ([(4, 2)], ["x.unbind(-1)"]),
    ([(8, 4)], ["x.topk(4, 0)"]),
    ([(4, 1)], ["x.expand(4, -1, 8)"]),
    ([(4, 8), (4, 8)], ["torch.stack([x, y], 1)", "torch.add(x, y, alpha=2)"]),
    ([(4, 8), (4, 2)], ["torch.cat([x, y], 1)"]),
    ([(4, 8), INDEX], ["x.index_select(0, y)"]),
    ([(4, 8), (8,)], ["x.mv(y)"]),
    ([(8,), (8,)], ["x.dot(y)"]),
    ([(4, 2, 8)], ["x.movedim((0, 1), (1, 2))", "x[..., None, 1::2, :4]", "x.mT"]),
    ([(4, 4, 4)], ["x.diagonal(0, 0, 2)"]),
    ([(4, 8, 4)], ["x[1, ..., 0]"]),
    ([(4, 8), (4, 1)], ["x * y"]),
    ([MASK, (4, 8)], ["torch.where(x, y, 0.0)"]),
    ([(4, 2, 4)], ["x.sum((0, 2), keepdim=True)", "torch.einsum('bcd->dc', x)", "x.flatten(0, 1)"]),
    ([(2, 4, 4), (4, 8)], ["torch.einsum('bij,jk->bik', x, y)"]),
    ([(8, 8)], ["x.reshape(2, 8, 4)"]),
]  # fmt: skip
CASES = {call: given for given, calls in GROUPS for call in calls}
KEEP = {  # the kinds of op whose result may be unreduced
    "linear", "adds", "multiplies", "divides", "sums", "contracts", "permutes", "reshapes", "broadcasts", "scans",
    "takes", "joins", "parts", "zeros",
}  # fmt: skip
NUMBERS = "F.pad(x, (0, 0, 2, 2), value=3.0)", "2 - x", "x + 1"  # the number is added once, and not on each device
ALL_WHOLE = "x.roll(1)", "x.repeat_interleave(2)", "x.var(False)"  # whose operand has one type
NO_GRADIENT = "(9 * x).int()", "x.argsort()", "x.argmax(1)", "x > 0"
TWO_CALLS = "(9 * x).int()", "x / torch.tensor(2.0, dtype=torch.float64)"


def called(call: str):
    return eval(f"lambda x, y=None: {call}", {"torch": torch, "F": torch.nn.functional})


class Recorded(torch.overrides.TorchFunctionMode):
    """The calls of a function on meta tensors, which `read_call` then reads."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.call = func, args, kwargs or {}
        return func(*args, **(kwargs or {}))


def is_tensor(x) -> bool:
    return isinstance(x, torch.Tensor)


def calls_of(fn, arrays):
    """The kind of op that a function calls, and the calls as they are read."""
    metas = [x.to("meta") for x in arrays]
    with Recorded() as seen:
        fn(*metas)
    made = []
    each_call(made.append, read_call(*seen.call, is_tensor))
    return op_kind(function_name(seen.call[0])), made


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
    fn, arrays = called(case), arrays_of(CASES[case])
    whole, legal, unreduced = fn(*arrays), 0, 0
    wholes = [whole] if is_tensor(whole) else whole
    kind, calls = calls_of(fn, arrays)
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
    assert bool(unreduced) == (kind in KEEP and case not in NUMBERS)


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
        fn = called(case)
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
    names = [name for line in KINDS.values() for name in line.split()]
    assert len(names) == len({*names})
    assert [op_kind(n) for n in ("__float__", "float", "__add__", "add_", "_softmax", "kron")] == [
        "values", "linear", "adds", "adds", "along", None,
    ]  # fmt: skip
