"""What runs a collective of `shard_map`: the ranks of a mesh, or one process that holds all shards stacked.

Operands come with a dim in front for each axis of `call.lead`, in the mesh's order: of the axis's size in one process,
of size 1 on ranks. Both take the axes of the call together, as one dim of blocks in front: [blocks, ...].
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from scaling.collectives.kinds import combine_parts, join, split_dim
from scaling.collectives.linear import run_op
from scaling.collectives.op import Op, event
from scaling.shard_map.law import ENTERS, LEAVES, Call
from scaling.trace import open_logs, record

KIND = {"psum": "AllReduce", "pmax": "AllReduce", "pmin": "AllReduce", "all_gather": "AllGather", "gather": "AllGather"}
KIND |= {"psum_scatter": "ReduceScatter", "all_to_all": "AllToAll", "ppermute": "CollectivePermute", "slice": "Slice"}
REDUCES = {"pmax": "max", "pmin": "min"}


class Bound:
    """A mesh as one call of `shard_map` has it. `places`: by axis, this device's index as the program sees it, a 0-dim
    tensor that varies over that axis alone; `levels`: the level of vmap at which it does."""

    def __init__(self, mesh, in_process: bool, places: tuple = (), levels: dict[int, str] | None = None):
        self.mesh, self.in_process, self.places, self.levels = mesh, in_process, places, levels or {}

    def in_order(self, axes) -> list[str]:
        """Axes in the mesh's order."""
        return [axis for axis in self.mesh.sizes if axis in axes]

    def width(self, axis: str) -> int:
        """How many devices along an axis this process holds."""
        return self.mesh.sizes[axis] if self.in_process else 1

    def run(self, x: Tensor, call: Call) -> Tensor:
        """The call on stacked operands."""
        if call.kind == "pvary":
            call = call._replace(axes=tuple(axis for axis in call.axes if axis not in call.lead))
        kept = [axis for axis in call.lead if axis not in call.axes]
        widths = [self.width(axis) for axis in call.axes]
        if call.kind not in ENTERS:
            x = x.movedim([call.lead.index(axis) for axis in call.axes], list(range(len(widths))))
            x = x.flatten(0, len(widths) - 1) if widths else x[None]
        call = call._replace(dim=call.dim + len(kept), to=call.to + len(kept))
        y = (one_process if self.in_process else one_rank)(x, call, self.mesh)
        if call.kind in LEAVES:
            return y
        y = y.unflatten(0, widths) if widths else y[0]
        stacked = (*call.axes, *kept)
        return y.movedim([stacked.index(a) for a in call.lead_after(self.mesh.sizes)], list(range(len(stacked))))


def one_rank(x: Tensor, call: Call, mesh) -> Tensor:
    """[1, ...] -> [1, ...], without the leading dim where the call enters or leaves the axes."""
    if call.kind == "pvary":
        return x[None].clone()
    y = run_op(x if call.kind in ENTERS else x[0], op_of(call, x.dim() - (call.kind not in ENTERS), mesh))
    return y if call.kind in LEAVES else y[None]


def one_process(x: Tensor, call: Call, mesh) -> Tensor:
    """The same of all shards: [n, ...] -> [n, ...], by operations that torch differentiates."""
    n, kind = mesh.size(call.axes), call.kind
    if open_logs and kind != "pvary":
        record(event(op_of(call, x.dim() - (kind not in ENTERS), mesh), x if kind in ENTERS else x[0]))
    if kind == "psum" or kind in REDUCES:
        return combine_parts(x, REDUCES.get(kind, "sum"))
    if kind == "pvary":
        return x.expand(n, *x.shape).clone()  # forward-mode AD wants each element in a place of its own
    if kind == "slice":
        return split_dim(x, n, call.dim)
    if kind == "gather":
        return join(x, call.dim)
    if kind == "all_gather":
        whole = join(x, call.dim)
        return whole.expand(n, *whole.shape).clone()
    if kind == "psum_scatter":
        return split_dim(combine_parts(x, "sum"), n, call.dim)
    if kind == "all_to_all":
        parts = split_dim(x, n, call.to + 1)  # [to, from, ...]
        return join(parts.movedim(1, 0), call.dim + 1)
    source_of = {target: source for source, target in call.pairs}
    return torch.stack([x[source_of[i]] if i in source_of else torch.zeros_like(x[0]) for i in range(n)])


def op_of(call: Call, dims: int, mesh) -> Op:
    """The call as a collective of this project's, on an operand of so many dims."""
    kind, group = KIND[call.kind], mesh.group(call.axes)
    options = {"dim": call.dim, "to": call.to, "pairs": call.pairs, "by": REDUCES.get(call.kind, "sum")}
    return Op.over(group, kind, _line(kind, call, dims), **options)


def _line(kind: str, call: Call, dims: int) -> str:
    """The call as a typed line, dims by number: "[D0_X, D1] -> [D0, D1]"."""
    axes = "{" + ",".join(call.axes) + "}"
    plain = [f"D{i}" for i in range(dims)]

    def at(dim: int) -> str:
        return f"[{', '.join(f'{name}_{axes}' if i == dim else name for i, name in enumerate(plain))}]"

    whole = f"[{', '.join(plain)}]"
    return {
        "AllReduce": f"{whole} {{U_{axes}}} -> {whole}",
        "AllGather": f"{at(call.dim)} -> {whole}",
        "ReduceScatter": f"{whole} {{U_{axes}}} -> {at(call.dim)}",
        "AllToAll": f"{at(call.dim)} -> {at(call.to)}",
        "CollectivePermute": f"{whole} -> {whole}",
        "Slice": f"{whole} -> {at(call.dim)}",
    }[kind]


def index_of(places: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """The row-major index of places along axes of these sizes."""
    index = torch.zeros((), dtype=torch.int64)
    for place, size in zip(places, sizes, strict=True):
        index = index * size + place
    return index
