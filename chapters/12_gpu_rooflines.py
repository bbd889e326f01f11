# %% [markdown]
"""Part 12, Rooflines for LLM Scaling on GPUs: the limits of data, tensor, expert and pipeline parallelism.
https://jax-ml.github.io/scaling-book/gpus#rooflines-for-llm-scaling-on-gpus

This chapter compares H100, B200 and GB200, checks the layouts of DeepSeek-V3 and LLaMA-3, and answers Quiz 5 with its
question of a better layout, and Appendix A. The collectives behind it are in 12_gpu_networks.py.
"""

# %%
import math

from scaling import cost
from scaling.book.answers import Answer
from scaling.book.page import Page
from scaling.configs import get
from scaling.cost import gpu
from scaling.cost.transformer import rule_of_thumb
from scaling.hardware import chip

page = Page(__doc__, plot=True)
H100, B200, GB200, H800 = chip("h100", "part12"), chip("b200", "part12"), chip("gb200"), chip("h800")
V5P = chip("v5p")
INSIDE, ACROSS = H100.intensity("node"), H100.intensity("scale-out")  # 2200 and 2475 FLOPs a byte
C, F70, DAY = H100.flops(), get("llama3-70b").F, 86400


def yes(value: bool) -> str:
    return "yes" if value else "no"


# %% [markdown]
# ## The limits of each strategy
# An H100 has links of 450e9 bytes/s to the others of its node, and the 8 GPUs of a node together have cables of 400e9
# bytes/s out of it. An AllReduce over many nodes first reduces within each node, after which each GPU has an eighth of
# the sum to send over the cables. So what counts there is the 400e9 of the whole node (12_gpu_networks.py). With one or
# the other as W, the limits are Part 5's. A layer is an MLP with weights [D, F], and B is the tokens of a step on N
# GPUs of C FLOPs/s.
#
# - *DP and ZeRO.* The backward pass takes 8BDF/(N C) seconds, and sends gradients of 8DF bytes in 8DF/W. So it is
#   compute-bound from B/N = C/W tokens a GPU on. If DP runs in and between nodes, the slower links decide. (Switches
#   that add up gradients, SHARP, would halve these numbers; by the book they gain about 30% in practice.) Over two
#   nodes, each node sends only half of the gradients over the cables; on H100s the links in the node then decide, with
#   7/8 of their 2200 tokens. A replica that spans 8 nodes, by tensor, expert or pipeline parallelism, sends its
#   gradients over the cables of all 8. With E experts of which a token takes k, DP needs E/k times the tokens: all
#   experts' gradients are sent, and only k do FLOPs for a token.
# - *TP* moves activations of 4BD bytes in the forward pass, however many ways there are, while the FLOPs of a GPU
#   become fewer with each. So it is compute-bound up to F W/C ways. In practice that is a node.
# - *EP* moves each token to its k experts and back by AllToAlls. What limits it is the width F of an expert: the wider
#   the expert, the more FLOPs are done for each token that is sent. The table has k = 8.
# - *PP* sends so little that it has no such limit. One pays with a bubble, and ZeRO-3 does not go with it, since
#   weights would be gathered for each microbatch. A gradient is complete only after the last microbatch, so there is
#   little left to hide its AllReduce.
#
# Between nodes, the B200 has more FLOPs with the same network, so it needs more tokens. The GB200 has nodes of 72 GPUs
# with nine times the bandwidth out of them. DP in and between such nodes is bound by the links in the node: it needs
# 71/72 of the 2,556 tokens in the table's second row, because a GPU already has one of the 72 parts itself.

# %%
ROOFLINES = {
    "GPUs of a node": lambda hw: f"{hw.node_gpus}",
    "DP, ZeRO in a node: tokens a GPU": lambda hw: f"{hw.intensity('node'):,.0f}",
    "... between nodes": lambda hw: f"{hw.intensity('scale-out'):,.0f}",
    "... in and between many nodes": lambda hw: f"{gpu.data_threshold(hw):,.0f}",
    "... over 2 nodes": lambda hw: f"{gpu.data_threshold(hw, 2):,.0f}",
    "... each replica on 8 nodes": lambda hw: f"{hw.intensity('scale-out') / 8:,.0f}",
    "TP in a node: ways": lambda hw: f"{F70 / hw.intensity('node'):.1f}",
    "TP over two nodes: ways": lambda hw: f"{gpu.tensor_limit_across(F70, hw):.1f}",
    "EP on 2 nodes: F above": lambda hw: f"{gpu.expert_min_width(2 * hw.node_gpus, 8, hw):,.0f}",
    "EP on 64 nodes: F above": lambda hw: f"{gpu.expert_min_width(64 * hw.node_gpus, 8, hw):,.0f}",
}
page.title(f"Rooflines, bf16, F = {F70:,}")
page.table([(name, *map(roof, (H100, B200, GB200))) for name, roof in ROOFLINES.items()], ["", "h100", "b200", "gb200"])

