"""The lines of a Transformer's layer that training, one device, prefill and decode share (Part 4).

They lie between the collectives of a listing: from y, the normed and gathered stream, to O, the output of the heads,
and to Act, the features. The function that attends is an argument: a kernel, a loop over blocks that arrive along C, or
a cache. `values` maps names to arrays that are already computed, which are not computed again. Z splits the batch of a
serving mesh; on a training mesh Z numbers the stages, and layers see a mesh without it.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaling import tree
from scaling.collectives import all_reduce, einsum, wait
from scaling.configs import Config
from scaling.mesh import AbstractMesh
from scaling.models.leaves import KV_HEADS
from scaling.models.pointwise import FUNCTIONS, gained_norm, gained_norm_vjp, mean_square, rms_norm, vjp
from scaling.models.rope import rotate

Values = dict[str, Any]
ONE = AbstractMesh({}).optional  # one device, on which all axes drop out
HEAD_LEAVES = ("b_Q", "b_K", "b_V", "norm_Q", "norm_K", "sinks")  # between the products Q, K, V and attention
SHARED_NORM = {"norm_attn": "norm_mlp", "b_norm_attn": "b_norm_mlp"}


def all_kept(x: Tensor, branch: str, layer: int = 0) -> Tensor:
    """Return x: the function that a model without dropout has in place of dropout."""
    return x


def scale_by(x: Tensor, factor: float) -> Tensor:
    """Return x times a factor of the model, and x alone if the factor is 1."""
    return x if factor == 1 else x * factor


def used_gains(params: Any, config: Config) -> Any:
    """Return the params with the gains by which norms multiply.

    In a model with `unit_offset` these are 1 + the stored gains. The last norm's are divided by `logit_scale`, since
    logits are linear in its output. For bfloat16 params the sum is float32, as in Hugging Face's classes.
    """
    if not config.unit_offset and config.logit_scale == 1:
        return params

    def used(name: str, leaf: Any) -> Any:
        if isinstance(leaf, dict):
            return {inner: used(inner, each) for inner, each in leaf.items()}
        if not name.startswith("norm"):
            return leaf
        gain = 1 + leaf.to(torch.promote_types(leaf.dtype, torch.float32)) if config.unit_offset else leaf
        return gain / config.logit_scale if name == "norm" else gain

    return {name: used(name, leaf) for name, leaf in params.items()}


def undifferentiated(f: Callable, *args: Any) -> tuple[Any, None]:
    """Return f(*args), and None in place of its vjp."""
    return f(*args), None


class Context(NamedTuple):
    """The model, the mesh and the positions of this rank's tokens, shared by the layers of one call.

    `prepared` and `of_layer` return it with other values in four fields, while the rest stay the same:

                made                              prepared, for a pass      of_layer(l), for one layer
        masks   masks(window) -> mask options     {window: mask options}    the same
        attend  attend(Q, K, V, **mask options)   the same, or None         attend(Q, K, V)
        rope    the tables of each layer          the same                  the layer's tables
        drop    drop(x, branch, layer=l)          the same                  drop(x, branch)

    Attributes:
        config: The model.
        mesh: The mesh.
        rope: The tables of this rank's T_C positions, as `turned_heads` takes them.
        attend: Returns O[B, T_C, N_Y, H]. It is None if a pass does not attend.
        masks: The options by which a layer with this window masks its scores in `attend`.
        drop: Returns x[B_PXE, T_CY, D], which a branch is about to add to the stream, with some elements dropped.
        slots: While serving, the slots of the new tokens in the cache.
        vjp: vjp(f, *args) -> (f(*args), vjp_fn), as `pointwise.vjp`; None for vjp_fn if no backward follows.
        einsum: einsum(line, x, W), which computes the products with weights.
        norm: norm(x, gain, eps) -> (the normed x, the statistic that its derivative needs).
        learned: Places[B_PXE, T_CY] of this rank's tokens in the table of learned positions, if the model has one.
        places: places[B, T_C] of the tokens in packed documents; None without documents.
        loads: As in `StepOptions`.
        adapters: In layers with adapters, the function that `weight_gradient` calls for the gradients of their factors.
        defers: Whether gradients of weights are products that are computed when they are waited for.
    """

    config: Config
    mesh: Any
    rope: tuple
    attend: Any
    drop: Callable = all_kept
    masks: Any = None
    slots: Any = None
    vjp: Callable = vjp
    einsum: Callable = einsum
    norm: Callable = gained_norm
    places: Any = None
    learned: Any = None
    loads: bool = False
    adapters: Callable | None = None
    defers: bool = False

    def prepared(self, attends: bool = True) -> "Context":
        """Return the context with the masks that all layers of a pass share, or with none if no layer `attends`."""
        if not callable(self.masks):
            return self
        if not attends:
            return self._replace(attend=None, masks=None)
        windows = [*dict.fromkeys(self.config.windows)]
        return self._replace(masks=dict(zip(windows, map(self.masks, windows), strict=True)))

    def of_layer(self, l: int) -> "Context":
        """Return the context of layer l: its mask, its positions, its dropout, and `residual_scale` within dropout."""
        config, drop = self.config, partial(self.drop, layer=l)
        attend = partial(self.attend, **self.masks[config.windows[l]]) if self.masks else self.attend
        if config.residual_scale == 1:
            return self._replace(attend=attend, drop=drop, rope=self.rope[l])

        def scaled(x: Tensor, branch: str) -> Tensor:
            return drop(x, branch) * config.residual_scale

        return self._replace(attend=attend, drop=scaled, rope=self.rope[l])


# Some models have biases, norms of heads, clipped heads, or fewer KV heads than Y between the products Q, K, V and
# attention. These functions work head by head, so they also hold on shards of heads.


def finish_heads(
    W: dict, Q: Tensor, K: Tensor, V: Tensor, at: Context, rows: str = "B_PXZE"
) -> tuple[Tensor, Tensor, Tensor]:
    """Return Q, K and V ready for attention: with their biases, normed, clipped, and rotated by their positions.

    With `qk_turned` queries and keys are rotated first and then normed. `rows` is the type of B.
    """
    Q, K, V = biased(Q, W, "b_Q"), biased(K, W, "b_K"), biased(V, W, "b_V")
    if at.config.qk_turned:
        Q, K = turned_heads(Q, K, at.rope, at.config)
    if "norm_Q" in W:
        Q, K = head_norm(Q, W["norm_Q"], at, rows), head_norm(K, W["norm_K"], at, rows)
    if (clip := at.config.head_clip) is not None:
        Q, K, V = Q.clamp(-clip, clip), K.clamp(-clip, clip), V.clamp(-clip, clip)
    return (Q, K, V) if at.config.qk_turned else (*turned_heads(Q, K, at.rope, at.config), V)


def turned_heads(Q: Tensor, K: Tensor, rope: tuple, config: Config) -> tuple[Tensor, Tensor]:
    """Return Q and K rotated by rope = (cos, sin), and with `qk_bare` then normed without gains.

    In a layer without rotation (Llama 4), rope is (cos, sin, grown), queries are multiplied by grown[T_C], and nothing
    is normed.
    """
    cos, sin, *grown = rope
    Q, K = rotate(Q, cos, sin), rotate(K, cos, sin)
    if grown:
        return Q * grown[0][..., None, None], K
    return (rms_norm(Q, eps=config.eps), rms_norm(K, eps=config.eps)) if config.qk_bare and config.qk_norm else (Q, K)


def read_norms(W: dict) -> dict:
    """Return a layer's params with a norm before the MLP; if both blocks share a norm, it is attention's."""
    if "norm_mlp" in W or "norm_attn" not in W:
        return W
    return W | {into: W[name] for name, into in SHARED_NORM.items() if name in W}


def seen_heads(W: dict, at: Context) -> dict:
    """Return W with only the KV heads that this rank's query heads see, if KV heads are replicated over Y."""
    if at.config.latent or at.config.K % at.mesh.sizes.get("Y", 1) == 0:
        return W
    return W | {name: own_heads(W[name], at) for name in KV_HEADS if name in W}


