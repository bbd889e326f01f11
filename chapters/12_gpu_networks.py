# %% [markdown]
"""Part 12, Networking and "How Do Collectives Work on GPUs?": nodes, a tree of switches, and collectives on them.
https://jax-ml.github.io/scaling-book/gpus#networking

This chapter goes through the tree level by level, times collectives in a node and beyond, compares them with the book's
measurements, counts the bytes that switches move message by message, adds SHARP, and answers Quizzes 2 to 4.
"""

# %% [markdown]
# ## Why another network?
# A TPU is joined to its nearest neighbours, so a pod has thousands of chips with the same links, and a collective uses
# one axis of a torus at a time. GPUs are joined by switches. Inside a node, or a rack, each GPU reaches every other at
# the full rate; beyond it they are joined by a tree whose levels are slower and shared.
#
# So on a torus one asks along which axis to shard, and on a tree how far a collective reaches. Inside a node every
# collective is cheap, AllToAlls above all. One level up a GPU has a ninth of the bandwidth, 50e9 bytes/s in place of
# 450e9, and the layouts of Part 5 are chosen so that little is sent there.

# %%
from scaling.book.answers import Answer
from scaling.book.layout import format_number
from scaling.book.page import Page
from scaling.configs import get
from scaling.cost import gpu
from scaling.hardware import chip
from scaling.show import bars, svg

page = Page(__doc__, plot=True)
H100, GB200, V5P = chip("h100", "part12"), chip("gb200"), chip("v5p")
L70 = get("llama3-70b")
NODE, LEAF, SPINE = H100.levels
TB, GB, US = 1e12, 1e9, 1e6

# %% [markdown]
# ## The tree of switches
# Eight GPUs and their switches are a *node*. 32 nodes under eight *leaf* switches are a *scalable unit* (SU), and four
# SUs under 16 *spine* switches are a SuperPod of 1,024 GPUs. The picture has the three levels. Each row is one box of
# the row above, opened: the spine has four SUs, one of them 32 nodes, and one of these eight GPUs.

# %%
tree = []
for level, child, label in ((SPINE, "SU", "SU"), (LEAF, "node", "n"), (NODE, "GPU", "GPU")):
    joined = f"{level.switches} switches join {level.degree} {child}s, {level.child_bw / GB:,.0f} GB/s from each"
    tree.append((f"{level.name}: {joined}", [bars.Bar(level.name, label, i, i + 1) for i in range(level.degree)]))
page.title("An H100 SuperPod from the top")
page.show(
    "\n".join(f"{title}\n{bars.text(boxes, 64, fill='_')}" for title, boxes in tree),
    lambda: svg.time_lines(tree, unit=None),
)

# %% [markdown]
# A GPU has 450e9 bytes/s into its node, a node has 400e9 into the network, and no level above has less for each node.
# Such a tree is called *fat*: its branches do not get thinner towards the top, so a collective over all of it is as
# fast as one over a few nodes.
#
# The table has for each level what its switches can move, what the cables from below bring to them, and the share of
# these cables of one GPU and of one node ("fat tree"). The last column is the bandwidth of an AllGather, V over its
# time for an array of V bytes, which the slowest level decides. A GB200 NVL72 has 72 GPUs in a node.

# %%
page.title("H100 SuperPod and GB200 NVL72, level by level")
rows = []
for hw in (H100, GB200):
    for row in gpu.levels_table(hw):
        switch = f"{row['switch_bw'] / TB:.1f}" if row["switch_bw"] else "-"
        shares = [f"{row[key] / GB:.0f}" for key in ("gpu_bw", "node_bw")]
        exact = f"{gpu.collective_bw(hw, row['gpus']) / GB:.0f}"
        unit = f"{row['unit_bw'] / TB:.1f}"
        rows.append((hw.name, row["level"], row["gpus"], row["switches"] or "-", switch, unit, *shares, exact))
page.table(rows, ["", "level", "GPUs", "switches", "switches\nTB/s", "cables\nTB/s", "a GPU\nGB/s", "fat tree\nGB/s",
                  "AllGather\nGB/s"])  # fmt: skip

# %% [markdown]
# Nodes have grown. A GB200 node is nine times as large as an H100's and sends nine times as much to other nodes, while
# each of its GPUs sends as much as a B200.

# %%
page.title("Nodes by generation: NVLinks, and bytes/s that leave a GPU and its node")
rows = []
for hw in map(chip, ("a100", "h100", "b200", "gb200")):
    level = hw.levels[0]
    egress = map(format_number, (level.link_bw, level.child_bw, hw.bandwidth("scale-out")))
    rows.append((hw.name, level.degree, level.switches, level.links, *egress))
