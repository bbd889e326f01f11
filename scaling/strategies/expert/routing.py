"""Routing of tokens to experts, decided once, as whole numbers without gradients.

With a capacity, an expert takes the first tokens of the global batch that chose it, whatever the mesh. So every layout
drops the same tokens, and equals one device. This costs an AllGather of how many tokens chose each expert, 8 E bytes
from each rank (where T is split, from each row of B on each rank). Another cost is that the end of the batch loses
tokens, so some ranks lose more than others. If each rank had a capacity, no message would be needed, but every mesh
would drop other tokens. T_C must be in plain order: under a capacity, bring x out of zig-zag order first.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from scaling.collectives import all_gather, all_reduce, all_to_all, shard
from scaling.configs import Config
from scaling.models.leaves import EXPERTS, SHARED, Leaf, leaves_here, map_leaves
from scaling.models.moe import OF_EACH, Rows, balanced_load, capacity_of, choose_experts, expert_rows, load_of, position
from scaling.spec import ShardingError, Spec, format_axes, parse

ExpertAxes = str | Sequence[str] | None


def axes_of(axis: ExpertAxes) -> tuple[str, ...]:
    """Return ("X",) for "X", ("X", "Y") for "XY" or ("X", "Y"), ("data",) for "data", and () for None or ()."""
    if not axis:
        return ()
    return parse(f"[I_{axis if isinstance(axis, str) else format_axes(axis)}]").axes


def _on(axes: tuple[str, ...]) -> str:
    """Return the axes as a subscript: "_XY", or "" if there are none."""
    return "_" + format_axes(axes) if axes else ""


def specs(config: Config, axis: ExpertAxes = "X", tensor: ExpertAxes = None) -> dict:
    """Return the types of a layer's params by `models.leaves`: experts over `axis`, F over `tensor` if one is given."""
    on = {"E": axes_of(axis), "Y": axes_of(tensor)}

    def own(name: str, leaf: Leaf) -> str:
        dims = parse(leaf.trained).dims[1:]  # of one layer, whole along D
        return str(Spec(name, tuple((dim, sum((on.get(each, ()) for each in axes), ())) for dim, axes in dims)))

    tables = EXPERTS | ({"shared": SHARED} if config.shared else {})
    return map_leaves(own, leaves_here(tables, config))


def experts_of(W: dict) -> dict:
    """Return the params of a Transformer layer that belong to its experts, as `specs` names them."""
    return {name: W[name] for name in ("router", *OF_EACH, "b_router", "bias", "shared") if name in W}


class ExpertLayout(NamedTuple):
    """The mesh axes that split experts (X), F (Y), B and T, and their subscripts in the types.

    Attributes:
        experts: The axes of the experts.
        tensor: The axes of F.
        batch: The axes of B.
        time: The axes of T.
        tokens: The axes of the tokens' dims B and T.
        sequence: Whether x and y have T split over Y as well, `T_Y`.
        ranks: The number of parts that the tokens are split into.
        X: The subscript of the experts' axes.
        Y: The subscript of F's axes.
        U: The mark of partial sums over F, such as " {U_Y}", or "" if F is whole.
        N: The subscript of the axes that split the tokens.
        R: The subscript of the axes that split the rows of one expert.
        BT: The dims B and T, with their axes.
        BT_Y: The dims B and T, with T split over F's axes as well.
    """

    experts: tuple[str, ...]
    tensor: tuple[str, ...]
    batch: tuple[str, ...]
    time: tuple[str, ...]
    tokens: tuple[str, ...]
    sequence: bool
    ranks: int
    X: str
    Y: str
    U: str
    N: str
    R: str
    BT: str
    BT_Y: str


def expert_layout(mesh, E: int, axis: ExpertAxes, tensor: ExpertAxes = None, spec: str | None = None) -> ExpertLayout:
    """Return the layout on the axes that the mesh has. Raise ShardingError if they do not fit, or E does not divide."""
    axes = (some if some is None or isinstance(some, str) else tuple(some) for some in (axis, tensor))
    return mesh.constant(_layout, E, *axes, spec)


