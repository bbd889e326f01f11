"""A decoder-only transformer on one device, as pure functions over a pytree (Part 4, "Transformer Accounting").

Pre-norm, rotary positions, grouped-query attention, a gated MLP (SwiGLU) or a plain one (GELU), causal:
    x[B, T, D] -> norm -> Q[B, T, N, H], K[B, S, K, H], V[B, S, K, H] -> heads[B, T, N, H] -> Attn[B, T, D]; x + Attn
               -> norm -> Tmp[B, T, F] -> Out[B, T, D]; x + Out
`SPECS` are the types of the params, here without mesh axes; `specs_of(config)` those that a model has. Where a function
takes `config=None`, the sizes are the params' and the rest is Config's defaults.
"""

import math
from collections.abc import Callable
from functools import partial

import optree
import torch
import torch.nn.functional as F
from torch import Tensor

from scaling import tree
from scaling.configs import Config
from scaling.mesh import AbstractMesh
from scaling.models import moe
from scaling.models.attention import sdpa
from scaling.models.module import Stateless
from scaling.models.pointwise import rms_norm
from scaling.models.remat import checkpoint_block, checkpoint_matmuls, matmul
from scaling.models.rope import SCALINGS, restarted, rotate, tables
from scaling.spec import parse

SPECS = {
    "embed": "E[V, D]",
    "layers": {
        "norm_attn": "g[L, D]",
        "W_Q": "W_Q[L, D, N, H]",
        "W_K": "W_K[L, D, K, H]",
        "W_V": "W_V[L, D, K, H]",
        "b_Q": "b_Q[L, N, H]",
        "b_K": "b_K[L, K, H]",
        "b_V": "b_V[L, K, H]",
        "norm_Q": "g[L, H]",
        "norm_K": "g[L, H]",
        "W_O": "W_O[L, N, H, D]",
        "b_O": "b_O[L, D]",
        "norm_mlp": "g[L, D]",
        "W_in": "W_in[L, D, F]",
        "W_gate": "W_gate[L, D, F]",
        "W_out": "W_out[L, F, D]",
    },
    "norm": "g[D]",
    "unembed": "U[D, V]",
}
EXPERTS = {  # in place of the MLP's; S is the width of the shared experts together
    "router": "router[L, D, E]",
    "bias": "bias[L, E]",
    "W_in": "W_in[L, E, D, F]",
    "W_gate": "W_gate[L, E, D, F]",
    "W_out": "W_out[L, E, F, D]",
    "shared": {"W_in": "W_in[L, D, S]", "W_gate": "W_gate[L, D, S]", "W_out": "W_out[L, S, D]"},
}
ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "relu": F.relu}
REMAT = {"none": lambda f: f, "block": checkpoint_block, "matmuls": checkpoint_matmuls}


def uncomputed(config: Config) -> list[str]:
    """What the model has that this file does not compute, by name."""
    found = list(config.uncomputed)
    found += ["latent attention"] if config.latent else []
    found += [f"dense_layers={config.dense_layers} before those with experts"] if config.dense_layers else []
    found += [f"{config.norms} norms a layer"] if config.norms != 2 else []
    if config.rope_scaling and config.rope_scaling.kind not in SCALINGS:
        found.append(f"rope_scaling of type {config.rope_scaling.kind!r}")
    if config.nonlinearity not in ACTIVATIONS:
        found.append(f"activation {config.nonlinearity!r}")
    elif config.moe and config.activation is not None:
        found.append(f"activation {config.activation!r} in experts")
    return found + ([f"dropout={config.dropout}"] if config.dropout else [])


def runs(config: Config) -> bool:
    """Whether this file's transformer is that model."""
    return not uncomputed(config)


def check_computed(config: Config) -> None:
    """ValueError that names what is not computed, if anything is not."""
    if found := uncomputed(config):
        raise ValueError(f"{config.name}: not computed here: {', '.join(found)}")


def specs_of(config: Config) -> dict:
    """The types of this model's params, whole, a part of `SPECS`. ValueError for a model that is not computed."""
    check_computed(config)
    absent = set() if config.gated else {"W_gate"}
    absent |= set() if config.attention_bias else {"b_Q", "b_K", "b_V"}
    absent |= set() if config.output_bias else {"b_O"}
    absent |= set() if config.qk_norm else {"norm_Q", "norm_K"}
    absent |= {"unembed"} if config.tied else set()
    absent |= set() if config.routing == "sigmoid" else {"bias"}
    absent |= set() if config.shared else {"shared"}

    def present(specs: dict) -> dict:
        return {n: present(s) if isinstance(s, dict) else s for n, s in specs.items() if n not in absent}

    return present(SPECS | {"layers": SPECS["layers"] | (EXPERTS if config.moe else {})})


