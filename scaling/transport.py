"""How data moves: each collective as an `Op`, run on plain tensors, and as a function that `torch.func` differentiates.

Everything private to torch that this project needs for communication is here. An `Op` is linear and knows its transpose
(law of cotangents: notation.md), so one autograd Function serves them all. There are two ways to run one:
- `start`: eagerly on the process group, possibly asynchronously: what hand-written code uses, at no extra cost;
- `traceable`: by torch's functional collectives, which torch.func, torch.compile and make_fx see through.
Over gloo a ReduceScatter is an AllToAll and a local sum: gloo's own is an AllReduce inside, with twice the bytes.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import torch.distributed as dist

from scaling.agree import agree_on
from scaling.mesh import Group
from scaling.spec import Spec, parse_line
from scaling.trace import Event, active, now, record

ops = torch.ops._c10d_functional
DUAL = {"AllGather": "ReduceScatter", "ReduceScatter": "AllGather", "Slice": "Pad", "Pad": "Slice"}
DUAL |= {"Broadcast": "Reduce", "Reduce": "Broadcast", "Scatter": "Gather", "Gather": "Scatter"}


class Op(NamedTuple):
    """One collective over one group, as constants that a compiler can keep in its graph.

    `dim`: the dim that grows (AllGather, Pad, Gather, AllToAll) or is split (ReduceScatter, Slice, Scatter); `to`: the
    dim that an AllToAll splits; `moves`: of a CollectivePermute, its (source, target) blocks, and of an op with a root
    ((root, root),); `line`: the types before and after; `checked`: ranks compare calls first.
    """

    kind: str
    group: str
    size: int
    index: int
    backend: str
    order: tuple[int, ...] = ()
    dim: int = 0
    to: int = 0
    moves: tuple[tuple[int, int], ...] = ()
    axes: tuple[str, ...] = ()
    line: str = ""
    checked: bool = False

    @staticmethod
    def over(group: Group, kind: str, line: str, dim: int = 0, to: int = 0, moves=()) -> "Op":
        g = group
        return Op(kind, g.name, g.size, g.index, g.backend, g.order, dim, to, tuple(moves), g.axes, line, g.checked)

    def dual(self) -> "Op":
        """The transpose: what carries cotangents back."""
        moves = self.moves
        if self.kind == "CollectivePermute":
            moves = tuple((target, source) for source, target in moves)
        dim, to = (self.to, self.dim) if self.kind == "AllToAll" else (self.dim, self.to)
        line = dual_line(self.line, self.axes)
        return self._replace(kind=DUAL.get(self.kind, self.kind), dim=dim, to=to, moves=moves, line=line)

    def batched(self) -> "Op":
        """The same on tensors with one more dim in front."""
        return self._replace(dim=self.dim + 1, to=self.to + 1)

    @property
    def root(self) -> int:
        return self.moves[0][0]

    def from_members(self, blocks: list) -> list:
        """What each member of the group sent, put into block order."""
        return [blocks[self.order.index(b)] for b in range(self.size)] if self.order else blocks

    def to_members(self, blocks: list) -> list:
        """Blocks, put into the order of the members they go to."""
        return [blocks[b] for b in self.order] if self.order else blocks

    def wire_bytes(self, nbytes: int) -> int:
        """Bytes that one rank sends, of V = `nbytes`, by the algorithms that are optimal in bytes."""
        n = self.size
        if self.kind == "AllReduce":
            return 2 * (n - 1) * nbytes // n
        if self.kind == "AllToAll":
            return (n - 1) * nbytes // n**2
        if self.kind == "CollectivePermute":
            return nbytes if any(s == self.index != t for s, t in self.moves) else 0
        if self.kind in ("Broadcast", "Scatter"):
            share = n - 1 if self.kind == "Broadcast" else (n - 1) / n
            return int(share * nbytes) if self.index == self.root else 0
        if self.kind in ("Reduce", "Gather"):
            return 0 if self.index == self.root else nbytes // (1 if self.kind == "Reduce" else n)
        return (n - 1) * nbytes // n if self.kind in ("AllGather", "ReduceScatter") else 0

    def volume(self, x: torch.Tensor) -> int:
        """V in bytes, of the operand."""
        return x.numel() * x.element_size() * (self.size if self.kind in ("AllGather", "AllToAll", "Gather") else 1)

    def event(self, x: torch.Tensor, async_op: bool = False) -> Event:
        line, volume = parse_line(self.line), self.volume(x)
        return Event(
            "Slice" if self.kind == "Pad" else self.kind,
            self.axes,
            line.operands[0],
            line.result,
            nbytes=volume,
            wire_bytes=self.wire_bytes(volume),
            start=now(),
            async_op=async_op,
        )


@lru_cache(maxsize=4096)
def dual_line(line: str, axes: tuple[str, ...]) -> str:
    """The types of the transpose: cotangents, which are unreduced over `axes` where the array was replicated."""
    before, after = parse_line(line).operands[0], parse_line(line).result

    def cotangent(spec: Spec) -> Spec:
        replicated = [a for a in axes if a not in spec.axes + spec.unreduced]
        kept = [a for a in spec.unreduced if a not in axes]
        return spec.with_name("d" + spec.name).with_unreduced(kept + replicated)

    return f"{cotangent(after)} -> {cotangent(before)}"


def output_shape(op: Op, shape) -> list[int]:
    shape = list(shape)
    if op.kind in ("AllGather", "Pad", "Gather", "AllToAll"):
        shape[op.dim] *= op.size
    if op.kind in ("ReduceScatter", "Slice", "Scatter"):
        shape[op.dim] //= op.size
    if op.kind == "AllToAll":
        shape[op.to] //= op.size
    return shape


def split(x: torch.Tensor, n: int, dim: int) -> torch.Tensor:
    """[..., n*m, ...] -> [n, ..., m, ...]: the blocks of a dim, as a leading dim."""
    return x.unflatten(dim, (n, x.shape[dim] // n)).movedim(dim, 0)


def join(blocks: torch.Tensor, dim: int) -> torch.Tensor:
    """[n, ..., m, ...] -> [..., n*m, ...]: the inverse of split."""
    return blocks.movedim(0, dim).flatten(dim, dim + 1)


def split_major(x: torch.Tensor, op: Op) -> torch.Tensor:
    """[..., n*m, ...] -> [n, m, ...], contiguous: no copy if the dim is the outermost in memory already."""
    return x.movedim(op.dim, 0).contiguous().unflatten(0, (op.size, x.shape[op.dim] // op.size))


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


def permute(x: torch.Tensor, op: Op) -> torch.Tensor:
    """Send x from block to block; a rank that receives nothing gets zeros. An AllToAll, all splits but one empty."""
    member = {block: op.order.index(block) if op.order else block for block in range(op.size)}
    sends = [member[t] for s, t in op.moves if s == op.index]
    receives = [member[s] for s, t in op.moves if t == op.index]
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


compilable = torch.compiler.allow_in_graph(linear)  # a Function with a jvp is refused by torch.compile otherwise


def differentiated(x: torch.Tensor) -> bool:
    """Whether x is seen by autograd, by a transform of torch.func, by a compiler or by a tensor mode."""
    if torch.compiler.is_compiling() or (x.requires_grad and torch.is_grad_enabled()):
        return True
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    return type(x) not in (torch.Tensor, torch.nn.Parameter) or torch._C._len_torch_dispatch_stack() > 0


def start(x: torch.Tensor, op: Op, group: Group, async_op: bool, out: torch.Tensor | None = None):
    """Start an op on the process group: (work to wait for or None, a function that then makes the result).

    `out` is a buffer that the result may be made in, where that saves a copy: of an AllReduce, the operand itself.
    Gathered and scattered dims are outermost in memory: what is copied is then a shard, never the whole array.
    """
    pg, n = group.pg, op.size
    if n == 1 and op.kind not in ("CollectivePermute", "Slice"):
        return None, lambda: x
    if pg is None or op.kind not in ("AllGather", "ReduceScatter", "AllReduce", "AllToAll"):
        result = traceable(x, op)
        return None, lambda: result
    if op.kind == "AllReduce":
        total = x if out is x and x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
        return dist.all_reduce(total, group=pg, async_op=async_op), lambda: total
    if op.kind == "AllGather":
        mine = x.movedim(op.dim, 0).contiguous()
        if out is not None and out.movedim(op.dim, 0).is_contiguous():
            blocks = out.movedim(op.dim, 0).unflatten(0, (n, len(mine)))
        else:
            blocks = mine.new_empty((n, *mine.shape))
        if op.backend == "gloo":  # into views of one buffer: less copying than gloo's gather into one tensor
            work = dist.all_gather(op.to_members(list(blocks)), mine, group=pg, async_op=async_op)
            return work, lambda: blocks.flatten(0, 1).movedim(0, op.dim)
        work = pg._allgather_base(blocks, mine)
        return work, lambda: reorder(blocks, op.order, inverse=True).flatten(0, 1).movedim(0, op.dim)
    if op.kind == "AllToAll":
        sent = reorder(split(x, n, op.to), op.order).contiguous()
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=pg, async_op=async_op)
        return work, lambda: join(reorder(received, op.order, inverse=True), op.dim)
    sent = reorder(split_major(x, op), op.order)
    if op.backend == "gloo":
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=pg, async_op=async_op)
        into = None if out is None else out.movedim(op.dim, 0)
        return work, lambda: add(received, into).movedim(0, op.dim)
    mine = torch.empty_like(sent[0])
    work = pg._reduce_scatter_base(mine, sent)
    return work, lambda: mine.movedim(0, op.dim)
