"""Part 4, All the Transformer Math You Need to Know: https://jax-ml.github.io/scaling-book/transformers

Parameters, FLOPs, KV caches and checkpoints by formula, each beside a real functional transformer: its params counted,
its FLOPs by torch's counter, its saved activations weighed. Then the worked problems, the book's answers beside ours.
"""

import argparse
import sys

import optree
import torch
from tabulate import tabulate
from torch.utils.flop_counter import FlopCounterMode

from scaling import cost
from scaling.book.answers import Answer, report
from scaling.collectives import einsum
from scaling.configs import MODELS, get
from scaling.cost import transformer as tm
from scaling.hardware import chip
from scaling.models import transformer
from scaling.models.attention import dot_product_attention, flash_attention
from scaling.show.charts import chart, save
from scaling.spec import parse_line
from scaling.trace import trace


def counted(f, *args) -> int:
    with FlopCounterMode(display=False) as counter:
        f(*args)
    return counter.get_total_flops()


# %% Counting dots: FLOPs of a contraction, by the rule and by torch's counter
def counting_dots() -> str:
    cases = [
        ("x[P] . y[P]", "p,p->", (1024,), (1024,)),
        ("A[N, P] x[P]", "np,p->n", (512, 1024), (1024,)),
        ("A[N, P] B[P, M]", "np,pm->nm", (512, 1024), (1024, 256)),
        ("C[GH, IJ, KL] D[GH, MN, KL]", "ghijkl,ghmnkl->ghijmn", (2, 3, 4, 5, 6, 7), (2, 3, 8, 9, 6, 7)),
    ]
    rows = []
    for name, equation, *shapes in cases:
        flops = tm.einsum_flops(equation, *shapes)
        numbers = sum(torch.Size(shape).numel() for shape in shapes)
        rows.append((name, equation, f"{flops:,}", f"{numbers:,}", f"{flops / numbers:.1f}"))
    return tabulate(rows, ["contraction", "einsum", "FLOPs", "numbers read", "FLOPs a number"], disable_numparse=True)


# %% Forward and backward: a matmul costs 2NPM forward, 4NPM backward
def forward_and_backward() -> tuple[int, int]:
    A, B = torch.empty(64, 32, device="meta"), torch.empty(32, 16, device="meta")
    forward = counted(torch.matmul, A, B)
    return forward, counted(lambda: torch.func.grad(lambda A, B: (A @ B).sum(), argnums=(0, 1))(A, B)) - forward


# %% Params and FLOPs of models, by formula, and as counted on the functional transformer (on meta tensors)
def models(B: int = 1, T: int = 4096) -> tuple[str, bool]:
    rows, equal = [], True
    for name, config in MODELS.items():
        params, flops = tm.params(config), tm.forward_flops(config, B, T)
        verdict = "formula only"
        if transformer.runs(config):
            two = config.with_(L=2)  # the counter walks every layer: two are enough
            tree = transformer.init(config, device="meta")
            tokens = torch.zeros(B, T, dtype=torch.long, device="meta")
            same = sum(leaf.numel() for leaf in optree.tree_leaves(tree)) == sum(params.values())
            if not config.moe:  # which expert computes what depends on the tokens: no FLOPs on meta tensors
                shallow = transformer.init(two, device="meta")
                same &= counted(transformer.forward, shallow, tokens) == sum(tm.forward_flops(two, B, T).values())
            equal, verdict = equal and same, ("params" if config.moe else "both") + (" equal" if same else " NOT EQUAL")
        total, active = sum(params.values()), tm.num_params(config, active=True)
        share = [f"{params[part] / total:.0%}" for part in ("mlp", "attention")]
        kv, ratio = tm.kv_cache_bytes(config), 3 * sum(flops.values()) / tm.rule_of_thumb(config, B * T)
        sizes = (f"{total / 1e9:.2f}e9", f"{active / 1e9:.2f}e9", *share, f"{kv / 1e3:.0f} kB", f"{ratio:.3f}")
        rows.append((name, *sizes, verdict))
    head = ["model", "params", "active", "MLP", "attention", "KV/token bf16", f"FLOPs / 6PT, T={T}", "counted"]
    return tabulate(rows, head, disable_numparse=True), equal