def inits(config: Config) -> dict:
    """How each param starts: normal with variance 1/(elements contracted), norms 1, biases 0."""

    def leaf(spec: str) -> tree.Normal | tree.Constant:
        name, dims = parse(spec).name, parse(spec).dim_names
        if name in ("g", "bias") or name.startswith("b_"):
            return tree.Constant(float(name == "g"))
        contracted = {"E": (), "W_O": ("N", "H"), "W_out": dims[-2:-1]}.get(name, ("D",))
        return tree.Normal(math.prod(config.sizes[dim] for dim in contracted) ** -0.5)

    return tree.map(leaf, specs_of(config))


def init(config: Config, seed: int = 0, dtype=torch.float32, device=None, *, mesh=None, specs=None) -> dict:
    """Params of this model, whole and on the CPU; on a `mesh`, by sharded `specs`, only this device's shards.

    The values are the same on every mesh: each is a function of the seed, its leaf and its place in the whole array.
    On the device "meta", shapes only. ValueError for a model that is not computed.
    """
    if mesh is None:
        mesh, device = AbstractMesh({}), device or "cpu"
    whole = specs_of(config)
    return tree.init(inits(config), whole if specs is None else specs, config.sizes, mesh, seed, dtype, device)


def config_of(params: dict, name: str = "params") -> Config:
    """The sizes of these params, with Config's defaults for what no shape tells."""
    layers = params["layers"]
    if "router" in layers:
        raise ValueError("params with experts do not say how many are active, and how: give config=")
    (V, D), (L, _, N, H) = params["embed"].shape, layers["W_Q"].shape
    K, F = layers["W_K"].shape[2], layers["W_in"].shape[-1]
    has = {"gated": "W_gate" in layers, "tied": "unembed" not in params, "attention_bias": "b_Q" in layers}
    has |= {"output_bias": "b_O" in layers, "qk_norm": "norm_Q" in layers}
    return Config(name, L, D, F, N, K, H, V, **has)