def _layout(mesh, E: int, axis: ExpertAxes, tensor: ExpertAxes, spec: str | None) -> ExpertLayout:
    def there(axes) -> tuple[str, ...]:
        return tuple(a for a in axes if a in mesh.sizes)

    experts, Y = there(axes_of(axis)), there(axes_of(tensor))
    x = parse(spec or f"x[B{_on(axes_of(axis))}, T, D]")
    rule = f"{x}\n  rule: the tokens of a layer of experts are x[B_X, T, D], with D whole, T over the axes of F last"
    fix = "gather or reduce x to such a type"
    if len(x.dims) != 3 or x.unreduced or x.dims[2][1]:
        raise ShardingError(f"{rule}\n  fix: {fix}")
    batch, time = there(x.dims[0][1]), there(x.dims[1][1])
    sequence = bool(Y) and time[-len(Y) :] == Y
    time = time[: -len(Y)] if sequence else time
    if set(Y) & {*batch, *time, *experts}:
        raise ShardingError(f"{rule}\n  fix: split F over axes that split neither tokens nor experts, not {tensor}")
    if not set(experts) <= {*batch, *time}:
        raise ShardingError(f"{rule}\n  fix: split B over the experts' axes {format_axes(experts)}, too")
    if E % mesh.size(experts):
        raise ShardingError(
            f"W_in[E{_on(experts)}, D, F]: {E} experts do not divide over {mesh.size(experts)} ranks\n"
            f"  fix: give {format_axes(experts)} a size that divides E"
        )
    B, U = f"B{_on(batch)}", f" {{U{_on(Y)}}}" if Y else ""
    N, R = _on(batch + time), _on(tuple(axis for axis in batch + time if axis not in experts))
    subscripts = _on(experts), _on(Y), U, N, R, f"{B}, T{_on(time)}", f"{B}, T{_on(time + Y)}"
    return ExpertLayout(experts, Y, batch, time, batch + time, sequence, mesh.size(batch + time), *subscripts)


class Routing(NamedTuple):
    """The ranks and experts that this rank's n tokens go to, decided once and saved for the backward.

    Attributes:
        experts: int64[n, k], the choices of each token.
        load: int64[E], the tokens of the global batch that chose each expert.
        balanced: The load that the balance loss makes even (`models.moe.balanced_load`).
        rows: The rows of this rank's choices.
        sends: How many rows this rank sends to each rank.
        receives: How many rows this rank receives from each rank.
        counts: The number of rows of each of this rank's experts; a single int if every expert has that many.
        order: int64[R], the permutation from the order of arrival, by sending rank, to the order of this rank's
            experts. None if the rows arrive in that order.
        back: The inverse of `order`.
    """

    experts: Tensor
    load: Tensor
    balanced: Tensor
    rows: Rows
    sends: tuple[int, ...]
    receives: tuple[int, ...]
    counts: tuple[int, ...] | int
    order: Tensor | None = None
    back: Tensor | None = None

    def by_expert(self, Row: Tensor) -> Tensor:
        """Return Row[R, D], which is in the order of arrival, by sending rank, in the order of this rank's experts."""
        return Row if self.order is None else Row.index_select(0, self.order)

    def by_group(self, Row: Tensor) -> Tensor:
        """Return Row[R, D], which is in the order of this rank's experts, in the order of arrival."""
        return Row if self.back is None else Row.index_select(0, self.back)


def route_tokens(
    params: dict, x: Tensor, config: Config, mesh, axis, *, tensor=None, spec: str | None = None, fixed: bool = False
) -> Routing:
    """Decide which experts the tokens of x go to. The arguments are as in `moe`, and all ranks call it together.

    If `fixed`, every expert computes every token, and the results of experts that a token has not chosen are left out.
    The numbers of rows then depend on shapes alone, so the host reads none. All ranks must have equally many tokens.
    On an AbstractMesh every expert gets equally many rows, or is full if there is a capacity.
    """
    at = expert_layout(mesh, config.E, axis, tensor, spec)
    experts = choose_experts(x, params["router"], config, params.get("bias"), params.get("b_router"))
    if at.sequence:
        experts = all_gather(f"e[{at.BT_Y}, K] -> e[{at.BT}, K]", experts, mesh)
    segments = len(experts) if at.time else 1  # parts of this rank's tokens that are neighbours in the global batch
    chosen, experts = experts, experts.flatten(0, 1)
    capacity, kept = capacity_of(config, len(experts) * at.ranks), None
    if capacity is None:
        load = load_of(experts, config.E)
        if at.tokens:
            load = all_reduce(f"load[E] {{U_{format_axes(at.tokens)}}} -> load[E]", load, mesh)
    else:
        load, places = _places(experts, segments, config.E, at, mesh)
        kept = places < capacity
    balanced = _balanced(chosen, load, config, mesh, at)
    if fixed:
        return _all_tokens(experts, load, config.E, mesh.size(at.experts), balanced)
    if experts.is_meta:
        return _even(experts, load, capacity, config, mesh, at, balanced)
    rows = expert_rows(experts, config.E, kept)
    arriving = _exchanged(rows.counts, at, mesh)
    groups, local = arriving.shape
    sizes = torch.cat([rows.counts.view(groups, local).sum(1), arriving.sum(1), arriving.sum(0)]).tolist()
    sends, receives, counts = sizes[:groups], sizes[groups : 2 * groups], sizes[2 * groups :]
    order = back = None
    if groups > 1 and local > 1:
        expert = torch.arange(local, device=x.device).repeat(groups)
        order = expert.repeat_interleave(arriving.flatten(), output_size=sum(receives)).argsort(stable=True)
        back = order.argsort()
    return Routing(experts, load, balanced, rows, tuple(sends), tuple(receives), tuple(counts), order, back)