# %% Gradient checkpointing: FLOPs of a step and saved bytes, by formula and measured on one layer more
def weigh(config, remat: str, B: int, T: int) -> float:
    """Elements per token that autograd holds for a layer's backward pass: of two layers, less those of one."""
    params = optree.tree_map(lambda p: p.requires_grad_(), transformer.init(config))
    own = {leaf.untyped_storage()._cdata for leaf in optree.tree_leaves(params)}

    def held(layers: int) -> int:
        storages = {}

        def pack(x):
            storages[x.untyped_storage()._cdata] = x.untyped_storage()
            return x

        shallow = params | {"layers": {name: p[:layers] for name, p in params["layers"].items()}}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = transformer.forward(shallow, torch.zeros(B, T, dtype=torch.long), remat, flash_attention)
        return sum(s.nbytes() for key, s in storages.items() if key not in own) // out.element_size()

    return (held(2) - held(1)) / (B * T)


def checkpointing(B: int = 2, T: int = 32) -> tuple[str, bool]:
    config = get("part4-q1").with_(name="small", L=4, D=64, F=256, N=8, K=8, H=8, V=256)
    params = transformer.init(config, device="meta")
    tokens = torch.zeros(B, T + 1, dtype=torch.long, device="meta")
    rows, equal = [], True
    for remat in tm.REMAT:
        formula = sum(tm.train_flops(config, B, T, remat=remat).values())
        measured = counted(lambda remat=remat: torch.func.grad(transformer.loss)(params, tokens, remat))
        width, held = sum(tm.saved_widths(config, remat).values()), weigh(config, remat, B, T)
        equal &= measured == formula and (abs(held / width - 1) < 0.06 if remat == "none" else held == width)
        ratio = formula / sum(tm.train_flops(config, B, T).values())
        rows.append((remat, formula, measured, f"{6 * ratio:.2f}", f"{width / config.D:.2f}", f"{held / config.D:.2f}"))
    head = ["saved", "FLOPs, formula", "counted", "x params x tokens", "saved / D, formula", "weighed"]
    return tabulate(rows, head, intfmt=",", floatfmt="", disable_numparse=[3, 4, 5]), equal


# %% Attention against the rest, as the context grows (Question 4): time on one chip, by roofline
def relative_cost(config, T: int, name: str = "v5e") -> tuple[float, float]:
    """Seconds of dot-product attention over those of the MLP at a context of T tokens: in prefill, in decoding."""
    hw, flops = chip(name), tm.forward_flops(config.with_(L=1), 1, T, causal=True)
    C, W = hw.flops("bf16"), hw.need("hbm_bw")
    moved = 2 * (2 * T * config.N + 2 * T * config.K) * config.H
    weights = 2 * config.matrices * config.D * config.F
    prefill = cost.roofline(flops["attention"], moved, C, W).lower / cost.roofline(flops["mlp"], weights, C, W).lower
    batch = 240  # sequences decoded together, enough for the MLP to be compute-bound
    read = batch * tm.kv_cache_bytes(config.with_(L=1), T)
    attention = cost.roofline(batch * 4 * T * config.N * config.H, read, C, W).lower
    mlp = cost.roofline(batch * 2 * config.matrices * config.D * config.F, weights, C, W).lower
    return prefill, attention / mlp


