"""Every name without a public home that this package uses of torch, in one place; a test tries each entry.

torch 2.11 to 2.15 have them alike. Where a public twin exists, it costs more: the functions of `torch.distributed` take
as long as a small collective, and `torch.compiler` imports the compiler.
"""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false
import importlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


class OpMode(TorchDispatchMode):
    """A mode that sees each operation. Torch would wrap its calls to hide them from a compiler, which takes long."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def fused_adamw_(params, grads, m, v, count: Tensor, *, beta1, beta2, eps, weight_decay, lr) -> None:
    """Update lists of tensors in place by AdamW in one kernel.

    `count` is the number of this update, from 1, in float32. The public torch.optim.adamw.adamw, which wraps this
    kernel, takes up to four times as long for small tensors.
    """
    options = {"beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay, "lr": lr}
    torch._fused_adamw_(params, grads, m, v, [], [count] * len(params), **options, amsgrad=False, maximize=False)


def fused_norm(x: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (x r gain, r) with r = 1 / sqrt(mean(x^2) + eps) over the last dim: one kernel on a GPU.

    The public torch.nn.functional.rms_norm does not return r.
    """
    return torch.ops.aten._fused_rms_norm(x, x.shape[-1:], gain, eps)


def fused_norm_vjp(x: Tensor, gain: Tensor, r: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Return (dx, dgain) of `fused_norm`; GPUs only."""
    return torch.ops.aten._fused_rms_norm_backward(dy, x, x.shape[-1:], r, gain, [True, True])


_ops = torch.ops._c10d_functional  # the functional collectives, for torch.compile, make_fx and meta tensors
for _op in (
    _ops.all_reduce,
    _ops.all_gather_into_tensor,
    _ops.reduce_scatter_tensor,
    _ops.all_to_all_single,
    _ops.wait_tensor,
):
    # torch.func.linearize computes constants ahead. It would do so with a collective but not with the wait after it.
    torch.fx.node.has_side_effect(_op.default)

in_transform = torch._C._functorch.peek_interpreter_stack  # not None inside a transform of torch.func
any_modes = torch._C._len_torch_dispatch_stack  # the number of active modes, at no cost
_stack = torch.utils._python_dispatch._get_current_dispatch_mode_stack
without_modes = torch.utils._python_dispatch._disable_current_modes  # a context that turns all modes off


def modes() -> int:
    """Return the number of active tensor modes, such as FakeTensorMode or FlopCounterMode.

    Modes with a true `only_looks` do not count because they run every op exactly as it runs without them.
    """
    return sum(not getattr(mode, "only_looks", False) for mode in _stack()) if any_modes() else 0


def mode_names() -> list[str]:
    """Return the class names of the active modes."""
    return [type(mode).__name__.lstrip("_") for mode in _stack()]


Function = TypeVar("Function", bound=Callable)


def constant(fn: Function) -> Function:
    """Mark fn, as torch.compiler.assume_constant_result does: a compiler calls it once and keeps the result."""
    fn._dynamo_marked_constant = True
    return fn


def assert_later(condition: Tensor, message: str) -> None:
    """Assert a condition without waiting: a GPU fails when it reaches the assertion, a CPU fails at once."""
    torch._assert_async(condition, message)


def lazy_clone(x: Tensor) -> Tensor:
    """Return x.clone(), which shares x's memory until one of the two is written to (copy on write)."""
    if in_transform() is not None or modes() > 0:
        return x.clone()
    try:
        return x._lazy_clone()
    except RuntimeError:  # torch did not allocate the memory, or other processes share it
        return x.clone()


def process_group(name: str) -> dist.ProcessGroup:
    """Return the process group of this name."""
    return dist.distributed_c10d._resolve_process_group(name)


def sum_over(x: Tensor, group: str) -> Tensor:
    """Return the sum of x over the group (AllReduce)."""
    return _ops.wait_tensor(_ops.all_reduce(x.contiguous(), "sum", group))


def gather_over(x: Tensor, size: int, group: str) -> Tensor:
    """x[m, ...] -> [n*m, ...]."""
    return _ops.wait_tensor(_ops.all_gather_into_tensor(x.contiguous(), size, group))


def scatter_sum_over(x: Tensor, size: int, group: str) -> Tensor:
    """x[n*m, ...] -> [m, ...]."""
    return _ops.wait_tensor(_ops.reduce_scatter_tensor(x.contiguous(), "sum", size, group))


def exchange_over(x: Tensor, received: Sequence[int], sent: Sequence[int], group: str) -> Tensor:
    """Exchange rows of x (AllToAll): `sent` and `received` are the number of rows for each member."""
    return _ops.wait_tensor(_ops.all_to_all_single(x.contiguous(), list(received), list(sent), group))


# The next functions call the process group itself, eagerly. Each returns a Work and fills its first argument.


class Nowhere:
    """A stand-in for a process group on an AbstractMesh.

    It sends nothing, and keeps buffers alive as long as a real transport would.
    """

    def __init__(self, *buffers):
        self.buffers = buffers

    def send(self, *buffers) -> "Nowhere":
        """Return a handle that keeps the buffers until it is waited for."""
        return Nowhere(*buffers)

    recv = allreduce = alltoall_base = send

    def wait(self) -> None:
        """Release the buffers."""
        self.buffers = ()


def gather_into(whole: Tensor, mine: Tensor, pg: dist.ProcessGroup):
    """Gather each member's `mine` into `whole`."""
    return pg._allgather_base(whole, mine)


def scatter_sum_into(mine: Tensor, whole: Tensor, pg: dist.ProcessGroup):
    """Reduce `whole` over the group and scatter it into `mine`."""
    return pg._reduce_scatter_base(mine, whole)


def exchange_into(received: Tensor, sent: Tensor, pg: dist.ProcessGroup, receives=(), sends=()):
    """Exchange rows (AllToAll): equal numbers of them, or as `receives` and `sends` say."""
    return pg.alltoall_base(received, sent, list(receives), list(sends))


def tape_gradients(results: Sequence[Tensor], edges: Sequence[Any], cotangents: Sequence[Tensor]):
    """Return the gradients as torch.autograd.grad(results, edges, cotangents, allow_unused=True) does.

    The first call of torch.autograd.grad imports sympy to compare shapes. That takes half a second, which every rank of
    a restarted run would spend.
    """
    backward = torch.autograd.graph._engine_run_backward
    return backward(tuple(results), tuple(cotangents), False, False, tuple(edges), True, accumulate_grad=False)


# torch.func wraps a tensor once for each level; vmap wraps only the tensors that are batched at its level.
is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
is_tracked = torch._C._functorch.is_gradtrackingtensor  # wrapped by a derivative, not by vmap
level_of = torch._C._functorch.maybe_get_level
unwrapped = torch._C._functorch.get_unwrapped
without_transforms = torch._C._DisableFuncTorch  # a context that hides what runs from all transforms of torch.func
without_functions = torch._C.DisableTorchFunction  # a context that calls no TorchFunctionMode


def unwrapped_by_all(x: Any) -> Any:
    """Return the tensor inside all wrappers of torch.func, however many there are."""
    while isinstance(x, Tensor) and is_wrapped(x):
        x = unwrapped(x)
    return x


# Flash attention of [batch, heads, T, H] never stores the T x S scores. The public function does not return the log of
# the softmax's denominator. The CPU's takes float64 and meta tensors, too, and scores to be added.
flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def takes_flash(q: Tensor) -> bool:
    """Return whether `flash_gpu` takes queries and keys like q: on CUDA, in 16 bits, with at most 256 features."""
    cuda = torch.backends.cuda
    fits = q.is_cuda and q.shape[-1] % 8 == 0  # the public function pads other widths
    return fits and cuda.can_use_flash_attention(cuda.SDPAParams(q, q, q, None, 0.0, False, False))


def flash_gpu(q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool, *, attn_mask: None = None, scale=None):
    """Return (O, lse), as `flash_cpu` does; there is no `attn_mask`."""
    assert attn_mask is None
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout, causal, False, scale=scale)[:2]