# %% [markdown]
# The picture shows the same. Where a line is above 1, the matmuls take longer than the AllReduce of the gradients.

# %%
per_gpu = (100, 10_000)
page.chart(
    "dp", {
        f"{hw.name}, {where}": [(b, b / hw.intensity(link)) for b in per_gpu]
        for hw in (H100, B200) for where, link in (("in a node", "node"), ("across nodes", "scale-out"))
    }, "tokens per GPU", "FLOPs time / comms time", "Data parallelism and ZeRO: compute-bound above 1", height=12,
    marks=[("y", 1, "ratio 1"), ("x", ACROSS, f"H100 across: {ACROSS:.0f}"),
           ("x", B200.intensity("scale-out"), f"B200 across: {B200.intensity('scale-out'):.0f}")],
)  # fmt: skip

# %% [markdown]
# ## The numbers of the text
# alpha is C/W between nodes, 2475 FLOPs a byte on H100s, E experts are spread over Z GPUs, and a token takes k of them.
# "rounding" means that the book rounded on the way; for an "erratum", the line below the row says what is wrong.

# %%
stages = 64
hops = cost.pipeline_comms(1, 1, 2, stages, 2 * stages)  # in units of 2BD/W, twice as many microbatches as stages
v3, deepseek_batch = get("deepseek-v3"), 15_360 * 4096  # sequences of 4096 tokens
page.answers([
    Answer("DP in a node of H100s: tokens per GPU", "2200", INSIDE, "tokens"),
    Answer("DP beyond the node", "2475", gpu.data_threshold(H100), "tokens"),
    Answer("DP of TPU v5p on three axes", "850", cost.data_threshold(V5P.flops(), V5P.bandwidth("ici", 3)), "tokens"),
    Answer("DP of LLaMA-3's 16,000 H100s: batch", "40e6", 16000 * ACROSS, "tokens"),
    Answer("DP in a node of H800s: tokens per GPU", "3300", H800.intensity("node"), "tokens"),
    Answer("DP of DeepSeek-V3's 2048 H800s: batch", "6.7e6", 2048 * H800.intensity("node"), "tokens"),
    Answer("DeepSeek-V3's own batch ('they used 4M')", "4e6", deepseek_batch, "tokens",
           erratum="15,360 sequences of 4096, as the Examples say"),
    Answer("MoE, E = 128, k = 4: DP across nodes", "79,200", cost.expert_inflation(128, 4) * ACROSS, "tokens"),
    Answer("DP over the 16 GPUs of 2 nodes", "1237", gpu.data_threshold(H100, 2), "tokens",
           erratum=f"{ACROSS / 2:.0f} is the network's; the 8 GPUs of a node need 7/8 of 2200 (Quiz "
           "4.5 finds the node slower, too), unless TP or EP fills it"),
    Answer("DP on an H100 or B200 ('about 2500')", "2500", gpu.data_threshold(B200), "tokens",
           erratum="on a B200 it is 5625 (Quiz 5)"),
    Answer("TP of F = 28000, across nodes", "11", cost.tensor_limit(28000, C, H100.bandwidth("scale-out")), "ways"),
    Answer("TP over two nodes, F = 28000", "19", gpu.tensor_limit_across(28000, H100), "ways"),
    Answer("EP over many nodes, Z >> k: F above alpha times", "8", gpu.expert_min_width(2**13, 1, H100) / ACROSS, ""),
    Answer("EP over 2 nodes, k = 8: F above alpha (Z - 8)/k", "2475", gpu.expert_min_width(16, 8, H100), ""),
    Answer("PP: the hops' time over 2BD/W", "1.5", hops, "", f"{stages} stages, {2 * stages} microbatches"),
])  # fmt: skip

# %% [markdown]
# ## Examples
# Two published runs chose the following layouts. Both have fewer tokens a GPU than plain DP needs: DeepSeek-V3 has
# 30,720, where 2475 E/k are 79,200, and LLaMA-3 has 977 of 2475. Yet both are compute-bound, because a replica over
# many nodes uses all their cables. A replica of DeepSeek-V3 is EP 64 x PP 16, on 128 nodes, and there are two. One of
# LLaMA-3 405B is TP 8 x PP 16, on 16 nodes, and there are 128. The rows "ours" are the tokens per GPU that DP then
# needs; both runs have more.

