"""A mixture of experts on one device: each token passes k of E MLPs (Part 4, "Sparsity and Mixture-of-Experts").

Routing is separate from computing. `choose_experts` picks the experts once, as whole numbers without a gradient.
`weigh` returns the weights of the chosen experts, with gradients. A backward pass that recomputes a layer is given the
choice and never chooses again (`checkpoint_routed`): a second choice could differ because of a last bit, and with it
every gradient.

    x[n, D] -> scores[n, E] -> experts[n, k], weights[n, k] -> y = sum over k of weights * MLP_expert(x)

Scores are a softmax over the chosen experts as in Mixtral (arxiv.org/abs/2401.04088), or sigmoids with a bias that
balances the load as in DeepSeek-V3 (arxiv.org/abs/2412.19437, section 2.1.2). The auxiliary losses come from
Switch Transformer (arxiv.org/abs/2101.03961, equations 4 to 6) and ST-MoE (arxiv.org/abs/2202.08906, equation 5).
`scaling.strategies.expert` is this layer on a mesh.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from scaling.collectives import einsum
from scaling.collectives.linear import followed
from scaling.configs import Config
from scaling.models.layer import Values, gate_features
from scaling.models.remat import computed_again
from scaling.scaled import Scaled
from scaling.spec import parse_line

BITS = 32  # precision at which scores are compared
OF_EACH = ("W_in", "W_gate", "W_out", "b_in", "b_gate", "b_out")  # the leaves of each expert
ALPHA = 1.702  # of GPT-OSS's gate, x sigmoid(1.702 x), which is close to GELU

Counts = Sequence[int] | int | None  # the rows of each expert, as `by_expert` takes them


def route(x: Tensor, router: Tensor, config: Config, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(weights[..., k], experts int64[..., k]) of x[..., D] by router[D, E]; the best expert first."""
    experts = choose_experts(x, router, config, bias)
    return weigh(router_logits(x, router), experts, config), experts


def router_logits(x: Tensor, router: Tensor, shift: Tensor | None = None) -> Tensor:
    """logits[..., E] of x[..., D], plus shift[E] if the router has one, in float32 or wider."""
    wide = torch.promote_types(x.dtype, torch.float32)
    logits = x.to(wide) @ router.to(wide)
    return logits if shift is None else logits + shift.to(wide)


def choose_experts(
    x: Tensor, router: Tensor, config: Config, bias: Tensor | None = None, shift: Tensor | None = None
) -> Tensor:
    """Return experts int64[..., k] of x[..., D]: the highest score + bias[E] first, and of equal ones the lower index.

    The bias enters the choice only, not the weights. With `config.expert_groups` only the experts of the best
    `top_groups` groups are candidates; a group's score is its best expert's (DeepSeek-V2), or of sigmoids the sum of
    its two best (V3). The choice does not depend on how tokens are batched: scores are computed in float64 and compared
    at 32 bits, so that a matmul's order of summation decides no tie.
    """
    with torch.no_grad():
        score = router_logits(x.detach().double(), router.detach().double(), shift)
        if bias is not None or config.expert_groups > 1:
            score = scores(score, config)
        if bias is not None:
            score = score + bias.detach().double()
        rank = _comparable(score)
        if config.expert_groups > 1:
            grouped = score.unflatten(-1, (config.expert_groups, -1))
            best = grouped.sort(-1, descending=True).values[..., : 2 if config.routing == "sigmoid" else 1].sum(-1)
            best = _descending(_comparable(best))
            kept = torch.zeros_like(grouped[..., 0]).scatter(-1, best[..., : config.top_groups], 1.0)
            rank = rank.masked_fill(kept.repeat_interleave(grouped.shape[-1], -1) == 0, -math.inf)
        return _descending(rank)[..., : config.k].contiguous()  # a view would keep the order of all E


def _comparable(score: Tensor) -> Tensor:
    """Round scores to multiples of 2^-BITS times the power of two above the largest one in the last dim."""
    exponent = torch.frexp(score.abs().amax(-1, keepdim=True)).exponent
    return torch.ldexp(score, BITS - exponent).round()


