"""The work of a model per layer and token, however it is split (Part 4): elements, FLOPs, activations.

`work_of(config, seq)` counts a transformer, and `work_of(Stack(L, D, F), 1)` the book's stack of blocks, which the
strategies run. The planner knows a model by its `LayerWork` alone.
"""

from dataclasses import dataclass, field
from functools import lru_cache

from scaling.common.arguments import whole
from scaling.configs import Config
from scaling.cost import transformer as tm


@dataclass(frozen=True)
class Stack:
    """The book's model of Part 5: L blocks of W_in[D, F] and W_out[F, D], without attention, vocabulary or norms."""

    L: int
    D: int
    F: int
    name: str = "stack"

    def __post_init__(self):
        whole(L=self.L, D=self.D, F=self.F)


@dataclass(frozen=True)
class LayerWork:
    """The work of a model: per layer, and in elements unless the name says otherwise.

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
    - `inner`: cotangents that an MLP's backward pass holds at once per token, besides [tokens, D]; `late`: the part of
      them that has been dropped when the deferred products are due
    - `masks`: how many masks of documents and windows the layers share
    - `scores`: a token's, with their weights, which are stored where scores are capped
    - `queries`: a token's, in all heads
    - `passes`: a token's elements that are read from memory or written to it in a forward pass, by matmuls and between
      them
    - `ends`: the embedding, and the unembedding, which is a matmul; a tied one is stored once
    """

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
    late: float
    passes: float
    ends: tuple[float, float]
    tied: bool = False
    up: float = 0.5
    again: dict[str, tuple[float, float, float, float]] = field(default_factory=dict)
    masks: int = 0
    scores: float = 0

    @property
    def blocks(self) -> int:
        """AllGathers over tensor in a forward pass, and as many ReduceScatters, of [tokens, D].

        Experts share one of each, as they do in the run.
        """
        return 2 if self.projections else 1

    @property
    def params(self) -> float:
        """The number of params of the whole model."""
        layers = self.L * (self.dense + self.small + self.experts)
        return layers + (max(self.ends) if self.tied else sum(self.ends)) + (self.D if self.ends[1] else 0)

    @property
    def active(self) -> float:
        """The number of params that a token is multiplied with, in layers and unembedding."""
        return self.L * (self.dense + self.routed) + self.ends[1]

    def flops(self, tokens: float, remat: str = "none") -> float:
        """Return the FLOPs of a training step: six per element and token, three per dot product, and recomputation."""
        dots = self.L * self.dots
        again = {"attention": dots, "matmuls": dots, "block": 2 * (self.active - self.ends[1]) + dots}.get(remat, 0)
        return tokens * (6 * self.active + 3 * dots + again)


@lru_cache(maxsize=64)
def work_of(model: Config | Stack, seq: int) -> LayerWork:
    """Return the work of a model on sequences of `seq` tokens."""
    if isinstance(model, Stack):
        return LayerWork(
            model.L, model.D, heads=model.F, kv_heads=model.F, dense=2 * model.D * model.F, projections=0, kv=0,
            queries=0, small=0, experts=0, routed=0, dots=0, exchanged=0, copies=0, groups=1, experts_count=1,
            saved={"none": (2 * model.F, model.D)},
            operands=0, inner=2 * model.F, late=model.F, passes=4 * model.F, ends=(0, 0),
        )  # fmt: skip
    config, L = model, model.L
    params, active = tm.params(config), tm.params(config, active=True)
    sparse = L - len(config.dense) if config.moe else 0
    routed = config.matrices * config.D * config.F * config.k * sparse / L if config.moe else 0
    experts = routed * config.E / config.k if config.moe else 0
    dense = (active["mlp"] + active["attention"] + active["router"]) / L - routed
    attends = tm.forward_flops(config, 1, seq, causal=True)["attention"] / seq / L
    widths = {policy: tm.saved_widths(config, policy) for policy in tm.POLICIES}
    kept = {policy: sum(row.values()) for policy, row in widths.items()}
    latent = config.latent
    return LayerWork(
        L=L, D=config.D, heads=config.N, kv_heads=config.N if latent else config.K, dense=dense,
        projections=active["attention"] / L,
        kv=0 if latent else 2 * config.D * config.K * config.H, queries=config.N * config.H,
        small=(params["norms"] - config.D) / L, experts=experts, routed=routed, dots=attends,
        exchanged=tm.kv_cache_bytes(config, 1, 1) / L, copies=config.k if config.moe else 0,
        groups=config.top_groups if config.expert_groups > 1 else config.E, experts_count=config.E,
        saved={
            policy: (kept[policy] - widths[policy].get("norms", 0), widths[policy].get("norms", 0))
            for policy in tm.POLICIES
        },
        again={policy: again(config, policy) for policy in tm.POLICIES}, masks=len({*config.windows}),
        scores=2 * config.N * seq * (config.score_cap is not None),
        inner=config.matrices * (config.F * config.k + config.S), late=0,
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
