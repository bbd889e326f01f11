"""The oracle of collectives: it knows what each device contributes, and reads what each gets off types; and a call made
in some mode, what comes of it held against what is wanted."""

from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from math import prod
from unittest import mock

import torch
from misuse.entries import DTYPES, SPOILS, Draw, Wrong, typed
from torch.utils.flop_counter import FlopCounterMode

from scaling.algebra.rules import CALLS, collective_steps
from scaling.common.torch_private import storage_of
from scaling.spec import ShardingError, Spec

BUFFERS = ["fits", "fits", "by columns", "shape", "shape", "dtype", "expanded", "meta", "numpy", "operand", "leaf"]
ENDS = slice(4), slice(-4, None)  # of the memory that a buffer lies in
UNSEEN = {"out: expanded", "out: meta", "out: numpy", "elsewhere"}  # by a graph: torch traces no mixture of devices


def contributions(draw: Draw, spec: Spec, local: list[int], dtype) -> torch.Tensor:
    """[*axes of the mesh, *whole shape]: of each device the part of the array that it contributes, alike where the type
    says that devices hold replicas. Small whole numbers: sums are exact in every dtype."""
    mesh = draw.mesh
    shape = [size * mesh.size(axes) for size, (_, axes) in zip(local, spec.dims, strict=True)]
    sizes = [n if axis in spec.unreduced else 1 for axis, n in mesh.sizes.items()]
    x = draw.whole_numbers(4, *sizes, *shape).expand(*mesh.sizes.values(), *shape)
    return torch.complex(x.double(), x.double() + 1).to(dtype) if dtype.is_complex else x.to(dtype)


def block(x: torch.Tensor, spec: Spec, mesh, coord) -> torch.Tensor:
    """What the device at coord holds of the whole array x, whatever its dims are called."""
    return x[typed((f"D{i}", axes) for i, (_, axes) in enumerate(spec.dims)).slices(tuple(x.shape), mesh, coord)]


def held(parts: torch.Tensor, before: Spec, after: Spec, mesh, by: str = "sum") -> torch.Tensor:
    """What this rank holds of `after`, where the parts that `before` is unreduced over have been put together."""
    for axis in mesh.sizes:
        if axis in before.unreduced and axis not in after.unreduced:
            parts = reduced(parts, by)
        else:
            parts = parts[mesh.coord[axis]]
    return block(parts, after, mesh, mesh.coord)


def reduced(parts: torch.Tensor, by: str) -> torch.Tensor:
    if by in ("max", "min"):
        return parts.amax(0) if by == "max" else parts.amin(0)
    total = parts.sum(0, dtype=parts.dtype)
    return total / len(parts) if by == "mean" else total


def devices_along(axes, mesh) -> list[tuple[int, ...]]:
    """The coordinates of this device's group over axes, in the order of their blocks: the first axis is major."""
    places = product(*(range(mesh.sizes[axis]) for axis in axes))
    coords = [dict(mesh.coord) | dict(zip(axes, place, strict=True)) for place in places]
    return [tuple(coord[axis] for axis in mesh.sizes) for coord in coords]


def expected(kind, parts, before: Spec, after: Spec, mesh, by: str, root: int, axes=(), pairs=()):
    """What this rank is to get, or None where the types say nothing of it."""
    here = tuple(mesh.coord[axis] for axis in mesh.sizes)
    if kind == "ppermute":
        group = devices_along(axes, mesh)
        sources = [s for s, t in pairs if group[t] == here]
        at = group[sources[0] if sources else 0]
        y = block(parts[at], before, mesh, dict(zip(mesh.sizes, at, strict=True)))
        return y if sources else torch.zeros_like(y)
    after = Spec(after.name, after.dims) if kind == "reduce" else after
    others = {*before.unreduced} ^ {*after.unreduced}
    along = [axis for _, dim in (before if kind == "gather" else after).dims for axis in dim if axis in others]
    if kind in ("reduce", "broadcast"):
        along = [axis for axis in before.unreduced if axis in others]
    if kind in ("broadcast", "scatter"):
        return block(parts[devices_along(along, mesh)[root]], after, mesh, mesh.coord)
    if kind != "gather" and {*after.unreduced} - {*before.unreduced}:
        return None
    y = held(parts, before, after, mesh, by)
    to_one = kind in ("reduce", "gather")
    return torch.zeros_like(y) if to_one and devices_along(along, mesh)[root] != here else y