def _descending(values: Tensor) -> Tensor:
    """Return indices from the largest to the smallest along the last dim; unlike topk, equal ones keep their order."""
    return values.argsort(dim=-1, descending=True, stable=True)


def weigh(logits: Tensor, experts: Tensor, config: Config) -> Tensor:
    """weights[..., k] of the experts chosen: their scores, with `norm_topk` over their sum, times `routed_scale`."""
    if config.norm_topk and config.routing == "softmax":
        weights = logits.gather(-1, experts).softmax(-1)
    else:
        weights = scores(logits, config).gather(-1, experts)
        if config.norm_topk:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * config.routed_scale


def capacity_of(config: Config, tokens: int) -> int | None:
    """Return the most tokens of a global batch for an expert: capacity * tokens * k / E, rounded up; None: no limit."""
    return None if config.capacity is None else math.ceil(config.capacity * tokens * config.k / config.E)


class Rows(NamedTuple):
    """The choices of n tokens as rows to be computed, one row per choice, sorted by expert and then by token.

    choice int64[R] is the index of each row among the n * k choices. place int64[n, k] is the row of each choice, R if
    a full expert dropped it. counts int64[E] is the number of rows of each expert.
    """

    choice: Tensor
    place: Tensor
    counts: Tensor

    def spread(self, x: Tensor) -> Tensor:
        """x[n, D] -> Row[R, D]: a copy of its token for each choice."""
        return x.index_select(0, self.choice // self.place.shape[1])

    def scaled(self, Row: Tensor, weights: Tensor) -> Tensor:
        """Row[R, D], weights[n, k] -> Row[R, D] times the weight of its choice; 0 for a row of no token."""
        dropped = len(Row) < self.place.numel()  # their place is R
        own = weights.new_zeros(len(Row) + dropped).scatter(0, self.place.flatten(), weights.flatten())
        return Row * own[: len(Row), None].to(Row.dtype)

    def picked(self, Row: Tensor) -> Tensor:
        """Row[R, D] -> the rows [n, k, D] of each token's choices; zeros for dropped choices."""
        if len(Row) < self.place.numel():
            Row = F.pad(Row, (0, 0, 0, 1))
        return Row.index_select(0, self.place.flatten()).unflatten(0, self.place.shape)

    def collect(self, Out: Tensor, weights: Tensor | None = None) -> Tensor:
        """Out[R, D], weights[n, k] -> y[n, D]: the weighted sum over each token's choices; dropped ones add nothing."""
        picked = self.picked(Out)
        return (picked if weights is None else picked * weights[..., None].to(Out.dtype)).sum(1)

    def dotted(self, Row: Tensor, x: Tensor) -> Tensor:
        """Row[R, D], x[n, D] -> the dot product [n, k] of each choice's row and its token; 0 for dropped choices."""
        return (self.picked(Row) @ x[..., None]).squeeze(-1)

    def sent(self, x: Tensor, weights: Tensor, config: Config) -> tuple[Tensor, Tensor | None]:
        """Return (Row[R, D] of x[n, D] for the experts, the weights of their results), by the model's routing."""
        Row = self.spread(x)
        return (self.scaled(Row, weights), None) if config.routing == "inputs" else (Row, weights)


def expert_rows(experts: Tensor, E: int, kept: Tensor | None = None) -> Rows:
    """Return the rows of experts int64[n, k]; where `kept` bool[n, k] is False, the choice is dropped."""
    flat = experts.flatten()
    if kept is not None:
        flat = torch.where(kept.flatten(), flat, E)
    counts = load_of(flat, E + 1)
    choice = flat.argsort(stable=True)
    if kept is not None:
        choice = choice[: flat.numel() - int(counts[E])]
    rows = torch.arange(len(choice), device=flat.device)
    place = torch.full_like(flat, len(choice)).scatter(0, choice, rows)
    return Rows(choice, place.view_as(experts), counts[:E])


def position(experts: Tensor, E: int) -> Tensor:
    """int64[n, k]: how many earlier tokens of experts int64[n, k] chose the same expert."""
    rows = expert_rows(experts, E)
    first = rows.counts.cumsum(0) - rows.counts
    return rows.place - first[experts]


def by_expert(
    line: str, Row: Tensor, W: Any, counts: Counts, product: Callable = einsum, add_to: Tensor | None = None
) -> Tensor:
    """Return the product of each expert's rows and its matrix: the first counts[0] rows times W[0], and so on.

    The line is that of one expert, `Row[R, D] * W_in[D, F] -> Tmp[R, F]`. If each expert has the same number of rows,
    `counts` may be that number; the product is then one for all experts. None: there is one matrix for all rows.
    Matrices with scales multiply the rows of all experts in one call, so that all rows are quantized together. With
    `add_to` the products are added to it.
    """
    add = {} if add_to is None else {"out": add_to, "add": True}
    if counts is None:
        return product(line, Row, W, **add)
    if isinstance(counts, int):
        return torch.vmap(partial(product, line))(Row.unflatten(0, (-1, counts)), W).flatten(0, 1)
    if isinstance(W, Scaled):
        return product(line, Row, W, counts=counts, **add)
    parts = [*zip(Row.split(list(counts)), W.unbind(), strict=True)]
    if followed(Row) or followed(W):
        return torch.cat([product(line, rows, own) for rows, own in parts])
    typed = parse_line(line)
    width = W.shape[1 + typed.operands[1].index(typed.result.dim_names[-1])]
    Out = Row.new_empty(len(Row), width) if add_to is None else add_to
    for (rows, own), out in zip(parts, Out.split(list(counts)), strict=True):
        product(line, rows, own, out=out, add=bool(add))
    return Out


def gradient_by_expert(
    W: dict, name: str, line: str, a: Tensor, b: Tensor, counts: Sequence[int] | None
) -> dict[str, Tensor]:
    """Return {name: dW}, by the line of one expert, `Row[R, D] * dTmp[R, F] -> dW_in[D, F]`, from all experts' rows."""
    if counts is None:
        return {name: einsum(line, a, b)}
    dW = a.new_empty(W[name].shape)
    for own, *rows in zip(dW, a.split(list(counts)), b.split(list(counts)), strict=True):
        einsum(line, *rows, out=own)
    return {name: dW}


def activate_rows(
    W: dict, s: Values, config: Config, counts: Counts = None, product: Callable = einsum, R: str = "", Y: str = ""
) -> Values:
    """Add to `s`, which has Row[R, D], Act[R, F_Y] and the products before it, unless `s` has them.

    `R` and `Y` are the subscripts of the axes that split the rows and F, such as "_Y". With a `clamp` both products are
    kept within it, and Act = (Tmp + 1) Gate sigmoid(1.702 Gate) (GPT-OSS).
    """
    if "Tmp" not in s:
        line = f"Row[R{R}, D] * W_in[D, F{Y}] -> Tmp[R{R}, F{Y}]"
        s = s | {"Tmp": biased_rows(by_expert(line, s["Row"], W["W_in"], counts, product), W.get("b_in"), counts)}
        if "W_gate" in W:
            line = f"Row[R{R}, D] * W_gate[D, F{Y}] -> Gate[R{R}, F{Y}]"
            Gate = by_expert(line, s["Row"], W["W_gate"], counts, product)
            s["Gate"] = biased_rows(Gate, W.get("b_gate"), counts)
    if "Act" in s:
        return s
    if config.clamp is None:
        return s | gate_features(W, s["Tmp"], s.get("Gate"), config)
    Gate = s["Gate"].clamp(max=config.clamp)
    Open = Gate * torch.sigmoid(ALPHA * Gate)
    return s | {"Open": Open, "Act": (s["Tmp"].clamp(-config.clamp, config.clamp) + 1) * Open}


def biased_rows(Row: Tensor, b: Tensor | None, counts: Counts) -> Tensor:
    """Return the rows plus their expert's bias b[E, ..], if there is one; `counts` are as in `by_expert`."""
    if b is None:
        return Row
    if counts is None:
        return Row + b
    if isinstance(counts, int):
        return (Row.unflatten(0, (-1, counts)) + b[:, None]).flatten(0, 1)
    return Row + torch.cat([own.expand(n, -1) for own, n in zip(b, counts, strict=True)])


def mlp(W: dict, Row: Tensor, config: Config, counts: Counts = None) -> Tensor:
    """Row[R, D] -> Out[R, D] on one device, through one expert or, with `counts`, each through its own."""
    Act = activate_rows(W, {"Row": Row}, config, counts)["Act"]
    Out = by_expert("Act[R, F] * W_out[F, D] -> Out[R, D]", Act, W["W_out"], counts)
    return biased_rows(Out, W.get("b_out"), counts)


def shared_experts(W: dict, x: Tensor, config: Config) -> Tensor:
    """x[n, D] through the experts that every token passes, times a sigmoid of the token if there is a gate[D]."""
    Out = mlp(W, x, config)
    return Out * (x @ W["gate"]).sigmoid()[..., None] if "gate" in W else Out


def forward(params: dict, x: Tensor, config: Config, experts: Tensor | None = None) -> tuple[Tensor, dict]:
    """Compute the layer, each token by its own experts only: x[B, T, D] -> (y[B, T, D], aux).

    The params are the rows of `models.leaves`. aux has the losses "balance" and "z", and "load" int64[E], the number of
    tokens that chose each expert. `experts` int64[B, T, k] is a choice made before. An expert over its capacity drops
    the last tokens of the batch.
    """
    if experts is None:
        experts = choose_experts(x, params["router"], config, params.get("bias"), params.get("b_router"))
    flat, chosen = x.flatten(0, -2), experts.flatten(0, -2)
    capacity = capacity_of(config, len(flat))
    rows = expert_rows(chosen, config.E, None if capacity is None else position(chosen, config.E) < capacity)
    logits, load = router_logits(flat, params["router"], params.get("b_router")), load_of(chosen, config.E)
    Row, weights = rows.sent(flat, weigh(logits, chosen, config), config)
    y = rows.collect(mlp(params, Row, config, rows.counts.tolist()), weights)
    if "shared" in params:
        y = y + shared_experts(params["shared"], flat, config)
    return y.view_as(x), losses(logits.view(*x.shape[:-1], -1), experts, config) | {"load": load}


def dense(params: dict, x: Tensor, config: Config, experts: Tensor | None = None) -> tuple[Tensor, dict]:
    """Compute the layer with every expert for every token, as the reference that all other forms have to equal.

    The params are the rows of `models.leaves`. x[B, T, D] -> (y[B, T, D], aux), where aux has the losses "balance" and
    "z" and "load" int64[E]. An expert over its capacity leaves out the last tokens of the batch.
    """
    if experts is None:
        experts = choose_experts(x, params["router"], config, params.get("bias"), params.get("b_router"))
    logits = router_logits(x, params["router"], params.get("b_router"))
    load, tokens = load_of(experts, config.E), experts[..., 0].numel()
    weights = weigh(logits, experts, config)
    chosen = F.one_hot(experts, config.E).sum(-2)
    if (capacity := capacity_of(config, tokens)) is not None:
        earlier = chosen.flatten(0, -2).cumsum(0).view_as(chosen) - chosen
        chosen = chosen * (earlier < capacity)
    weights = torch.zeros_like(logits).scatter(-1, experts, weights) * chosen
    y = torch.zeros_like(x)
    for e in range(config.E):
        W = {name: params[name][e] for name in OF_EACH if name in params}
        weight = weights[..., e, None].to(x.dtype)
        if config.routing == "inputs":
            y = y + mlp(W, (weight * x).flatten(0, -2), config).view_as(x)
        else:
            y = y + weight * mlp(W, x.flatten(0, -2), config).view_as(x)
    if "shared" in params:
        y = y + shared_experts(params["shared"], x.flatten(0, -2), config).view_as(x)
    return y, losses(logits, experts, config) | {"load": load}


def checkpoint_routed(f: Callable) -> Callable:
    """Return a layer that is recomputed in the backward pass without choosing its experts again.

    `f(params, x, routing) -> (outs, routing)` decides the routing if it is given None, and otherwise uses the one
    given; `outs` is a tuple of tensors. The result maps (params, x) to (outs, routing).
    """

    def step(params, x):
        decided = []

        def first(params, x):
            outs, routing = f(params, x, None)
            decided.append(routing)
            return outs, ()

        outs = computed_again(first, lambda _, params, x: f(params, x, decided[0])[0], params, x)
        return outs, decided[0]

    return step


def scores(logits: Tensor, config: Config) -> Tensor:
    """Return each expert's score, the softmax or sigmoid of logits[..., E]."""
    return logits.softmax(-1) if config.routing == "softmax" else logits.sigmoid()


def load_of(experts: Tensor, E: int) -> Tensor:
    """int64[E]: how many tokens chose each expert."""
    flat = experts.flatten()
    return torch.zeros(E, dtype=torch.int64, device=flat.device).scatter_add(0, flat, torch.ones_like(flat))


def balanced_load(experts: Tensor, config: Config) -> Tensor:
    """Count the choices experts[B, T, k] of each expert for `balance_loss`: int64[E], or by sequence int64[B, E].

    With `config.balance_first` only the first choice of each token counts.
    """
    chosen = (experts[..., :1] if config.balance_first else experts).flatten(1)
    load = torch.zeros(len(experts), config.E, dtype=torch.int64, device=experts.device)
    load = load.scatter_add(1, chosen, torch.ones_like(chosen))
    return load if config.balance_by == "sequence" else load.sum(0)


def balance_loss(logits: Tensor, load: Tensor, config: Config, tokens: int, sequences: int = 1) -> Tensor:
    """Return E * sum over experts of f P: f is an expert's share of the choices, P its mean score; 1 if even.

    load int64[E], of `balanced_load`, and `tokens` describe the global batch, logits[..., E] this rank's part of it.
    The result is the part's term, and the terms add up to the loss. By sequence, load[B, E] counts each whole sequence,
    and the loss is the mean over all `sequences` of the global batch (DeepSeek-V3, arXiv:2412.19437, equations 17 to
    20). Sigmoid scores are first divided by their sum.
    """
    score, choices = scores(logits, config), 1 if config.balance_first else config.k
    if config.routing != "softmax":
        score = score / (score.sum(-1, keepdim=True) + 1e-20)
    load = load.to(score.dtype)
    if load.dim() == 1:
        share = load / (float(tokens) * choices)  # an int of 64 bits would be too small for a large batch
        return (share * score.flatten(0, -2).sum(0)).sum() * config.E / float(tokens)
    each = load.sum(-1, keepdim=True) / choices  # tokens of each sequence
    share = load / (each * choices)
    return (share * score.sum(1) / each).sum() * config.E / sequences


def z_loss(logits: Tensor, tokens: int) -> Tensor:
    """Return the mean over `tokens` of logsumexp(logits[..., E])^2; logits of a part of the tokens give its term."""
    return logits.logsumexp(-1).square().sum() / tokens


def losses(logits: Tensor, experts: Tensor, config: Config) -> dict[str, Tensor]:
    """Return the losses of a whole batch: logits[B, T, E], experts[B, T, k]."""
    count = experts[..., 0].numel()
    balance = balance_loss(logits, balanced_load(experts, config), config, count, len(experts))
    return {"balance": balance, "z": z_loss(logits, count)}


def update_bias(bias: Tensor, load: Tensor, rate: float = 1e-3) -> Tensor:
    """bias[.., E] after a step in which `load`[.., E] tokens chose each expert.

    It goes up by `rate` where fewer tokens than the mean did, and down where more did, so that no auxiliary loss
    disturbs the model's own (DeepSeek-V3).
    """
    load = load.to(torch.float64)
    return bias + rate * torch.sign(load.mean(-1, keepdim=True) - load).to(bias.dtype)
