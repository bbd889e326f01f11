"""Ops of the table in every layout on X=2, Y=2: the shards together beside one device; and what is refused."""

import itertools
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from scaling import auto, explicit
from scaling.algebra.law import Illegal
from scaling.algebra.layouts import DimAxes, spec_of
from scaling.algebra.ops import KINDS, op_kind
from scaling.algebra.planner import all_layouts
from scaling.explicit.functions import LocalPlan, each_call, read_call
from scaling.mesh import AbstractMesh
from scaling.spec import ShardingError

MESH, AXES = AbstractMesh({"X": 2, "Y": 2}), ("X", "Y")
INDEX = torch.tensor([3, 0, 2, 2])
CASES = {  # a call, and the kinds of its arrays: their shapes, or the index
    "split": (lambda x: torch.split(x, 3, 1), (4, 8)),
    "unbind": (lambda x: x.unbind(-1), (4, 2)),
    "sort": (lambda x: x.sort(0), (4, 8)),
    "topk": (lambda x: x.topk(4, 0), (8, 4)),
    "argsort": (lambda x: x.argsort(), (4, 8)),
    "expand": (lambda x: x.expand(4, -1, 8), (4, 1)),
    "pad": (lambda x: F.pad(x, (1, 3)), (4, 8)),
    "pad with a number": (lambda x: F.pad(x, (0, 0, 2, 2), value=3.0), (4, 8)),
    "stack": (lambda x, y: torch.stack([x, y], 1), (4, 8), (4, 8)),
    "cat": (lambda x, y: torch.cat([x, y], 1), (4, 8), (4, 2)),
    "index_select": (lambda x, i: x.index_select(0, i), (4, 8), INDEX),
    "select": (lambda x: x.select(1, 2), (4, 8)),
    "narrow": (lambda x: x.narrow(1, 2, 4), (4, 8)),
    "roll": (lambda x: x.roll(1, 1), (4, 8)),
    "roll of all": (lambda x: x.roll(1), (4, 8)),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, 0), (4, 8)),
    "repeat_interleave of all": (lambda x: x.repeat_interleave(2), (4, 8)),
    "argmax": (lambda x: x.argmax(1), (4, 8)),
    "var": (lambda x: x.var(0), (4, 8)),
    "var of all": (lambda x: x.var(False), (4, 8)),
    "cumsum": (lambda x: x.cumsum(1), (4, 8)),
    "zeros_like": (lambda x: torch.zeros_like(x), (4, 8)),
    "ones_like": (lambda x: torch.ones_like(x), (4, 8)),
    "int": (lambda x: (9 * x).int(), (4, 8)),
    "mv": (lambda x, y: x.mv(y), (4, 8), (8,)),
    "dot": (lambda x, y: x.dot(y), (8,), (8,)),
    "movedim of two": (lambda x: x.movedim((0, 1), (1, 2)), (4, 2, 8)),
    "diagonal": (lambda x: x.diagonal(0, 0, 2), (4, 4, 4)),
    "getitem": (lambda x: x[..., None, 1::2, :4], (4, 2, 8)),
    "getitem of all": (lambda x: x[..., ...], (4, 8)),
    "getitem of one": (lambda x: x[1, ..., 0], (4, 8, 4)),
    "div": (lambda x: x / 2, (4, 8)),
    "div by a scalar": (lambda x: x / torch.tensor(2.0, dtype=torch.float64), (4, 8)),
    "rsub of a number": (lambda x: 2 - x, (4, 8)),
    "add of another": (lambda x, y: torch.add(x, y, alpha=2), (4, 8), (4, 8)),
    "add of zero": (lambda x: torch.add(x, 0, alpha=2), (4, 8)),
    "add of a number": (lambda x: x + 1, (4, 8)),
    "mul": (lambda x, y: x * y, (4, 8), (4, 1)),
    "neg": (lambda x: -x, (4, 8)),
    "gt": (lambda x: x > 0, (4, 8)),
    "gelu": (lambda x: F.gelu(x), (4, 8)),
    "where": (lambda at, x: torch.where(at, x, 0.0), torch.arange(32).view(4, 8) % 3 > 0, (4, 8)),
    "softmax": (lambda x: torch.softmax(x, 1), (4, 8)),
    "logsumexp": (lambda x: torch.logsumexp(x, 1), (4, 8)),
    "sum of kept dims": (lambda x: x.sum((0, 2), keepdim=True), (4, 2, 4)),
    "mean": (lambda x: x.mean(0), (4, 8)),
    "mean of all": (lambda x: x.mean(), (4, 8)),
    "einsum of one": (lambda x: torch.einsum("bcd->dc", x), (4, 2, 4)),
    "einsum": (lambda x, y: torch.einsum("bij,jk->bik", x, y), (2, 4, 4), (4, 8)),
    "reshape": (lambda x: x.reshape(2, 8, 4), (8, 8)),
    "flatten": (lambda x: x.flatten(0, 1), (4, 2, 4)),
    "unsqueeze": (lambda x: x.unsqueeze(1), (4, 8)),
    "mT": (lambda x: x.mT, (4, 2, 8)),
}
KEEP = {  # the kinds of op whose result may be unreduced
    "linear", "adds", "multiplies", "divides", "sums", "contracts", "permutes", "reshapes", "broadcasts", "scans",
    "takes", "joins", "parts", "zeros",
}  # fmt: skip
NUMBERS = "pad with a number", "rsub of a number", "add of a number"  # which is added once, and not on each device


