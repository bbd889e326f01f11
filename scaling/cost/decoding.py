"""The collectives of a decode step by sharding form, and where they begin to bind (Part 7, "Generation").

All weights are stationary in each form:

    heads        KV[2, B_E, S, K_Y, H]    heads and F over Y; an AllReduce of X[B, D] after attention and after the MLP;
                                          with experts over E, whose rows two AllToAlls bring and take back
    heads_batch  KV[2, B_Z, S, K_Y, H]    weights over YZ; two AllToAlls over Z bring Q to the caches and O back
    sequence     KV[2, B, S_Z, K_Y, H]    weights over YZ; AllGather_Z of Q, ReduceScatter_Z of O, joined as in flash
    2d           KV[2, B_XZ, S, K_Y, H]   weights W_in[D_X, F_YZ]; x[B, D_XYZ] between the blocks
    experts      KV[2, B_E, S, K_Y, H]    as heads, with whole experts over E and Y, and tokens split over both

In latent attention the cache is KV[B, S, M], whole along Y; queries against it are M wide, and the results C wide.
Bytes are V as in scaling.cost.collectives. An AllReduce takes two passes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scaling.common.arguments import one_of, positive
from scaling.configs import Config
from scaling.cost.lanes import mesh_seconds
from scaling.hardware import Chip
from scaling.spec import ShardingError, dtype_bytes

FORMS = ("heads", "heads_batch", "sequence", "2d", "experts")


@dataclass(frozen=True)
class StepCollective:
    """A collective that runs `times` times in a step, on V bytes each time, over these mesh axes ("YZ": both)."""

    op: str
    what: str
    axes: str
    nbytes: float
    times: int


def check_kind(form: str, config: Config) -> None:
    """Raise a ShardingError unless the form decodes the kinds of layers that the model has."""
    if form != "heads" and config.linear:
        raise ShardingError(
            f"{config.name}: linear layers are not served by the form {form!r}\n"
            '  rule: a state is split by heads alone\n  fix: choose form="heads"'
        )
    if form == "2d" and config.latent:
        raise ShardingError(
            f'{config.name}: the form "2d" has no latent attention\n  rule: its ranks R and C are not split over X\n'
            '  fix: choose form="heads_batch", or "sequence"'
        )
    if form == "2d" and config.moe:
        raise ShardingError(f'{config.name}: the form "2d" has no experts\n  fix: choose form="heads"')


def check_form(form: str, config: Config, sizes: Mapping[str, int]) -> None:
    """Raise a ShardingError unless the model's heads, experts, F and D divide over the mesh of the form."""
    one_of("form", form, FORMS)
    X, Y, Z, E = (sizes.get(axis, 1) for axis in "XYZE")
    used = {"heads": "YE", "experts": "YE", "2d": "XYZ"}.get(form, "YZ")
    if unused := [axis for axis in "XZE" if sizes.get(axis, 1) > 1 and axis not in used]:
        raise ShardingError(
            f"form {form!r} on {dict(sizes)}: the form does not use the axis {unused[0]}\n  fix: give that axis size 1"
        )
    if (form == "experts" or E > 1) and not config.moe:
        raise ShardingError(f"{config.name}: experts over chips, of a model without\n  fix: use other axes and forms")
    if config.E % (parts := E * Y if form == "experts" else E):
        raise ShardingError(
            f"E = {config.E} experts do not divide over {parts} chips\n  fix: use another number of them"
        )
    check_kind(form, config)
    ways = Y * Z
    for letter, size in (("N", config.N), ("F", 0 if form == "experts" else config.F)):
        if size % ways:
            raise ShardingError(
                f"{letter}_YZ: {letter} = {size} does not divide over {ways} chips\n"
                "  fix: use fewer chips, or other sizes"
            )
    if config.D % (X * ways):
        raise ShardingError(f"D_XYZ: D = {config.D} does not divide over {X * ways} chips\n  fix: use fewer chips")
    if config.K % Y and Y % config.K and not config.latent:
        raise ShardingError(
            f"K_Y: neither of K = {config.K} and Y = {Y} divides the other\n  fix: choose another size of Y"
        )


def copies(config: Config, sizes: Mapping[str, int]) -> float:
    """Return how often the cache is stored: if Y exceeds the number of KV heads, each head is on several chips.

    A latent serves all heads, so each chip along Y has the whole of it.
    """
    return max(1.0, sizes.get("Y", 1) / (1 if config.latent else config.K))


