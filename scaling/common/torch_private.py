"""All that this package uses of torch without a public name, in one place; a test tries each entry.

torch 2.11 to 2.15 have them alike. A public twin, where there is one, costs more: the functions of
`torch.distributed` take as long as a small collective; `torch.compiler` imports the compiler.
"""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
import importlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


def fused_adamw_(params, grads, m, v, count: Tensor, *, beta1, beta2, eps, weight_decay, lr) -> None:
    """AdamW in place on lists of tensors, in one kernel: `count` is the number of this update, from 1, in float32.
    torch.optim.adamw.adamw, around it, takes up to four times as long for small tensors."""
    options = {"beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay, "lr": lr}
    torch._fused_adamw_(params, grads, m, v, [], [count] * len(params), **options, amsgrad=False, maximize=False)


def fused_norm(x: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x r gain, r), r = 1 / sqrt(mean(x^2) + eps) over the last dim: on a GPU one kernel. Its public name,
    torch.nn.functional.rms_norm, returns no r."""
    return torch.ops.aten._fused_rms_norm(x, x.shape[-1:], gain, eps)


def fused_norm_vjp(x: Tensor, gain: Tensor, r: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """(dx, dgain) of it; on GPUs alone."""
    return torch.ops.aten._fused_rms_norm_backward(dy, x, x.shape[-1:], r, gain, [True, True])


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
any_modes = torch._C._len_torch_dispatch_stack  # how many are on, at no cost
_stack = torch.utils._python_dispatch._get_current_dispatch_mode_stack
without_modes = torch.utils._python_dispatch._disable_current_modes  # a context in which they are off


def modes() -> int:
    """The number of tensor modes that are on, FakeTensorMode or FlopCounterMode; those that say that
    they `only_looks` do not count: what runs is what runs without them."""
    return sum(not getattr(mode, "only_looks", False) for mode in _stack()) if any_modes() else 0


def mode_names() -> list[str]:
    return [type(mode).__name__.lstrip("_") for mode in _stack()]


Function = TypeVar("Function", bound=Callable)


def constant(fn: Function) -> Function:
    """As torch.compiler.assume_constant_result: a compiler calls fn once and keeps what it returns."""
    fn._dynamo_marked_constant = True
    return fn


def assert_later(condition: Tensor, message: str) -> None:
    """On a GPU the assertion fails when the GPU comes to it, so that nobody waits for that; on a CPU at once."""
    torch._assert_async(condition, message)


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


class Nowhere:
    """Stands for a process group on an AbstractMesh: nothing is sent, and buffers live as long as if they were."""

    def __init__(self, *buffers):
        self.buffers = buffers

    def send(self, *buffers) -> "Nowhere":
        return Nowhere(*buffers)

    recv = allreduce = alltoall_base = send

    def wait(self) -> None:
        self.buffers = ()


def gather_into(whole: Tensor, mine: Tensor, pg: dist.ProcessGroup):
    return pg._allgather_base(whole, mine)


def scatter_sum_into(mine: Tensor, whole: Tensor, pg: dist.ProcessGroup):
    return pg._reduce_scatter_base(mine, whole)


def exchange_into(received: Tensor, sent: Tensor, pg: dist.ProcessGroup, receives=(), sends=()):
    """AllToAll of rows: equal numbers of them, or as `receives` and `sends` say."""
    return pg.alltoall_base(received, sent, list(receives), list(sends))


def tape_gradients(results: Sequence[Tensor], leaves: Sequence[Tensor], cotangents: Sequence[Tensor]):
    """As torch.autograd.grad(results, leaves, cotangents, allow_unused=True), whose first call imports sympy in order
    to compare shapes: half a second, which every rank of a run that is started again would spend."""
    backward = torch.autograd.graph._engine_run_backward
    return backward(tuple(results), tuple(cotangents), False, False, tuple(leaves), True, accumulate_grad=False)


# What torch.func wraps a tensor in, level by level: of vmap those alone whose level it is batched at.
is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
is_tracked = torch._C._functorch.is_gradtrackingtensor  # wrapped by a derivative of torch.func, not by vmap
level_of = torch._C._functorch.maybe_get_level
unwrapped = torch._C._functorch.get_unwrapped
without_transforms = torch._C._DisableFuncTorch  # a context in which no transform of torch.func sees what runs
without_functions = torch._C.DisableTorchFunction  # a context in which no TorchFunctionMode is called


def unwrapped_by_all(x: Any) -> Any:
    """What torch.func has wrapped, whatever the number of its levels."""
    while isinstance(x, Tensor) and is_wrapped(x):
        x = unwrapped(x)
    return x


# The CPU's flash attention, which holds no T x S scores and takes float64 and meta tensors too.
flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def storage_of(x: Tensor) -> int:
    """Which memory x lies in: a meta tensor's data_ptr is 0."""
    return x.untyped_storage()._cdata


# Which arrays are known to be shards: it is noted on their memory, so that views of them are known as well.


def note_shard(x: Tensor, spec: Any, mesh: Any) -> Tensor:
    """Note that x is a shard of this type, if the mesh splits it and its memory holds nothing else; return x."""
    if any(mesh.sizes.get(axis, 1) > 1 for axis in spec.axes):
        inner = unwrapped_by_all(x)
        if (memory := inner.untyped_storage()).nbytes() == inner.nbytes:
            memory.__dict__["_shard_type"] = spec
    return x


def noted_shard(x: Tensor) -> Any:
    """Return the type that was noted of x, or None."""
    return unwrapped_by_all(x).untyped_storage().__dict__.get("_shard_type")


RecordedSpan = torch._C._profiler._RecordFunctionFast  # as torch.profiler.record_function, in a tenth of its time


def profiling() -> bool:
    """Whether a torch.profiler is on in this process."""
    return torch.autograd.profiler._is_profiler_enabled


def import_compiler() -> None:
    """What the first gradient of torch.func and the first torch.compile import."""
    importlib.import_module("torch._dynamo")


def aot_graphs(fn: Callable, *args) -> tuple[torch.fx.Graph, torch.fx.Graph]:
    """AOTAutograd's graphs of the forward and the backward pass of fn(*args).sum()."""
    compile_ = importlib.import_module("functorch.compile")  # it imports the compiler
    found = {}

    def keep(name: str):
        def compiler(module: torch.fx.GraphModule, inputs):
            found[name] = module.graph
            return compile_.make_boxed_func(module.forward)

        return compiler

    compile_.aot_function(fn, fw_compiler=keep("forward"), bw_compiler=keep("backward"))(*args).sum().backward()
    return found["forward"], found["backward"]


def inductor_code(fn: Callable, *args) -> str:
    """The program that torch.compile(fn) writes for these operands."""
    utils = importlib.import_module("torch._inductor.utils")  # it is the compiler
    _, (code, *_) = utils.run_and_get_code(torch.compile(fn), *args)
    return code


def checkpoint_place(file: str, start: int, nbytes: int) -> object:
    """Where a block lies, as the `.metadata` of torch.distributed.checkpoint says it."""
    filesystem = importlib.import_module("torch.distributed.checkpoint.filesystem")  # it takes a second
    return filesystem._StorageInfo(file, start, nbytes)
