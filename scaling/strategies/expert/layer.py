"""One layer of experts, line by line.

A row is one choice of one token. The tokens are in G groups, one on each rank, and each group has R rows for every
expert; R is ragged, a different number for each (g, e).

    1. n   [G_X, E]       -> n   [G, E_X]         AllToAll in `route_tokens`: how many rows each rank will get
    2. Row [G_X, E, R, D] -> Row [G, E_X, R, D]   AllToAll: dispatch
    3. Out = W_out act(W_in Row)                  each expert its own rows, perhaps none; {U_Y} if F is split over Y
    4. Out [G, E_X, R, D] -> Out [G_X, E, R, D]   AllToAll: combine, while the shared experts compute
    5. y = sum over k of weights * Out
    6. y [B_X, T, D] {U_Y} -> y [B_X, T, D]       AllReduce, or ReduceScatter to T_Y; only if F is split over Y
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from scaling import tree
from scaling.collectives import all_gather, all_reduce, all_to_all, einsum, ragged_all_to_all, reduce_scatter, wait
from scaling.collectives.checked import alike
from scaling.configs import Config
from scaling.models.layer import Values
from scaling.models.moe import (
    ALPHA,
    Counts,
    activate_rows,
    balance_loss,
    biased_rows,
    by_expert,
    gradient_by_expert,
    router_logits,
    weigh,
    z_loss,
)
from scaling.models.pointwise import FUNCTIONS, vjp
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
    y = all_gather(f"x[{at.BT_Y}, D] -> x[{at.BT}, D]", x, mesh) if at.sequence else x
    Out, aux, _ = forward(params, {"y": y, "routing": routing}, config, mesh, at)
    return Out, aux | {"load": routing.load}


def forward(
    W: dict, s: Values, config: Config, mesh, at: ExpertLayout, product: Callable = einsum
) -> tuple[Tensor, dict[str, Tensor], Values]:
    """y[B_X, T, D] and the routing of `s` -> (Out[B_X, T, D], the losses, s with all that `backward` reads).

    `product` computes the products with the experts' weights.
    """
    tokens, routing, (R, Y, U) = s["y"].flatten(0, 1), s["routing"], (at.R, at.Y, at.U)
    logits = router_logits(s["y"], W["router"], W.get("b_router"))
    weights, aux = weigh_tokens(logits, routing, config, mesh, at)
    Row, weights = routing.rows.sent(tokens, weights, config)
    Row = _exchange(f"Row[G{at.X}, E, R, D] -> Row[G, E{at.X}, R, D]", Row, routing, mesh, at)  # 2. critical path
    Row = routing.by_expert(wait(Row))
    s = activate_rows(W, s | {"logits": logits, "Row": Row}, config, routing.counts, product, R, Y)
    line = f"Act[R{R}, F{Y}] * W_out[F{Y}, D] -> Out[R{R}, D]{U}"
    Out = by_expert(line, s["Act"], W["W_out"], routing.counts, product)  # 3.
    if "b_out" in W:  # each rank along Y adds a part
        Out = biased_rows(Out, W["b_out"] / mesh.size(at.tensor), routing.counts)
    Out = routing.by_group(Out)
    line = f"Out[G, E{at.X}, R, D]{U} -> Out[G{at.X}, E, R, D]{U}"
    Out = _exchange(line, Out, routing, mesh, at, back=True)  # 4. while the shared experts compute
    if "shared" in W:
        Every, s["shared"] = shared_forward(W["shared"], tokens, config, at, product)
    s["Out"] = wait(Out)
    Out = routing.rows.collect(s["Out"], weights)  # 5.
    if "shared" in W:
        Out = Out + Every
    Out = Out.view_as(s["y"])
    if at.sequence:
        Out = reduce_scatter(f"Out[{at.BT}, D]{U} -> Out[{at.BT_Y}, D]", Out, mesh)  # 6. critical path
    elif at.tensor:
        Out = all_reduce(f"Out[{at.BT}, D]{U} -> Out[{at.BT}, D]", Out, mesh)  # 6. critical path
    return Out, aux, s


def backward(
    W: dict, dOut: Tensor, dLoss: dict[str, float], s: Values, config: Config, mesh, at: ExpertLayout,
    product: Callable = einsum, gradient: Callable = gradient_by_expert,
) -> tuple[Tensor, dict]:  # fmt: skip
    """dOut[B_PXE, T_CY, D] -> (dy[B_PXE, T_CY, D], dW typed as W and unreduced as `moe` says).

    Args:
        W: The params.
        dOut: The cotangent of the first result of `forward`; where that has T_Y, so has dy.
        dLoss: The cotangents of the losses "balance" and "z".
        s: The third result of `forward`. "Act" and "Open" are computed again if they are missing.
        config: The model.
        mesh: The mesh.
        at: The layout.
        product: As in `forward`.
        gradient: gradient(W, name, line, a, b, counts) -> {name: dW}, as `gradient_by_expert`.
    """
    tokens, routing, (R, Y, U) = s["y"].flatten(0, 1), s["routing"], (at.R, at.Y, at.U)
    rows, inputs = routing.rows, config.routing == "inputs"  # whose weights multiply the experts' inputs
    if at.sequence:
        dOut = all_gather(f"dOut[{at.BT_Y}, D] -> dOut[{at.BT}, D]", dOut, mesh)  # 6. critical path
    elif at.tensor:
        dOut = all_reduce(f"dOut[{at.BT}, D]{U} -> dOut[{at.BT}, D]", dOut, mesh)  # 6. critical path
    dTokens = dOut.flatten(0, 1)
    (weights, aux), weigh_vjp = vjp(lambda logits: weigh_tokens(logits, routing, config, mesh, at), s["logits"])
    dRows = rows.spread(dTokens) if inputs else rows.scaled(rows.spread(dTokens), weights)  # 5.
    line = f"dOut[G{at.X}, E, R, D] -> dOut[G, E{at.X}, R, D]"
    dRows = _exchange(line, dRows, routing, mesh, at)  # 4. while the shared experts compute
    dW: dict[str, Any] = {}
    if "shared" in W:
        dShared, dW["shared"] = shared_backward(W["shared"], dTokens, s["shared"], config, at, product, gradient)
    dRows = routing.by_expert(wait(dRows))
    s = activate_rows(W, s, config, routing.counts, product, R, Y)
    dRow, dTmp, dGate = rows_backward(W, dRows, s, config, at, routing.counts, product, R)  # 3.
    dRow = routing.by_group(dRow)
    line = f"dRow[G, E{at.X}, R, D]{U} -> dRow[G{at.X}, E, R, D]{U}"
    dRow = _exchange(line, dRow, routing, mesh, at, back=True)  # 2. while gradients of weights are computed
    dW |= up_gradients(W, dTmp, dGate, s, routing.counts, R, Y, gradient)
    del dTmp, dGate
    dRow = wait(dRow)
    dweights = rows.dotted(dRow, tokens) if inputs else rows.dotted(s["Out"], dTokens)
    dy = rows.collect(dRow, weights if inputs else None)  # 1.
    del dRow
    dLoss = {name: aux[name].new_full((), d) for name, d in dLoss.items()}
    dlogits = weigh_vjp((dweights.to(weights.dtype), dLoss))[0].flatten(0, 1)
    dy += (dlogits @ W["router"].to(dlogits.dtype).T).to(dy.dtype)
    dW["router"] = (tokens.to(dlogits.dtype).T @ dlogits).to(W["router"].dtype)
    if "bias" in W:  # which enters the choice alone
        dW["bias"] = torch.zeros_like(W["bias"])
    if "b_router" in W:
        dW["b_router"] = dlogits.sum(0).to(W["b_router"].dtype)
    if "shared" in W:
        dy += dShared
    dy = dy.view_as(s["y"])
    if at.sequence:
        dy = reduce_scatter(f"dy[{at.BT}, D]{U} -> dy[{at.BT_Y}, D]", dy, mesh, async_op=True)  # critical path
    dW |= down_gradient(W, dRows, s, routing.counts, R, Y, gradient)
    if "b_out" in W:
        dW["b_out"] = sum_by_expert(dRows / mesh.size(at.tensor), routing.counts)
    return wait(dy), dW


def rows_backward(
    W: dict, dOut: Tensor, s: Values, config: Config, at: ExpertLayout, counts: Counts, product: Callable, R: str
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dOut[R, D] -> (dRow[R, D] {U_Y}, dTmp[R, F_Y], dGate[R, F_Y] or None without a gate)."""
    Y, U = at.Y, at.U
    dAct = by_expert(f"dOut[R{R}, D] * W_out[F{Y}, D] -> dAct[R{R}, F{Y}]", dOut, W["W_out"], counts, product)
    dTmp, dGate = activate_rows_vjp(dAct, s, config)
    del dAct
    dRow = by_expert(f"dTmp[R{R}, F{Y}] * W_in[D, F{Y}] -> dRow[R{R}, D]{U}", dTmp, W["W_in"], counts, product)
    if dGate is not None:
        line = f"dGate[R{R}, F{Y}] * W_gate[D, F{Y}] -> dRow[R{R}, D]{U}"
        dRow = by_expert(line, dGate, W["W_gate"], counts, product, add_to=dRow)
    return dRow, dTmp, dGate