# %%
deepseek, llama = {"EP": 64, "PP": 16, "DP": 2}, {"TP": 8, "PP": 16, "DP": 128}
# E/k times C/W_node, over the nodes that a replica spans, times (X - 1)/X of two replicas
v3_threshold = cost.expert_inflation(v3.E, v3.k) * gpu.data_threshold(H800, 2, model_nodes=64 * 16 // 8)
llama_threshold = gpu.data_threshold(H100, model_nodes=8 * 16 // 8)
page.answers([
    Answer("DeepSeek-V3: tokens per GPU ('30k')", "30e3", deepseek_batch / math.prod(deepseek.values()), "tokens"),
    Answer("DeepSeek-V3: GPUs of EP x PP x DP", "2048", math.prod(deepseek.values()), "GPUs"),
    Answer("DeepSeek-V3: nodes that 64 experts' shards span", "8", deepseek["EP"] / H800.node_gpus, "nodes"),
    Answer("DeepSeek-V3: model parallelism in all", "1024", deepseek["EP"] * deepseek["PP"], "ways"),
    Answer("DeepSeek-V3: bandwidth of DP 2 over that of many", "2",
           gpu.data_threshold(H800, model_nodes=128) / gpu.data_threshold(H800, 2, 128), "times", "X/(X - 1)"),
    Answer("DeepSeek-V3: DP is compute-bound from", "", v3_threshold, "tokens",
           f"E/k = {v3.E // v3.k} times 2475/128/2, far below 30,720"),
    Answer("LLaMA-3: tokens per GPU ('about 1k')", "1e3", 16e6 / math.prod(llama.values()), "tokens"),
    Answer("LLaMA-3: GPUs of TP x PP x DP ('16k')", "16e3", math.prod(llama.values()), "GPUs"),
    Answer("LLaMA-3: PP reduces the cost of DP by", "16", gpu.data_threshold(H100) / llama_threshold, "times"),
    Answer("LLaMA-3: DP is compute-bound from", "", llama_threshold, "tokens", "2475 / 16"),
])  # fmt: skip

# %% [markdown]
# ## Quiz 5: B200, and LLaMA-3 70B on 4096 H100
# Question 2 takes three steps. With 8-way TP and DP alone, params and optimizer do not fit a GPU. With ZeRO-3 they fit,
# but a GPU has too few tokens to be compute-bound. With 8-way pipelining a replica spans 8 nodes, and then the tokens
# are enough.

# %%
W_node = H100.bandwidth("node")
params, B, tokens = 70e9, 4e6, 15e12
held = cost.training_memory(params, Y=8, grad_bytes=0)
seconds = cost.seconds_at(6 * params * tokens, 4096, C, 0.45)
shape, links = cost.LayerShape(B, 8192, F70), cost.Links(C, X=H100.bandwidth("scale-out"))
dp, fsdp = (cost.layer(s, shape, links, X=8, direction=d) for s, d in (("dp", "backward"), ("fsdp", "forward")))
own, piped = B / 4096, gpu.data_threshold(H100, model_nodes=8)
page.answers([
    Answer("5.1 B200: TP and DP in a node", "2500", B200.intensity("node"), "tokens"),
    Answer("5.1 B200: DP beyond", "5625", gpu.data_threshold(B200), "tokens"),
    Answer("5.1 GB200: DP beyond, at a B200's 2250e12 FLOPs/s", "",
           B200.flops() / GB200.bandwidth("scale-out"), "tokens",
           f"the book only says that it changes; {gpu.data_threshold(GB200):.0f} with the table's 2300e12"),
    Answer("App. A: an H100's DP roofline over a GB200's", "4",
           ACROSS * GB200.bandwidth("scale-out") / B200.flops(), "times"),
    Answer("5.2.1 GPUs for 70B and Adam", "9", math.ceil(params / cost.largest_model(H100.need("hbm_bytes"))), "GPUs"),
    Answer("5.2.2 FLOPs of 15T tokens", "6.3e24", rule_of_thumb(get("llama3-70b"), tokens), "FLOPs"),
    Answer("5.2.2 seconds on 4096 at 45% MFU", "3.5e6", seconds, "s"),
    Answer("5.2.2 days", "40", seconds / DAY, "days"),
    Answer("5.2.3 most TP in a node", "14.372", cost.tensor_limit(F70, C, W_node), "ways",
           erratum="28672 / 1995; 990e12/450e9 is 2200"),
    Answer("5.2.3 8-way TP and DP: a GPU holds", "87.5", held.total / 1e9, "GB"),
    Answer("5.2.3 8-way TP and DP fits", "no", yes(held.total <= H100.hbm_bytes)),
    Answer("5.2.3 tokens per GPU", "976", own, "tokens"),
    Answer("5.2.3 8-way TP and ZeRO-3 is compute-bound", "no", yes(own > ACROSS)),
    Answer("5.2.3 ZeRO-3's threshold over DP's", "2", (fsdp.comms / fsdp.math) / (dp.comms / dp.math), "times",
           erratum="the same: 4DF to 4BDF forward, 8DF to 8BDF backward"),
    Answer("5.2.3 threshold with 8-way PP", "309", piped, "tokens"),
    Answer("5.2.3 with 8-way PP it is compute-bound", "yes", yes(own > piped)),
])  # fmt: skip

# %% [markdown]
# ## Quiz 5.3: Megatron-LM's layouts, and whether there is a better one
# TP stays in a node, so DP gains only from the nodes that a replica's stages span: it needs 2475 tokens a GPU, divided
# by the number of these nodes. The last columns have the fewest nodes for which the run is compute-bound and a quarter
# of the memory stays free. Fewer stages mean a smaller bubble.

# %%
MEGATRON = {"16B": (4, 1, 192, 192), "70B": (8, 2, 768, 384), "314B": (8, 8, 3072, 1536)}  # TP, PP, GPUs, sequences
found, rows = {}, []
for name, (tp, pp, gpus, sequences) in MEGATRON.items():
    nodes = max(1, tp * pp // H100.node_gpus)
    per_gpu, least = sequences * 4096 / gpus, gpu.data_threshold(H100, model_nodes=nodes)
    for enough in (1, 2, 4, 8):
        state = cost.training_memory(float(name[:-1]) * 1e9, X=gpus // (8 * enough), Y=8, Z=enough, zero=1).total
        if gpu.data_threshold(H100, model_nodes=enough) < per_gpu and state < 0.75 * H100.hbm_bytes:
            break
    found[name] = (per_gpu, least, enough)
    rows.append((name, f"TP {tp} x PP {pp}", per_gpu, nodes, f"{least:,.0f}", enough, f"{state / 1e9:.1f}"))
page.title("Megatron-LM on H100s, 4096 tokens a sequence")
heads = ["model", "layout", "tokens\na GPU", "nodes", "compute-\nbound from", "nodes\nenough", "ZeRO-1\nGB a GPU"]
page.table(rows, heads)
page.answers([
    Answer("5.3 16B: tokens per GPU", "4096", found["16B"][0], "tokens"),
    Answer("5.3 70B: tokens per GPU", "2048", found["70B"][0], "tokens"),
    Answer("5.3 314B: tokens per GPU", "2048", found["314B"][0], "tokens"),
    Answer("5.3 16B: compute-bound from", "2,472", found["16B"][1], "tokens",
           rounded=(found["16B"][1] * 989 / 990, "the 989e12 FLOPs/s of Part 1's H100")),
    Answer("5.3 70B: compute-bound from ('roughly 1k')", "1e3", found["70B"][1], "tokens",
           "two nodes a replica: 2475/2", hedged="roughly 1k"),
    Answer("5.3 314B: compute-bound from", "300", found["314B"][1], "tokens", "eight nodes a replica: 2475/8"),
    Answer("5.3 all three are compute-bound", "yes", yes(all(b > least for b, least, _ in found.values()))),
    Answer("5.3 a better layout of 314B: nodes a replica", "", found["314B"][2], "nodes",
           "TP 8 x PP 4 with ZeRO-1: half of the stages, so a smaller bubble"),
    Answer("5.3 a better layout of 70B: TP over two nodes, up to", "", gpu.tensor_limit_across(F70, H100), "ways",
           "TP 16 without stages spans two nodes as well, and has no bubble"),
    Answer("5.3 a better layout of 16B: bytes a GPU with ZeRO-3 alone", "", cost.training_memory(
        16e9, X=192, zero=3).total / 1e9, "GB", "4096 > 2475: no TP is needed at all"),
])  # fmt: skip
page.end()

# %% [markdown]
# ## Three things to try
# 1. Edit: replace `chip("h800")` by `chip("h800", "nvidia")`. By NVIDIA's data sheet an H800 has 200e9 bytes/s one way:
#    how many tokens does its DP need in a node?
#    Answer: 4,950, which is 990e12 / 200e9. The book's 3,300 takes 300 GB/s, so the row DIFFERS, and so does the batch
#    of 2048 H800s, with 10.1M tokens in place of 6.8M.
# 2. Question: how wide must an expert be for EP over 4 nodes of H100s with k = 8? Evaluate
#    `gpu.expert_min_width(32, 8, H100)`.
#    Answer: 7,425, which is 2,475 (Z - 8) / k: of Z = 32 GPUs, 24 are outside of a token's node.
# 3. Flag: run with `--plot dp.svg`. How far apart are the lines of a B200 in a node and across nodes?
#    Answer: A factor of 2.25: in a node it needs 2,500 tokens a GPU, and across nodes 5,625. On two log axes the lines
#    are parallel.