page.table(rows, ["", "GPUs", "switches", "NVLinks\na GPU", "a link", "a GPU", "the node"])

# %% [markdown]
# ## Collectives of 64 MB on H100s
# In a node of N GPUs, each has V/N of the V bytes and sends it to N - 1 others at W = 450e9 bytes/s, so an AllGather
# takes V (N - 1)/(N W). Beyond the node the slowest level decides. An AllReduce takes twice as long. With SHARP the
# switches add, so that each GPU sends its part once and receives the sum, in about half the time.
#
# Compare the AllToAll on 8 and on 16 GPUs. An AllGather can be done level by level, so that one copy of a shard goes up
# for a whole node. In an AllToAll each byte is for one GPU only, and every byte for another node leaves at 50e9 bytes/s
# per GPU. The last column is a ragged AllToAll, in which each token goes to k = 2 of the GPUs of a node, or of the
# nodes if there are several, as with experts.

# %%
V = 64e6
page.title("Collectives of 64 MB: us")
rows = []
for n in (2, 8, 16, 64, 256, 1024):
    calls = (gpu.all_gather(V, H100, n), gpu.all_reduce(V, H100, n), gpu.all_reduce(V, H100, n, sharp=True))
    calls += (gpu.all_to_all(V, H100, n), gpu.all_to_all(V, H100, n, k=2))
    rows.append((n, *(format_number(US * t, 3) for t in calls)))
page.table(rows, ["GPUs", "AllGather", "AllReduce", "with SHARP", "AllToAll", "ragged, k = 2"])

# %% [markdown]
# ## How good is the model?
# The table has an AllReduce in a node of 8 H100s without SHARP, read off the book's figure. Its *bus bandwidth*, what
# each link carries, is 2V (N - 1)/N over the time; for an AllGather (Appendix B) it is V (N - 1)/N over the time. The
# model has 450e9 for any size. The chart shows that a node comes near it for very large arrays only, and that one axis
# of a v5p 4x4x4 comes near its own bandwidth at smaller sizes. So on GPUs small collectives cost more than the formulas
# say. The mark is a shard of LLaMA-3 70B's MLP, 58 MB, which reaches between 127 and 292 of 450 GB/s; the book says
# 150, a third.
#
# Benchmarks such as nccl-tests take the same formula with SHARP, too. There a GPU sends V, not 2V (N - 1)/N, so the
# reported number can be above what a link carries: 480 GB/s on links of 450 is no error of measurement.

# %%
BUS = {4.2e6: 0.045e12, 17e6: 0.127e12, 134e6: 0.292e12, 268e6: 0.323e12, 1.07e9: 0.352e12, 8.6e9: 0.367e12}
GATHER = {4.2e6: 0.025e12, 17e6: 0.081e12, 134e6: 0.234e12, 268e6: 0.28e12, 1.07e9: 0.331e12, 4.3e9: 0.35e12}
V5P_BUS = {4.2e6: 0.0235e12, 17e6: 0.066e12, 134e6: 0.0765e12, 268e6: 0.079e12, 1.07e9: 0.0775e12, 8.6e9: 0.0815e12}
page.title("AllReduce over 8 H100s, and the bus of an AllGather, as the book measured them")
rows = []
for nbytes, bus in BUS.items():
    seconds, model = 2 * nbytes * 7 / 8 / bus, gpu.all_reduce(nbytes, H100, 8)
    times = (f"{US * seconds:,.0f}", f"{US * model:,.0f}", f"{bus / NODE.child_bw:.0%}")
    gathered = f"{GATHER[nbytes] / GB:.0f}" if nbytes in GATHER else "-"
    rows.append((format_number(nbytes), f"{bus / GB:.0f}", *times, gathered))
page.table(rows, ["bytes", "bus GB/s", "measured us", "model us", "of 450 GB/s", "AllGather's"])
ends = (min(BUS), max(BUS))
page.chart(
    "bus", {
        "model, H100: 450e9": [(x, NODE.child_bw) for x in ends],
        "model, v5p: 9e10": [(x, V5P.link_bw) for x in ends],
    },
    "bytes", "bus bytes/s", "What a link carries, by model and as measured", height=12,
    points={"AllReduce, 8 H100s": list(BUS.items()), "AllReduce, v5p ring of 4": list(V5P_BUS.items()),
            "AllGather, 8 H100s": list(GATHER.items())},
    marks=[("x", 2 * 8192 * 3584, "MLP shard: 58 MB")],
)  # fmt: skip