def up_gradients(
    W: dict, dTmp: Tensor, dGate: Tensor | None, s: Values, counts: Any, R: str, Y: str, gradient: Callable
) -> dict[str, Any]:
    """Return the gradients of W_in and W_gate and of their biases, unreduced over the axes R of the rows."""
    U = f" {{U{R}}}" if R else ""
    dW = gradient(W, "W_in", f"Row[R{R}, D] * dTmp[R{R}, F{Y}] -> dW_in[D, F{Y}]{U}", s["Row"], dTmp, counts)
    if dGate is not None:
        line = f"Row[R{R}, D] * dGate[R{R}, F{Y}] -> dW_gate[D, F{Y}]{U}"
        dW |= gradient(W, "W_gate", line, s["Row"], dGate, counts)
    for name, d in (("b_in", dTmp), ("b_gate", dGate)):
        if d is not None and name in W:
            dW[name] = sum_by_expert(d, counts)
    return dW


def down_gradient(W: dict, dOut: Tensor, s: Values, counts: Any, R: str, Y: str, gradient: Callable) -> dict[str, Any]:
    """Return the gradient of W_out, unreduced over the axes R of the rows."""
    U = f" {{U{R}}}" if R else ""
    return gradient(W, "W_out", f"Act[R{R}, F{Y}] * dOut[R{R}, D] -> dW_out[F{Y}, D]{U}", s["Act"], dOut, counts)


