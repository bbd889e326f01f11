"""Serving a transformer (Parts 7 and 8): reads, FLOPs and time of a decode step, and the batches that fit.

A decode step makes one token for each of `batch` sequences: it reads the weights once and the keys and values of every
sequence, so its bound is

    seconds = batch KV / W + max(2 batch params / C, weights / W)         attention + matmuls with weights

A `Load` describes the model independently of chips, and `step` puts it on chips. Units are bytes, FLOPs and seconds. It
needs no torch.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from scaling.common.arguments import not_negative, positive, whole
from scaling.configs import Config
from scaling.cost import transformer as tm
from scaling.hardware import Chip
from scaling.spec import dtype_bytes

Point = TypeVar("Point")


@dataclass(frozen=True)
class Load:
    """The work of serving one model: `Load(70e9, 70e9, 160e3)` in the book's round numbers, or `load(config)`.

    Attributes:
        weights: Bytes of all stored params.
        params: The number of params that a token is multiplied with.
        kv_token: Bytes of keys and values that each token of context adds in the layers without a window.
        local: (window, bytes per token) of the layers with a window, or with chunks, whose first tokens see fewer.
        kv_flops: FLOPs of attention for each byte of cache, 2G / bytes of an element.
        lookup: Bytes of the embedding, from which a step takes a row per token.
        experts: Bytes of the routed experts within `weights`.
        E: The number of routed experts.
        k: The experts of each token.
    """

    weights: float
    params: float
    kv_token: float = 0.0
    local: tuple[tuple[int, float], ...] = ()
    kv_flops: float = 0.0
    lookup: float = 0.0
    experts: float = 0.0
    E: int = 1
    k: int = 1

    def __post_init__(self):
        positive(weights=self.weights, params=self.params)
        not_negative(kv_token=self.kv_token, kv_flops=self.kv_flops, lookup=self.lookup, experts=self.experts)

    def kv(self, context: float) -> float:
        """Return the bytes of one sequence's keys and values at this context."""
        return self.kv_token * context + sum(min(context, window) * each for window, each in self.local)

    def read(self, batch: int) -> float:
        """Return the bytes of weights that a step of `batch` tokens reads, including only experts that get a token.

        With uniform and independent routing these are a share 1 - (1 - k/E)^batch of the experts, on average.
        """
        return self.weights - self.lookup - self.experts * (1 - self.k / self.E) ** batch


def load(config: Config, weights="bf16", kv="bf16") -> Load:
    """Return the Load of a transformer with weights, and keys and values, in these dtypes."""
    stored, counts = dtype_bytes(weights), tm.params(config)
    lookup = 0 if config.tied else config.D * config.V
    routed = config.matrices * config.D * config.F * config.E * (config.L - len(config.dense)) if config.moe else 0
    layers: dict[int, float] = {}
    if config.linear:  # a state has its full size from the first token on
        layers[1] = len(config.linear.layers) * tm.state_bytes(config, "bf16")
    windows = config.windows if config.cached is None else (None,) * config.cached
    per_layer = tm.kv_cache_bytes(config, 1, kv) / max(1, len(windows))
    for window in windows:
        layers[window or 0] = layers.get(window or 0, 0.0) + per_layer
    latent, size = config.latent, dtype_bytes(kv)
    flops = 2 * config.G / size  # 4NH FLOPs for 2KH elements
    if latent:  # scores against the latents and the rotary keys, values out of the latents
        flops = 2 * config.N * (2 * latent.kv_rank + latent.rope) / ((latent.kv_rank + latent.rope) * size)
    return Load(
        weights=stored * sum(counts.values()), params=tm.num_params(config, active=True) - lookup,
        kv_token=layers.pop(0, 0.0), local=tuple(layers.items()), kv_flops=flops, lookup=stored * lookup,
        experts=stored * routed, E=config.E, k=config.k,
    )  # fmt: skip


@dataclass(frozen=True)
class DecodeStep:
    """Seconds of a decode step on each chip: reading caches, reading weights, their matmuls, collectives."""

    kv: float
    weights: float
    math: float
    comms: float = 0.0

    @property
    def seconds(self) -> float:
        """The bound: attention, and then the matmuls, whose reads, FLOPs and collectives all overlap."""
        return self.kv + max(self.weights, self.math, self.comms)

    @property
    def apart(self) -> float:
        """Seconds if the collectives overlap with nothing else."""
        return self.kv + max(self.weights, self.math) + self.comms

    @property
    def bound(self) -> str:
        """The slowest part: "KV cache", "weights", "compute" or "collectives"."""
        parts = {"KV cache": self.kv, "weights": self.weights, "compute": self.math, "collectives": self.comms}
        return max(parts, key=lambda name: parts[name])