# %% [markdown]
# ## Pop Quiz 3: an inner axis that spans more of a unit
# If an array is also split over an inner axis Y, does gathering it over X become cheaper? Each GPU then gathers only
# V/Y. But the GPUs of a node share its 400e9 bytes/s, and the node as a whole still needs all of V. So up to Y = 8, a
# node, nothing is gained where it matters. Beyond 8, Y spans several nodes, each of which needs its part only.
#
# The quiz has an AllGather over X of bf16[8192_X, 32768_Y] on 256 GPUs.


# %%
def outer_gather(Y: int, exact: bool = False) -> float:
    """Return the seconds of AllGather_X(bf16[8192_X, 32768_Y]) over 256 GPUs, with Y the inner axis."""
    return gpu.all_gather(2 * 8192 * 32768, H100, 256 // Y, inner=Y, exact=exact)


page.title("AllGather_X(bf16[8192_X, 32768_Y]) over an SU: ms")
rows = [(Y, *(f"{1e3 * outer_gather(Y, exact):.3f}" for exact in (False, True))) for Y in (1, 2, 4, 8, 16, 32, 64, 128)]
page.table(rows, ["Y", "V / W", "exact"])
page.say("exact: V times the greatest of (D - 1)/(D max(Y, S) W) over the levels, D children of S GPUs. W is a GPU's "
         "share of a level's links; in the book's formula without Y it is a child's.")  # fmt: skip

# %% [markdown]
# ## Quiz 4: the bytes that switches move, message by message
# The formulas of Quiz 4 are confirmed by counting, for M nodes of N GPUs. Every copy of every shard is counted at the
# switch of one node and at the one above (top), and so are SHARP's four phases. For an AllGather of B bytes, a node's
# switch receives each shard once, B in all, but has to send BN to its N GPUs. That is why the links into the GPUs bind
# inside a node.


# %%
def gather_ledger(nodes: int, gpus: int) -> dict[str, float]:
    """Return bytes in and out of one node's switch and of the one above, for an AllGather of one byte over all GPUs."""
    moved, shard = dict.fromkeys(("node in", "node out", "top in", "top out"), 0.0), 1 / (nodes * gpus)
    for source in range(nodes * gpus):
        home = source // gpus
        moved["top in"] += shard  # one copy goes up, and from there one to each other node
        moved["top out"] += shard * (nodes - 1)
        moved["node in"] += shard  # the ledger of node 0's switch: in from its GPU or from above
        moved["node out"] += shard * ((gpus - 1) + 1 if home == 0 else gpus)  # to its GPUs, and its own also up
    return moved


def sharp_ledger(gpus: int) -> tuple[float, float]:
    """Return bytes in and out of a node's switch, for an AllReduce of one byte with SHARP, by its four phases."""
    shard, into, out = 1 / gpus, 0.0, 0.0
    for _ in range(gpus):  # each owns one shard of the sum
        into += shard * (gpus - 1)  # the others' terms go up
        out += shard  # the switch adds them up and sends the owner their sum
        into += shard  # the owner adds its own term, and sends it back
        out += shard * (gpus - 1)  # multicast to the others
    return into, out


page.title("Quizzes 4.1 and 4.2: bytes that switches move, M nodes of N GPUs, B = 1")
rows = []
for M, N in ((4, 8), (2, 8), (3, 5)):
    formulas = {"node in": ("B", 1), "node out": ("BN", N), "top in": ("B", 1), "top out": ("B(M - 1)", M - 1)}
    rows += [(f"{M} x {N}: {key}", *formulas[key], found) for key, found in gather_ledger(M, N).items()]
into, out = sharp_ledger(8)
rows += [("SHARP AllReduce, 8: in", "BN", 8, into), ("SHARP AllReduce, 8: out", "BN", 8, out)]
page.same(rows, ["AllGather, M x N", "formula", "value", "counted"])

# %% [markdown]
# ## Quizzes 2 and 3: nodes, and beyond
# All answers follow from the tree's levels: what a unit's cables and switches carry, and how many switches larger
# clusters need. A row begins with the number of its question. *Bisection* is the bandwidth between two halves of the
# GPUs, both directions together; *egress* is what leaves a unit, one way.

# %%
node, leaf, spine = gpu.levels_table(H100)
units = spine["gpus"] // leaf["gpus"], leaf["gpus"] // node["gpus"]  # SUs, and nodes in each
switches = units[0] * units[1] * node["switches"] + units[0] * leaf["switches"] + spine["switches"]
gathered, ports, cable = 2 * 4096 * 65536, LEAF.ports, LEAF.link_bw


def enough(gpus: int, ports_up: float) -> float:
    """Return the number of switches, of `ports_up` ports each, that carry the messages of so many GPUs' nodes."""
    return gpus / 8 * leaf["node_bw"] / (ports_up * cable)


page.answers([
    Answer("2.1 switches of a node", "6.4", node["switch_bw"] / TB, "TB/s"),
    Answer("2.1 so a node's GPUs get", "3.6", min(node["unit_bw"], node["switch_bw"]) / TB, "TB/s"),
    Answer("2.2 bisection of a node", "3.6", gpu.bisection_bw(H100, 8) / TB, "TB/s", "both directions"),
    Answer("2.3 AllGather of bf16[4096, 65536] in a node", "1.04", 1e3 * gpu.all_gather(gathered, H100, 8), "ms"),
    Answer("2.3 AllGather of bf16[4096, 65536], approximately", "1.19",
           1e3 * gpu.all_gather(gathered, H100, 8, exact=False), "ms"),
    Answer("Switches of a SuperPod of 1024", "560", switches),
    Answer("Egress of a v5p, all axes", "540", V5P.bandwidth("ici", 3) / GB, "GB/s"),
    Answer("Egress of a GB200 node", "3.6", GB200.bandwidth("scale-out") / TB, "TB/s"),
    Answer("Egress of a GB200 node over an H100 node's", "9",
           GB200.bandwidth("scale-out") / H100.bandwidth("scale-out"), "times"),
    Answer("3.1 cables of a node", "400", leaf["node_bw"] / GB, "GB/s"),
    Answer("3.1 leaf switches, half of their ports, for each node", "400",
           leaf["switch_bw"] / 2 / units[1] / GB, "GB/s"),
    Answer("3.1 32 ports of a leaf switch, '32 * 400 / 8'", "12.8", LEAF.ports / 2 * cable / TB, "TB/s",
           erratum="those of all eight switches of an SU; one has 1.6"),
    Answer("3.1 cables of an SU to the spine", "12.8", SPINE.child_bw / TB, "TB/s"),
    Answer("3.1 spine switches", "51.2", spine["switch_bw"] / TB, "TB/s", "400 GB/s for each of 128 nodes"),
    Answer("3.2 spine switches for 2048 GPUs", "32", enough(2048, ports)),
    Answer("3.2 cables of a leaf switch to each of the 32", "1", ports / 2 / enough(2048, ports)),
    Answer("3.2 spine switches for 4096 GPUs, half of their ports up", "128", enough(4096, ports / 2)),
    Answer("3.2 core switches for 4096 GPUs", "64", enough(4096, ports)),
])  # fmt: skip

# %% [markdown]
# ## Collectives: the text, and Quiz 4
# The times are for a node and beyond it: approximately, as the book's V/W, and precisely, with its factor (N - 1)/N.

# %%
pop, W = 2 * 1024 * 16384, NODE.child_bw
slow, fast = (gpu.all_reduce(1, H100, 8, sharp=sharp) for sharp in (False, True))
two, one = (gpu.all_to_all(1, H100, n) for n in (16, 8))
shares = {z: [gpu.nonzero_share(z, 4, random) * (z - 1) / z for random in (True, False)] for z in (4, 16, 64)}
spine_only = gpu.all_gather(1, H100, 4, inner=256)  # four SUs; each of their GPUs has its own part
mlp, sharp = 2 * L70.D * L70.F / 8, 2.71e11 / 2.1e11  # the latter as measured in the figure
page.answers([
    Answer("Pop quiz 1: AllGather of bf16[1024, 16384]", "75", US * gpu.all_gather(pop, H100, 8, exact=False), "us"),
    Answer("Pop quiz 1: the same AllGather, precisely", "65", US * gpu.all_gather(pop, H100, 8), "us"),
    Answer("AllToAll in a node: TPU's B/4W over it", "2", 0.25 / W / gpu.all_to_all(1, H100, 8, exact=False), "times"),
    Answer("Pop quiz 2: AllToAll with 4 of 8 entries", "0.5", gpu.all_to_all(1, H100, 8, k=4) / one, "times"),
    Answer("LLaMA-3 70B's MLP, 8-way: a shard", "58", mlp / 1e6, "MB", "an AllReduce of it reaches 150 of 450 GB/s"),
    Answer("Bus bandwidth at 8.6 GB of 450 GB/s ('close to 370')", "370", max(BUS.values()) / GB, "GB/s", "measured"),
    Answer("'T_AR or RS', the general rule: an AllReduce over a ReduceScatter", "1",
           gpu.all_reduce(1, H100, 1024) / gpu.reduce_scatter(1, H100, 1024), "times", erratum=
           "it is the time of an AllGather or a ReduceScatter"),
    Answer("App. B: 'min(K / Z)' of K = 8 experts on Z = 4 devices", "2", gpu.nonzero_share(4, 8), "", erratum=
           "min(K/Z, 1): no more than all of them"),
])  # fmt: skip

# %% [markdown]
# The last answers are the gain of SHARP, and the bandwidth of each level.

# %%
page.answers([
    Answer("SHARP's gain in a node, in theory", "75", 100 * (slow / fast - 1), "%"),
    Answer("SHARP's gain as measured, 2.1e11 to 2.71e11 bytes/s", "30", 100 * (sharp - 1), "%",
           "read off the figure"),
    Answer("SHARP: the bus of 8.6 GB with this gain", "480", max(BUS.values()) / GB * sharp, "GB/s"),
    Answer("AllGather bandwidth of a node", "514", gpu.collective_bw(H100, 8) / GB, "GB/s"),
    Answer("AllGather bandwidth of an SU", "413", gpu.collective_bw(H100, 256) / GB, "GB/s"),
    Answer("AllGather bandwidth of the spine's own ring", "17.1", 1 / spine_only / TB, "TB/s"),
    Answer("AllGather bandwidth of 1024 GPUs", "413", gpu.collective_bw(H100, 1024) / GB, "GB/s"),
    Answer("AllToAll over 2 nodes against 1: more than", "4", two / one, "times",
           erratum="of the approximations 1/2 and 1/8; exactly 1/4 / 400e9 over 7/64 / 450e9"),
    Answer("Collective bandwidth of a node: bisection x 2/N", "450", 2 * gpu.bisection_bw(H100, 8) / 8 / GB, "GB/s",
           erratum="what the formula gives; 3.6e12 counts both directions already, and bisection/N is 450"),
    Answer("Pop quiz 3: Y <= 8", "1.34", 1e3 * outer_gather(8), "ms", f"precisely {1e3 * outer_gather(8, True):.2f}"),
    Answer("Pop quiz 3: Y = 16", "0.67", 1e3 * outer_gather(16), "ms"),
    Answer("Pop quiz 3: Y = 128", "0.084", 1e3 * outer_gather(128), "ms"),
    Answer("4.3 SHARP AllReduce in a node, inner Y = 2: over B/W", "0.5",
           gpu.all_reduce(1, H100, 4, 2, sharp=True) * W, "", "1/Y"),
    Answer("4.4 SHARP AllReduce at the spine, Y = 256", "12.8",
           1 / gpu.all_reduce(1, H100, 4, 256, sharp=True) / TB, "TB/s"),
    Answer("4.5 AllGather over 2 nodes", "514", gpu.collective_bw(H100, 16) / GB, "GB/s",
           "the node binds; its leaf has 800"),
    *(Answer(f"App. B: ragged AllToAll, k = 4 of {z}", book, share[0], "", f"approximately {share[1]:.3g}")
      for (z, share), book in zip(shares.items(), ("0.513", "0.213", "0.060"), strict=True)),
])  # fmt: skip
page.end()

# %% [markdown]
# ## Three things to try
# 1. Edit: replace `moved["top out"] += shard * (nodes - 1)` by `moved["top out"] += shard * nodes`. If the top switch
#    also sent every shard back to where it came from, which of the formulas would not hold?
#    Answer: "Top out" is B(M - 1), since a shard does not return to its own node. The three rows of it say NO: 4, 2 and
#    3 are counted in place of 3, 1 and 2.
# 2. Question: how long does an AllReduce of 64 MB over 1024 GPUs take if its array is split over 8 GPUs inside?
#    Evaluate `US * gpu.all_reduce(64e6, H100, 128, inner=8)`.
#    Answer: 310 us, as without the split: each of a node's 8 GPUs sends an eighth, and together they have the same 400
#    GB/s.
# 3. Flag: run with `--plot bus.svg`. At which size does a node reach half of 450 GB/s?
#    Answer: Between 17 MB, where it reaches 127 GB/s, and 134 MB, where it reaches 292.
