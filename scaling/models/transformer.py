"""A decoder-only transformer on one device, as pure functions over a pytree (Part 4, "Transformer Accounting").

Pre-norm, rotary positions, grouped-query attention, a gated MLP (SwiGLU) or a plain one (GELU), causal:
    x[B, T, D] -> norm -> Q[B, T, N, H], K[B, S, K, H], V[B, S, K, H] -> heads[B, T, N, H] -> Attn[B, T, D]; x + Attn
               -> norm -> Tmp[B, T, F] -> Out[B, T, D]; x + Out
If a function takes `config=None`, the sizes come from the params, and the rest are Config's defaults.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import optree
import torch
import torch.nn.functional as F
from torch import Tensor

from scaling import tree
from scaling.common.arguments import one_of
from scaling.configs import Config
from scaling.models import moe
from scaling.models.attention import sdpa, within_chunks
from scaling.models.inputs import check_ids, check_params, check_range, check_segments, check_weights
from scaling.models.latent import attend_latents
from scaling.models.layer import (
    ONE,
    Context,
    activate_features,
    attend_heads,
    biased,
    normed,
    read_norms,
    rms,
    scale_by,
    undifferentiated,
    used_gains,
)
from scaling.models.leaves import check_computed, computes, specs_of, uncomputed
from scaling.models.linear import attend_linear
from scaling.models.params import config_of_params, init, inits
from scaling.models.pointwise import soft_cap
from scaling.models.remat import checkpoint_block, checkpoint_matmuls, matmul_weight
from scaling.models.rope import check_positions, layer_tables, restarted

__all__ = ["REMAT", "attention_block", "check_computed", "computes", "forward"]
__all__ += ["config_of_params", "init", "inits", "loss", "loss_and_grads", "mlp_block", "specs_of"]
__all__ += ["all_layers", "uncomputed"]

REMAT = {"none": lambda f: f, "block": checkpoint_block, "matmuls": checkpoint_matmuls}


def attention_block(
    layer: dict, x: Tensor, attend: Callable, rope: tuple, config: Config, matmul: Callable = matmul_weight, places=None
) -> Tensor:
    """x[B, T, D] -> Attn[B, T, D], without the residual, for a layer with heads, with latents, or with a state.

    Heads and latents attend by attend(Q, K, V) -> O[B, T, N, H]. A linear layer does not; with packed documents it
    needs the `places`[B, T] of the tokens in them.
    """
    at = context(config, attend, rope, matmul)._replace(places=places)
    y, _ = normed(layer, "norm_attn", x, config, rms)
    listing = attend_linear if "W_QKVZ" in layer else attend_latents if config.latent else attend_heads
    O = listing(layer, {"y": y}, at)["O"]
    Attn = biased(matmul(O.flatten(-2), layer["W_O"].flatten(0, 1)), layer, "b_O")
    return normed(layer, "norm_attn_out", Attn, config, rms)[0]


def mlp_block(layer: dict, x: Tensor, config: Config, matmul: Callable = matmul_weight) -> Tensor:
    """Out[B, T, D] of x[B, T, D], without the residual; it is gated if the layer has a W_gate."""
    y, _ = normed(read_norms(layer) if config.parallel else layer, "norm_mlp", x, config, rms)
    Act = activate_features(layer, {"y": y}, context(config, None, (), matmul))["Act"]
    return normed(layer, "norm_mlp_out", biased(matmul(Act, layer["W_out"]), layer, "b_out"), config, rms)[0]


def context(config: Config, attend: Any, rope: tuple, matmul: Callable) -> Context:
    """Return the Context of a layer on one device, which autograd or torch.func differentiates."""

    def einsum(line: str, y: Tensor, W: Tensor) -> Tensor:
        return matmul(y, W)

    return Context(config, ONE, rope, attend, vjp=undifferentiated, einsum=einsum, norm=rms)


def forward(
    params: dict,
    tokens: Tensor,
    remat: str = "none",
    attention: Callable = sdpa,
    *,
    config: Config | None = None,
    segments: Tensor | None = None,
) -> Tensor:
    """tokens[B, T] -> Logits[B, T, V]. segments[B, T] are the ids of packed documents, which do not see each other.

    `remat` decides which arrays each layer saves for the backward pass: with "none" nothing is recomputed, "block"
    saves only the layer's input, "matmuls" the outputs of its big matmuls (`scaling.cost.transformer.REMAT`). The
    results are equal. `attention(Q, K, V)` maps [B, T, N, H], [B, S, K, H], [B, S, K, H] to [B, T, N, H], and takes
    `window=` and `segments=` where the model or the call has them.
    """
    return _forward(params, tokens, remat, attention, config or config_of_params(params), segments)[0]


def _forward(params: dict, tokens: Tensor, remat: str, attention: Callable, config: Config, segments: Tensor | None):
    """Return (logits, the experts' losses), the latter as the sum over layers of aux_coef * balance + z_coef * z."""
    one_of("remat", remat, REMAT)
    if config.moe and remat == "matmuls":
        raise ValueError('remat="matmuls" cannot be used with experts\n  fix: choose remat="block" or "none"')
    if config.norms in ("after", "both") and remat == "matmuls":  # it replays the last product without its values
        raise ValueError('remat="matmuls" cannot be used with norms after blocks\n  fix: choose "block" or "none"')
    check_computed(config)
    check_ids("tokens", tokens)
    if segments is not None:
        check_segments(segments, tokens)
        segments = segments.to(tokens.device)
    if not torch.compiler.is_compiling():
        check_params(params, config)
    try:
        x = F.embedding(tokens, params["embed"])
    except IndexError:
        raise ValueError(
            f"tokens must lie in 0..{len(params['embed']) - 1}: that is the vocabulary\n  fix: give other ids"
        ) from None
    x, params = scale_by(x, config.embed_scale), used_gains(params, config)
    positions = torch.arange(tokens.shape[1], device=tokens.device) if segments is None else restarted(segments)
    check_positions(config, tokens.shape[1], segments is not None)
    if "positions" in params:
        x = x + F.embedding(positions, params["positions"])
    ropes = layer_tables(config, positions, x.dtype, length=tokens.shape[1])
    extra, places = x.new_zeros(()), None if segments is None else positions
    if config.chunked:
        here = torch.arange(tokens.shape[1], device=tokens.device)
        attention = partial(within_chunks, attention, tokens.shape[1], here, positions)
    for layer, window, rope in zip(all_layers(params, config), config.windows, ropes, strict=True):
        x, more = _step(config, remat, attention, window, segments, rope, places)(layer, x)
        extra = extra if more is None else extra + more
    x, _ = normed(params, "norm", x, config, rms)
    logits = matmul_weight(x, params["unembed"] if "unembed" in params else params["embed"].T)
    return soft_cap(biased(logits, params, "b_unembed"), config.logit_cap), extra


def _step(config: Config, remat: str, attention: Callable, window: int | None, segments, rope: tuple, places):
    """Return step(layer, x) -> (x, the layer's losses or None), with this window and rematerialisation."""
    given = {"window": window} if window is not None else {}
    given |= {"segments": segments} if segments is not None else {}
    given |= {"cap": config.score_cap} if config.score_cap is not None else {}
    scale = config.residual_scale

    def attend(layer: dict, x: Tensor, matmul=matmul_weight) -> Tensor:
        return x + scale_by(attention_block(layer, x, partial(attention, **given), rope, config, matmul, places), scale)

    def dense(layer: dict, x: Tensor, matmul=matmul_weight) -> Tensor:
        mid = attend(layer, x, matmul)
        return mid + scale_by(mlp_block(layer, x if config.parallel else mid, config, matmul), scale)

    def routed(layer: dict, x: Tensor, experts: Tensor | None = None):
        x = attend(layer, x)
        y, _ = normed(layer, "norm_mlp", x, config, rms)
        if experts is None:
            experts = moe.choose_experts(y, layer["router"], config, layer.get("bias"), layer.get("b_router"))
        Out, aux = moe.forward(layer, y, config, experts)
        return (x + scale_by(Out, scale), config.aux_coef * aux["balance"] + config.z_coef * aux["z"]), experts

    layered = moe.checkpoint_routed(routed) if remat == "block" else routed
    wrapped = REMAT[remat](dense)
    return lambda layer, x: layered(layer, x)[0] if "router" in layer else (wrapped(layer, x), None)


def all_layers(params: dict, config: Config) -> list[dict]:
    """Return the params of each layer, from the stack of its kind."""
    stacks = {name: iter(tree.unstacked(params[name])) for name in dict.fromkeys(config.kinds)}
    return [next(stacks[kind]) for kind in config.kinds]


def loss(
    params: dict,
    tokens: Tensor,
    remat: str = "none",
    attention: Callable = sdpa,
    *,
    config: Config | None = None,
    targets: Tensor | None = None,
    weights: Tensor | None = None,
    segments: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Return the mean cross-entropy, in nats, of each next token of tokens[B, T + 1], plus the experts' losses.

    With `targets`[B, T], the tokens[B, T] are the inputs only; a target equal to `ignore_index` does not count. With
    weights[B, T] the mean is sum(w * ce) / sum(w), or 0 if all are 0. A token's loss is (1 - label_smoothing) ce +
    label_smoothing (mean over V of ce) + z_loss lse^2. Nothing is dropped: dropout belongs to
    `scaling.strategies.transformer.loss_and_grads`. segments[B, T], or [B, T + 1] like the tokens, are the ids of
    packed documents; without `targets`, the first token of a document is never a target. Other arguments are as in
    `forward`.
    """
    check_ids("tokens", tokens)
    if targets is None and tokens.shape[1] < 2:
        raise ValueError(f"tokens {list(tokens.shape)} hold no next token\n  fix: give tokens[B, T + 1], T at least 1")
    inside, wanted = (tokens[:, :-1], tokens[:, 1:]) if targets is None else (tokens, targets)
    check_ids("targets", wanted, inside.shape)
    if weights is not None:
        check_weights(weights, wanted)
    documents = segments
    if isinstance(segments, Tensor) and targets is None and segments.shape == tokens.shape:
        segments = segments[:, :-1]
    logits, extra = _forward(params, inside, remat, attention, config or config_of_params(params), segments)
    counts = wanted != ignore_index
    if documents is not None and targets is None:
        same = documents[:, 1:] == documents[:, :-1]
        counts = counts & F.pad(same, (0, wanted.shape[1] - same.shape[1]), value=True)
    counts = counts if weights is None else weights * counts
    check_range("tokens" if targets is None else "targets", wanted, logits.shape[-1], counts)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logprobs, inside_V = wide.log_softmax(-1), torch.where(counts == 0, 0, wanted)
    ce = -logprobs.gather(-1, inside_V[..., None])[..., 0]
    if label_smoothing:
        ce = (1 - label_smoothing) * ce - label_smoothing * logprobs.mean(-1)
    if z_loss:
        ce = ce + z_loss * wide.logsumexp(-1).square()
    w = counts.to(wide.dtype)
    total = w.sum()
    return (w * ce).sum() / torch.where(total == 0, 1, total) + extra


def loss_and_grads(params: Any, tokens: Tensor, *args, **options) -> tuple[Tensor, Any]:
    """Return (loss, gradients as the params), as torch.func.grad_and_value of `loss` would, but by torch.autograd.

    This is faster, since nothing is kept for a second derivative, and must not be called inside torch.func.
    """
    own = tree.map(lambda p: p.detach().requires_grad_(), params)
    value = loss(own, tokens, *args, **options)
    found = torch.autograd.grad(value, tree.leaves(own), allow_unused=True)  # unused: the bias of a choice of experts
    grads = [torch.zeros_like(p) if d is None else d for p, d in zip(tree.leaves(own), found, strict=True)]
    return value.detach(), optree.tree_unflatten(optree.tree_structure(params), grads)
