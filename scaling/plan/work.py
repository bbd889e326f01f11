"""The work of a model per layer and token, however it is split (Part 4): elements, FLOPs, activations.

The planner knows a model by its `LayerWork` alone.
"""

from dataclasses import dataclass
from functools import lru_cache

from scaling.common.limits import LIMITS
from scaling.configs import Config
from scaling.cost import transformer as tm


@dataclass(frozen=True)
class LayerWork:
    """The work of a model: per layer, except `params`, and in elements unless the name says otherwise.

    - `dense`: matrices that every token uses, split over tensor; `projections` of them are attention's, and `kv` of
      these are the K heads' of keys and values
    - `up`: the share of an MLP before its activation; `small`: what no axis but fsdp splits (norms)
    - `experts`: the experts' matrices; `routed`: the share of them that a token uses
    - `dots`: FLOPs of a token's causal dot products
    - `exchanged`: a token's keys and values, which are sent over context
    - `copies`: how often a token is sent over expert, to at most `groups` of the experts' groups
    - `saved`: by policy, the elements saved for backward per token: (split over tensor, not split); `operands` of it
      are matmuls' operands
    - `again`: by policy, the elements computed again per token, as in `saved`, for attention and for the MLP
    - `inner`: cotangents that an MLP's backward pass holds at once per token, besides [tokens, D]
    - `masks`: a token's scores in the masks of documents and windows that the layers share
    - `scores`: a token's, with their weights, which are stored where scores are capped
    - `queries`: a token's, in all heads
    - `passes`: a token's elements that are read from memory or written to it in a forward pass, by matmuls and between
      them
    - `ends`: the embedding, and the unembedding, which is a matmul; a tied one is stored once
    """

    params: int
    L: int
    D: int
    heads: int
    kv_heads: int
    dense: float
    projections: float
    kv: float
    queries: float
    small: float
    experts: float
    routed: float
    dots: float
    exchanged: float
    copies: int
    groups: int
    experts_count: int
    saved: dict[str, tuple[float, float]]
    operands: float
    inner: float
    passes: float
    ends: tuple[float, float]
    tied: bool
    up: float
    again: dict[str, tuple[float, float, float, float]]
    masks: int
    scores: float

    @property
    def active(self) -> float:
        """The number of params that a token is multiplied with, in layers and unembedding."""
        return self.L * (self.dense + self.routed) + self.ends[1]

    def flops(self, tokens: float) -> float:
        """Return the FLOPs of a training step: six for each element and token, and causal dot products three times."""
        return tokens * (6 * self.active + 3 * self.L * self.dots)


@lru_cache(maxsize=64)
def work_of(config: Config, seq: int) -> LayerWork:
    """Return the work of a model on sequences of `seq` tokens."""
    L = config.L
    params, active = tm.params(config), tm.params(config, active=True)
    sparse = L - len(config.dense) if config.moe else 0
    routed = config.matrices * config.D * config.F * config.k * sparse / L if config.moe else 0
    experts = routed * config.E / config.k if config.moe else 0
    dense = (active["mlp"] + active["attention"] + active["router"]) / L - routed
    attends = tm.forward_flops(config, 1, seq, causal=True)["attention"] / seq / L
    widths = {policy: tm.saved_widths(config, policy) for policy in tm.POLICIES}
    kept = {policy: sum(row.values()) for policy, row in widths.items()}
    whole = {policy: row.get("norms", 0) + row.get("rows", 0) for policy, row in widths.items()}  # on each tensor rank
    latent = config.latent
    return LayerWork(
        params=sum(params.values()), L=L, D=config.D, heads=config.N, kv_heads=config.N if latent else config.K,
        dense=dense, projections=active["attention"] / L,
        kv=0 if latent else 2 * config.D * config.K * config.H, queries=config.N * config.H,
        small=(params["norms"] - config.D) / L, experts=experts, routed=routed, dots=attends,
        exchanged=tm.kv_cache_bytes(config, 1, 1) / L, copies=config.k if config.moe else 0,
        groups=config.top_groups if config.expert_groups > 1 else config.E, experts_count=config.E,
        saved={
            policy: (kept[policy] - whole[policy], whole[policy])
            for policy in tm.POLICIES
        },
        again={policy: again(config, policy) for policy in tm.POLICIES}, masks=masks(config, seq),
        scores=2 * config.N * seq * (config.score_cap is not None),
        inner=config.matrices * (config.F * config.k + config.S),
        operands=sum(widths["none"].get(name, 0) for name in ("norms", "heads", "product")), passes=passes(config),
        ends=(config.D * config.V, config.D * config.V), tied=config.tied, up=(config.matrices - 1) / config.matrices,
    )  # fmt: skip


def again(config: Config, policy: str) -> tuple[float, float, float, float]:
    """Return the elements that a backward pass computes again per token: of attention, then of the MLP.

    Each has two numbers: elements that are split over tensor, and elements that are not. "block" computes all of a
    layer again, and attention's before the MLP's backward; Q and K are then held before and after their rotation.
    """
    rows, D = tm.saved_widths(config, "none"), config.D
    Q, K = config.N * config.H, config.K * config.H
    attention = 2.0 * Q + K  # Q and K rotated, and O
    heads = sum(rows[name] for name in rows if name in ("Q", "K", "V", "A_Q", "A_KV", "KV"))
    mlp = rows["activation"] + rows["product"]
    block = attention + heads + D, D, mlp + rows["Tmp"], D
    if config.moe:  # the router's input in fp32, two rows for each expert, and their sum
        block = (*block[:2], block[2] + D, (2 + 2 * config.k) * D)
    nothing = 0.0, 0.0, 0.0, 0.0
    of = {"block": block, "matmuls": (attention, D, mlp, D), "attention": (attention, 0.0, 0.0, 0.0), "none": nothing}
    return of[policy]


def masks(config: Config, seq: int) -> int:
    """Return the scores per token in the shared masks: of spans of documents, and of windows shorter than a row."""
    windows = {window if window and window < seq and not config.chunked else None for window in config.windows}
    return sum(seq if window or config.score_cap is not None else min(seq, LIMITS.span) for window in windows)


def passes(config: Config) -> float:
    """Return the elements per token that a layer's forward pass reads from memory or writes there, kernel by kernel.

    Between matmuls there are two norms (read, write) and residual sums (two reads, a write), rotations of Q and K, the
    gated activation (two reads, a write), and for experts the copies, sorted and summed. Matmuls read their operand and
    write their result.
    """
    D, Q, KV = config.D, config.N * config.H, config.K * config.H
    experts = config.k if config.moe else 0
    wide = config.F * config.k + config.S
    gate = config.matrices - 1
    between = 10 * D + 2 * (Q + KV) + (gate + 1) * wide + 4 * D * experts
    blocks = 1 + (experts + config.shared if config.moe else 1)
    return between + (2 * D * blocks + 2 * Q + 2 * KV + (gate + 1) * wide)
