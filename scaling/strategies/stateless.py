"""Any unmodified nn.Module under data, FSDP and tensor parallelism, by types alone (Part 5).

Params are a pytree by dotted name, `dict(module.named_parameters())`, and so are their types:

    stored = {"fc1.weight": "W[F, D_X]", "fc1.bias": "b[F_X]", ...}      what each rank keeps
    used = {"fc1.weight": "W[F, D]", "fc1.bias": "b[F]", ...}            what the module is called with

`call(module, stored, used, mesh)` is a pure function of the shards: each is resharded from the one type to the other,
the module is called by `functional_call`, and what was gathered is dropped. Its gradient, by torch.func.grad or vjp,
follows the law of cotangents: that of a shard is reduce-scattered on the way back, with no line of its own.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from scaling import tree
from scaling.collectives import reshard
from scaling.common.arguments import one_of
from scaling.models.remat import checkpoint_block
from scaling.spec import ShardingError, Spec, parse

BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm


def call(f: "nn.Module | Callable", stored: Any, used: Any, mesh, again: bool = False) -> Callable:
    """g(params, *args) = f of the params, each resharded from its `stored` to its `used` type.

    `f`: a module, whose own params are not read, or a function f(params, *args). `stored`, `used`: trees of types like
    the params; a leaf whose two types are equal is passed as it is. Any reshard may stand between them: an AllGather
    (FSDP: `W[F, D_X]` used as `W[F, D]`), or partial sums (`b[D]` used as `b[D] {U_Y}`: a bias after a sum over Y,
    which one rank along Y adds). `again`: the backward keeps the shards alone and gathers, and computes, once more;
    the arguments are then floating-point tensors. ShardingError if the trees' leaves differ, a param of the module
    has no type, or a BatchNorm of it is in training.
    """
    apply = (lambda params, *args: functional_call(f, params, args)) if isinstance(f, nn.Module) else f
    tree.paired(used, stored, "used")
    if isinstance(f, nn.Module):
        check_module(f, stored)

    def gathered(params, args):
        tree.paired(params, stored)
        return apply(tree.map(lambda W, a, b: resharded(W, parse(a), parse(b), mesh), params, stored, used), *args)

    run = checkpoint_block(gathered) if again else gathered
    return lambda params, *args: run(params, args)


def check_module(module: nn.Module, stored: Any) -> None:
    """ShardingError unless each param has a type, and the module is a function of its params and each row alone."""
    if untyped := [name for name, _ in module.named_parameters() if name not in stored]:
        what = f"{untyped[0]}: this param of the module has no type, and would not be trained"
        raise ShardingError(f"{what}\n  fix: give one for each of {', '.join(untyped)}")
    for name, part in module.named_modules():
        if isinstance(part, BATCH_NORMS) and part.training:
            what = f"{name}: {type(part).__name__} in training takes its statistics from this rank's rows alone"
            raise ShardingError(f"{what}\n  fix: GroupNorm or LayerNorm, or module.eval(), which uses those it has")


def resharded(x: Tensor, now: Spec, then: Spec, mesh) -> Tensor:
    """x, typed `now`, as the type `then`: a line of its own, unless they are the same."""
    return x if now.same_sharding(then) else reshard(f"{now} -> {then}", x, mesh)


def reduce_grads(grads: Any, stored: Any, mesh, over: Sequence[str], *, loss: str) -> Any:
    """Gradients of each rank's own loss, unreduced over the axes `over`, `Loss[] {U_XY}`, reduced to the params' types.

    A leaf that is replicated over X has a gradient that is unreduced `{U_X}`, each rank's own terms: one AllReduce over
    those axes of `over` that its type does not mention. What is sharded over X was reduced on the way back. `loss` says
    what the ranks' losses make together, which no gradient shows: "sum", the loss is their sum (`.sum()` of own rows,
    or a share of the global mean), or "mean", it is their mean (PyTorch's habit, `.mean()` of own rows, as many on each
    rank): then the gradients are divided by the number of ranks along `over`. ValueError for any other.
    """
    one_of("loss", loss, ("sum", "mean"))
    ranks = mesh.size(tuple(over)) if loss == "mean" else 1

    def one(grad: Tensor, spec: str) -> Tensor:
        wanted = parse(spec)
        partial = wanted.with_unreduced([axis for axis in over if axis not in wanted.axes])
        total = resharded(grad, partial, wanted, mesh)
        return total if ranks == 1 else total / ranks

    return tree.map(one, grads, stored)


def parameters(module: nn.Module) -> dict[str, Tensor]:
    """The module's params by dotted name, as a pytree of plain tensors."""
    return {name: W.detach() for name, W in module.named_parameters()}