def step(
    load: Load, batch: int, context: float, chip: Chip, chips: int = 1, compute: str = "bf16", copies: float = 1,
    comms: float = 0.0,
) -> DecodeStep:  # fmt: skip
    """Return the seconds of a decode step (Part 7, "Theoretical estimates for LLM latency and throughput").

    Everything is fully sharded over the chips, except that the cache may be stored `copies` times. `compute` is the
    dtype of the matmuls. In the book attention is always bound by bandwidth; here its FLOPs count if they take longer.
    """
    whole(batch=batch, chips=chips)
    not_negative(context=context, comms=comms)
    positive(copies=copies)
    W, C = chips * chip.need("hbm_bw"), chips * chip.flops(compute)
    cached = batch * load.kv(context)
    attention = max(copies * cached / W, load.kv_flops * cached / C)
    return DecodeStep(attention, load.read(batch) / W, 2 * batch * load.params / C, comms)


def mixed(
    load: Load, works: Sequence[tuple[int, int]], chip: Chip, chips: int = 1, compute: str = "bf16"
) -> DecodeStep:
    """Return the seconds of one pass over several sequences, each given as (new tokens, context including them).

    A chunk of a prompt is (T, S), and a sequence that decodes is (1, S). Each cache is read once, and a token attends
    to itself and the tokens before it.
    """
    tokens = sum(new for new, _ in works)
    whole(tokens=tokens, chips=chips)
    W, C = chips * chip.need("hbm_bw"), chips * chip.flops(compute)
    read = sum(load.kv(context) for _, context in works)
    pairs = sum(load.kv(context) * (new - new * (new - 1) / (2 * context)) for new, context in works)
    attention = max(read / W, load.kv_flops * pairs / C)
    return DecodeStep(attention, load.read(tokens) / W, 2 * tokens * load.params / C)


# --- What fits ---------------------------------------------------------------------------------------------------


def slices(chip: Chip, most: int = 4096) -> list[tuple[int, ...]]:
    """Return the slices of a torus, from one chip to the pod: 1x1, 2x2, 2x4, 4x4, 4x8, ...; for GPUs (n,).

    Sides are powers of two, and the shortest is doubled each time; no slice has two chips.
    """
    if chip.kind != "tpu":
        return [(2**i,) for i in range(most.bit_length()) if 2**i <= most]
    pod, shape = chip.longest, (1,) * chip.need("axes")
    found = []
    while math.prod(shape) <= most and all(side <= room for side, room in zip(shape, pod, strict=True)):
        found += [shape] if math.prod(shape) != 2 else []
        shape = tuple(sorted((2 * shape[0], *shape[1:])))
    return found


def smallest_slice(nbytes: float, chip: Chip) -> tuple[int, ...]:
    """Return the smallest slice whose memory holds `nbytes` bytes (Part 8, "What's the LLaMA Serving Story?")."""
    positive(nbytes=nbytes)
    shapes = slices(chip)
    for shape in shapes:
        if math.prod(shape) * chip.need("hbm_bytes") >= nbytes:
            return shape
    raise ValueError(
        f"{nbytes:.3g} bytes fit no slice of {chip.name}: the largest is {'x'.join(map(str, shapes[-1]))}"
        "\n  fix: choose a larger chip, fewer bytes a param, or a smaller batch"
    )


def largest_batch(load: Load, context: float, chip: Chip, chips: int, headroom: float = 1.0) -> int:
    """Return the most sequences of this context whose caches fit with the sharded weights; 0 if weights do not fit."""
    room = headroom * chips * chip.need("hbm_bytes") - load.weights
    return max(0, math.floor(room / load.kv(context)))


# --- Curves ------------------------------------------------------------------------------------------------------


def pareto(points: Iterable[Point], low: Callable[[Point], float], high: Callable[[Point], float]) -> list[Point]:
    """Return all points that none beats by `low` (seconds, less is better) and `high` (tokens/s, more is better)."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda p: (low(p), -high(p))):
        if not kept or high(point) > high(kept[-1]):
            kept.append(point)
    return kept


# --- Prefill and generation together -----------------------------------------------------------------------------


def prefill_servers(prefill: float, step: float, batch: int, generated: float) -> float:
    """Return the prefill servers per busy generation server: batch * prefill / (step * generated) (Part 8).

    `prefill` seconds of one prompt, `step` seconds of a decode step of `batch` sequences, `generated` tokens of each.
    """
    positive(prefill=prefill, step=step, batch=batch, generated=generated)
    return batch * prefill / (step * generated)


def turnover(batch: int, prompt: float, generated: float) -> tuple[float, float]:
    """Return the sequences that end per step, B/G, and the tokens that leave caches with them, B(P + G)/G (Part 8)."""
    positive(batch=batch, generated=generated)
    not_negative(prompt=prompt)
    return batch / generated, batch * (prompt + generated) / generated
