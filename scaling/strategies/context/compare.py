"""The costs of each form of context parallelism, from its types alone (Part 3's counts of bytes).

    costs("ring", {"B": 1, "T": 1 << 17, "N": 64, "K": 8, "H": 128}, {"C": 16})

are the costs of one attention layer: the bytes that a rank sends, by mesh axis; the rounds of communication; how evenly
the scores are spread; the keys and values that a rank holds at once; and what must divide. A trace of the forms counts
the same bytes. Segments, 8 bytes a token, are left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from scaling.models.tiles import Mask
from scaling.spec import dtype_bytes, format_axes, parse
from scaling.strategies.context.ring import check_length, copied_heads, hops_needed, work


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
