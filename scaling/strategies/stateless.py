"""Any unmodified nn.Module under data, FSDP and tensor parallelism, by types alone (Part 5).

Params are a pytree by dotted name, `dict(module.named_parameters())`, and so are their types:

    stored = {"fc1.weight": "W[F, D_X]", "fc1.bias": "b[F_X]", ...}      how each rank stores the params
    used = {"fc1.weight": "W[F, D]", "fc1.bias": "b[F]", ...}            how the module is called with them

`call(module, stored, used, mesh)` is a pure function of the shards. Each shard is resharded from its stored to its used
type, the module is called by `functional_call`, and the gathered arrays are dropped. Gradients, by torch.func.grad or
vjp, follow the law of cotangents: the cotangent of a gathered shard is reduce-scattered on the way back, without a
further line.
"""

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from scaling import tree
from scaling.collectives import reshard
from scaling.common.arguments import one_of
from scaling.common.torch_private import TorchDispatchMode, storage_of, unwrapped_by_all
from scaling.models.dropout import dropout
from scaling.models.remat import checkpoint_block
from scaling.spec import ShardingError, Spec, parse, refuse

BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm


def call(
    f: "nn.Module | Callable",
    stored: Any,
    used: Any,
    mesh,
    again: bool = False,
    *,
    dropped: Mapping[str, str] | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> Callable:
    """Return g(params, *args, seed=None) = f of the params, each resharded from its `stored` to its `used` type.

    Any reshard may lie between the types: an AllGather (FSDP: `W[F, D_X]` used as `W[F, D]`), or partial sums (`b[D]`
    used as `b[D] {U_Y}`: a bias after a sum over Y, which one rank along Y adds).

    Args:
        f: A module, whose stored params are not read, or a function f(params, *args).
        stored: The stored types, a tree like the params.
        used: The used types, a tree like the params. A leaf whose two types are equal is passed unchanged.
        mesh: The mesh.
        again: Whether the backward keeps only the shards, and gathers and computes once more. The arguments are then
            floating-point tensors.
        dropped: The type of the input of each active `nn.Dropout`, by the Dropout's name in the module. Its mask then
            follows from `seed` and the places of the elements in the whole array, so it is the same on every mesh.
        reduce_dtype: The dtype in which gradients of gathered params are summed over ranks, and then rounded once.

    Raises:
        ShardingError: The trees' leaves differ, a param of the module has no type, a BatchNorm of it is in training, or
            the forward draws random numbers or writes to a param or buffer. The forward is watched at the first call.
    """
    module = f if isinstance(f, nn.Module) else None
    apply = f if module is None else (lambda params, *args: functional_call(module, params, args))
    tree.paired(used, stored, "used")
    if module is not None:
        check_module(module, stored)
    seen: set[tuple[bool, ...]] = set()  # which parts were in training at calls that were watched

    def gathered(seed, params, args):
        tree.paired(params, stored)
        W = tree.map(lambda W, a, b: resharded(W, parse(a), parse(b), mesh, reduce_dtype), params, stored, used)
        training = () if module is None else tuple(part.training for part in module.modules())
        new = training not in seen and not torch.compiler.is_compiling()
        with ExitStack() as stack:
            if module is not None and any(training):
                stack.enter_context(dropout_masks(module, dropped or {}, mesh, seed))
            if new:
                if module is not None:
                    check_module(module, stored)
                held = tree.named_leaves(W) if module is None else W | dict(module.named_buffers())
                stack.enter_context(refusing_effects(module, held))
            result = apply(W, *args)
        if new:
            seen.add(training)
        return result

    def g(params, *args, seed: int | None = None):
        run = partial(gathered, seed)
        return (checkpoint_block(run) if again else run)(params, args)

    return g


def check_module(module: nn.Module, stored: Any) -> None:
    """Raise ShardingError unless each param has a type, and the module depends on its params and each row alone."""
    if untyped := [name for name, _ in module.named_parameters() if name not in stored]:
        what = f"{untyped[0]}: this param of the module has no type, and would not be trained"
        raise ShardingError(f"{what}\n  fix: give one for each of {', '.join(untyped)}")
    for name, part in module.named_modules():
        if isinstance(part, BATCH_NORMS) and part.training:
            what = f"{name}: {type(part).__name__} in training takes its statistics from this rank's rows alone"
            raise ShardingError(f"{what}\n  fix: GroupNorm or LayerNorm, or module.eval(), which uses those it has")


def resharded(x: Tensor, now: Spec, then: Spec, mesh, reduce_dtype: torch.dtype | None = None) -> Tensor:
    """Return x, typed `now`, as the type `then`, by one reshard, or unchanged if the two are the same.

    With `reduce_dtype` the sum over ranks in its backward is of that dtype.
    """
    if now.same_sharding(then):
        return x
    if reduce_dtype in (None, x.dtype) or then.unreduced:
        return reshard(f"{now} -> {then}", x, mesh)
    return _ReducedIn.apply(x, now, then, mesh, reduce_dtype)


class _ReducedIn(torch.autograd.Function):
    """A reshard whose backward sums the cotangent, `{U_X}` where x is gathered over X, in another dtype than x's."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, now, then, mesh, dtype):
        return reshard(f"{now} -> {then}", x, mesh)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.line = inputs[1:]

    @staticmethod
    def backward(ctx, dy):
        now, then, mesh, dtype = ctx.line
        axes = [axis for axis in now.axes if axis not in then.axes]
        total = reshard(f"{then.cotangent(axes)} -> {now.cotangent(axes)}", dy.to(dtype), mesh)
        return total.to(dy.dtype), None, None, None, None

    @staticmethod
    def jvp(ctx, tangent, *_):
        now, then, mesh, _ = ctx.line
        return reshard(f"{now} -> {then}", tangent, mesh)


def reduce_grads(
    grads: Any, stored: Any, mesh, over: Sequence[str], *, loss: str, reduce_dtype: torch.dtype | None = None
) -> Any:
    """Reduce gradients of each rank's own loss, unreduced over the axes `over`, `Loss[] {U_XY}`, to the params' types.

    A leaf that is replicated over X has a gradient that is unreduced `{U_X}`, each rank's own terms. It is all-reduced
    over the axes of `over` that its type does not mention. The gradient of a leaf that is sharded over X was reduced on
    the way back.

    Args:
        grads: The gradients.
        stored: The types of their params.
        mesh: The mesh.
        over: The axes over which the ranks' losses differ.
        loss: How the ranks' losses make up the whole loss, which no gradient shows. "sum": it is their sum (`.sum()` of
            each rank's rows, or its share of the global mean). "mean": it is their mean (PyTorch's habit, `.mean()` of
            each rank's rows, as many on each rank), so the gradients are divided by the number of ranks along `over`.
        reduce_dtype: The dtype in which gradients are added and divided; each is then rounded once to its own dtype.

    Raises:
        ValueError: `loss` is neither.
    """
    one_of("loss", loss, ("sum", "mean"))
    ranks = mesh.size(tuple(over)) if loss == "mean" else 1

    def one(grad: Tensor, spec: str) -> Tensor:
        wanted = parse(spec)
        partial_sum = wanted.with_unreduced([axis for axis in over if axis not in wanted.axes])
        total = resharded(grad.to(reduce_dtype or grad.dtype), partial_sum, wanted, mesh)
        return (total if ranks == 1 else total / ranks).to(grad.dtype)

    return tree.map(one, grads, stored)


def parameters(module: nn.Module) -> dict[str, Tensor]:
    """Return the module's params by dotted name, as a pytree of plain tensors."""
    return {name: W.detach() for name, W in module.named_parameters()}


# Checks that the forward of someone else's module has no side effects on ranks, made while it first runs. If it draws
# random numbers, all ranks draw the same ones, though their rows differ, and another mesh draws others. If it writes to
# a param or a buffer, such as a running mean, it changes values that ranks do not exchange. So the first call is
# watched, and refused before such an operation runs, or at its end if it has replaced a buffer. `nn.Dropout` is
# allowed, with masks that belong to the elements of the whole array (`scaling.models.dropout`), so that they are the
# same on every mesh.

PURE = "a forward is a function of its params and arguments, so that all meshes compute the same"
NO_DRAW = {"p", "dropout", "dropout_p", "train", "training"}  # an operation draws nothing if one of these is 0 or False


class Watch(TorchDispatchMode):
    """A mode that refuses an operation that draws random numbers or writes to one of these tensors, before it runs."""

    only_looks = True  # the same operations run without it

    def __init__(self, held: Mapping[str, Tensor], module: nn.Module | None):
        super().__init__()
        self.held = {storage_of(unwrapped_by_all(x)): name for name, x in held.items()}
        self.names = {part: name for name, part in module.named_modules()} if module is not None else {}
        self.inside: list[nn.Module] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        arguments = func._schema.arguments
        given = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
        given |= dict(zip([argument.name for argument in arguments], args, strict=False)) | (kwargs or {})
        if torch.Tag.nondeterministic_seeded in func.tags and not _draws_nothing(given):
            fix = "module.eval(), a rate of 0, or scaling.models.dropout with the places of its rows"
            self.refuse(f"draws random numbers ({func.name()}), which every rank would draw alike for other rows", fix)
        for argument in arguments if func._schema.is_mutable else ():
            if argument.alias_info is not None and argument.alias_info.is_write:
                leaves = tree.leaves(given.get(argument.name))
                for name in (self.held.get(storage_of(unwrapped_by_all(x))) for x in leaves if isinstance(x, Tensor)):
                    if name is not None:
                        fix = "module.eval() where that keeps it, or a module that does not write"
                        self.refuse(f"writes to {name} ({func.name()}), which ranks do not tell each other", fix)
        return func(*args, **kwargs or {})

    def enter(self, part: nn.Module, _) -> None:
        """Note that a part of the module starts to run."""
        self.inside.append(part)

    def leave(self, part: nn.Module, *_) -> None:
        """Note that the module's part has returned; the innermost part that is still running is named in errors."""
        if part in self.inside:  # else another thread's, which had entered before
            self.inside.remove(part)

    def refuse(self, what: str, fix: str) -> None:
        """Raise a ShardingError that names the part of the module that is running."""
        part = self.inside[-1] if self.inside else None
        whole = "the module" if self.names else "the function"
        name = whole if part is None else f"{self.names.get(part) or whole}: {type(part).__name__}"
        raise ShardingError(f"{name} {what}\n  rule: {PURE}\n  fix: {fix}")


@contextmanager
def refusing_effects(module: nn.Module | None, held: Mapping[str, Tensor]) -> Iterator[None]:
    """Refuse random numbers and writes to tensors that are `held` while this runs; an error names the module's part."""
    watch = Watch(held, module)
    with ExitStack() as stack:
        stack.callback(register_module_forward_pre_hook(watch.enter).remove)
        stack.callback(register_module_forward_hook(watch.leave).remove)
        before = _drawn_by_python()
        with watch:
            yield
        if _drawn_by_python() != before:
            watch.refuse(
                "draws random numbers of Python's or numpy's", "module.eval(), or draw by scaling.models.dropout"
            )
        for name, x in module.named_buffers() if module is not None else ():
            if name in held and not _same(unwrapped_by_all(x), unwrapped_by_all(held[name])):
                watch.refuse(f"replaces {name}, which ranks do not tell each other", "a module that keeps its buffers")


@contextmanager
def dropout_masks(module: nn.Module, types: Mapping[str, str], mesh, seed: int | None) -> Iterator[None]:
    """Give the module's active Dropouts masks by the place of each element in the whole array, while this runs.

    Args:
        module: The module.
        types: The type of each Dropout's input, by its name in the module.
        mesh: The mesh.
        seed: The seed of this call, or None.

    Raises:
        ShardingError: An active Dropout has no type, or there is no seed.
    """
    active = {n: part for n, part in module.named_modules() if type(part) is nn.Dropout and part.training and part.p}
    for name in active:
        if name not in types:
            what = f"{name or 'the module'}: Dropout draws random numbers, which every rank would draw alike"
            fix = f'give dropped={{"{name}": "x[B_X, D]"}}, the type of what it is given, and a seed at each call'
            raise ShardingError(f"{what}\n  rule: {PURE}\n  fix: {fix}, or module.eval()")
    if active and seed is None:
        fix = "g(params, x, seed=dropout.at_step(seed, step)): scaling.models.dropout makes one for each step"
        raise ShardingError(f"{next(iter(active))}: Dropout is given no seed\n  rule: {PURE}\n  fix: {fix}")
    try:
        for name, part in active.items():
            part.__dict__["forward"] = partial(_drop, part.p, name, parse(types[name]), mesh, seed or 0, count())
        yield
    finally:
        for part in active.values():
            part.__dict__.pop("forward", None)


def _drop(rate: float, name: str, spec, mesh, seed: int, times: "count[int]", x: Tensor) -> Tensor:
    """Return x with its elements dropped; `times` counts how often this Dropout has been used in this forward."""
    if len(spec.dims) != x.dim() or not x.dim():
        what = f"{name}: Dropout is given a tensor of shape {tuple(x.shape)}, and its type has {len(spec.dims)} dims"
        refuse(spec, what, "a type names each dim", f"give the type of what {name} is given")
    spec.check_axes(mesh)
    sizes = tuple(n * mesh.size(axes) for n, (_, axes) in zip(x.shape, spec.dims, strict=True))
    rows, *columns = (
        torch.arange(part.start, part.stop, device=x.device) for part in spec.slices(sizes, mesh, mesh.coord)
    )
    channels, positions = (columns.pop() if columns else None), torch.zeros(1, dtype=torch.int64, device=x.device)
    for size, column in zip(sizes[1:], columns, strict=False):
        positions = (positions[:, None] * size + column).flatten()
    whole = x.new_ones(len(rows), len(positions), 1 if channels is None else sizes[-1])
    kept = dropout(whole, name, next(times), rate=rate, seed=seed, samples=rows, positions=positions)
    kept = kept if channels is None else kept[..., channels]
    kept = kept.reshape(x.shape)
    return torch.where(kept > 0, x * kept, 0)


def _same(x: Tensor, y: Tensor) -> bool:
    return x is y or (x.shape == y.shape and x.dtype == y.dtype and torch.equal(x, y))


def _draws_nothing(given: Mapping[str, Any]) -> bool:
    return any(type(value) in (bool, int, float) and value == 0 for name, value in given.items() if name in NO_DRAW)


def _drawn_by_python() -> tuple:
    """Return a state that changes when Python's generator, or numpy's if it is in use, is drawn from."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else str(numpy.random.get_state(legacy=True)[1:3])