def own_heads(W: Any, at: Context) -> Any:
    """Return the KV heads W[.., K, H] that this rank's query heads see; an array with scales is cut part by part."""
    N = at.config.N // at.mesh.sizes["Y"]
    first = at.mesh.coord["Y"] * N // at.config.G
    return tree.map(lambda part: part.narrow(-2, first, max(1, N // at.config.G)) if part.dim() > 1 else part, W)


def in_place(part: Any, whole: Tensor, at: Context) -> Any:
    """Return the gradient of all KV heads, zero but for the heads used: the transpose of `own_heads`."""
    if not isinstance(whole, Tensor) or part.shape == whole.shape:  # an array with scales is never a part
        return part
    padded = torch.zeros_like(whole)
    own_heads(padded, at).copy_(wait(part))
    return padded


def weight_gradient(W: dict, name: str, line: str, a: Tensor, b: Tensor, at: Context) -> dict[str, Any]:
    """Return {name: dW of the line}; in a layer with adapters, {name: its adapter's gradients} or, without one, {}."""
    if at.adapters is not None:
        return at.adapters(W, name, line, a, b, at)
    dW = at.einsum(line, a, b, defer=at.defers)
    return {name: in_place(dW, W[name], at) if name in KV_HEADS else dW}


def attend_heads(W: dict, values: Values, at: Context) -> Values:
    """Compute O[B_PXZE, T_C, N_Y, H] from y[B_PXZE, T_C, D] in `values`; return them with O and "attend_vjp".

    attend_vjp(dO) returns ({name: gradient {U_PXEC}} of the leaves in `HEAD_LEAVES`, dQ, dK, dV), and in a model with
    gates dG as well.
    """
    if "O" in values:
        return values
    if "Q" not in values:
        y, einsum = values["y"], at.einsum
        Q = einsum("y[B_PXZE, T_C, D] * W_Q[D, N_Y, H] -> Q[B_PXZE, T_C, N_Y, H]", y, W["W_Q"])
        K = einsum("y[B_PXZE, T_C, D] * W_K[D, K_Y, H] -> K[B_PXZE, T_C, K_Y, H]", y, W["W_K"])
        V = einsum("y[B_PXZE, T_C, D] * W_V[D, K_Y, H] -> V[B_PXZE, T_C, K_Y, H]", y, W["W_V"])
        values = values | {"Q": Q, "K": K, "V": V}
        if "W_G" in W:
            values["G"] = einsum("y[B_PXZE, T_C, D] * W_G[D, N_Y, H] -> G[B_PXZE, T_C, N_Y, H]", y, W["W_G"])
    heads = [values["Q"], values["K"], values["V"], *([values["G"]] if "G" in values else [])]

    def attend(leaves: dict, Q: Tensor, K: Tensor, V: Tensor, *opened: Tensor) -> Tensor:
        sinks = {"sinks": leaves["sinks"]} if "sinks" in leaves else {}
        O = at.attend(*finish_heads(leaves, Q, K, V, at), **sinks)
        return O * opened[0].sigmoid() if opened else O

    leaves = {name: W[name] for name in HEAD_LEAVES if name in W}
    O, attend_vjp = at.vjp(attend, leaves, *heads)  # each head alone: only C communicates
    return values | {"O": O, "attend_vjp": attend_vjp}


def activate_features(W: dict, values: Values, at: Context) -> Values:
    """Compute Act[B_PXZE, T_C, F_Y] from y[B_PXZE, T_C, D] in `values`; return them with it and its products."""
    y, einsum = values.get("y"), at.einsum
    if "Tmp" not in values:
        Tmp = einsum("y[B_PXZE, T_C, D] * W_in[D, F_Y] -> Tmp[B_PXZE, T_C, F_Y]", y, W["W_in"])
        values = values | {"Tmp": biased(Tmp, W, "b_in")}
        if "W_gate" in W:
            Gate = einsum("y[B_PXZE, T_C, D] * W_gate[D, F_Y] -> Gate[B_PXZE, T_C, F_Y]", y, W["W_gate"])
            values["Gate"] = biased(Gate, W, "b_gate")
    return values if "Act" in values else values | gate_features(W, values["Tmp"], values.get("Gate"), at.config)


def biased(x: Tensor, W: Mapping, name: str) -> Tensor:
    """Return x plus this bias, if the model has it."""
    return x + W[name] if name in W else x


def biased_features(W: dict, Tmp: Tensor, Gate: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return both products of the MLP, plus their biases if the model has them."""
    return biased(Tmp, W, "b_in"), None if Gate is None else biased(Gate, W, "b_gate")


def gate_features(W: dict, Tmp: Tensor, Gate: Tensor | None, config: Config) -> Values:
    """Return Act: act(Tmp), or with a gate Open * Tmp, where Open = act(Gate) is returned as well."""
    act, _ = FUNCTIONS[config.nonlinearity]
    if "alpha_p" in W:
        return {"Act": act(Tmp, W["alpha_p"], W["alpha_n"])}
    if Gate is None:
        return {"Act": act(Tmp)}
    Open = act(Gate)
    return {"Open": Open, "Act": Open * Tmp}


# The norms of all families. LayerNorm is RMSNorm of x minus its mean over D (Ba et al. 2016, arxiv.org/abs/1607.06450).
# A layer that lacks one of the norms leaves the norm's input unchanged: OLMo 2 norms a block's output, not its input.


def centered(x: Tensor) -> Tensor:
    """Return x minus its mean over the last dim, as LayerNorm does, in float32 or wider."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x - x.mean(-1, keepdim=True)


def norm_operands(W: dict, name: str, x: Tensor, config: Config, center: Callable = centered) -> tuple[Any, Any]:
    """Return x[.., D] and the gain of the norm `name` as RMSNorm takes them; without this norm the gain is None.

    The gain is ones in a model whose norms have none. For LayerNorm x is centered, and both have its wider dtype.
    """
    gain = W.get(name) if config.norm_gain or name.endswith("_out") else x.new_ones(x.shape[-1])
    if gain is None or not config.centered:
        return x, gain
    x = center(x)
    return x, gain.to(x.dtype)


def normed(W: dict, name: str, x: Tensor, config: Config, norm: Callable = gained_norm) -> tuple[Tensor, Any]:
    """Return (y[.., D], the statistic that `normed_backward` needs), of x[.., D] and the norm `name` of a layer W."""
    given, gain = norm_operands(W, name, x, config)
    if gain is None:
        return x, None
    y, r = norm(given, gain, config.eps)
    return (y + W[f"b_{name}"] if f"b_{name}" in W else y).to(x.dtype), r


def normed_backward(W: dict, name: str, x: Tensor, r: Any, dy: Tensor, config: Config) -> tuple[Tensor, dict]:
    """Return (dx, the gradients of the norm's gain and bias)."""
    given, gain = norm_operands(W, name, x, config)
    if gain is None:
        return dy, {}
    dx, dgain = gained_norm_vjp(given, gain, r, dy.to(given.dtype))
    dW = {name: dgain.to(W[name].dtype)} if name in W else {}
    if f"b_{name}" in W:
        dW[f"b_{name}"] = dy.flatten(0, -2).sum(0)
    return (centered(dx) if config.centered else dx).to(x.dtype), dW


def rms(x: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, None]:
    """Return (RMSNorm of x, None): without a statistic, for passes that have no backward or leave it to autograd."""
    return rms_norm(x, gain=gain, eps=eps), None


def head_norm(x: Tensor, gain: Tensor, at: Any, rows: str) -> Tensor:
    """Norm x[.., N_Y, H] head by head with a gain[H], or all heads together with a gain[N_Y, H]; `rows` is B's type.

    With `qk_layernorm` it is LayerNorm head by head, with a gain[N_Y, H].
    """
    if at.config.qk_layernorm:
        return (rms_norm(centered(x), gain=gain.new_ones(x.shape[-1]), eps=at.config.eps) * gain).to(x.dtype)
    if gain.dim() == 1:
        return rms_norm(x, gain=gain, eps=at.config.eps)
    wide, square = x.flatten(-2), None
    if at.mesh.sizes.get("Y", 1) > 1:
        line = f"s[{rows}, T_C, I] {{U_Y}} -> s[{rows}, T_C, I]"
        square = all_reduce(line, mean_square(wide), at.mesh, op="mean")
    return rms_norm(wide, square, gain=gain.flatten(), eps=at.config.eps).view_as(x)
