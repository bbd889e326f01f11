"""One layer of experts, line by line.

A row is one choice of one token. The tokens are in G groups, one on each rank, and each group has R rows for every
expert; R is ragged, a different number for each (g, e).

    1. n   [G_X, E]       -> n   [G, E_X]         AllToAll in `route_tokens`: how many rows each rank will get
    2. Row [G_X, E, R, D] -> Row [G, E_X, R, D]   AllToAll: dispatch
    3. Out = W_out act(W_in Row)                  each expert its own rows, perhaps none; {U_Y} if F is split over Y
    4. Out [G, E_X, R, D] -> Out [G_X, E, R, D]   AllToAll: combine
    5. y = sum over k of weights * Out
    6. y [B_X, T, D] {U_Y} -> y [B_X, T, D]       AllReduce, or ReduceScatter to T_Y; only if F is split over Y
"""

from functools import partial

import torch
from torch import Tensor

from scaling import tree
from scaling.collectives import all_gather, all_reduce, all_to_all, ragged_all_to_all, reduce_scatter
from scaling.collectives.checked import alike
from scaling.configs import Config
from scaling.models.moe import balance_loss, by_expert, mlp, router_logits, shared_experts, weigh, z_loss
from scaling.scaled import TapedMatrix
from scaling.spec import ShardingError
from scaling.strategies.expert.routing import ExpertLayout, Routing, expert_layout, route_tokens, specs


def moe(
    params: dict,
    x: Tensor,
    config: Config,
    mesh,
    axis,
    *,
    tensor=None,
    spec: str | None = None,
    routing: Routing | None = None,
    fixed: bool = False,
) -> tuple[Tensor, dict]:
    """x[B_axis, T, D] -> (y[B_axis, T, D], aux), equal to `scaling.models.moe.dense` on one device.

    Args:
        params: This rank's shards, typed as in `specs`: "router", "W_in", "W_gate" if `config.gated`, "W_out", and
            perhaps "bias", which enters the choice alone, and "shared", the experts that every token passes.
        x: The tokens.
        config: The model.
        mesh: The mesh. An axis that it lacks drops out.
        axis: The experts' axis, or several, "XY".
        tensor: The axis that F is split over.
        spec: The type of x if more axes split it, `x[B_XE, T_C, D]`. If T is split over `tensor` last, `x[B_X, T_Y,
            D]`, so is the T of y.
        routing: The result of `route_tokens` for this x, if a backward pass computes the layer again.
        fixed: Whether every expert computes every token, as in `route_tokens`.

    Returns:
        y and aux. aux has "balance" and "z", this rank's terms of the losses over the global batch, unreduced over the
        axes of x and `tensor`. They are added, times `config.aux_coef` and `z_coef`, to a loss while that is unreduced.
        It also has "load" int64[E], how many tokens of the global batch chose each expert, before any was dropped.
        Cotangents follow the law (notation.md): W_in's, W_gate's and W_out's are unreduced over axes of x that are not
        the experts', the router's and shared's over all axes of x, and the router's and x's over `tensor`.
    """
    at = expert_layout(mesh, config.E, axis, tensor, spec)
    if not torch.compiler.is_compiling():
        check_layer(params, x, config, mesh, at)
        alike(mesh, "moe", (*at.experts, *at.tensor), config=config, axis=axis, tensor=tensor, spec=spec)
    if routing is None:
        routing = route_tokens(params, x, config, mesh, axis, tensor=tensor, spec=spec, fixed=fixed)
    if at.sequence:
        x = all_gather(f"x[{at.BT_Y}, D] -> x[{at.BT}, D]", x, mesh)
    tokens = x.flatten(0, 1)
    logits = router_logits(tokens, params["router"], params.get("b_router"))
    Row, weights = routing.rows.sent(tokens, weigh(logits, routing.experts, config), config)
    if at.experts:
        line = f"Row[G{at.X}, E, R, D] -> Row[G, E{at.X}, R, D]"
        Row = _exchanged(line, Row, routing, at, mesh)  # 2. critical path
    Row = Row if routing.order is None else Row.index_select(0, routing.order)
    copies = mesh.size(at.tensor)
    Out = by_expert(partial(mlp, clamp=config.clamp, over=at.Y, parts=copies), params, Row, routing.counts)  # 3.
    Out = Out if routing.back is None else Out.index_select(0, routing.back)
    if at.experts:
        line = f"Out[G, E{at.X}, R, D]{at.U} -> Out[G{at.X}, E, R, D]{at.U}"
        Out = _exchanged(line, Out, routing, at, mesh, back=True)  # 4. critical path
    y = routing.rows.collect(Out, weights)  # 5.
    if "shared" in params:
        y = y + shared_experts(params["shared"], tokens, partial(mlp, over=at.Y))
    y = y.view_as(x)
    if at.sequence:
        y = reduce_scatter(f"y[{at.BT}, D]{at.U} -> y[{at.BT_Y}, D]", y, mesh)  # 6. critical path
    elif at.tensor:
        y = all_reduce(f"y[{at.BT}, D]{at.U} -> y[{at.BT}, D]", y, mesh)  # 6. critical path
    logits, count = logits.view(*x.shape[:-1], -1), len(tokens) * at.ranks
    balance = balance_loss(logits, routing.balanced, config, count, len(x) * mesh.size(at.batch)) / copies
    return y, {"balance": balance, "z": z_loss(logits, count) / copies, "load": routing.load}


def _exchanged(line: str, x: Tensor, routing: Routing, at: ExpertLayout, mesh, back: bool = False) -> Tensor:
    """Return the rows after the AllToAll of this line. If their numbers are fixed, R is a dim like any other."""
    ends = (routing.receives, routing.sends) if back else (routing.sends, routing.receives)
    if not isinstance(routing.counts, int):
        return ragged_all_to_all(line, x, *ends, mesh)
    ranks = mesh.size(at.experts)
    rows = x.unflatten(0, (ranks if back else 1, -1, routing.counts // ranks))
    return all_to_all(line, rows, mesh).flatten(0, 2)


def check_layer(params: dict, x: Tensor, config: Config, mesh, at: ExpertLayout) -> None:
    """Raise ShardingError that names the leaf, unless these are this config's params on this mesh, for x[B, T, D]."""
    if not isinstance(x, Tensor) or x.dim() != 3 or not x.is_floating_point() or x.layout is not torch.strided:
        found = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise ShardingError(f"x[B, T, D]: a layer of experts is given {found}\n  fix: give floats of three dims")
    if not isinstance(params, dict):
        raise ShardingError(f"a layer of experts of a {type(params).__name__}\n  fix: give a dict of its params")
    types, sizes = specs(config, at.experts, at.tensor), config.sizes | {"D": x.shape[-1]}
    fix = "give the params of this config, sharded as expert.specs says"
    params = tree.map(lambda W: W.like if isinstance(W, TapedMatrix) else W, params)
    types.pop("bias", None)
    if params.get("bias") is not None:  # it enters the choice of experts if it is given, whatever the routing
        types["bias"] = "bias[E]"
    tree.check(params, types, sizes, mesh, fix=fix)
    tree.check_floats(params)