def flash_gpu_backward(dO, q, k, v, O, lse, dropout: float, causal: bool, *, attn_mask: None = None, scale=None):
    """Return (dq, dk, dv), as `flash_cpu_backward` does. Without dropout the kernel does not read the random state."""
    assert attn_mask is None
    ends = None, None, q.shape[2], k.shape[2]  # of packed sequences, which these are not
    state = (q.new_empty(shape, dtype=torch.uint64) for shape in ((2,), ()))
    given = dO, q, k, v, O, lse, *ends, dropout, causal, *state
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(*given, scale=scale)


def storage_of(x: Tensor) -> int:
    """Return a key of the memory in which x lies, which also works for meta tensors, whose data_ptr is 0."""
    return x.untyped_storage()._cdata


# Shards are noted on their memory, so that views of them are known as well.


def note_shard(x: Tensor, spec: Any, mesh: Any) -> Tensor:
    """Note that x is a shard of this type, if the mesh splits it and its memory holds nothing else; return x.

    Nothing is noted while compiling, where x has no memory.
    """
    if not torch.compiler.is_compiling() and any(mesh.sizes.get(axis, 1) > 1 for axis in spec.axes):
        inner = unwrapped_by_all(x)
        if (memory := inner.untyped_storage()).nbytes() == inner.nbytes:
            memory.__dict__["_shard_type"] = spec
    return x