# %% The worked problems
def answers() -> list[Answer]:
    q1, v5e = get("part4-q1"), chip("v5e")
    params = tm.params(q1)
    forward, backward = forward_and_backward()
    unembed = tm.train_flops(q1, 1, 1)["unembed"] / (q1.D * q1.V)
    big = _proportioned(8192)
    v3, alpha = get("deepseek-v3"), round(v5e.intensity("hbm"), -1)  # the book's 240
    v3_flops, v3_hours = 6 * 37e9 * 14.8e12, 2.79e6

    line = "A[B_X, D_Y] * W[D_Y, F] -> C[B_X, F] {U_Y}"
    mesh, sizes = {"X": 4, "Y": 8, "Z": 4}, {"B": 64, "D": 128, "F": 32}
    with trace() as log:
        einsum(line, *(torch.empty(s.local_shape(sizes, mesh), device="meta") for s in parse_line(line).operands))
    whole = 2 * sizes["B"] * sizes["D"] * sizes["F"]

    grouped = q1.with_(L=1, N=64, K=8)
    T, tree = 512, transformer.init(grouped.with_(L=1, V=8), device="meta")
    tokens = torch.zeros(1, T + 1, dtype=torch.long, device="meta")
    extra = counted(lambda: torch.func.grad(transformer.loss)(tree, tokens, "matmuls"))
    extra -= counted(lambda: torch.func.grad(transformer.loss)(tree, tokens))
    square = get("part4-q1").with_(L=1)
    crossover = next(T for T in range(1, 10**6) if _projections_equal(square, T))
    ratio = cost.all_to_all(1e9, chip("v5p"), 16) / cost.all_gather(1e9, chip("v5p"), 16)
    return [
        Answer("Backward over forward FLOPs of a matmul", "2", backward / forward, note="counted"),
        Answer("T = 8D where attention dominates, D = 8192", "64", tm.attention_crossover(big) / 1024, "Ki tokens"),
        Answer("the same for D = 4608 (Gemma 27B)", "37e3", tm.attention_crossover(_proportioned(4608)), "tokens"),
        Answer(
            "Gemma 2 27B as it is (F = 8D, NH < D)", "", tm.attention_crossover(get("gemma2-27b")), "tokens",
            note="attention_fraction = 1: its MLP is twice as wide as the book's F = 4D, and NH = 4096",
        ),
        Answer("Full activations, 20 a layer: BT = 4M, L=64, D=8192", "84", _saved(20) / 1e12, "TB"),
        Answer("Block remat, 1 a layer", "4.2", _saved(1) / 1e12, "TB"),
        Answer(
            "Big matmuls only: arrays of width D a layer", "7", len(tm.saved_widths(big, "matmuls")) + 1.0, "arrays",
            note=f"two are F wide, so {sum(tm.saved_widths(big, 'matmuls').values()) / big.D:.0f} D with F = 4D",
        ),
        Answer("Block remat: FLOPs over params x tokens", "8", tm.rule_of_thumb(q1, 1.0, "block") / tm.num_params(q1)),
        Answer("KV cache of 8k tokens, int8, KH = 8192", "8", tm.kv_cache_bytes(big, 8192, "int8") / 2**30, "GiB"),
        Answer("AllToAll over AllGather on a bidirectional ring", "0.25", ratio),
        Answer("DeepSeek-V3's sparsity E/k lies in 8..64", "yes", "yes" if 8 <= v3.E / v3.k <= 64 else "no"),
        Answer("Takeaways: FLOPs of the vocabulary / BTDV", "12", unembed, erratum="6BTDV: the embedding is no matmul"),
        Answer(
            "1 params", "16e9", tm.num_params(q1), "params",
            erratum="4096 taken as 4e3 and 16384 as 16e3; in full 17.44e9",
        ),
        Answer("1 attention's share of a layer", "0.25", params["attention"] / (params["attention"] + params["mlp"])),
        Answer("1 KV cache a token, int8", "512", tm.kv_cache_bytes(q1, 1, "int8") / 1024, "KiB"),
        Answer("2 FLOPs done / FLOPs needed", "4", log.flops * 128 / whole, note="traced, 128 devices: Z repeats"),
        Answer("2 FLOPs needed / FLOPs a device (= XY)", "32", whole / log.flops, note="traced"),
        Answer(
            "3 FLOPs / (IJKLMNO)", "2",
            tm.einsum_flops("ijkl,ijmno->klmno", (2, 3, 4, 5), (2, 3, 6, 7, 8)) / (2 * 3 * 4 * 5 * 6 * 7 * 8),
        ),
        Answer("4 intensity of prefill, T = S = 1000, G = 8 (TG/(G+1))", "889", tm.attention_intensity(1000, 1000, 8)),
        Answer("4 intensity of decoding, G = 8, S large (-> G)", "8", tm.attention_intensity(1, 10**6, 8)),
        Answer(
            "4 compute-bound from S =", "240", _compute_bound_from(1, alpha), "tokens",
            erratum="240 is the limit of many heads a KV head: 240(G+1)/G, so 480 with MHA, 270 with G = 8",
        ),
        Answer("4 the same for G = 8", "", _compute_bound_from(8, alpha), "tokens", note="240 (G+1)/G"),
        Answer("5 T at which attention = projections, D = 4096", "8192", float(crossover), "tokens", note="T = 2D"),
        Answer("6 FLOPs to rematerialize / (B T^2 N H)", "4", extra / (T**2 * grouped.N * grouped.H), note="counted"),
        Answer("7 FLOPs that the H800 hours offer", "1.52e25", v3_hours * 3600 * 3026e12 / 2, "FLOPs"),
        Answer("7 DeepSeek-V3's utilization", "0.217", v3_flops / (v3_hours * 3600 * 3026e12 / 2)),
        Answer("8 MoE batch, int8 weights, bf16 FLOPs: x E/k", "120", alpha * 0.5, "tokens"),
        Answer(
            "8 the same for DeepSeek", "3840", alpha * 0.5 * cost.expert_inflation(256, 8), "tokens",
            note=f"{cost.critical_batch(v5e.flops('bf16'), v5e.hbm_bw, dtypes=('bf16', 'int8', 'bf16')):.1f} unrounded",
        ),
    ]  # fmt: skip