def _all_tokens(experts: Tensor, load: Tensor, E: int, groups: int, balanced: Tensor) -> Routing:
    """Return the routing by which each of E experts, split over `groups` ranks, gets all n tokens of each of them."""
    (n, k), local = experts.shape, E // groups
    token = torch.arange(n, device=experts.device)
    rows = Rows((token * k).repeat(E), experts * n + token[:, None], torch.full_like(load, n))
    arrived = torch.arange(groups * local * n, device=experts.device)
    order, back = (
        arrived.view(parts, -1, n).transpose(0, 1).flatten() if groups > 1 and local > 1 else None
        for parts in (groups, local)
    )
    sent = (local * n,) * groups
    return Routing(experts, load, balanced, rows, sent, sent, groups * n, order, back)


def _balanced(experts: Tensor, load: Tensor, config: Config, mesh, at: ExpertLayout) -> Tensor:
    """Return `balanced` of the Routing, over the global batch, from the choices experts[B, T, k] and their load."""
    if config.balance_by == "batch" and not config.balance_first:
        return load
    sequence = config.balance_by == "sequence"
    axes, type = (at.time, "load[B, E]") if sequence else (at.tokens, "load[E]")  # of each sequence, or of all
    each = balanced_load(experts, config)
    return all_reduce(f"{type} {{U_{format_axes(axes)}}} -> {type}", each, mesh) if axes else each


def _exchanged(counts: Tensor, at: ExpertLayout, mesh) -> Tensor:
    """Return n[G, E_X], the numbers of rows that each rank sends to this rank's experts, from this rank's counts[E]."""
    if not at.experts:
        return counts[None]
    return all_to_all(f"n[G{at.X}, E] -> n[G, E{at.X}]", counts[None], mesh)


def _places(experts: Tensor, segments: int, E: int, at: ExpertLayout, mesh) -> tuple[Tensor, Tensor]:
    """Return (load int64[E], places int64[n, k]); places count the earlier tokens that chose the same expert."""
    segment = torch.arange(len(experts), device=experts.device) // (len(experts) // segments)
    key = experts + E * segment[:, None]
    counts = load_of(key, segments * E).view(segments, 1, E)
    whole = all_gather(f"n[{at.BT}, E] -> n[B, T, E]", counts, mesh) if at.tokens else counts
    earlier = (whole.flatten(0, 1).cumsum(0) - whole.flatten(0, 1)).view_as(whole)
    if at.tokens:
        earlier = shard(f"n[B, T, E] -> n[{at.BT}, E]", earlier, mesh)
    return whole.sum((0, 1)), earlier.flatten()[key] + position(key, segments * E)


def _even(experts: Tensor, load: Tensor, capacity: int | None, config: Config, mesh, at, balanced) -> Routing:
    """Return the routing on an AbstractMesh, which has no values: sends, receives and counts for equal loads."""
    groups, total = mesh.size(at.experts), experts.numel()
    if capacity is not None:
        total = min(total, -(-capacity * config.E // at.ranks))
    _exchanged(load, at, mesh)

    def split(parts: int) -> tuple[int, ...]:
        return tuple(total // parts + (i < total % parts) for i in range(parts))

    row = torch.empty(total, dtype=torch.int64, device=experts.device)
    sends, counts = split(groups), split(config.E // groups)
    order = row if groups > 1 and len(counts) > 1 else None
    return Routing(experts, load, balanced, Rows(row, experts, load), sends, sends, counts, order, order)