def is_legal(kind: str, line: str, before: Spec, after: Spec) -> bool:
    """Whether the rules, which other tests hold against outsiders, allow a line."""
    if kind not in CALLS or (kind == "shard" and before.same_sharding(after)):
        return True
    try:
        return bool(collective_steps(CALLS[kind], line))
    except ShardingError:
        return False


def describe(x) -> str:
    if not isinstance(x, torch.Tensor):
        return type(x).__name__
    return f"{tuple(x.shape)} {x.layout if x.layout != torch.strided else x.stride()} on {x.device}"


def buffer(draw: Draw, shape, dtype, x):
    """(what is given as out, the memory around it, whether it fits)."""
    how, shape = draw.choice(BUFFERS), tuple(shape)
    others = [(*shape, 1), (1, *shape), shape[1:], tuple(n + 1 for n in shape), (1,) * len(shape), (0,)]
    if how == "shape":
        shape = draw.choice([other for other in others if other != shape])
    if how == "dtype":
        dtype = draw.choice([other for other in DTYPES if other != dtype])
    n = prod(shape)
    holds = isinstance(x, torch.Tensor) and x.numel() >= n > 0 and x.dtype == dtype and x.is_contiguous()
    if not {"expanded": n > 1, "operand": holds, "leaf": dtype.is_floating_point}.get(how, True):
        how = "fits"
    memory = torch.ones(n + 8, device=draw.mesh.device).to(dtype)
    inside = memory[4 : 4 + n]
    made = {
        "by columns": lambda: inside.view(shape[::-1]).permute([*range(len(shape))][::-1]),
        "expanded": lambda: memory[4:5].view((1,) * len(shape)).expand(shape),
        "meta": lambda: inside.view(shape).to("meta"),
        "numpy": lambda: torch.ones(n).numpy(),
        "operand": lambda: x.view(-1)[:n].view(shape),
        "leaf": lambda: inside.view(shape).clone().requires_grad_(),
    }
    return made.get(how, lambda: inside.view(shape))(), memory, how


class Case:
    """A call that is drawn, `call(x)`: what it is to give, why it must be refused, and whether it may be."""

    def __init__(self, draw: Draw, x, wanted=None, wrong: list | None = None, may_refuse: bool = False):
        self.draw, self.x, self.wanted, self.wrong, self.may_refuse = draw, x, wanted, wrong or [], may_refuse
        self.options, self.memory = {}, None

    def out(self, shape, dtype) -> str:
        """Give a buffer: how it fits."""
        self.options["out"], self.memory, how = buffer(self.draw, shape, dtype, self.x)
        if how in ("shape", "dtype", "expanded", "meta", "numpy"):
            self.wrong.append(f"out: {how}")
        self.may_refuse |= how in ("operand", "leaf")
        return how

    def hold(self, call: Callable, what: str, linear: bool = True) -> str:
        """Make the call in some mode, and hold what comes of it against what is wanted."""
        mesh, x, options, wanted = self.draw.mesh, self.x, self.options, self.wanted
        mode = self.draw.choice(self.draw.modes)
        plain = isinstance(x, torch.Tensor) and x.layout == torch.strided and x.device.type == mesh.device.type
        if not plain or (mode in ("leaf", "vjp", "jvp") and x.dtype not in (torch.float64, torch.float32)):
            mode = "plain"
        if mode == "in graph" and UNSEEN & {*self.wrong}:
            mode = "plain"
        kept = x.clone() if plain else None
        around = None if self.memory is None else self.memory.clone()
        what, given = f"{what} {options} of {describe(x)}, {mode}, wrong: {self.wrong}", options.get("out")
        try:
            y, more = in_mode(mode, call, x, mesh)
        except (ValueError, TypeError) as error:  # also ShardingErrors, and Python's of a wrong signature
            if not self.wrong and not self.may_refuse and wanted is not None and mode == "plain":
                raise Wrong(f"refused: {what}\n{error}") from error
            if kept is not None and not torch.equal(x.resolve_neg(), kept):
                raise Wrong(f"the operand of a refused call was changed: {what}") from error
            return "refused"
        except Exception as error:
            if mode in ("plain", "no_grad"):
                raise Wrong(f"an error without the line: {what}\n{type(error).__name__}: {error}") from error
            return f"loud in {mode}: {type(error).__name__}: {str(error).splitlines()[0][:120]}"
        if self.wrong:
            raise Wrong(f"accepted: {what}")
        if wanted is None:
            raise Wrong(f"a result where the types promise none: {what}")
        for result in more.get("results", [y]):
            result = result.to_dense() if result.layout == torch.sparse_coo else result
            if not is_same(result, wanted, exact=result is y, autocast=mode == "autocast"):
                raise Wrong(f"another number: {what}\n{result}\nwanted {wanted}")
        if given is not None and mode in ("plain", "in graph") and not (y is given and torch.equal(given, wanted)):
            raise Wrong(f"the buffer does not hold the result: {what}")
        if around is not None and any(not torch.equal(self.memory[end], around[end]) for end in ENDS):
            raise Wrong(f"memory around the buffer was written: {what}")
        if plain and not options.get("donate") and (given is None or storage_of(given) != storage_of(x)):
            if mode in ("plain", "in graph", "leaf", "vjp") and y.layout == torch.strided:
                y.copy_(~y if y.dtype == torch.bool else torch.full_like(y, 7) if y.is_complex() else 7 - y.float())
            if not torch.equal(x.resolve_neg(), kept):
                raise Wrong(f"the operand is changed, by the call or by a change of its result: {what}")
        if "pairing" in more and linear and options.get("op", "sum") in ("sum", "mean"):
            pairing = torch.stack([each.double() for each in more["pairing"]])
            if mesh.size() > 1:
                torch.distributed.all_reduce(pairing)
            if not torch.allclose(pairing[0], pairing[1], rtol=1e-4, atol=1e-4):
                raise Wrong(f"<w, f(x)> and <f'(w), x> are {pairing.tolist()}: {what}")
        return f"right, {mode}"


