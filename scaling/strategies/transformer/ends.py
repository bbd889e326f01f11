"""The ends of a Transformer, outside its layers: the embedding, and the head with the loss (Part 5).

The vocabulary is split over Y, and the backward is written by hand.

    x      [B, T_CY, D]  = rows of E[V_Y, D] for this rank's tokens, reduce-scattered over Y
    logits [R, V_Y]      = x[R, D] * U[D, V_Y]             of some rows R of the B T_C tokens at a time

The logits of all tokens would be the largest array of a step. So the loss is computed in chunks. As soon as a chunk's
softmax is known, so are its dlogits and its part of dx and dU, and the next chunk's logits replace this chunk's. No
logit is computed twice. For each token, the softmax over V needs the largest logit over Y, and three sums over Y: of
exp(logit - max), of the target's logit, which one rank has, and, for label smoothing, of all logits.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaling.collectives import all_gather, all_reduce, einsum, masked, reduce_scatter
from scaling.collectives.calls import zeroed
from scaling.common.limits import LIMITS
from scaling.configs import Config
from scaling.models.layer import biased, normed, normed_backward, scale_by
from scaling.models.pointwise import soft_cap


def embed(W: Mapping[str, Tensor], tokens: Tensor, places: Tensor | None, mesh, config: Config) -> Tensor:
    """tokens[B_PXE, T_C], E[V_Y, D] -> x[B_PXE, T_CY, D], scaled. Tokens of other parts of V add zeros here.

    Learned positions P[J, D] of places[B_PXE, T_CY] are added, if the model has them.
    """
    local, here = in_part(tokens, len(W["embed"]), mesh)
    x = masked("x[B_PXE, T_C, D] {U_Y}", torch.nn.functional.embedding(local, W["embed"]), here, mesh)
    x = scale_by(reduce_scatter("x[B_PXE, T_C, D] {U_Y} -> x[B_PXE, T_CY, D]", x, mesh), config.embed_scale)
    return x if places is None else x + torch.nn.functional.embedding(places, W["positions"])


def embed_backward(dx: Tensor, tokens: Tensor, places: Tensor | None, size: int, mesh, config: Config) -> dict:
    """dx[B_PXE, T_CY, D], tokens[B_PXE, T_C] -> {dE[V_Y, D] {U_PXEC}, dP[J, D] {U_PXECY}}, of `size` rows V_Y.

    Both are in float32 at least.
    """
    found = {}
    if places is not None:
        found["positions"] = sum_rows(dx, places, config.learned_positions)
    dx = all_gather("dx[B_PXE, T_CY, D] -> dx[B_PXE, T_C, D]", dx, mesh)
    local, here = in_part(tokens, size, mesh)
    return found | {"embed": sum_rows(zeroed(scale_by(dx, config.embed_scale), here), local, size)}


def sum_rows(dx: Tensor, indices: Tensor, size: int) -> Tensor:
    """Sum the rows dx[B, T, D] that have the same index[B, T] into a table of `size` rows, in float32 at least.

    torch's kernel on CPUs adds in the dtype of dx: in bfloat16 the sum for a frequent token would stop growing.
    """
    dx = dx.to(torch.promote_types(dx.dtype, torch.float32))
    return torch.ops.aten.embedding_dense_backward(dx, indices, size, -1, False)


def in_part(tokens: Tensor, size: int, mesh) -> tuple[Tensor, Tensor]:
    """Return (each token's row in this rank's part of the vocabulary, or 0; whether the part has the token)."""
    local = tokens - mesh.coord.get("Y", 0) * size
    here = (local >= 0) & (local < size)
    return torch.where(here, local, 0), here


class Terms(NamedTuple):
    """The parts of a token's loss: (1 - smoothing) ce + smoothing (mean over V of ce) + z_loss lse^2.

    Attributes:
        V: The number of entries of the vocabulary. The ranks' parts may hold more; those are padding, without a logit.
        smoothing: The share of the mean over V.
        z_loss: The factor of lse^2, where lse is the log of the softmax's denominator.
        cap: The soft cap of the logits, or None.
    """

    V: int
    smoothing: float
    z_loss: float
    cap: float | None = None


def head(
    W: dict,
    x: Tensor,
    targets: Tensor,
    weights: Tensor,
    terms: Terms,
    config: Config,
    mesh,
    gradients: bool = True,
    frozen: bool = False,
    chunk_bytes: int = LIMITS.chunk,
) -> tuple[Tensor, Any, dict[str, Tensor]]:
    """x[B_PXE, T_CY, D] -> (Loss[] {U_PXECY}, dx[B_PXE, T_CY, D], dW): the weighted loss of this rank's tokens.

    Args:
        W: "norm" g[D], and "unembed" U[D, V_Y] or, tied, "embed" E[V_Y, D]; perhaps "b_unembed" b[V_Y].
        x: The result of the last layer.
        targets: targets[B_PXE, T_C]. A target of weight 0 may lie outside the vocabulary.
        weights: weights[B_PXE, T_C], already divided by the sum of all weights.
        terms: The parts of a token's loss.
        config: The model.
        mesh: The mesh.
        gradients: Whether to compute dx and dW.
        frozen: Whether to compute dx alone, without dW.
        chunk_bytes: The most bytes of logits, in float32, at a time.
    """
    y, r = normed(W, "norm", x, config)
    y = all_gather("y[B_PXE, T_CY, D] -> y[B_PXE, T_C, D]", y, mesh)  # on the critical path
    loss, dy, dW = chunked_loss(y, W, targets, weights, terms, mesh, chunk_bytes, gradients, frozen)
    if dy is None:
        return loss, None, {}
    dy = reduce_scatter("dy[B_PXE, T_C, D] {U_Y} -> dy[B_PXE, T_CY, D]", dy, mesh)  # on the critical path
    dx, dnorm = normed_backward(W, "norm", x, r, dy, config)
    return loss, dx, dnorm | dW if dW else {}


def token_logprobs(W: dict, x: Tensor, targets: Tensor, config: Config, mesh) -> Tensor:
    """x[B_PXE, T_CY, D], targets[B_PXE, T_C] -> logprobs[B_PXE, T_C], the targets'; `W` as in `head`."""
    terms, (U, tied) = Terms(config.V, 0.0, 0.0, config.logit_cap), table_of(W)
    y, _ = normed(W, "norm", x, config)
    y = all_gather("y[B_PXE, T_CY, D] -> y[B_PXE, T_C, D]", y, mesh)
    rows, found = y.flatten(0, 1), []
    size = max(1, LIMITS.chunk // (4 * U.shape[0 if tied else 1]))
    for some, ids in zip(rows.split(size), targets.flatten().split(size), strict=True):
        one = torch.ones(len(ids), dtype=rows.dtype, device=rows.device)
        found.append(chunk_loss(some, W, ids, one, terms, mesh, False)[0])
    ce = all_reduce("ce[R_PXEC] {U_Y} -> ce[R_PXEC]", torch.cat(found), mesh)
    return -ce.view(targets.shape)


def table_of(W: Mapping[str, Tensor]) -> tuple[Tensor, bool]:
    """Return U[D, V_Y] and False or, if the model has none, the tied E[V_Y, D] and True."""
    return (W["unembed"], False) if "unembed" in W else (W["embed"], True)


def chunked_loss(
    x, W: Mapping, targets, weights, terms: Terms, mesh, chunk_bytes: int, gradients: bool, frozen: bool = False
) -> tuple[Tensor, Any, dict[str, Tensor]]:
    """x[B_PXE, T_C, D], targets[B_PXE, T_C], weights[B_PXE, T_C] -> Loss[] {U_PXECY}; `W` as in `head`.

    With `gradients`, dx[B_PXE, T_C, D] {U_Y} follows, or else None, and dU[D, V_Y] {U_PXEC} (tied: dE[V_Y, D]) and
    db[V_Y] {U_PXEC} by their names, if they are not `frozen`. The sum over chunks is in float64, that of their dU in
    float32 at least: in bfloat16 each chunk would round the sum again.
    """
    rows, dU, (U, tied), db = x.flatten(0, 1), None, table_of(W), W.get("b_unembed")
    db = None if db is None else torch.zeros_like(db, dtype=torch.promote_types(db.dtype, torch.float32))
    loss = rows.new_zeros((), dtype=torch.float64)
    dx = torch.empty_like(rows) if gradients else None
    V, dV = ("E[V_Y, D]", "dE[V_Y, D]") if tied else ("U[D, V_Y]", "dU[D, V_Y]")
    count = max(1, -(-4 * len(rows) * U.shape[0 if tied else 1] // chunk_bytes))
    size = max(1, -(-len(rows) // count))
    chunks = rows.split(size), targets.flatten().split(size), weights.flatten().split(size)
    for i, (some, ids, w) in enumerate(zip(*chunks, strict=True)):
        term, dlogits = chunk_loss(some, W, ids, w, terms, mesh, gradients)
        loss = loss + term.sum(dtype=torch.float64)
        if dx is not None:
            out = dx[i * size : i * size + len(some)]
            einsum(f"dlogits[R_PXEC, V_Y] * {V} -> dx[R_PXEC, D] {{U_Y}}", dlogits, U, out=out)
        if dx is not None and not frozen:
            line = f"x[R_PXEC, D] * dlogits[R_PXEC, V_Y] -> {dV} {{U_PXEC}}"
            if dU is None or dU.dtype == x.dtype:
                dU = einsum(line, some, dlogits, out=dU, add=dU is not None)
            else:
                dU.add_(einsum(line, some, dlogits))
            dU = dU if count == 1 else dU.to(torch.promote_types(dU.dtype, torch.float32))
            db = None if db is None or dlogits is None else db.add_(dlogits.sum(0))
        del dlogits  # before the next chunk's are made
    loss = loss.to(torch.promote_types(x.dtype, torch.float32))
    dW = {} if dU is None else {"embed" if tied else "unembed": dU.to(x.dtype)}
    if dW and db is not None:
        dW["b_unembed"] = db.to(x.dtype)
    return loss, None if dx is None else dx.view_as(x), dW


def chunk_loss(x, W: Mapping, targets, w, terms: Terms, mesh, gradients: bool):
    """x[R_PXEC, D], targets[R_PXEC], w[R_PXEC] -> loss[R_PXEC] {U_Y}.

    It is followed by dlogits[R_PXEC, V_Y] = softmax w - (1 - smoothing) w [target] - smoothing / V w, in the logits'
    own buffer.
    """
    U, tied = table_of(W)
    if tied:
        logits = einsum("x[R_PXEC, D] * E[V_Y, D] -> logits[R_PXEC, V_Y]", x, U)
    else:
        logits = einsum("x[R_PXEC, D] * U[D, V_Y] -> logits[R_PXEC, V_Y]", x, U)
    logits = biased(logits, W, "b_unembed")
    logits = soft_cap(logits.to(torch.promote_types(logits.dtype, torch.float32)), terms.cap)
    slope_of_cap = None if terms.cap is None or not gradients else 1 - (logits / terms.cap).square()
    w, V_Y = w.to(logits.dtype), logits.shape[-1]
    real = min(max(terms.V - mesh.coord.get("Y", 0) * V_Y, 0), V_Y)  # entries of this part that are not padding
    if real < V_Y:
        logits[:, real:] = -torch.inf
    local, here = in_part(targets, V_Y, mesh)
    top = all_reduce("m[R_PXEC] {U_Y} -> m[R_PXEC]", logits.amax(-1), mesh, op="max")
    pick = logits.gather(-1, local[:, None])[:, 0] - top
    pick = masked("pick[R_PXEC] {U_Y}", pick, here, mesh)
    every = (logits[:, :real] - top[:, None]).sum(-1) if terms.smoothing else torch.zeros_like(pick)
    exp = logits.sub_(top[:, None]).exp_()
    sums = torch.stack([exp.sum(-1), pick, every])
    total, pick, every = all_reduce("s[K, R_PXEC] {U_Y} -> s[K, R_PXEC]", sums, mesh)
    lse = total.log() + top
    ce = total.log() - (1 - terms.smoothing) * pick - terms.smoothing / terms.V * every
    loss = torch.where(w == 0, 0, w * (ce + terms.z_loss * lse.square()))
    loss = masked("loss[R_PXEC] {U_Y}", loss, here, mesh)  # the rank that has the target counts the token
    if not gradients:
        return loss, None
    slope = torch.where(w == 0, 0, w * (1 + 2 * terms.z_loss * lse) / total)
    dlogits = exp.mul_(slope[:, None])
    dlogits.scatter_add_(-1, local[:, None], (-(1 - terms.smoothing) * w * here)[:, None])
    if terms.smoothing:
        dlogits[:, :real].sub_((terms.smoothing / terms.V * w)[:, None])
    dlogits = dlogits if slope_of_cap is None else dlogits.mul_(slope_of_cap)
    return loss, dlogits.to(x.dtype)