class Recorded(torch.overrides.TorchFunctionMode):
    """The calls of a function on meta tensors, which `read_call` then reads."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.call = func, args, kwargs or {}
        return func(*args, **(kwargs or {}))


def is_tensor(x) -> bool:
    return isinstance(x, torch.Tensor)


def calls_of(fn, arrays):
    metas = [x.to("meta") for x in arrays]
    with Recorded() as seen:
        fn(*metas)
    made = []
    each_call(made.append, read_call(*seen.call, is_tensor))
    return made


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


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("int", "div by a scalar")])
def test_shards_are_what_the_types_say(name):
    fn, *given = CASES[name]
    arrays = arrays_of(given)
    whole, legal, unreduced = fn(*arrays), 0, 0
    wholes = [whole] if is_tensor(whole) else whole
    calls = calls_of(fn, arrays)
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
    assert legal > len(calls) or "of all" in name
    assert bool(unreduced) == (op_kind(name.split()[0]) in KEEP and name not in NUMBERS)


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


def on_ranks(mesh) -> tuple[Counter[str], list[str]]:
    """How many calls of arrays were compared with one device's, by case, in a loss and its gradient; and the cases in
    which these, or the values as a program of auto mode, differ."""
    compared, wrong = Counter(), []
    for name, (fn, *given) in CASES.items():
        first, *others = arrays = arrays_of(given)
        axes = [f"{n}{axis if n > 1 else ''}" for n, axis in zip(first.shape, ("_X", "_Y", ""), strict=False)]
        types = [f"[{', '.join(axes)}]", *(str([*x.shape]) for x in others)]
        if not alike(auto.jit(fn, mesh, types)(*arrays), fn(*arrays)):
            wrong.append(f"{name}, planned")
        if name in ("int", "argsort", "argmax", "gt", "where"):
            continue  # no gradient
        gradient, value = torch.func.grad_and_value(lambda *xs, fn=fn: weighted(fn(*xs)))(*arrays)
        for at in all_layouts(first.shape, mesh.sizes, AXES)[::5]:
            rest = [DimAxes(at.dims) if x.shape == first.shape else DimAxes(((),) * x.dim()) for x in others]
            x, *typed = [explicit.array(x, t, mesh) for x, t in zip(arrays, [at, *rest], strict=True)]
            try:
                loss, pull = explicit.vjp(lambda x, fn=fn, typed=typed: weighted(fn(x, *typed)), x)
            except ShardingError:
                continue  # it must be whole along a dim
            compared[name] += 1
            found = [loss, *pull(explicit.array(torch.ones((), dtype=torch.float64), "[]", mesh))]
            wrong += [] if alike(found, [value, gradient]) else [f"{name} {at}"]
    return compared, wrong


def test_values_gradients_and_planned_programs_are_one_devices(ranks):
    for compared, wrong in ranks(on_ranks, {"X": 2, "Y": 2}):
        assert wrong == []
        assert len(compared) == len(CASES) - 5
        assert compared.total() > 80


def test_a_name_has_one_kind():
    names = [name for line in KINDS.values() for name in line.split()]
    assert len(names) == len({*names})
    assert [op_kind(n) for n in ("__float__", "float", "__add__", "add_", "_softmax", "kron")] == [
        "values", "linear", "adds", "adds", "along", None,
    ]  # fmt: skip