def spoiled(draw: Draw, x: torch.Tensor):
    """(an operand that is none of its type, why), or x as it is."""
    how = draw.choice(["one dim more", "flat", "an array", "a list", "none", "elsewhere", "sparse"])
    if (how == "flat" and x.dim() == 1) or (how == "sparse" and not (x.dim() and x.dtype == torch.float32)):
        return x, ""
    return SPOILS[how](x), how


def is_same(result, wanted, exact: bool, autocast: bool) -> bool:
    if result.shape != wanted.shape or (result.dtype != wanted.dtype and not autocast):
        return False
    if wanted.is_meta or exact:
        return result.is_meta if wanted.is_meta else torch.equal(result.resolve_neg().to(wanted.dtype), wanted)
    if wanted.is_complex():
        return torch.equal(result, wanted)
    return torch.allclose(result.double(), wanted.double(), rtol=1e-6, atol=0)


CONTEXTS: dict[str, Callable] = {  # that a call of a mode is made in
    "in graph": lambda device: mock.patch("torch.compiler.is_compiling", return_value=True),
    "no_grad": lambda device: torch.no_grad(),
    "inference": lambda device: torch.inference_mode(),
    "flops": lambda device: FlopCounterMode(display=False),
    "autocast": lambda device: torch.autocast(device, torch.bfloat16),
}


def in_mode(mode: str, call: Callable, x, mesh):
    """(the result, what else came of it)."""
    if mode in ("leaf", "vjp"):
        leaf = x.clone().requires_grad_()
        y, pull = torch.func.vjp(call, x) if mode == "vjp" else (call(leaf), None)
        w = (torch.arange(y.numel(), dtype=y.dtype, device=y.device) % 5 + mesh.rank).view(y.shape)
        (dx,) = pull(w) if pull else torch.autograd.grad(y, leaf, w)
        return y.detach(), {"pairing": [(w * y.detach()).sum(), (dx * leaf.detach()).sum()]}
    if mode == "jvp":
        y, tangent = torch.func.jvp(call, (x,), (x,))
        return y, {"results": [y, tangent]}  # all are homogeneous: f(x) = f'(x) x
    if mode == "vmap":
        both = torch.func.vmap(call)(torch.stack([x, x]))
        return both[0], {"results": [both[0], both[1]]}
    with CONTEXTS.get(mode, nullcontext)(mesh.device.type):
        return call(x), {}