def collectives(form: str, config: Config, batch: int, sizes: Mapping[str, int], dtype="bf16") -> list[StepCollective]:
    """Return the collectives of a decode step of `batch` tokens on a mesh `sizes`, with activations in `dtype`.

    These are the collectives that `scaling.serve.decode` runs, without axes of size 1. The stream x is reduced after
    each block and after the embedding, and the last AllGather gathers the logits. With E, each rank has a part of the
    batch, and experts are assumed to get equally many tokens.
    """
    check_form(form, config, sizes)
    X, Y, Z, E = (sizes.get(axis, 1) for axis in "XYZE")
    L, sparse, token = config.L, config.L - len(config.dense), dtype_bytes(dtype) * batch / E
    blocks = 2 * L + 1 - (sparse if form == "experts" else 0)
    stream, queries, logits = token * config.D, token * config.N * config.H, token * config.V
    asks, gets = queries, queries
    if latent := config.latent:  # absorbed queries against latents are M wide, sums of latents C wide
        asks = token * config.N * (latent.kv_rank + latent.rope)
        gets = token * config.N * latent.kv_rank
    found = [StepCollective("AllGather", "logits", "YZ", logits, 1)]
    if form == "2d":
        own = token * config.H * max(1.0, config.K / Y)
        found += [
            StepCollective("AllReduce", "logits", "X", logits / (Y * Z), 1),
            StepCollective("AllReduce", "mean squares", "XYZ", token, blocks),
            StepCollective("AllGather", "x", "YZ", stream / X, blocks),
            StepCollective("ReduceScatter", "x", "YZ", stream / X, blocks),
            StepCollective("ReduceScatter", "Q", "X", queries / (Y * Z), L),
            StepCollective("ReduceScatter", "K and V", "X", own, 2 * L),
            StepCollective("AllToAll", "Q and O", "Z", queries / (X * Y), 2 * L),
            StepCollective("AllGather", "O", "X", queries / (Y * Z), L),
            StepCollective("AllReduce", "Tmp", "X", token * config.F / (Y * Z), L * (config.matrices - 1)),
        ]
    else:
        found.append(StepCollective("AllReduce", "x", "YZ", stream, blocks))
    if form == "experts" or E > 1:
        whole, over = E * token, "EY" if form == "experts" else "E"  # bytes of an element of the batch
        counts = 8 * config.E * (E * Y if form == "experts" else E)
        found[0] = StepCollective("AllGather", "logits", "Y", whole * config.V, 1)
        found += [
            StepCollective("AllGather", "logits", "E", whole * config.V / Y, 1),
            StepCollective("AllReduce", "tokens of each expert", over, 8 * config.E, sparse),
            StepCollective("AllToAll", "tokens of each expert", over, counts, sparse),
            StepCollective("AllToAll", "tokens to experts", over, whole * config.k * config.D, 2 * sparse),
        ]
    if form == "experts":
        found.append(StepCollective("AllGather", "x", "Y", stream, sparse))
    if form == "heads_batch":
        found.append(StepCollective("AllToAll", "Q", "Z", asks / Y, L))
        found.append(StepCollective("AllToAll", "O", "Z", gets / Y, L))
    if form == "sequence":
        found += [
            StepCollective("AllGather", "Q", "Z", asks / Y, L),
            StepCollective("AllReduce", "maxima", "Z", token * config.N / Y, L),
            StepCollective("ReduceScatter", "sums", "Z", token * config.N / Y, L),
            StepCollective("ReduceScatter", "O", "Z", gets / Y, L),
        ]
    return [moved for moved in found if math.prod(sizes.get(axis, 1) for axis in moved.axes) > 1]


def collective_seconds(moved: StepCollective, chip: Chip, shape: Sequence[int], sizes: Mapping[str, int]) -> float:
    """Return the seconds of all `moved.times` collectives by `lanes.mesh_seconds`; `sizes` come innermost first."""
    return moved.times * mesh_seconds(moved.op, moved.nbytes, moved.axes, sizes, chip, shape)


# --- Where the collectives begin to bind -------------------------------------------------------------------------


def bandwidth_limit(F: float, batch: float, W_hbm: float, W_ici: float, weights="bf16") -> float:
    """Return the Y where an MLP's AllGather takes as long as reading weights: F / (B beta), beta = W_hbm / W_ici.

    It follows from 2 B D / W_ici = w D F / (Y W_hbm), with w bytes of a weight.
    """
    positive(F=F, batch=batch, W_hbm=W_hbm, W_ici=W_ici)
    return dtype_bytes(weights) / 2 * F / (batch * W_hbm / W_ici)


def stationary_1d(B: float, D: float, W: float) -> float:
    """Return the seconds of an MLP's AllGather and ReduceScatter over all three axes: 4BD / (3 W) on any chips."""
    positive(B=B, D=D, W=W)
    return 4 * B * D / (3 * W)


def stationary_2d(B: float, D: float, F: float, X: float, YZ: float, W: float, dtype="bf16") -> float:
    """Return the seconds of the 2D form's MLP on three axes: 2BD / (X W) + 4BF / (YZ W) (Part 7, Question 7).

    The AllGather and ReduceScatter run over Y and Z, two axes of links, the AllReduce over X, one axis.
    """
    positive(B=B, D=D, F=F, X=X, YZ=YZ, W=W)
    size = dtype_bytes(dtype)
    return size * B * D / (X * W) + 2 * size * B * F / (YZ * W)


def best_2d(N: float, D: float, F: float) -> tuple[float, float]:
    """Return the fastest X and YZ on N chips: sqrt(N D / 2F), which is sqrt(N/8) at F = 4D, and sqrt(2 N F / D)."""
    positive(N=N, D=D, F=F)
    return (N * D / (2 * F)) ** 0.5, (2 * N * F / D) ** 0.5


def threshold_2d(D: float, F: float) -> float:
    """Return the chips from which the 2D form communicates faster than the 1D form on three axes: 18 F/D, 72 at F = 4D.

    It follows from squaring both sides of 4BD / 3W = B sqrt(32 D F / N) / W.
    """
    positive(D=D, F=F)
    return 32 * (F / D) * (3 / 4) ** 2