def noted_shard(x: Tensor) -> Any:
    """Return the type that `note_shard` noted of x, or None."""
    return unwrapped_by_all(x).untyped_storage().__dict__.get("_shard_type")


RecordedSpan = torch._C._profiler._RecordFunctionFast  # torch.profiler.record_function takes ten times as long


def profiling() -> bool:
    """Return whether a torch.profiler is on in this process."""
    return torch.autograd.profiler._is_profiler_enabled


def import_compiler() -> None:
    """Import the modules that the first gradient of torch.func and the first torch.compile need."""
    importlib.import_module("torch._dynamo")


def aot_graphs(fn: Callable, *args) -> tuple[torch.fx.Graph, torch.fx.Graph]:
    """Return AOTAutograd's graphs of the forward and the backward pass of fn(*args).sum()."""
    compile_ = importlib.import_module("functorch.compile")  # imports the compiler
    found = {}

    def keep(name: str):
        def compiler(module: torch.fx.GraphModule, inputs):
            found[name] = module.graph
            return compile_.make_boxed_func(module.forward)

        return compiler

    compile_.aot_function(fn, fw_compiler=keep("forward"), bw_compiler=keep("backward"))(*args).sum().backward()
    return found["forward"], found["backward"]


def inductor_code(fn: Callable, *args) -> str:
    """Return the program that torch.compile(fn) writes for these operands."""
    utils = importlib.import_module("torch._inductor.utils")  # imports the compiler
    _, (code, *_) = utils.run_and_get_code(torch.compile(fn), *args)
    return code


def checkpoint_place(file: str, start: int, nbytes: int) -> object:
    """Return a block's place in the form that the `.metadata` of torch.distributed.checkpoint stores."""
    filesystem = importlib.import_module("torch.distributed.checkpoint.filesystem")  # the import takes a second
    return filesystem._StorageInfo(file, start, nbytes)


def scaled_mm(rows: Tensor, columns: Tensor, of_rows: Tensor, of_columns: Tensor) -> Tensor:
    """Return out[M, N] in bfloat16 of rows[M, K] and columns[N, K] in float8, with a float32 scale for each."""
    return torch._scaled_mm(rows, columns.t(), of_rows[:, None], of_columns[None], out_dtype=torch.bfloat16)
