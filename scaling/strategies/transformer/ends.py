"""The ends of a Transformer, its vocabulary split over Y (Part 5): embedding, and the loss with its backward by hand.

    x      [B, T_CY, D]  = rows of E[V_Y, D] for this rank's tokens, reduce-scattered over Y
    logits [B, T_C, V_Y] = x[B, T_C, D] * U[D, V_Y]        the only array of this size, overwritten as it is used

The softmax over V needs three sums over Y of each token: of exp(logit - max), of the target's logit, which one rank
has, and, for label smoothing, of all logits. They are scattered along T: each token's loss is computed by one rank.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from scaling.collectives import einsum
from scaling.models.pointwise import rms_norm
from scaling.strategies.axes import all_gather, all_reduce, masked, reduce_scatter, shard


def embed(E: Tensor, tokens: Tensor, mesh) -> Tensor:
    """tokens[B_PXE, T_C], E[V_Y, D] -> x[B_PXE, T_CY, D]. Tokens of another rank's part of V add zeros here."""
    local, here = in_part(tokens, len(E), mesh)
    x = masked("x[B_PXE, T_C, D] {U_Y}", torch.nn.functional.embedding(local, E), here, mesh)
    return reduce_scatter("x[B_PXE, T_C, D] {U_Y} -> x[B_PXE, T_CY, D]", x, mesh)


def in_part(tokens: Tensor, size: int, mesh) -> tuple[Tensor, Tensor]:
    """(the place of each token in this rank's part of the vocabulary, 0 if it has none; whether it has one)."""
    local = tokens - mesh.coord.get("Y", 0) * size
    here = (local >= 0) & (local < size)
    return torch.where(here, local, 0), here


class Terms(NamedTuple):
    """What a token's loss is made of: (1 - smoothing) ce + smoothing (mean over V of ce) + z_loss lse^2."""

    V: int
    smoothing: float
    z_loss: float


def head(W: dict, x: Tensor, targets: Tensor, weights: Tensor, terms: Terms, eps: float, mesh) -> Tensor:
    """x[B_PXE, T_CY, D] -> Loss[] {U_PXECY}: the sum of this rank's tokens' losses times their weights.

    `W`: "norm" g[D], and "unembed" U[D, V_Y] or, tied, "embed" E[V_Y, D]. targets, weights [B_PXE, T_C]: a weight has
    been divided by the sum of all weights; a target of weight 0 may lie outside the vocabulary.
    """
    x = rms_norm(x, gain=W["norm"], eps=eps)
    x = all_gather("x[B_PXE, T_CY, D] -> x[B_PXE, T_C, D]", x, mesh)  # on the critical path
    tied = "unembed" not in W
    return VocabLoss.apply(x, W["embed" if tied else "unembed"], targets, weights, terms, tied, mesh)[0]


class VocabLoss(torch.autograd.Function):
    """x[B, T_C, D], U[D, V_Y] (tied: E[V_Y, D]) -> Loss[] {U_PXECY}, with its backward written out."""

    @staticmethod
    def forward(x, U, targets, weights, terms, tied, mesh):
        """x[B_PXE, T_C, D], targets[B_PXE, T_C], weights[B_PXE, T_C] -> Loss[] {U_PXECY}

        and the logits' buffer, which now holds the softmax's part of dlogits, for the backward alone.
        """
        if tied:
            logits = einsum("x[B_PXE, T_C, D] * E[V_Y, D] -> logits[B_PXE, T_C, V_Y]", x, U)
        else:
            logits = einsum("x[B_PXE, T_C, D] * U[D, V_Y] -> logits[B_PXE, T_C, V_Y]", x, U)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        local, here = in_part(targets, logits.shape[-1], mesh)
        top = all_reduce("m[B_PXE, T_C] {U_Y} -> m[B_PXE, T_C]", logits.amax(-1), mesh, op="max")
        pick = logits.gather(-1, local[..., None])[..., 0] - top
        pick = masked("pick[B_PXE, T_C] {U_Y}", pick, here, mesh)
        every = (logits - top[..., None]).sum(-1) if terms.smoothing else torch.zeros_like(pick)
        exp = logits.sub_(top[..., None]).exp_()
        sums = torch.stack([exp.sum(-1), pick, every])
        total, pick, every = reduce_scatter("s[K, B_PXE, T_C] {U_Y} -> s[K, B_PXE, T_CY]", sums, mesh)
        w = shard("w[B_PXE, T_C] -> w[B_PXE, T_CY]", weights.to(exp.dtype), mesh)
        lse = total.log() + shard("m[B_PXE, T_C] -> m[B_PXE, T_CY]", top, mesh)
        ce = total.log() - (1 - terms.smoothing) * pick - terms.smoothing / terms.V * every
        loss = torch.where(w == 0, 0, w * (ce + terms.z_loss * lse.square())).sum()
        slope = torch.where(w == 0, 0, w * (1 + 2 * terms.z_loss * lse) / total)
        slope = all_gather("k[B_PXE, T_CY] -> k[B_PXE, T_C]", slope, mesh)
        return loss, exp.mul_(slope[..., None])

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, U, targets, weights, ctx.terms, ctx.tied, ctx.mesh = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # or autograd makes zeros of the buffer's size
        ctx.save_for_backward(x, U, targets, weights)
        ctx.buffer = output[1]

    @staticmethod
    def backward(ctx, dLoss, _):
        """dlogits = softmax w - (1 - smoothing) w [target] - smoothing / V w, in the logits' own buffer."""
        if ctx.buffer is None:
            raise RuntimeError(
                "the loss's backward runs once: the logits' buffer holds their gradient afterwards"
                "\n  fix: call the loss again"
            )
        x, U, targets, weights = ctx.saved_tensors
        dlogits, ctx.buffer = ctx.buffer, None
        w = weights.to(dlogits.dtype)
        local, here = in_part(targets, dlogits.shape[-1], ctx.mesh)
        dlogits.scatter_add_(-1, local[..., None], (-(1 - ctx.terms.smoothing) * w * here)[..., None])
        if ctx.terms.smoothing:
            dlogits.sub_((ctx.terms.smoothing / ctx.terms.V * w)[..., None])
        dlogits = dlogits.mul_(dLoss).to(x.dtype)
        V, dV = ("E[V_Y, D]", "dE[V_Y, D]") if ctx.tied else ("U[D, V_Y]", "dU[D, V_Y]")
        dx = einsum(f"dlogits[B_PXE, T_C, V_Y] * {V} -> dx[B_PXE, T_C, D] {{U_Y}}", dlogits, U)
        dU = einsum(f"x[B_PXE, T_C, D] * dlogits[B_PXE, T_C, V_Y] -> {dV} {{U_PXEC}}", x, dlogits)
        return dx, dU, None, None, None, None, None
