"""A decoder-only transformer on one device, as pure functions over a pytree (Part 4, "Transformer Accounting").

Pre-norm, rotary positions, grouped-query attention, a gated MLP (SwiGLU) or a plain one (GELU), causal:
    x[B, T, D] -> norm -> Q[B, T, N, H], K[B, S, K, H], V[B, S, K, H] -> heads[B, T, N, H] -> Attn[B, T, D]; x + Attn
               -> norm -> Tmp[B, T, F] -> Out[B, T, D]; x + Out
`SPECS` are the types of the params, here without mesh axes. Dense models with grouped-query attention.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from scaling.configs import Config
from scaling.models.attention import dot_product_attention
from scaling.models.remat import checkpoint_block, checkpoint_matmuls, matmul
from scaling.spec import parse

SPECS = {
    "embed": "E[V, D]",
    "layers": {
        "norm_attn": "g[L, D]",
        "W_Q": "W_Q[L, D, N, H]",
        "W_K": "W_K[L, D, K, H]",
        "W_V": "W_V[L, D, K, H]",
        "W_O": "W_O[L, N, H, D]",
        "norm_mlp": "g[L, D]",
        "W_in": "W_in[L, D, F]",
        "W_gate": "W_gate[L, D, F]",
        "W_out": "W_out[L, F, D]",
    },
    "norm": "g[D]",
    "unembed": "U[D, V]",
}
CONTRACTED = {"W_O": ("N", "H"), "W_out": ("F",), "embed": ()}


def runs(config: Config) -> bool:
    """Whether this file's transformer is that model: dense, grouped-query attention, two norms a layer."""
    return not config.moe and config.latent is None and config.norms == 2


def init(config: Config, seed: int = 0, dtype=torch.float32, device="cpu") -> dict:
    """Params of this model: normal with variance 1/(elements contracted), norms 1. On "meta", shapes only.

    Without a gate there is no W_gate; tied, no unembed. ValueError for a model that it is not.
    """
    if not runs(config):
        raise ValueError(
            f"{config.name}: only dense models with grouped-query attention and two norms a layer run here"
        )
    generator = None if device == "meta" else torch.Generator(device).manual_seed(seed)
    sizes = {letter: getattr(config, letter) for letter in "LDFNKHV"}
    absent = set() if config.gated else {"W_gate"}
    absent |= {"unembed"} if config.tied else set()

    def leaf(name: str, text: str) -> torch.Tensor:
        spec = parse(text)
        if spec.name == "g":
            return torch.ones(spec.global_shape(sizes), dtype=dtype, device=device)
        fan_in = math.prod(sizes[dim] for dim in CONTRACTED.get(name, ("D",)))
        drawn = torch.randn(spec.global_shape(sizes), dtype=dtype, device=device, generator=generator)
        return drawn / math.sqrt(fan_in)

    def tree(specs: dict) -> dict:
        return {
            name: tree(spec) if isinstance(spec, dict) else leaf(name, spec)
            for name, spec in specs.items()
            if name not in absent
        }

    return tree(SPECS)


def rms_norm(x: torch.Tensor, gain: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    """x over the root mean square of its last dim, times gain[D]; computed in float32 or wider."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * gain


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float = 500_000.0) -> torch.Tensor:
    """Rotary embedding of x[B, T, heads, H] at positions[T]: the halves of H as the coordinates of H/2 planes."""
    half = x.shape[-1] // 2
    wide = torch.promote_types(x.dtype, torch.float32)
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=wide) / half)
    angle = positions.to(wide)[:, None, None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def attention_block(layer: dict, x: torch.Tensor, attention: Callable, matmul: Callable = matmul) -> torch.Tensor:
    """Attn[B, T, D] of x[B, T, D]: projections, rotation and dot-product attention, without the residual."""
    positions = torch.arange(x.shape[1], device=x.device)
    y = rms_norm(x, layer["norm_attn"])
    Q = rotate(matmul(y, layer["W_Q"]), positions)
    K = rotate(matmul(y, layer["W_K"]), positions)
    heads = attention(Q, K, matmul(y, layer["W_V"]))
    return matmul(heads.flatten(-2), layer["W_O"].flatten(0, 1))


def mlp_block(layer: dict, x: torch.Tensor, matmul: Callable = matmul) -> torch.Tensor:
    """Out[B, T, D] of x[B, T, D]: SwiGLU if the layer has a W_gate, else GELU, without the residual."""
    y = rms_norm(x, layer["norm_mlp"])
    Tmp = matmul(y, layer["W_in"])
    Tmp = F.silu(matmul(y, layer["W_gate"])) * Tmp if "W_gate" in layer else F.gelu(Tmp)
    return matmul(Tmp, layer["W_out"])


def block(layer: dict, x: torch.Tensor, attention: Callable, matmul: Callable = matmul) -> torch.Tensor:
    """One layer: x[B, T, D] -> x[B, T, D]."""
    x = x + attention_block(layer, x, attention, matmul)
    return x + mlp_block(layer, x, matmul)


def forward(params: dict, tokens: torch.Tensor, remat: str = "none", attention: Callable = dot_product_attention):
    """Logits[B, T, V] of tokens[B, T].

    `remat` says what the backward pass finds saved of each layer: "none" of it is computed again, "block" saves the
    layer's input only, "matmuls" the outputs of its big matmuls (`scaling.cost.transformer.REMAT`). The numbers are
    the same. `attention(Q, K, V)` maps [B, T, N, H], [B, S, K, H], [B, S, K, H] to [B, T, N, H].
    """

    def plain(layer, x, matmul=matmul):
        return block(layer, x, attention, matmul)

    if remat not in (wraps := {"none": lambda f: f, "block": checkpoint_block, "matmuls": checkpoint_matmuls}):
        raise ValueError(f"unknown remat {remat!r}: one of {', '.join(wraps)}")
    step = wraps[remat](plain)
    stacked = params["layers"]
    x = params["embed"][tokens]
    for slices in zip(*(stacked[name].unbind() for name in stacked), strict=True):
        x = step(dict(zip(stacked, slices, strict=True)), x)
    x = rms_norm(x, params["norm"])
    return matmul(x, params["unembed"] if "unembed" in params else params["embed"].T)


def loss(params: dict, tokens: torch.Tensor, remat: str = "none", attention: Callable = dot_product_attention):
    """Mean cross-entropy of each next token of tokens[B, T + 1]."""
    logits = forward(params, tokens[:, :-1], remat, attention)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide.flatten(0, 1), tokens[:, 1:].flatten())
