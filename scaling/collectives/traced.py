"""Each collective as a function of tensors that torch.func, torch.compile and make_fx see through.

Called with this rank's shard and the `Op`, of more than one rank. By torch's functional collectives; over gloo a
ReduceScatter is an AllToAll and a local sum, since gloo's own is an AllReduce inside, with twice the bytes.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad as padded

from scaling._torch import exchange_over, gather_over, scatter_sum_over, sum_over
from scaling.collectives.op import Op


def split_dim(x: Tensor, n: int, dim: int) -> Tensor:
    """[..., n*m, ...] -> [n, ..., m, ...]: the blocks of a dim, as a leading dim."""
    return x.unflatten(dim, (n, x.shape[dim] // n)).movedim(dim, 0)


def join(blocks: Tensor, dim: int) -> Tensor:
    """[n, ..., m, ...] -> [..., n*m, ...]: the inverse of split."""
    return blocks.movedim(0, dim).flatten(dim, dim + 1)


def split_major(x: Tensor, op: Op) -> Tensor:
    """[..., n*m, ...] -> [n, m, ...], contiguous: no copy if the dim is the outermost in memory already."""
    x = (x.movedim(op.dim, 0) if op.dim else x).contiguous()
    return x.view(op.size, len(x) // op.size, *x.shape[1:])


def reorder(blocks: Tensor, order: tuple[int, ...], inverse: bool = False) -> Tensor:
    """Blocks into members' order, or (inverse) members' into blocks' order."""
    if not order:
        return blocks
    index = [order.index(b) for b in range(len(order))] if inverse else list(order)
    return torch.stack([blocks[i] for i in index])


def combine_parts(parts: Tensor, by: str, out: Tensor | None = None) -> Tensor:
    """[n, ...] -> [...]: the sum, or the greatest or least. A maximum with a NaN among its parts is NaN."""
    if by == "sum":
        return torch.sum(parts, 0, dtype=parts.dtype, out=out)
    return torch.amax(parts, 0, out=out) if by == "max" else torch.amin(parts, 0, out=out)


def _exchange(blocks: Tensor, op: Op) -> Tensor:
    """Block i goes to member i: [n, ...] -> [n, ...], what each member sent."""
    ones = [1] * op.size
    return exchange_over(blocks, ones, ones, op.group)


def slice_(x: Tensor, op: Op) -> Tensor:
    return split_dim(x, op.size, op.dim)[op.index].clone()


def pad(x: Tensor, op: Op) -> Tensor:
    """This rank's block in its place among zeros."""
    m, behind = x.shape[op.dim], [0, 0] * (x.dim() - 1 - op.dim)
    return padded(x, (*behind, op.index * m, (op.size - 1 - op.index) * m))


def all_reduce(x: Tensor, op: Op) -> Tensor:
    """A maximum is a ReduceScatter of the elements in a row and an AllGather: gloo's and NCCL's own lose NaNs."""
    if op.by == "sum":
        return sum_over(x, op.group)
    flat = padded(x.flatten(), (0, -x.numel() % op.size))
    mine = combine_parts(_exchange(flat.view(op.size, len(flat) // op.size), op), op.by)
    whole = gather_over(mine, op.size, op.group)
    whole = (
        whole if len(whole) == x.numel() else whole[: x.numel()].clone()
    )  # forward-mode AD wants no part of a tensor
    return whole.view(x.shape)


def all_gather(x: Tensor, op: Op) -> Tensor:
    blocks = gather_over(x.movedim(op.dim, 0)[None], op.size, op.group)
    return reorder(blocks, op.order, inverse=True).flatten(0, 1).movedim(0, op.dim)


def reduce_scatter(x: Tensor, op: Op) -> Tensor:
    blocks = reorder(split_major(x, op), op.order)
    if op.backend == "gloo" or op.by != "sum":
        return combine_parts(_exchange(blocks, op), op.by).movedim(0, op.dim)
    return scatter_sum_over(blocks.flatten(0, 1), op.size, op.group).movedim(0, op.dim)


def all_to_all(x: Tensor, op: Op) -> Tensor:
    blocks = _exchange(reorder(split_dim(x, op.size, op.to), op.order), op)
    return join(reorder(blocks, op.order, inverse=True), op.dim)


def ends(op: Op) -> tuple[list[int], list[int]]:
    """The members that this rank sends to, and those that it receives from: one each, or none."""
    member = {block: op.order.index(block) if op.order else block for block in range(op.size)}
    return [member[t] for s, t in op.pairs if s == op.index], [member[s] for s, t in op.pairs if t == op.index]


def permute(x: Tensor, op: Op) -> Tensor:
    """Send x from block to block; a rank that receives nothing gets zeros. An AllToAll, all splits but one empty."""
    sends, receives = ends(op)
    if op.size == 1:
        return x.clone() if receives else torch.zeros_like(x)
    flat = x.flatten()
    inputs = [flat.numel() if m in sends else 0 for m in range(op.size)]
    outputs = [flat.numel() if m in receives else 0 for m in range(op.size)]
    received = exchange_over(flat if sends else flat[:0], outputs, inputs, op.group)
    return received.view(x.shape) if receives else torch.zeros_like(x)


# Ops with a root. What only the root has is, elsewhere, zeros: so each is a linear map.


def at_root(op: Op) -> bool:
    return op.index == op.root


def broadcast(x: Tensor, op: Op) -> Tensor:
    return sum_over(x if at_root(op) else torch.zeros_like(x), op.group)


def reduce(x: Tensor, op: Op) -> Tensor:
    total = all_reduce(x, op)
    return total if at_root(op) else torch.zeros_like(total)


def scatter(x: Tensor, op: Op) -> Tensor:
    sent, received = _between_root_and_all(op)
    blocks = reorder(split_dim(x, op.size, op.dim), op.order)
    return exchange_over(blocks if at_root(op) else blocks[:0], received, sent, op.group)[0]


def gather(x: Tensor, op: Op) -> Tensor:
    received, sent = _between_root_and_all(op)
    blocks = exchange_over(x[None], received, sent, op.group)
    if not at_root(op):
        return torch.zeros_like(x).repeat([op.size if dim == op.dim else 1 for dim in range(x.dim())])
    return join(reorder(blocks, op.order, inverse=True), op.dim)


def _between_root_and_all(op: Op) -> tuple[list[int], list[int]]:
    """(the blocks that this member sends to each member, and those that it receives from each) of a Scatter."""
    root = op.order.index(op.root) if op.order else op.root
    return [1 if at_root(op) else 0] * op.size, [1 if member == root else 0 for member in range(op.size)]
