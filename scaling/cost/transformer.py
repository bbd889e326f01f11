"""Parameters, FLOPs and KV cache of a transformer (Part 4): exact, and by the book's rules of thumb.

B counts sequences, T query tokens and S key-value tokens of each; sizes are in bytes, work in FLOPs (a multiply and an
add are two). Only matmuls count as work, as in the book's tables; norms, softmax and the like are left out.
Each count is a dict by component; `sum(....values())` is the total. Plain Python: no torch.
"""

import math
from typing import Any

from scaling.common.arguments import one_of, whole
from scaling.configs import Config
from scaling.spec import dtype_bytes

REMAT = ("none", "matmuls", "block")
POLICIES = ("none", "attention", "matmuls", "block")  # on a mesh
REDUCES = ("each", "once")  # when gradients are scattered: after each microbatch, or once, as sums over all


# --- Counting dots -----------------------------------------------------------------------------------------------


def einsum_flops(equation: str, *shapes: tuple[int, ...]) -> int:
    """Return the FLOPs of `"bd,df->bf"` on these shapes: twice the product of all dims (Part 4, Counting Dots).

    Each dim counts once. Without a contracted dim nothing is added, so the factor of two is left out. There may be one
    or two operands.
    """
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    operands = inputs.split(",")
    if not arrow or len(operands) != len(shapes) or not 1 <= len(operands) <= 2:
        what = f"{equation!r} needs an arrow and a shape for each of its one or two operands, got {shapes}"
        raise ValueError(f'{what}\n  fix: write it as "bd,df->bf", with as many shapes')
    sizes: dict[str, int] = {}
    for letters, shape in zip(operands, shapes, strict=True):
        if len(letters) != len(shape):
            raise ValueError(
                f"{equation!r}: {letters} has {len(letters)} dims, but the shape is {shape}"
                "\n  fix: give a size for each dim"
            )
        for letter, size in zip(letters, shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise ValueError(
                    f"{equation!r}: {letter} is both {sizes[letter]} and {size}"
                    "\n  fix: give the dim one size in all operands"
                )
    if unknown := set(output) - sizes.keys():
        raise ValueError(
            f"{equation!r}: the result has {', '.join(sorted(unknown))}, which no operand has"
            "\n  fix: write a result of the operands' dims"
        )
    return math.prod(sizes.values()) * (1 if set(output) == sizes.keys() else 2)


# --- Parameters --------------------------------------------------------------------------------------------------


def attention_params(config: Config) -> int:
    """Return the params of a layer's W_Q, W_K, W_V and W_O, 2D(N+K)H, or of latent attention's low-rank factors.

    With gated heads there is a W_G as large as W_Q.
    """
    if (latent := config.latent) is None:
        return 2 * config.D * (config.N + config.K) * config.H + config.D * config.N * config.H * config.head_gate
    D, N = config.D, config.N
    queries = D * latent.q_rank + (latent.q_rank or D) * N * (latent.nope + latent.rope)
    keys_values = D * (latent.kv_rank + latent.rope) + latent.kv_rank * N * (latent.nope + latent.value)
    return queries + keys_values + N * latent.value * D


def linear_params(config: Config) -> int:
    """Return the params of a linear layer's products and convolutions, D (k(m + u) + n v) + w (2 k h + n v)."""
    if config.linear is None:
        return 0
    s = config.linear.sizes
    products = s["k"] * (s["m"] + s["u"]) + s["n"] * s["v"]
    return config.D * products + s["w"] * (2 * s["k"] * s["h"] + s["n"] * s["v"])


def state_bytes(config: Config, dtype: Any = "bf16") -> float:
    """Return the bytes of a sequence's state in a linear layer: 4 n h v in float32, and the w - 1 last tokens' QKV."""
    if config.linear is None:
        return 0.0
    s = config.linear.sizes
    tail = (s["w"] - 1) * (2 * s["k"] * s["h"] + s["n"] * s["v"])
    return 4 * s["n"] * s["h"] * s["v"] + tail * dtype_bytes(dtype)


def _head_gains(config: Config) -> int:
    heads = config.N + config.K if config.qk_wide or config.qk_layernorm else 2
    return heads * config.H * (config.qk_norm and not config.qk_bare)


def params(config: Config, active: bool = False) -> dict[str, int]:
    """Return the number of parameters by component; with `active`, only the experts of one token count.

    "vocab" is DV if the unembedding is tied to the embedding, and 2DV if not.
    """
    D, sparse = config.D, config.L - len(config.dense)
    each = config.k if active else config.E
    wide = config.F * each + config.S
    head_norms = config.latent.q_rank + config.latent.kv_rank if config.latent else _head_gains(config)
    biases = (config.N + 2 * config.K) * config.H * config.attention_bias + D * config.output_bias
    biases += ((config.matrices - 1) * config.F + D) * config.mlp_bias
    gains = config.L * config.layer_norms + 1  # of D each, as are their biases
    attending, s = len(config.attending), config.sizes
    rule = config.L - attending, (2 * s["n"] + s["v"] if config.linear else 0)  # A_log, dt and the heads' gain
    return {
        "mlp": config.matrices * D * (sparse * wide + len(config.dense) * config.F_dense),
        "attention": attending * attention_params(config) + (config.L - attending) * linear_params(config),
        "router": sparse * D * (config.E + config.shared_gate) if config.moe else 0,
        "norms": attending * head_norms + math.prod(rule) + gains * D * config.norm_gain,
        "biases": gains * D * config.norm_bias
        + config.L * (biases + config.N * config.sinks + 2 * (config.activation == "xielu"))
        + (sparse * config.E if config.routing == "sigmoid" and config.moe else 0)
        + (sparse * (config.E + each * ((config.matrices - 1) * config.F + D)) if config.expert_bias else 0),
        "vocab": (1 if config.tied else 2) * D * config.V + config.V * config.unembed_bias,
    } | ({"positions": D * config.learned_positions} if config.learned_positions else {})


def num_params(config: Config, active: bool = False) -> int:
    """Return the number of all parameters, or of the `active` ones."""
    return sum(params(config, active).values())


# --- FLOPs -------------------------------------------------------------------------------------------------------


def visible_pairs(T: int, S: int, window: int | None = None, chunked: bool = False) -> int:
    """Count the (query, key) pairs of the last T of S tokens: TS - T(T-1)/2, or fewer with a `window`.

    Each query attends to itself and to the tokens before it: at most `window` keys in all or, if `chunked`, those in
    its chunk.
    """
    if chunked and window:
        return _chunk_pairs(S, window) - _chunk_pairs(S - T, window)
    hidden = max(0, S - window) if window else 0  # keys hidden from the last query; one less from the one before
    some = min(T, hidden)
    return T * S - T * (T - 1) // 2 - some * hidden + some * (some - 1) // 2


def _chunk_pairs(S: int, chunk: int) -> int:
    whole, rest = divmod(S, chunk)
    return whole * (chunk * (chunk + 1) // 2) + rest * (rest + 1) // 2


def forward_flops(config: Config, B: int, T: int, S: int | None = None, causal: bool = False) -> dict[str, int]:
    """Return the FLOPs of a forward pass over B sequences of T tokens that attend to S (default T), by component.

    `causal` counts only the visible pairs of each head, since a kernel can skip the others. A plain einsum computes
    them all. The unembedding counts for every token; the embedding is a look-up, not a matmul.
    """
    S = T if S is None else S
    whole(B=B, T=T, S=S)
    tokens, counts = B * T, params(config, active=True)
    if causal and S < T:
        raise ValueError(f"causal attention of T={T} tokens needs at least as many keys, got S={S}\n  fix: give S >= T")
    windows = [config.windows[l] for l in config.attending]
    pairs = sum(visible_pairs(T, S, window, config.chunked) if causal else T * S for window in windows)
    linear = config.linear  # a token decays a state, reads it twice and writes to it
    rule = 6 * len(linear.layers) * linear.values * linear.key * linear.value if linear else 0
    head = config.latent.nope + config.latent.rope + config.latent.value if config.latent else 2 * config.H
    return {
        "mlp": 2 * tokens * (counts["mlp"] + counts["router"]),
        "projections": 2 * tokens * counts["attention"],
        "attention": 2 * B * pairs * config.N * head + tokens * rule,
        "unembed": 2 * tokens * config.D * config.V,
    }


def remat_flops(config: Config, B: int, T: int, remat: str, causal: bool = False, last: bool = True) -> int:
    """Return the FLOPs that the backward pass recomputes (Part 4, Gradient checkpointing).

    "none" recomputes nothing. "block" saves only each layer's input, so the layers' forward passes run again (which the
    book rounds to 2 * params * tokens), without the unembedding. "matmuls" saves the outputs of the seven matmuls, so
    only the two of dot-product attention run again, 4BT^2NH per layer (Question 6); "attention" recomputes these, too.
    With "block", `last` includes each layer's last product, whose result is never read; on a mesh it does not run.
    """
    one_of("remat", remat, POLICIES)
    forward = forward_flops(config, B, T, causal=causal)
    if remat == "none":
        return 0
    if remat in ("attention", "matmuls"):
        return forward["attention"]
    unread = 0 if last else 2 * B * T * config.L * config.D * config.F
    return forward["mlp"] + forward["projections"] + forward["attention"] - unread


def train_flops(config: Config, B: int, T: int, causal: bool = False, remat: str = "none") -> dict[str, int]:
    """Return the FLOPs of a training step: three times the forward pass, and the recomputed work."""
    again = remat_flops(config, B, T, remat, causal)
    return {key: 3 * flops for key, flops in forward_flops(config, B, T, causal=causal).items()} | {"remat": again}


def rule_of_thumb(config: Config, tokens: float, remat: str = "none") -> float:
    """Return 6 * params * tokens for a training step, 8 with block remat (Part 4), counting active params only."""
    one_of("remat", remat, REMAT)
    return (8 if remat == "block" else 6) * num_params(config, active=True) * tokens


def prefill_flops(config: Config, prompt: int, batch: int = 1) -> int:
    """Return the FLOPs of prefill, which unembeds only each prompt's last token: roughly 2 * params * tokens."""
    flops = forward_flops(config, batch, prompt, causal=True)
    return sum(flops.values()) - flops["unembed"] + 2 * batch * config.D * config.V


# --- Bytes -------------------------------------------------------------------------------------------------------


def kv_cache_bytes(config: Config, tokens: int = 1, dtype: Any = "bf16") -> float:
    """Return the bytes of this many tokens' keys and values, 2*L*K*H each (Part 4, KV caching), or of their latents.

    If only some layers of a model have a cache, L counts these.
    """
    latent, layers = config.latent, config.L if config.cached is None else config.cached
    each = latent.kv_rank + latent.rope if latent else 2 * config.K * config.H
    return tokens * layers * each * dtype_bytes(dtype)


def saved_widths(config: Config, remat: str) -> dict[str, int]:
    """Return the elements saved for backward per token and layer, by array (Part 4, Gradient checkpointing).

    "block" saves the layer's input. "matmuls" also saves the outputs of the seven big matmuls, eight with latents;
    W_out's is part of the next layer's input, since the residual stream that it is added to is saved. "none" saves
    everything that a gradient reads, with an attention kernel that keeps its output and one statistic per head rather
    than the [T, S] scores. "attention" saves all of that except the arrays that this kernel keeps.
    """
    one_of("remat", remat, POLICIES)
    D, Q, KV = config.D, config.N * config.H, config.K * config.H
    F = config.F * config.k + config.S
    block = {"In": D}
    if remat == "block":
        return block
    heads, norms = {"Q": Q, "K": KV, "V": KV}, 2 * D
    if config.latent:  # the latents before and after their norms, in addition to the heads
        s, N, R = config.sizes, config.N, config.latent.q_rank
        heads, norms = {"A_Q": R, "A_KV": s["M"], "Q": N * s["A"], "KV": N * s["W"]}, norms + R + s["C"]
    rows = 2 * config.k * D if config.moe else 0  # that experts receive and return
    matmuls = block | heads | {"Attn": D, "Tmp": (config.matrices - 1) * F, "rows": rows}
    if remat == "matmuls":
        return matmuls
    attended = {"heads": Q, "statistics": config.N} if remat != "attention" else {}  # Q and K are kept rotated
    return matmuls | {"norms": norms} | attended | {"activation": F, "product": F if config.gated else 0}


def saved_bytes(config: Config, tokens: int, remat: str, dtype="bf16") -> float:
    """Return the bytes of all layers' saved activations for this many tokens."""
    return tokens * config.L * sum(saved_widths(config, remat).values()) * dtype_bytes(dtype)


# --- Attention ---------------------------------------------------------------------------------------------------


def attention_intensity(T: int, S: int, G: int = 1) -> float:
    """Return the FLOPs per byte of dot-product attention in a kernel: TSG/(TG + S) in bf16 (Part 4, Question 4).

    T queries in each of G heads read S keys and values once, and write as many bytes as they read of Q.
    """
    return T * S * G / (T * G + S)


def attention_fraction(config: Config, T: int) -> float:
    """Return the FLOPs of attention's dot products over the layers' other matmuls: T/8D if F = 4D, NH = KH = D."""
    flops = forward_flops(config, 1, T)
    return flops["attention"] / (flops["mlp"] + flops["projections"])


def attention_crossover(config: Config) -> float:
    """Return the sequence length at which `attention_fraction` is 1, T = 8D in the book's proportions."""
    return 1 / attention_fraction(config, 1)
