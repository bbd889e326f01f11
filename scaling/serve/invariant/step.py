"""Prefill and extend in tiles: one pass over the layers, on one device or with heads and features over Y."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaling.configs import Config
from scaling.models.pointwise import rms_norm
from scaling.models.rope import tables
from scaling.models.transformer import headed, unstacked
from scaling.serve.forms.parts import embedding_rows, own_biases
from scaling.serve.int8 import floats
from scaling.serve.invariant.attention import TokenRows
from scaling.serve.invariant.experts import moe
from scaling.serve.invariant.tiles import ACTIVATIONS, TILE, product
from scaling.serve.step import accepted
from scaling.serve.types import ONE
from scaling.spec import ShardingError
from scaling.strategies.axes import all_gather, all_reduce
from scaling.strategies.transformer.heads import own_heads


def prefill(
    params: dict,
    tokens: Tensor,
    cache: dict,
    config: Config,
    mesh=None,
    *,
    lengths: Tensor | None = None,
    donate: bool = False,
    sizes: Sequence[int] = (TILE,),
) -> tuple[Tensor, dict]:
    """(logits[B, V] at each row's last token, cache), as `serve.prefill`; decode is the same with one token a row.

    `sizes`: what `agreeing(params, config)` has found. ShardingError for a mesh with another axis than Y.
    """
    return _run(params, tokens, cache, config, mesh, lengths, donate, sizes, False)


def extend(
    params: dict,
    tokens: Tensor,
    cache: dict,
    config: Config,
    mesh=None,
    *,
    lengths: Tensor | None = None,
    donate: bool = False,
    sizes: Sequence[int] = (TILE,),
) -> tuple[Tensor, dict]:
    """(logits[B, T, V] at every token, cache), as `serve.extend`: what checks a draft. The rest as in `prefill`."""
    return _run(params, tokens, cache, config, mesh, lengths, donate, sizes, True)


class ForwardPass(NamedTuple):
    """What all layers share. x[1, R, D] are the tokens of all requests, R a multiple of the least of `sizes`."""

    config: Config
    mesh: Any
    rows: TokenRows
    rope: tuple[Tensor, Tensor]
    sizes: Sequence[int]

    def matmul(self, x: Tensor, W: Tensor) -> Tensor:
        """x[1, R, D] times W[D, ...]."""
        return product(x[0], W, self.sizes).unflatten(-1, W.shape[1:])[None]


@torch.no_grad()
def _run(params, tokens, cache, config, mesh, lengths, donate, sizes, every) -> tuple[Tensor, dict]:
    mesh = ONE if mesh is None else mesh
    check_axes(mesh)
    lengths, cache = accepted(params, tokens, cache, config, mesh, lengths, "heads", donate, 1)
    (B, T), dtype = tokens.shape, params["norm"].dtype
    rows = TokenRows(cache, lengths, T, config.N // mesh.sizes.get("Y", 1) // cache["KV"].shape[4], min(sizes))
    rope = tables(rows.positions, config.H, config.theta, config.rope_scaling, dtype)
    at = ForwardPass(config, mesh, rows, rope, sizes)
    ends = {name: floats(leaf, dtype) for name, leaf in params.items() if name != "layers"}
    x = embedding_rows(ends["embed"], tokens[rows.row, rows.column][None], mesh, "x[B, T, D] {U_Y}")
    x = all_reduce("x[B, T, D] {U_Y} -> x[B, T, D]", x, mesh)  # zeros, but for one rank: any order
    for l, W in enumerate(unstacked(params["layers"])):
        W = floats(W, dtype)
        x = x + _attention(W, x, at, functools.partial(rows.attend, cache, l, config.windows[l]))
        x = x + _mlp_block(W, x, at)
    if not every:
        x = x[:, torch.cat([rows.last, rows.last[:1].expand(-B % min(sizes))])]
    x = rms_norm(x, gain=ends["norm"], eps=config.eps)
    logits = at.matmul(x, ends["unembed"] if "unembed" in ends else ends["embed"].T)  # logits[1, R, V_Y]
    logits = all_gather("logits[1, R, V_Y] -> logits[1, R, V]", logits, mesh)[0]  # logits[R, V]
    cache["lengths"] = cache["lengths"] + lengths
    if not every:
        return logits[:B], cache
    whole = logits.new_zeros(B, T, config.V)
    whole[rows.row, rows.column] = logits  # rows that fill a tile up are copies of the first
    return whole, cache


def check_axes(mesh) -> None:
    """ShardingError for an axis whose messages would depend on the batch."""
    if other := [axis for axis, size in mesh.sizes.items() if size > 1 and axis != "Y"]:
        raise ShardingError(
            f"mesh axis {other[0]}: the batch-invariant mode splits heads and features over Y alone\n"
            "  rule: over another axis, which rows a rank computes together would depend on the batch\n"
            "  fix: give a mesh of Y alone, and run one engine for each replica"
        )


def _attention(W: dict, x: Tensor, at: ForwardPass, attend: Callable) -> Tensor:
    """Attn[1, R, D], its keys and values written to the cache."""
    y = rms_norm(x, gain=W["norm_attn"], eps=at.config.eps)
    Q, K, V = (at.matmul(y, M) for M in (W["W_Q"], own_heads(W["W_K"], at, 1), own_heads(W["W_V"], at, 1)))
    O = attend(*headed(own_biases(W, at), Q, K, V, at.rope, at.config.eps))
    Attn = _summed(at.matmul(O.flatten(-2), W["W_O"].flatten(0, 1)), at.mesh)
    return Attn + W["b_O"] if "b_O" in W else Attn


def _mlp_block(W: dict, x: Tensor, at: ForwardPass) -> Tensor:
    """Out[1, R, D]; of experts, each its own rows."""
    y = rms_norm(x, gain=W["norm_mlp"], eps=at.config.eps)
    if not at.config.moe:
        return _summed(_mlp(W, y, at, at.config.nonlinearity), at.mesh)
    act = "silu" if "W_gate" in W else "gelu"
    return _summed(
        moe(W, y[0], at.config, min(at.sizes), lambda W, rows: _mlp(W, rows[None], at, act)[0])[None], at.mesh
    )


def _mlp(W: dict, y: Tensor, at: ForwardPass, act: str) -> Tensor:
    """Out[1, R, D] {U_Y}."""
    Tmp = at.matmul(y, W["W_in"])
    Tmp = ACTIVATIONS[act](at.matmul(y, W["W_gate"])) * Tmp if "W_gate" in W else ACTIVATIONS[act](Tmp)
    return at.matmul(Tmp, W["W_out"])


def _summed(part: Tensor, mesh) -> Tensor:
    """part[1, R, D] {U_Y} -> x[1, R, D]: the ranks' parts side by side, added in the order of the ranks."""
    first, *others = all_gather("part[G_Y, R, D] -> part[G, R, D]", part, mesh)
    return sum(others, first)[None]
