"""Ops of the table in every layout on X=2, Y=2: the shards together beside one device; and what is refused."""

import itertools
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from typings import check_devices, planned

from scaling import auto, explicit
from scaling.algebra.law import Illegal
from scaling.algebra.layouts import DimAxes
from scaling.algebra.ops import KINDS, op_kind
from scaling.algebra.planner import all_layouts
from scaling.explicit.functions import each_call, read_call
from scaling.mesh import AbstractMesh, Mesh
from scaling.spec import ShardingError

MESH, AXES = AbstractMesh({"X": 2, "Y": 2}), ("X", "Y")
INDEX = torch.tensor([3, 0, 2, 2])
CASES = {  # a call, and the kinds of its arrays: their shapes, or the index
    "split": (lambda x: torch.split(x, 3, 1), (4, 8)),
    "chunk": (lambda x: x.chunk(2), (4, 8)),
    "unbind": (lambda x: x.unbind(-1), (4, 2)),
    "sort": (lambda x: x.sort(), (4, 8)),
    "topk": (lambda x: x.topk(4, 0), (8, 4)),
    "cummax": (lambda x: x.cummax(0), (4, 4)),
    "argsort": (lambda x: x.argsort(), (4, 8)),
    "expand": (lambda x: x.expand(4, -1, 8), (4, 1)),
    "broadcast_to": (lambda x: torch.broadcast_to(x, (4, 4, 8)), (4, 8)),
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
    "argmin of all": (lambda x: x.argmin(), (4, 8)),
    "var": (lambda x: x.var(0), (4, 8)),
    "var of all": (lambda x: x.var(False), (4, 8)),
    "std": (lambda x: torch.std(x, 1, keepdim=True), (4, 8)),
    "cumsum": (lambda x: x.cumsum(1), (4, 8)),
    "zeros_like": (lambda x: torch.zeros_like(x), (4, 8)),
    "ones_like": (lambda x: torch.ones_like(x), (4, 8)),
    "full_like": (lambda x: torch.full_like(x, 3.0), (4, 8)),
    "int": (lambda x: (9 * x).int(), (4, 8)),
    "mv": (lambda x, y: x.mv(y), (4, 8), (8,)),
    "dot": (lambda x, y: x.dot(y), (8,), (8,)),
    "movedim of two": (lambda x: x.movedim((0, 1), (1, 2)), (4, 2, 8)),
    "diagonal": (lambda x: x.diagonal(0, 0, 2), (4, 4, 4)),
    "getitem": (lambda x: x[..., None, 1::2, :4], (4, 2, 8)),
    "getitem of all": (lambda x: x[..., ...], (4, 8)),
    "getitem of one": (lambda x: x[1, ..., 0], (4, 8, 4)),
    "moveaxis": (lambda x: torch.moveaxis(x, 0, 2), (4, 2, 8)),
    "div": (lambda x: x / 2, (4, 8)),
    "div by a scalar": (lambda x: x / torch.tensor(2.0, dtype=torch.float64), (4, 8)),
    "rdiv": (lambda x: 2 / x, (4, 8)),
    "rsub of a number": (lambda x: 2 - x, (4, 8)),
    "rsub of zero": (lambda x: 0 - x, (4, 8)),
    "add of another": (lambda x, y: torch.add(x, y, alpha=2), (4, 8), (4, 8)),
    "add of zero": (lambda x: torch.add(x, 0, alpha=2), (4, 8)),
    "add of a number": (lambda x: x + 1, (4, 8)),
    "add of a row": (lambda x, y: x + y, (4, 8), (8,)),
    "mul": (lambda x, y: x * y, (4, 8), (4, 1)),
    "pow": (lambda x: x**2, (4, 8)),
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
    "flatten": (lambda x: x.flatten(0, 1), (4, 2, 4)),
    "unflatten": (lambda x: x.unflatten(0, (4, 2)), (8, 4)),
    "unsqueeze": (lambda x: x.unsqueeze(1), (4, 8)),
    "mT": (lambda x: x.mT, (4, 2, 8)),
    "transpose": (lambda x: x.transpose(-1, 0), (4, 2, 8)),
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
                local = planned(call, arrays, at, MESH.sizes)
            except (Illegal, ShardingError):
                continue
            legal, unreduced = legal + 1, unreduced + bool(local.result.unreduced)
            # of a sum the first device has a quarter, the second three: a number else than in the law
            check_devices(call, arrays, wanted, local, MESH.sizes, (0.25, 0.75))
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


def apart(name: str, got, wanted) -> list[str]:
    """The name, if a result or one of several is not one device's."""
    assert is_tensor(wanted) == isinstance(got, torch.Tensor | explicit.Array)
    pairs = zip(*(([r] if is_tensor(wanted) else r) for r in (got, wanted)), strict=True)
    alike = [
        a.dtype == b.dtype and torch.allclose(a.double(), b.double(), rtol=1e-10, atol=1e-10)
        for a, b in ((a if is_tensor(a) else a.whole(), b) for a, b in pairs)
    ]
    return [] if all(alike) else [name]


def arrays_on_ranks(mesh) -> tuple[Counter[str], list[str]]:
    """How many calls of arrays were compared with one device's, by case, and those that differ: in gradients, and of
    every fourth in values."""
    compared, wrong = Counter(), []
    for name, (fn, *given) in CASES.items():
        arrays = arrays_of(given)
        differs = name not in ("int", "argsort", "argmax", "argmin of all", "gt", "where")
        wanted = torch.func.grad(lambda *xs, fn=fn: weighted(fn(*xs)))(*arrays) if differs else None
        for at in all_layouts(arrays[0].shape, mesh.sizes, AXES)[::3]:
            rest = [DimAxes(at.dims) if x.shape == arrays[0].shape else DimAxes(((),) * x.dim()) for x in arrays[1:]]
            typed = [explicit.array(x, t, mesh) for x, t in zip(arrays, [at, *rest], strict=True)]
            try:
                values = fn(*typed) if compared[name] % 4 == 0 or not differs else None
                found = explicit.grad(lambda *xs, fn=fn: weighted(fn(*xs)))(*typed) if differs else None
            except ShardingError:
                continue  # it must be whole along a dim
            compared[name] += 1
            wrong += [] if values is None else apart(f"{name} {at}", values, fn(*arrays))
            wrong += apart(f"gradient of {name} {at}", found, wanted) if differs else []
    return compared, wrong


@pytest.mark.slow
def test_values_and_gradients_are_one_devices(ranks):
    for compared, wrong in ranks(arrays_on_ranks, {"X": 2, "Y": 2}):
        assert wrong == []
        assert compared.keys() == CASES.keys()
        assert compared.total() > 80


def planned_on_ranks(mesh) -> list[str]:
    """Programs of auto mode whose values are not one device's; the first argument is split over X, or over X and Y."""
    wrong = []
    for name, (fn, *given) in CASES.items():
        arrays = arrays_of(given)
        types = ["[" + ", ".join(map(str, x.shape)) + "]" for x in arrays]
        axes = ["_X", "_Y", ""]
        first = ", ".join(f"{n}{axis if n > 1 else ''}" for n, axis in zip(arrays[0].shape, axes, strict=False))
        wrong += apart(name, auto.jit(fn, mesh, (f"[{first}]", *types[1:]))(*arrays), fn(*arrays))
    return wrong


@pytest.mark.slow
def test_planned_programs_are_one_devices(ranks):
    assert ranks(planned_on_ranks, {"X": 2, "Y": 2}) == [[]] * 4


def test_out_of_broadcasts_and_take():
    mesh = Mesh({"X": 1, "Y": 1})
    x, i = explicit.array(torch.arange(8.0).view(4, 2), "[4_X, 2]", mesh), explicit.array(INDEX, "[4_Y]", mesh)
    taken = explicit.take(x, i, 0, out="[4_Y, 2_X]")
    assert taken.type == "float32[4_Y, 2_X]"
    assert torch.equal(taken.whole(), torch.arange(8.0).view(4, 2)[INDEX])
    grown = explicit.broadcast_to(x, (3, 4, 2), out="[3, 4, 2_Y]")
    assert grown.type == "float32[3, 4, 2_Y]"


def test_a_name_has_one_kind():
    names = [name for line in KINDS.values() for name in line.split()]
    assert len(names) == len({*names})
    assert [op_kind(n) for n in ("__float__", "float", "__add__", "add_", "_softmax", "kron")] == [
        "values", "linear", "adds", "adds", "along", None,
    ]  # fmt: skip