def activate_rows_vjp(dAct: Tensor, s: Values, config: Config) -> tuple[Tensor, Tensor | None]:
    """Return (dTmp, dGate) of `activate_rows`; dGate is None without a gate."""
    _, act_vjp = FUNCTIONS[config.nonlinearity]
    if "Gate" not in s:
        return act_vjp(dAct, s["Tmp"]), None
    if config.clamp is None:
        return dAct * s["Open"], act_vjp(dAct * s["Tmp"], s["Gate"])
    Tmp, Gate = s["Tmp"].clamp(-config.clamp, config.clamp), s["Gate"].clamp(max=config.clamp)
    opened = torch.sigmoid(ALPHA * Gate)
    slope = opened * (1 + ALPHA * Gate * (1 - opened))
    return dAct * s["Open"] * (Tmp == s["Tmp"]), dAct * (Tmp + 1) * slope * (Gate == s["Gate"])


def sum_by_expert(Row: Tensor, counts: Sequence[int] | None) -> Tensor:
    """Row[R, D] -> the sum [E, D] of each expert's rows, the gradient of its bias; with counts=None that of all."""
    return Row.sum(0) if counts is None else torch.stack([rows.sum(0) for rows in Row.split(list(counts))])


def shared_forward(W: dict, y: Tensor, config: Config, at: ExpertLayout, product: Callable) -> tuple[Tensor, Values]:
    """y[R, D] -> (Out[R, D] {U_Y} of the experts that every token passes, the values to save)."""
    N, Y, U = at.N, at.Y, at.U
    s = activate_rows(W, {"Row": y}, config, None, product, N, Y)
    Out = product(f"Act[R{N}, F{Y}] * W_out[F{Y}, D] -> Out[R{N}, D]{U}", s["Act"], W["W_out"])
    if "gate" not in W:
        return Out, s
    return Out * (y @ W["gate"]).sigmoid()[:, None], s | {"Out": Out}