def headed(layer: dict, Q: Tensor, K: Tensor, V: Tensor, rope: tuple, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Biases, q/k norms and rotation of Q[B, T, N, H], K[B, T, K, H], V: head by head, so the same on shards of heads.

    `rope`: (cos, sin) of the positions that these rows have.
    """
    if "b_Q" in layer:
        Q, K, V = Q + layer["b_Q"], K + layer["b_K"], V + layer["b_V"]
    if "norm_Q" in layer:
        Q, K = rms_norm(Q, gain=layer["norm_Q"], eps=eps), rms_norm(K, gain=layer["norm_K"], eps=eps)
    return rotate(Q, *rope), rotate(K, *rope), V


def attention_block(layer: dict, x: Tensor, attend: Callable, rope: tuple, eps: float, matmul=matmul) -> Tensor:
    """Attn[B, T, D] of x[B, T, D], without the residual. attend(Q, K, V) -> heads[B, T, N, H]."""
    y = rms_norm(x, gain=layer["norm_attn"], eps=eps)
    Q, K, V = (matmul(y, layer[name]) for name in ("W_Q", "W_K", "W_V"))
    heads = attend(*headed(layer, Q, K, V, rope, eps))
    Attn = matmul(heads.flatten(-2), layer["W_O"].flatten(0, 1))
    return Attn + layer["b_O"] if "b_O" in layer else Attn


def mlp_block(layer: dict, x: Tensor, activation: str, eps: float, matmul=matmul) -> Tensor:
    """Out[B, T, D] of x[B, T, D], without the residual: gated if the layer has a W_gate."""
    y = rms_norm(x, gain=layer["norm_mlp"], eps=eps)
    Tmp = matmul(y, layer["W_in"])
    act = ACTIVATIONS[activation]
    Tmp = act(matmul(y, layer["W_gate"])) * Tmp if "W_gate" in layer else act(Tmp)
    return matmul(Tmp, layer["W_out"])


def forward(
    params: dict,
    tokens: Tensor,
    remat: str = "none",
    attention: Callable = sdpa,
    *,
    config: Config | None = None,
    segments: Tensor | None = None,
) -> Tensor:
    """Logits[B, T, V] of tokens[B, T]. segments[B, T]: the ids of packed documents, which do not see each other.

    `remat` says what the backward pass finds saved of each layer: "none" of it is computed again, "block" saves the
    layer's input only, "matmuls" the outputs of its big matmuls (`scaling.cost.transformer.REMAT`). The numbers are
    the same. `attention(Q, K, V)` maps [B, T, N, H], [B, S, K, H], [B, S, K, H] to [B, T, N, H], and takes `window=`
    and `segments=` where the model or the call has them.
    """
    return _forward(params, tokens, remat, attention, config or config_of(params), segments)[0]


def _forward(params: dict, tokens: Tensor, remat: str, attention: Callable, config: Config, segments: Tensor | None):
    """(logits, the experts' losses): `forward`, and the sum over layers of aux_coef * balance + z_coef * z."""
    if remat not in REMAT:
        raise ValueError(f"unknown remat {remat!r}: one of {', '.join(REMAT)}")
    if config.moe and remat == "matmuls":
        raise ValueError('remat="matmuls" does not go with experts\n  fix: remat="block", or "none"')
    check_computed(config)
    if (L := len(params["layers"]["W_Q"])) != config.L:
        raise ValueError(f"{config.name}: the params have {L} layers, the config {config.L}")
    try:
        x = F.embedding(tokens, params["embed"])
    except IndexError:
        raise ValueError(f"tokens must lie in 0..{len(params['embed']) - 1}: that is the vocabulary") from None
    positions = torch.arange(tokens.shape[1], device=tokens.device) if segments is None else restarted(segments)
    rope = tables(positions, config.H, config.theta, config.rope_scaling, x.dtype)
    steps = {w: _step(config, remat, attention, w, segments, rope) for w in set(config.windows)}
    extra = x.new_zeros(())
    for layer, window in zip(unstacked(params["layers"]), config.windows, strict=True):
        x, more = steps[window](layer, x)
        extra = extra if more is None else extra + more
    x = rms_norm(x, gain=params["norm"], eps=config.eps)
    return matmul(x, params["unembed"] if "unembed" in params else params["embed"].T), extra


def _step(config: Config, remat: str, attention: Callable, window: int | None, segments: Tensor | None, rope: tuple):
    """step(layer, x) -> (x, the layer's losses or None), with this window and rematerialisation."""
    given = {"window": window} if window is not None else {}
    given |= {"segments": segments} if segments is not None else {}
    eps = config.eps

    def attend(layer: dict, x: Tensor, matmul=matmul) -> Tensor:
        return x + attention_block(layer, x, lambda *qkv: attention(*qkv, **given), rope, eps, matmul)

    def dense(layer: dict, x: Tensor, matmul=matmul) -> Tensor:
        x = attend(layer, x, matmul)
        return x + mlp_block(layer, x, config.nonlinearity, eps, matmul)

    def routed(layer: dict, x: Tensor, experts: Tensor | None = None):
        x = attend(layer, x)
        y = rms_norm(x, gain=layer["norm_mlp"], eps=eps)
        if experts is None:
            experts = moe.choose(y, layer["router"], config, layer.get("bias"))
        Out, aux = moe.forward(layer, y, config, experts)
        return (x + Out, config.aux_coef * aux["balance"] + config.z_coef * aux["z"]), experts

    if config.moe:
        layered = moe.checkpoint_routed(routed) if remat == "block" else routed
        return lambda layer, x: layered(layer, x)[0]
    wrapped = REMAT[remat](dense)
    return lambda layer, x: (wrapped(layer, x), None)


def unstacked(layers: dict) -> list[dict]:
    """Params stacked over L as a list of L layers' params."""
    leaves, structure = optree.tree_flatten(layers)
    return [optree.tree_unflatten(structure, each) for each in zip(*(W.unbind() for W in leaves), strict=True)]


def loss(
    params: dict,
    tokens: Tensor,
    remat: str = "none",
    attention: Callable = sdpa,
    *,
    config: Config | None = None,
    weights: Tensor | None = None,
    segments: Tensor | None = None,
) -> Tensor:
    """Mean cross-entropy, in nats, of each next token of tokens[B, T + 1], plus the experts' losses if there are any.

    weights[B, T]: the mean is sum(w * ce) / sum(w), and 0 where they are all 0. segments[B, T], or [B, T + 1] beside
    the tokens: the ids of packed documents. The rest as in `forward`.
    """
    if segments is not None:
        segments = segments[:, : tokens.shape[1] - 1]
    logits, extra = _forward(params, tokens[:, :-1], remat, attention, config or config_of(params), segments)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    ce = -wide.log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    if weights is None:
        return ce.mean() + extra
    w = weights.to(wide.dtype)
    total = w.sum()
    return (w * ce).sum() / torch.where(total == 0, 1, total) + extra


def loss_and_grads(params: dict, tokens: Tensor, *args, **options) -> tuple[Tensor, dict]:
    """(loss, gradients as the params): what torch.func.grad_and_value of `loss` gives, by torch.autograd.

    Faster, since nothing is kept to differentiate again; not to be called inside torch.func.
    """
    own = tree.map(lambda p: p.detach().requires_grad_(), params)
    value = loss(own, tokens, *args, **options)
    found = torch.autograd.grad(value, tree.leaves(own), allow_unused=True)  # unused: the bias of a choice of experts
    grads = [torch.zeros_like(p) if d is None else d for p, d in zip(tree.leaves(own), found, strict=True)]
    return value.detach(), optree.tree_unflatten(optree.tree_structure(params), grads)


def module(config: Config) -> Stateless:
    """`forward` as a stateless module: functional_call(module(config), flat(params), (tokens,)) -> logits."""
    return Stateless(partial(forward, config=config), init(config, device="meta"))
