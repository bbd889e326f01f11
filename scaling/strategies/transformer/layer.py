"""One layer of a Transformer, line by line (Parts 4 and 5): attention and MLP, tensor and sequence parallel over Y.

Between the blocks the residual stream x[B_PXE, T_CY, D] is split along the sequence over Y as well: norms and
residuals are computed once, not |Y| times (sequence parallelism, Korthikanti et al. 2022, arXiv:2205.05198). Weights
come gathered over X. Axes that the mesh lacks drop out. The backward is the vjp of these lines.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaling.collectives import einsum
from scaling.configs import Config
from scaling.models.pointwise import rms_norm
from scaling.models.transformer import ACTIVATIONS, headed
from scaling.strategies.axes import all_gather, reduce_scatter
from scaling.strategies.expert import experts_of, moe
from scaling.strategies.expert.routing import route_tokens as moe_route

ROWS = "x[B_PXE, T_CY, D]"  # the residual stream


def all_kept(x: Tensor, branch: str, layer: int = 0) -> Tensor:
    """No dropout."""
    return x


class Context(NamedTuple):
    """What all layers of one microbatch share: the model, the mesh, and where this rank's tokens lie.

    `rope`: (cos, sin) of the positions of this rank's T_C tokens. `attend(Q, K, V, window)` -> O[B, T_C, N_Y, H].
    `drop(x, branch, layer=l)`: of x[B_PXE, T_CY, D], which a branch is about to add to the stream, some elements.
    """

    config: Config
    mesh: Any
    rope: tuple[Tensor, Tensor]
    attend: Callable
    drop: Callable = all_kept


def run_layer(W: dict, x: Tensor, at: Context, window: int | None, routing=None):
    """x[B_PXE, T_CY, D] -> (x, the experts' auxiliary terms {U_PXECY}, or None), routing.

    `routing`: where the tokens go, if it was decided before: a layer that is computed again never routes again.
    """
    x = x + at.drop(attention(W, x, at, window), "attention")
    y = rms_norm(x, gain=W["norm_mlp"], eps=at.config.eps)
    if not at.config.moe:
        return (x + at.drop(mlp(W, y, at), "mlp"), None), None
    return experts(W, x, y, at, routing)


def attention(W: dict, x: Tensor, at: Context, window: int | None) -> Tensor:
    """Attn[B_PXE, T_CY, D] of the residual stream; heads over Y."""
    mesh = at.mesh
    y = rms_norm(x, gain=W["norm_attn"], eps=at.config.eps)
    y = all_gather("y[B_PXE, T_CY, D] -> y[B_PXE, T_C, D]", y, mesh)  # on the critical path
    Q = einsum("y[B_PXE, T_C, D] * W_Q[D, N_Y, H] -> Q[B_PXE, T_C, N_Y, H]", y, W["W_Q"])
    K = einsum("y[B_PXE, T_C, D] * W_K[D, K_Y, H] -> K[B_PXE, T_C, K_Y, H]", y, own_heads(W["W_K"], at, 1))
    V = einsum("y[B_PXE, T_C, D] * W_V[D, K_Y, H] -> V[B_PXE, T_C, K_Y, H]", y, own_heads(W["W_V"], at, 1))
    if "b_K" in W:
        W = W | {"b_K": own_heads(W["b_K"], at, 0), "b_V": own_heads(W["b_V"], at, 0)}
    Q, K, V = headed(W, Q, K, V, at.rope, at.config.eps)
    O = at.attend(Q, K, V, window)
    Attn = einsum("O[B_PXE, T_C, N_Y, H] * W_O[N_Y, H, D] -> Attn[B_PXE, T_C, D] {U_Y}", O, W["W_O"])
    Attn = reduce_scatter("Attn[B_PXE, T_C, D] {U_Y} -> Attn[B_PXE, T_CY, D]", Attn, mesh)  # on the critical path
    return Attn + W["b_O"] if "b_O" in W else Attn


def own_heads(W: Tensor, at: Any, dim: int) -> Tensor:
    """Of KV heads that are replicated over Y, those that this rank's query heads see; W[.., K_Y, H] as it is.

    `at`: what has the model as `config`, and the `mesh`.
    """
    config, Y = at.config, at.mesh.sizes.get("Y", 1)
    if config.K % Y == 0:
        return W
    N = config.N // Y
    first = at.mesh.coord["Y"] * N // config.G
    return W.narrow(dim, first, max(1, N // config.G))


def mlp(W: dict, y: Tensor, at: Context) -> Tensor:
    """Out[B_PXE, T_CY, D] of the normed stream; features over Y."""
    y = all_gather("y[B_PXE, T_CY, D] -> y[B_PXE, T_C, D]", y, at.mesh)  # on the critical path
    Tmp = einsum("y[B_PXE, T_C, D] * W_in[D, F_Y] -> Tmp[B_PXE, T_C, F_Y]", y, W["W_in"])
    act = ACTIVATIONS[at.config.nonlinearity]
    if "W_gate" in W:
        Gate = einsum("y[B_PXE, T_C, D] * W_gate[D, F_Y] -> Gate[B_PXE, T_C, F_Y]", y, W["W_gate"])
        Tmp = act(Gate) * Tmp
    else:
        Tmp = act(Tmp)
    Out = einsum("Tmp[B_PXE, T_C, F_Y] * W_out[F_Y, D] -> Out[B_PXE, T_C, D] {U_Y}", Tmp, W["W_out"])
    return reduce_scatter("Out[B_PXE, T_C, D] {U_Y} -> Out[B_PXE, T_CY, D]", Out, at.mesh)  # on the critical path


def experts(W: dict, x: Tensor, y: Tensor, at: Context, routing):
    """The same with a mixture of experts in place of the MLP: experts over E, each one's features over Y."""
    config, given, W = at.config, {"tensor": "Y", "spec": ROWS}, experts_of(W, at.config)
    if routing is None:
        with torch.no_grad():
            routing = moe_route(W, y.detach(), config, at.mesh, "E", **given)
    Out, aux = moe(W, y, config, at.mesh, "E", **given, routing=routing)
    return (x + at.drop(Out, "mlp"), config.aux_coef * aux["balance"] + config.z_coef * aux["z"]), routing