def shared_backward(
    W: dict, dOut: Tensor, s: Values, config: Config, at: ExpertLayout, product: Callable, gradient: Callable
) -> tuple[Tensor, dict]:
    """dOut[R, D] -> (dy[R, D] {U_Y}, dW)."""
    s, dW, dlogit = activate_rows(W, s, config, None, product, at.N, at.Y), {}, None
    if "gate" in W:
        opened = (s["Row"] @ W["gate"]).sigmoid()
        dlogit = (dOut * s["Out"]).sum(-1) * opened * (1 - opened)
        dW, dOut = {"gate": dlogit @ s["Row"]}, dOut * opened[:, None]
    dy, dTmp, dGate = rows_backward(W, dOut, s, config, at, None, product, at.N)
    if dlogit is not None:
        dy += dlogit[:, None] * W["gate"]
    dW |= up_gradients(W, dTmp, dGate, s, None, at.N, at.Y, gradient)
    return dy, dW | down_gradient(W, dOut, s, None, at.N, at.Y, gradient)


def weigh_tokens(
    logits: Tensor, routing: Routing, config: Config, mesh, at: ExpertLayout
) -> tuple[Tensor, dict[str, Tensor]]:
    """logits[B, T, E] -> (weights[n, k] of each token's experts, this rank's terms of the losses "balance" and "z").

    The ranks along Y have the same tokens, so each has a share of the losses.
    """
    weights = weigh(logits.flatten(0, 1), routing.experts, config)
    count, copies = len(weights) * at.ranks, mesh.size(at.tensor)
    balance = balance_loss(logits, routing.balanced, config, count, len(logits) * mesh.size(at.batch))
    return weights, {"balance": balance / copies, "z": z_loss(logits, count) / copies}


def _exchange(line: str, Row: Tensor, routing: Routing, mesh, at: ExpertLayout, back: bool = False) -> Any:
    """Start the AllToAll of this line, which sends rows to the experts' ranks, or `back`; return rows or a Pending."""
    if not at.experts:
        return Row
    if isinstance(routing.counts, int):  # the same number for all, so R is a dim like any other
        ranks = mesh.size(at.experts)
        blocks = Row.unflatten(0, (ranks if back else 1, -1, routing.counts // ranks))
        return all_to_all(line, blocks, mesh).flatten(0, 2)
    ends = (routing.receives, routing.sends) if back else (routing.sends, routing.receives)
    return ragged_all_to_all(line, Row, *ends, mesh, async_op=True)


def check_layer(params: dict, x: Tensor, config: Config, mesh, at: ExpertLayout) -> None:
    """Raise ShardingError that names the leaf, unless these are this config's params on this mesh, for x[B, T, D]."""
    if not isinstance(x, Tensor) or x.dim() != 3 or not x.is_floating_point() or x.layout is not torch.strided:
        found = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise ShardingError(f"x[B, T, D]: a layer of experts is given {found}\n  fix: give floats of three dims")
    if not isinstance(params, dict):
        raise ShardingError(f"a layer of experts of a {type(params).__name__}\n  fix: give a dict of its params")
    types, sizes = specs(config, at.experts, at.tensor), config.sizes | {"D": x.shape[-1]}
    fix = "give the params of this config, sharded as expert.specs says"
    types.pop("bias", None)
    if params.get("bias") is not None:  # it enters the choice of experts if it is given, whatever the routing
        types["bias"] = "bias[E]"
    tree.check(params, types, sizes, mesh, fix=fix)
    tree.check_floats(params)
