"""All that the collectives and products use of torch without a public name, in one place; a test tries each entry.

torch 2.11 to 2.13 have them alike. A public twin, where there is one, costs more: the functions of
`torch.distributed` take as long as a small collective; `torch.compiler` imports the compiler.
"""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def fused_adamw_(params, grads, m, v, count: Tensor, *, beta1, beta2, eps, weight_decay, lr) -> None:
    """AdamW in place on lists of tensors, in one kernel: `count` is the number of this update, from 1, in float32.
    torch.optim.adamw.adamw, around it, takes up to four times as long for small tensors."""
    options = {"beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay, "lr": lr}
    torch._fused_adamw_(params, grads, m, v, [], [count] * len(params), **options, amsgrad=False, maximize=False)


_ops = torch.ops._c10d_functional  # the functional collectives: what torch.compile, make_fx and meta tensors understand
for _op in (
    _ops.all_reduce,
    _ops.all_gather_into_tensor,
    _ops.reduce_scatter_tensor,
    _ops.all_to_all_single,
    _ops.wait_tensor,
):
    # torch.func.linearize computes constants ahead: it would do so with a collective, and not with the wait after it.
    torch.fx.node.has_side_effect(_op.default)

in_transform = torch._C._functorch.peek_interpreter_stack  # not None inside a transform of torch.func
modes = torch._C._len_torch_dispatch_stack  # the number of tensor modes that are on: FakeTensorMode, FlopCounterMode
without_modes = torch.utils._python_dispatch._disable_current_modes  # a context in which they are off


def mode_names() -> list[str]:
    return [type(mode).__name__.lstrip("_") for mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack()]


def constant(fn: Callable) -> Callable:
    """As torch.compiler.assume_constant_result: a compiler calls fn once and keeps what it returns."""
    fn._dynamo_marked_constant = True
    return fn


def lazy_clone(x: Tensor) -> Tensor:
    """x.clone(), whose memory is x's until one of the two is written to (copy on write)."""
    if in_transform() is not None or modes() > 0:
        return x.clone()
    try:
        return x._lazy_clone()
    except RuntimeError:  # memory that torch did not allocate, or that other processes share
        return x.clone()


def process_group(name: str) -> dist.ProcessGroup:
    return dist.distributed_c10d._resolve_process_group(name)


def sum_over(x: Tensor, group: str) -> Tensor:
    return _ops.wait_tensor(_ops.all_reduce(x.contiguous(), "sum", group))


def gather_over(x: Tensor, size: int, group: str) -> Tensor:
    """x[m, ...] -> [n*m, ...]."""
    return _ops.wait_tensor(_ops.all_gather_into_tensor(x.contiguous(), size, group))


def scatter_sum_over(x: Tensor, size: int, group: str) -> Tensor:
    """x[n*m, ...] -> [m, ...]."""
    return _ops.wait_tensor(_ops.reduce_scatter_tensor(x.contiguous(), "sum", size, group))


def exchange_over(x: Tensor, received: Sequence[int], sent: Sequence[int], group: str) -> Tensor:
    """AllToAll of rows of x: `sent` and `received` say how many for each member."""
    return _ops.wait_tensor(_ops.all_to_all_single(x.contiguous(), list(received), list(sent), group))


# The same on a process group itself, eagerly: each returns a Work, and fills its first argument.


def gather_into(whole: Tensor, mine: Tensor, pg: dist.ProcessGroup):
    return pg._allgather_base(whole, mine)


def scatter_sum_into(mine: Tensor, whole: Tensor, pg: dist.ProcessGroup):
    return pg._reduce_scatter_base(mine, whole)


def exchange_into(received: Tensor, sent: Tensor, pg: dist.ProcessGroup, receives=(), sends=()):
    """AllToAll of rows: equal numbers of them, or as `receives` and `sends` say."""
    return pg.alltoall_base(received, sent, list(receives), list(sends))


# What torch.func wraps a tensor in, level by level: of vmap those alone whose level it is batched at.
is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
level_of = torch._C._functorch.maybe_get_level
unwrapped = torch._C._functorch.get_unwrapped
without_functions = torch._C.DisableTorchFunction  # a context in which no TorchFunctionMode is called