def _proportioned(D: int):
    """The book's proportions at this width: F = 4D, NH = KH = D."""
    return get("part4-q1").with_(D=D, F=4 * D, N=D // 128, K=D // 128)


def _projections_equal(config, T: int) -> bool:
    flops = tm.forward_flops(config, 1, T)
    return flops["attention"] >= flops["projections"]


def _saved(per_layer: int) -> float:
    return cost.checkpoint_bytes(4e6, [8192] * per_layer, 64)


def _compute_bound_from(G: int, alpha: float) -> float:
    """The shortest S = T whose prefill has an intensity of alpha."""
    return float(next(S for S in range(1, 10**5) if tm.attention_intensity(S, S, G) >= alpha - 1e-9))


def attention_kernels() -> bool:
    """Appendix A: the blockwise softmax and its explicit backward equal the einsums."""
    Q, K, V = (torch.randn(1, 96, heads, 16, dtype=torch.float64) for heads in (4, 2, 2))
    results = []
    for attention in (dot_product_attention, lambda *a: flash_attention(*a, block=32)):
        out, vjp = torch.func.vjp(attention, Q, K, V)
        results.append((out, *vjp(out)))
    return all(torch.allclose(a, b, rtol=1e-11, atol=1e-12) for a, b in zip(*results, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", metavar="FILE", help="also write the figure of Question 4, PNG or SVG")
    args = parser.parse_args()
    print("Counting dots\n" + counting_dots())
    table, same = models()
    print("\nParams and FLOPs\n" + table)
    saved, equal = checkpointing()
    print("\nGradient checkpointing, on a small transformer (D=64, F=256, 8 heads, T=32)\n" + saved)
    contexts = [2**i for i in range(8, 19)]
    costs = [relative_cost(get("llama3-70b"), T) for T in contexts]
    names = ("prefill, causal", "decoding, 240 sequences")
    series = {name: [(T, c[i]) for T, c in zip(contexts, costs, strict=True)] for i, name in enumerate(names)}
    words = "context", "time of dot-product attention / MLP", "LLaMA-3 70B on v5e (Question 4)"
    print("\n" + chart(series, *words, height=12))
    if args.plot:
        print("wrote", save(args.plot, series, *words))
    kernels = attention_kernels()
    print(f"\nAppendix A: blockwise attention and its backward equal the einsums: {'yes' if kernels else 'NO'}\n")
    return report(answers()) or int(not (same and equal and kernels))


if __name__ == "__main__":
    sys.exit(main())
