"""Collectives that torch.func, torch.compile and make_fx see through, by torch's functional collectives.

An `Op` is linear, so one autograd Function serves them all: its backward applies the transposed Op (the law of
cotangents: notation.md). What is private to torch for this stands here.
"""

from collections.abc import Callable
from functools import lru_cache

import torch

from scaling.collectives.checked import agree_on
from scaling.collectives.op import Op, output_shape
from scaling.trace import active, now, record

ops = torch.ops._c10d_functional


def split(x: torch.Tensor, n: int, dim: int) -> torch.Tensor:
    """[..., n*m, ...] -> [n, ..., m, ...]: the blocks of a dim, as a leading dim."""
    return x.unflatten(dim, (n, x.shape[dim] // n)).movedim(dim, 0)


def join(blocks: torch.Tensor, dim: int) -> torch.Tensor:
    """[n, ..., m, ...] -> [..., n*m, ...]: the inverse of split."""
    return blocks.movedim(0, dim).flatten(dim, dim + 1)


def split_major(x: torch.Tensor, op: Op) -> torch.Tensor:
    """[..., n*m, ...] -> [n, m, ...], contiguous: no copy if the dim is the outermost in memory already."""
    x = (x.movedim(op.dim, 0) if op.dim else x).contiguous()
    return x.view(op.size, len(x) // op.size, *x.shape[1:])


def add(blocks: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    return torch.sum(blocks, 0, dtype=blocks.dtype, out=out)


def traceable(x: torch.Tensor, op: Op) -> torch.Tensor:
    """Run an op by functional collectives: also under torch.compile, make_fx and on meta tensors."""
    if op.kind == "Slice":
        return split(x, op.size, op.dim)[op.index].clone()
    if op.kind == "Pad":
        blocks = x.new_zeros((op.size, *x.shape))
        blocks[op.index] = x
        return join(blocks, op.dim)
    if op.size == 1 and op.kind != "CollectivePermute":
        return x.clone()
    if op.backend == "abstract":
        return x.new_empty(output_shape(op, x.shape))
    if op.kind == "AllReduce":
        return ops.wait_tensor(ops.all_reduce(x.contiguous(), "sum", op.group))
    if op.kind == "AllGather":
        mine = x.movedim(op.dim, 0).contiguous()[None]
        blocks = ops.wait_tensor(ops.all_gather_into_tensor(mine, op.size, op.group))
        return reorder(blocks, op.order, inverse=True).flatten(0, 1).movedim(0, op.dim)
    if op.kind == "ReduceScatter":
        blocks = reorder(split_major(x, op), op.order)
        if op.backend == "gloo":
            return add(exchange(blocks, op)).movedim(0, op.dim)
        mine = ops.wait_tensor(ops.reduce_scatter_tensor(blocks.flatten(0, 1), "sum", op.size, op.group))
        return mine.movedim(0, op.dim)
    if op.kind == "AllToAll":
        blocks = exchange(reorder(split(x, op.size, op.to), op.order).contiguous(), op)
        return join(reorder(blocks, op.order, inverse=True), op.dim)
    if op.kind == "CollectivePermute":
        return permute(x, op)
    return rooted(x, op)


def reorder(blocks: torch.Tensor, order: tuple[int, ...], inverse: bool = False) -> torch.Tensor:
    """Blocks into members' order, or (inverse) members' into blocks' order."""
    if not order:
        return blocks
    index = [order.index(b) for b in range(len(order))] if inverse else list(order)
    return torch.stack([blocks[i] for i in index])


def exchange(blocks: torch.Tensor, op: Op) -> torch.Tensor:
    """Block i goes to member i: [n, ...] -> [n, ...], what each member sent."""
    ones = [1] * op.size
    return ops.wait_tensor(ops.all_to_all_single(blocks, ones, ones, op.group))


def ends(op: Op) -> tuple[list[int], list[int]]:
    """The members that this rank sends to, and those that it receives from: one each, or none."""
    member = {block: op.order.index(block) if op.order else block for block in range(op.size)}
    return [member[t] for s, t in op.moves if s == op.index], [member[s] for s, t in op.moves if t == op.index]


def permute(x: torch.Tensor, op: Op) -> torch.Tensor:
    """Send x from block to block; a rank that receives nothing gets zeros. An AllToAll, all splits but one empty."""
    sends, receives = ends(op)
    if op.size == 1 or op.backend == "abstract":
        return x.clone() if op.size > 1 or receives else torch.zeros_like(x)
    flat = x.flatten()
    inputs = [flat.numel() if m in sends else 0 for m in range(op.size)]
    outputs = [flat.numel() if m in receives else 0 for m in range(op.size)]
    sent = flat if sends else flat[:0]
    received = ops.wait_tensor(ops.all_to_all_single(sent.contiguous(), outputs, inputs, op.group))
    return received.view(x.shape) if receives else torch.zeros_like(x)


def rooted(x: torch.Tensor, op: Op) -> torch.Tensor:
    """Broadcast, Reduce, Scatter, Gather. What only the root has is, elsewhere, zeros: so each is a linear map."""
    at_root = op.index == op.root
    if op.kind == "Broadcast":
        return ops.wait_tensor(ops.all_reduce(x.contiguous() if at_root else torch.zeros_like(x), "sum", op.group))
    if op.kind == "Reduce":
        total = ops.wait_tensor(ops.all_reduce(x.contiguous(), "sum", op.group))
        return total if at_root else torch.zeros_like(total)
    n, root = op.size, op.order.index(op.root) if op.order else op.root
    one_way = [[1 if m == root else 0 for m in range(n)], [1] * n if at_root else [0] * n]
    if op.kind == "Scatter":
        blocks = reorder(split(x, n, op.dim), op.order).contiguous()
        sent = blocks if at_root else blocks[:0]
        return ops.wait_tensor(ops.all_to_all_single(sent, one_way[0], one_way[1], op.group))[0]
    received = ops.wait_tensor(ops.all_to_all_single(x.contiguous()[None], one_way[1], one_way[0], op.group))
    if not at_root:
        return x.new_zeros(output_shape(op, x.shape))
    return join(reorder(received, op.order, inverse=True), op.dim)


class Linear(torch.autograd.Function):
    """An Op under differentiation: its backward applies the transposed Op, its jvp the Op itself."""

    @staticmethod
    def forward(x, *op):
        op = Op(*op)
        if type(x) not in (torch.Tensor, torch.nn.Parameter):
            return traceable(x, op)  # a tracer's: nothing runs
        agree_on(op, x)
        event = record(op.event(x)) if active() else None
        result = traceable(x, op)
        if event is not None:
            event.end = now()
        return result

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.op = Op(*inputs[1:])

    @staticmethod
    def backward(ctx, cotangent):
        return linear(cotangent, *ctx.op.dual()), *(None,) * len(ctx.op)

    @staticmethod
    def jvp(ctx, tangent, *_):
        return linear(tangent, *ctx.op)

    @staticmethod
    def vmap(info, in_dims, x, *op):
        return linear(x.movedim(in_dims[0], 0), *Op(*op).batched()), 0


def linear(x: torch.Tensor, *op) -> torch.Tensor:
    return Linear.apply(x, *op)


@lru_cache(maxsize=1)
def register() -> None:
    """Tell torch.compile to keep `linear` in its graph: it would refuse to look into a Function that has a jvp.

    Called while compiling, since it imports the compiler, which takes as long as torch itself.
    """
    torch.compiler.allow_in_graph(linear)


def constant(fn: Callable) -> Callable:
    """As torch.compiler.assume_constant_result: a compiler calls fn once and keeps what it returns."""
    fn._dynamo_marked_constant = True  # set here, because torch.compiler would import the compiler
    return fn


def differentiated(x: torch.Tensor) -> bool:
    """Whether x is seen by autograd, by a transform of torch.func, by a compiler or by a tensor mode."""
    if torch.compiler.is_compiling() or (x.requires_grad and torch.is_grad_enabled()):
        return True
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    return type(x) not in (torch.Tensor, torch.nn.Parameter) or torch._C._len_torch_dispatch_stack() > 0
