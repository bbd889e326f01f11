"""Any unmodified nn.Module under data, FSDP and tensor parallelism, by types alone (Part 5).

Params are a pytree by dotted name, `dict(module.named_parameters())`, and so are their types:

    stored = {"fc1.weight": "W[F, D_X]", "fc1.bias": "b[F_X]", ...}      how each rank stores the params
    used = {"fc1.weight": "W[F, D]", "fc1.bias": "b[F]", ...}            how the module is called with them

`call(module, stored, used, mesh)` is a pure function of the shards. Each shard is resharded from its stored to its used
type, the module is called by `functional_call`, and the gathered arrays are dropped. Gradients, by torch.func.grad or
vjp, follow the law of cotangents: the cotangent of a gathered shard is reduce-scattered on the way back, without a
further line.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from scaling import tree
from scaling.collectives import reshard
from scaling.common.arguments import one_of
from scaling.models.remat import checkpoint_block
from scaling.spec import ShardingError, Spec, parse
from scaling.strategies.purity import dropout_masks, refusing_effects

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
