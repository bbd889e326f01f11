"""Context parallelism: attention of a sequence that is split over a mesh axis (Part 5, its note; Part 4, Appendix A).

    O = attention(Q, K, V, mesh, axis="C", form="zigzag")

The other parts of a Transformer treat each token alone, so there context parallelism is data parallelism over tokens.
Only in attention does a token need other tokens' keys and values. Five forms bring them together: `ring` and `zigzag`
pass them round in blocks, `gather` gathers them, `ulysses` exchanges tokens for heads, and `usp` does so over one axis,
in a ring over another. `costs` returns the costs of each.
"""

import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch

from scaling.collectives import shard
from scaling.collectives.checked import alike
from scaling.common.arguments import flag, positive, whole
from scaling.models.blockwise import Attention
from scaling.models.tiles import Mask
from scaling.spec import dtype_bytes, format_axes, parse, refuse
from scaling.strategies.context.ring import (
    FORMS,
    Gathered,
    Ring,
    check_length,
    copied_heads,
    exchanged,
    from_zigzag,
    hops_needed,
    positions,
    to_zigzag,
    work,
)

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)

__all__ = ["attention", "costs", "from_zigzag", "positions", "to_zigzag", "work"]


def attention(
    Q: torch.Tensor,
    K: torch.Tensor,
    V: torch.Tensor,
    mesh,
    *,
    axis: str | Sequence[str] = "C",
    form: str = "ring",
    causal: bool = True,
    window: int | None = None,
    segments: torch.Tensor | None = None,
    scale: float | None = None,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return softmax(Q K^T scale) V over all of T: O[B, T_C, N, H] of Q[B, T_C, N, H], K and V[B, T_C, K, H].

    K divides N: G = N/K query heads share a KV head. The result is differentiable once, by autograd and torch.func, on
    a Mesh, on one rank and, with meta tensors, on an AbstractMesh.

    Args:
        Q: The queries of this rank's tokens, in plain order, or for zigzag in zig-zag order (`to_zigzag`).
        K: The keys, in the same order.
        V: The values, in the same order.
        mesh: The mesh.
        axis: The axis that T is split over. For usp it is a pair: T_CY is a ring over C, with heads over Y.
        form: "ring", "zigzag", "gather", "ulysses" or "usp".
        causal: Whether a query sees no later key.
        window: If given, a query sees no key that is `window` or more positions away.
        segments: int[B, T_C], the documents that are packed into a sequence. A query sees only keys of
            the same document.
        scale: The factor of the scores, 1/sqrt(H) by default.
        cap: If given, scores are kept within it: they become cap tanh(score / cap).
        sinks: If given, sinks[N] are scores of a key that every query of a head sees, without a value. Their gradient
            is unreduced over the axes.

    Raises:
        ShardingError: The form cannot take these shapes. It is raised before anything is sent.
    """
    axes = (axis,) if isinstance(axis, str) or not hasattr(axis, "__len__") else tuple(axis)
    flag(causal=causal)
    if torch.compiler.is_compiling():
        return _in_graph(mesh.constant(_number, axes, form, causal, window, scale, cap), Q, K, V, segments, sinks)
    options = {"causal": causal, "window": window, "scale": scale, "segments": segments, "cap": cap}
    alike(mesh, f"attention over {axis}", [str(each) for each in axes], form=form, **options)
    return _attention(Q, K, V, segments, sinks, mesh, axes, form, causal, window, scale, cap)


def _attention(Q, K, V, segments, sinks, mesh, axes, form, causal, window, scale, cap) -> torch.Tensor:
    line = f"Q[B, T_{format_axes(axes)}, N, H]" if all(isinstance(a, str) for a in axes) else "Q[B, T, N, H]"
    _check(line, Q, K, V, mesh, axes, form, window, segments, scale)
    mesh = mesh.sliced  # the lines name the axes of the sequence alone
    mask, scale = Mask(bool(causal), window), 1 / math.sqrt(Q.shape[-1]) if scale is None else float(scale)
    t, heads = Q.shape[1], mesh.size(axes[-1:])
    if form in ("ulysses", "usp"):
        Y = format_axes(axes[-1:])
        own = None if sinks is None else shard(f"s[N] -> s[N_{Y}]", sinks, mesh)
        ring = Ring(mesh, axes[:-1], t * heads, mask, scale, heads=(f"N_{Y}", f"R_{Y}"), cap=cap)
        inside = partial(_apply, ring, sinks=own)
        return exchanged(Q, K, V, segments, mesh, axes, inside)
    kind = Gathered if form == "gather" else Ring
    return _apply(kind(mesh, axes, t, mask, scale, form, cap=cap), Q, K, V, segments, sinks)


def _apply(ring: Ring, Q, K, V, segments, sinks=None) -> torch.Tensor:
    return Attention.apply(ring, Q, K, V, segments, sinks)[0]


_numbered: list[tuple] = []  # meshes and settings that a compiled graph, which holds no meshes, refers to by number


def _number(mesh, *setting) -> int:
    torch.compiler.allow_in_graph(_in_graph)
    call = weakref.ref(mesh), *setting  # the list keeps no mesh alive
    if call not in _numbered:
        _numbered.append(call)
    return _numbered.index(call)


def _in_graph(number: int, Q, K, V, segments, sinks) -> torch.Tensor:
    """Compute one call of a compiled graph; inlined, its Functions would be refused, because they have a jvp."""
    mesh, *setting = _numbered[number]
    return _attention(Q, K, V, segments, sinks, mesh(), *setting)


def _check(line: str, Q, K, V, mesh, axes: tuple[str, ...], form: str, window, segments, scale) -> None:
    """Raise ShardingError or ValueError, before anything is sent, if the form cannot take these arguments."""
    call = f"{form}: {line}"
    wanted = 2 if form == "usp" else 1
    if form in FORMS and len(axes) != wanted:
        rule = "usp splits T over two axes, a ring and one that moves to the heads; the other forms over one"
        refuse(call, f"{len(axes)} axes", rule, "axis=('C', 'Y')" if wanted == 2 else "axis='C', or form='usp'")
    if not all(isinstance(axis, str) for axis in axes):
        refuse(call, f"axis={axes!r}", "an axis is named by a text", "axis='C'")
    parse(line).check_axes(mesh)
    for x in (Q, K, V) if segments is None else (Q, K, V, segments):
        if not isinstance(x, torch.Tensor) or x.device != Q.device or x.layout is not torch.strided:
            found = f"{x.layout} on {x.device}" if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"
            refuse(call, f"an operand is {found}", "all are dense tensors on one device", "move it to where Q is")
    positive(scale=1.0 if scale is None else scale)
    whole(window=1 if window is None else window)
    shapes = f"Q, K, V of shapes {tuple(Q.shape)}, {tuple(K.shape)}, {tuple(V.shape)}"
    same = Q.dim() == 4 and K.shape == V.shape and K.dim() == 4 and all(Q.shape[i] == K.shape[i] for i in (0, 1, 3))
    if not same or 0 in (*Q.shape[1:], K.shape[2]) or Q.shape[2] % K.shape[2]:
        rule = "Q[B, T_C, N, H], K and V[B, T_C, K, H] have one B, T and H (all but B at least 1), and K divides N"
        refuse(call, shapes, rule, "as many keys as queries on each rank; K heads of keys that G = N/K share")
    if not Q.dtype == K.dtype == V.dtype or not Q.is_floating_point():
        rule = "Q, K and V have one dtype of floats"
        refuse(call, f"Q, K, V of {Q.dtype}, {K.dtype}, {V.dtype}", rule, "convert them, e.g. K.to(Q.dtype)")
    if segments is not None and (segments.shape != Q.shape[:2] or segments.dtype not in INTEGERS):
        what = f"segments of shape {tuple(segments.shape)} and {segments.dtype}"
        refuse(call, what, "segments[B, T_C] are integers, of this rank's tokens", "shard them as Q")
    check_length(form, Q.shape[1] * mesh.size(axes), mesh.size(axes), line)


# The costs of each form, from its types alone (Part 3's counts of bytes). A trace of the forms counts the same bytes.


@dataclass(frozen=True)
class Costs:
    """The costs of one form.

    Attributes:
        form: The form.
        sent: {axis: (bytes that a rank sends in the forward, and in the backward)}.
        rounds: The number of rounds in the forward.
        balance: The scores of the busiest rank over the mean of all ranks.
        held: The bytes of keys and values on a rank at once, in the forward.
        limits: The sizes that must divide.
    """

    form: str
    sent: dict[str, tuple[int, int]]
    rounds: int
    balance: float
    held: int
    limits: str


def costs(
    form: str,
    sizes: Mapping[str, int],
    mesh,
    *,
    axis: str | Sequence[str] = "C",
    dtype: Any = "bf16",
    causal: bool = True,
    window: int | None = None,
) -> Costs:
    """Return the costs of `attention` with these arguments.

    Args:
        form: The form.
        sizes: B (on each rank), T (in all), N, K and H.
        mesh: A mesh, or the sizes of its axes.
        axis: The axis that T is split over, or a pair for usp.
        dtype: The dtype of Q, K and V.
        causal: As in `attention`.
        window: As in `attention`.
    """
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    mesh = dict(mesh if isinstance(mesh, Mapping) else mesh.sizes)
    sizes, over, mask = (
        {**sizes, "S": sizes["T"]},
        "_" + format_axes(axes) if axes else "",
        {"causal": causal, "window": window},
    )
    check_length(form, sizes["T"], prod(mesh[a] for a in axes), f"Q[B, T{over}, N, H]")
    narrow, wide = dtype_bytes(dtype), max(4, dtype_bytes(dtype))  # per element sent, and of gradients that are summed
    if form in ("ulysses", "usp"):
        (*outer, Y), n = axes, mesh[axes[-1]]
        R = copied_heads(sizes["N"], sizes["K"], n)
        of_keys = wide if sizes["K"] < R else narrow  # heads are copied, so their gradients are summed
        inside = costs("ring", sizes | {"K": R // n}, mesh, axis=outer, dtype=of_keys, **mask)
        Q = parse(f"Q[B, T{over}, N, H]").nbytes(sizes, mesh, narrow)
        KV = parse(f"KV[2, B, S{over}, R, H]").nbytes(sizes | {"R": R}, mesh, of_keys)
        moved = int(2 * Q + KV) * (n - 1) // n  # Q, K and V to the heads, O back; in the backward pass the other way
        limits = f"{format_axes(axes)} | T, {Y} | N"
        sent = inside.sent | {Y: (moved, moved)}
        return Costs(form, sent, inside.rounds + 2 * (n > 1), inside.balance, inside.held, limits)
    C, busy = prod(mesh[a] for a in axes), work(form, sizes["T"], prod(mesh[a] for a in axes), **mask)
    KV, dKV = (int(parse(f"KV[2, B, S{over}, K, H]").nbytes(sizes, mesh, element)) for element in (narrow, wide))
    balance, limits = max(busy) * C / sum(busy), f"{'2' if form == 'zigzag' else ''}{format_axes(axes)} | T"
    if form == "gather":
        sent = (C - 1) * KV, (C - 1) * (KV + dKV)
        return Costs(form, {axes[0]: sent}, 1, balance, C * KV, limits)
    hops = hops_needed(form, sizes["T"] // C, C, Mask(**mask))
    sent = hops * KV, hops * KV + (hops + 1) * dKV if hops else 0
    return Costs(form, dict.fromkeys(axes, sent), hops, balance, 2 * KV if hops else KV, limits)
