"""Where tokens go, decided once: whole numbers, without gradients.

With a capacity an expert takes the first tokens of the global batch that chose it, whatever the mesh: every layout
drops the same ones, and equals one device. What it costs is an AllGather of how many tokens chose each expert, 8 E
bytes from each rank (where T is split, from each row of B on each rank), and that it is the end of the batch that loses
tokens, so some ranks more than others. A capacity of each rank's own would need no message, and drop other tokens on
every mesh. T_C is taken to be in plain order: under a capacity, bring x out of zig-zag order first.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaling.collectives import all_gather, all_reduce, all_to_all, shard
from scaling.configs import Config
from scaling.models.balance import balanced_load, load_of
from scaling.models.moe import Rows, capacity_of, choose_experts, expert_rows, position
from scaling.spec import format_axes
from scaling.strategies.expert.layout import ExpertLayout, expert_layout


class Routing(NamedTuple):
    """Where this rank's n tokens go: all that computing the layer, and computing it again, need to know.

    experts int64[n, k]; load int64[E], the tokens of the global batch that chose each; `balanced`, the load that the
    balance loss wants even (`models.moe.balanced_load`), and `count`, the tokens that the losses count; the rows of
    this rank's choices; how many of them it `sends` to and how many rows it `receives` from each rank; `counts`, the
    rows of each expert that it holds; `order`, which puts rows as they arrive, by rank, into the experts' order, and
    its inverse, `back` (None: they arrive in it).
    """

    experts: Tensor
    load: Tensor
    balanced: Tensor
    count: "int | Tensor"
    rows: Rows
    sends: tuple[int, ...]
    receives: tuple[int, ...]
    counts: tuple[int, ...]
    order: Tensor | None = None
    back: Tensor | None = None


def route_tokens(
    params: dict, x: Tensor, config: Config, mesh, axis, *, tensor=None, spec: str | None = None, mask=None
) -> Routing:
    """Decide where the tokens of x go; arguments as `moe`'s. All ranks call it together.

    On an AbstractMesh every expert gets equally many rows, or is full if there is a capacity.
    """
    at = expert_layout(config, mesh, axis, tensor, spec)
    experts = choose_experts(x, params["router"], config, params.get("bias"))
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
    balanced, count = _counted(chosen, load, config, mesh, at, mask)
    if experts.is_meta:
        return _even(experts, load, capacity, config, mesh, at, balanced, count)
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
    return Routing(experts, load, balanced, count, rows, tuple(sends), tuple(receives), tuple(counts), order, back)


def _counted(experts: Tensor, load: Tensor, config: Config, mesh, at: ExpertLayout, mask) -> "tuple[Tensor, Any]":
    """(the balanced load, how many tokens the losses count) of the global batch, from this rank's experts[B, T, k]."""
    count: Any = experts[..., 0].numel() * at.ranks
    if mask is None and config.balance_by == "batch" and not config.balance_first:
        return load, count
    each, sequence = balanced_load(experts, config, mask), config.balance_by == "sequence"
    axes, type = (at.time, "load[B, E]") if sequence else (at.tokens, "load[E]")  # of each sequence, or of all
    each = all_reduce(f"{type} {{U_{format_axes(axes)}}} -> {type}", each, mesh) if axes else each
    if mask is not None:
        count = mask.sum()
        over = f"count[] {{U_{format_axes(at.tokens)}}} -> count[]"
        count = (all_reduce(over, count, mesh) if at.tokens else count).clamp(min=1)
    return each, count


def _exchanged(counts: Tensor, at: ExpertLayout, mesh) -> Tensor:
    """The rows that each rank sends to each expert held here, n[G, E_X]; counts[E]: those that this rank sends."""
    if not at.experts:
        return counts[None]
    return all_to_all(f"n[G{at.X}, E] -> n[G, E{at.X}]", counts[None], mesh)


def _places(experts: Tensor, segments: int, E: int, at: ExpertLayout, mesh) -> tuple[Tensor, Tensor]:
    """(load int64[E], places int64[n, k]): how many earlier tokens of the global batch chose the same expert."""
    segment = torch.arange(len(experts), device=experts.device) // (len(experts) // segments)
    key = experts + E * segment[:, None]
    counts = load_of(key, segments * E).view(segments, 1, E)
    whole = all_gather(f"n[{at.BT}, E] -> n[B, T, E]", counts, mesh) if at.tokens else counts
    earlier = (whole.flatten(0, 1).cumsum(0) - whole.flatten(0, 1)).view_as(whole)
    if at.tokens:
        earlier = shard(f"n[B, T, E] -> n[{at.BT}, E]", earlier, mesh)
    return whole.sum((0, 1)), earlier.flatten()[key] + position(key, segments * E)


def _even(experts: Tensor, load: Tensor, capacity: int | None, config: Config, mesh, at, balanced, count) -> Routing:
    """The same without values: what every rank sends, receives and holds if the experts' loads are equal."""
    groups, total = mesh.size(at.experts), experts.numel()
    if capacity is not None:
        total = min(total, -(-capacity * config.E // at.ranks))
    _exchanged(load, at, mesh)

    def split(parts: int) -> tuple[int, ...]:
        return tuple(total // parts + (i < total % parts) for i in range(parts))

    row = torch.empty(total, dtype=torch.int64, device=experts.device)
    sends, counts = split(groups), split(config.E // groups)
    order = row if groups > 1 and len(counts) > 1 else None
    return Routing(experts, load, balanced, count, Rows(row, experts, load), sends, sends, counts, order, order)
