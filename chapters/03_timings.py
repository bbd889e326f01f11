# %% [markdown]
"""Part 3, the cost of collectives on a torus: bandwidth, latency, several axes, and the questions about time.
https://jax-ml.github.io/scaling-book/sharding

This chapter compares an AllGather on a ring with the book's measurement, shows where hops and where bytes decide the
time of the four collectives, plans one AllGather over two axes, and answers Pop Quiz 2, Questions 2 and 3, and the
table of "What Have We Learned?". How the collectives work is the subject of 03_collectives.py.
"""

# %%
from scaling import cost
from scaling.algebra import reshard
from scaling.book.answers import Answer
from scaling.book.layout import format_number
from scaling.book.page import Page
from scaling.collectives import rings
from scaling.cost.collectives import seconds_on
from scaling.hardware import chip
from scaling.hardware.torus import Torus
from scaling.spec import parse

page = Page(__doc__, plot=True)
V4P, V5E = chip("v4p"), chip("v5e")
OPS, US = ("AllGather", "ReduceScatter", "AllReduce", "AllToAll"), 1e6

# %% [markdown]
# ## How long does an AllGather take?
# Let V be the bytes of the whole array, X the number of chips, and W_ici the bytes/s of a chip's two links on a ring,
# both together. At every hop a chip passes on a shard of V/X to the left and another to the right, 2V/X in all, which
# takes 2V/(X W_ici). After X/2 hops every shard has reached every chip from one side or the other. Both factors of 2
# and both X cancel, so the time is V/W_ici for any X, as in the first column of times. The second one counts that a
# chip already has its own share, so it has the factor (X - 1)/X. So has the third, of a line: there all shards of one
# half must pass the link in the middle, one way, and it takes twice as long.

# %%
V = 64e6
page.title("AllGather of 64 MB over X v5e: us")
rows = []
for X in (2, 4, 8, 16):
    ring, line = (cost.all_gather(V, V5E, X, wrap=wrap) for wrap in (True, False))
    exact = cost.all_gather(V, V5E, X, wrap=True, exact=True)
    rows.append((X, X // 2, f"{US * ring:.1f}", f"{US * exact:.1f}", f"{US * line:.1f}"))
page.table(rows, ["X", "hops both ways", "ring: V/W_ici", "ring, exactly", "line: V (X - 1)/X / link"])

# %% [markdown]
# ## A note on latency
# A hop takes a microsecond however little it carries, and in this time a link of a v5e could carry 45 kB. So a small
# array takes as long as its hops. The book's measurement over a ring of 16 reaches the full bandwidth at about 10 MB,
# later than the model max(latency, V/W) says, because latency and transfer partly add up.

# %%
MEASURED = {8e3: 0.03e10, 131e3: 0.87e10, 524e3: 2.7e10, 4.2e6: 7.2e10, 17e6: 8.65e10, 134e6: 8.95e10, 1e9: 9.0e10}
turn = cost.latency_bound_bytes(V5E, 16)
model = [(V, V / cost.all_gather(V, V5E, 16)) for V in (4e3, turn, 1e9)]
page.chart(
    "bandwidth", {"model: V over max(latency, V/W)": model}, "bytes V", "bytes/s", "AllGather over a ring of 16 v5e",
    points={"measured (read off the book's figure)": list(MEASURED.items())}, height=14,
    marks=[("x", turn, f"8 hops of 1 us: V = {format_number(turn)}"), ("y", V5E.ici_bw, "W_ici = 9e10")],
)  # fmt: skip
ends = (1e3, turn, 1e10)
page.chart(
    "latency",
    {op: [(V, cost.seconds(op, V, V5E, 16)) for V in sorted({*ends, 4 * turn})] for op in OPS if op != "ReduceScatter"},
    "bytes V", "seconds", "Collectives over a ring of 16 v5e (ReduceScatter as AllGather)", height=14,
    marks=[("x", turn, f"V = {format_number(turn)}")],
)  # fmt: skip

# %% [markdown]
# ## Several axes at once
# Over two axes a chip has twice the links, and to gather over one axis and then over the other does not use them all at
# once. A planner that counts bytes cannot see that; one that counts time can. The first plan is the cheapest by bytes,
# one axis after the other. The second gathers over both axes in one step although they split two dims, and is faster.
# The third uses the idle axis Z as well: it first slices the array over Z, which costs nothing, and is the fastest.

# %%
MESH, SIZES = {"X": 4, "Y": 4, "Z": 4}, {"B": 1024, "D": 4096}
by_time = seconds_on(V4P, SIZES, MESH, flops=False)
no_Z = seconds_on(V4P, SIZES, {"X": 4, "Y": 4}, flops=False)
plans = {
    "by bytes, X and Y": reshard("A[B_X, D_Y]", "A[B, D]", SIZES, {"X": 4, "Y": 4}),
    "by time, X and Y": reshard("A[B_X, D_Y]", "A[B, D]", SIZES, {"X": 4, "Y": 4}, cost=no_Z),
    "by time, Z as well": reshard("A[B_X, D_Y]", "A[B, D]", SIZES, MESH, cost=by_time),
    "2.1 with idle Z": reshard("A[B_X, D_Y]", "A[B, D_Y]", SIZES, MESH, cost=by_time),
}
took = {name: US * sum(map(by_time, plan.steps)) for name, plan in plans.items()}
page.title("bf16 A[1024_X, 4096_Y] -> A[1024, 4096] on v4p 4x4x4")
page.table([(name, f"{took[name]:.1f}", str(plan)) for name, plan in plans.items()], ["plan", "us", "steps"])

# %% [markdown]
# ## Pop Quiz 2, and Questions 2 and 3
# These are times on rings and lines of v5e and v4p. Several of them are bound by hops and not by bytes: wherever an
# array is small, more bandwidth would not help.

# %%
quiz = parse("A[E_Y, F]")
large, small = {"E": 2048, "F": 8192}, {"E": 256, "F": 256}
nbytes = {key: quiz.total_nbytes(sizes, {"Y": 4}, "bf16") for key, sizes in (("large", large), ("small", small))}
local = parse("A[B_X, D_Y]").nbytes(SIZES, MESH, "bf16")
ring = {(a, w): b for a, w, _, b in rings.ring_counts(16, 32)}  # scalars over the busiest link, of 16 shards of 32
one_way = V * ring["AllGather", 1] / (16 * 32) / V5E.link_bw
hop = V * ring["ReduceScatter", 2] / (16 * 32) / V5E.link_bw / 8  # of the eight hops both ways
routed = Torus((16,), (True,)).all_to_all_seconds(V, V5E.link_bw)
page.answers([
    Answer("Latency-bound below, a link of a v5e", "45", V5E.link_bw * V5E.hop_latency / 1e3, "kB"),
    Answer("10 MB, where the measured bandwidth peaks: a chip's 16th", "625",
           parse("A[I_X]").nbytes({"I": 10**7}, {"X": 16}, "int8") / 1e3, "kB"),
    Answer("Pop quiz 2: each device holds", "8.4", quiz.nbytes(large, {"Y": 4}, "bf16") / 1e6, "MB"),
    Answer("Pop quiz 2: AllGather_Y([E_Y, F]), were it a ring", "377",
           US * cost.all_gather(nbytes["large"], V5E, 4, wrap=True), "us",
           rounded=(US * 34e6 / 9e10, "34e6 for 33.55e6 bytes")),
    Answer("Pop quiz 2: on the line that 4 chips of a v5e are", "560",
           US * cost.all_gather(nbytes["large"], V5E, 4), "us", "3 hops; 680 measured in the book"),
    Answer("Pop quiz 2: a shard of E = F = 256 over one link", "0.7", US * nbytes["small"] / 4 / V5E.link_bw, "us"),
    Answer("Pop quiz 2: E = F = 256, latency-bound", "3", US * cost.all_gather(nbytes["small"], V5E, 4), "us",
           "3 hops; 8 measured in the book"),
    Answer("2.1 AllGather_X([B_X, D_Y])", "23", US * cost.all_gather(4 * local, V4P, 4), "us"),
    Answer("2.2 AllGather_XY([B_X, D_Y])", "46", took["by time, X and Y"], "us", "as planned"),
    Answer("2.2 one axis after the other", "", took["by bytes, X and Y"], "us",
           "the plan by bytes: 2BD/(4W), then the whole array over one axis"),
    Answer("2.2 latency bound", "4", US * V4P.hop_latency * Torus((4, 4), (True, True)).diameter, "us"),
    Answer("2.3 AllReduce_Z([B_X, D_Y] {U_Z})", "11.6", US * cost.all_reduce(local, V4P, 4), "us"),
    Answer("2 fun fact: 2.1 over X and the idle Z", "11.5", took["2.1 with idle Z"], "us",
           rounded=(23 / 2, "23 for 23.3")),
    Answer("2 fun fact: 2.2 over all three axes", "31", took["by time, Z as well"], "us"),
    Answer("3 AllGather_X([B_X]), B = 128: each device holds", "64",
           parse("A[B_X]").nbytes({"B": 128}, {"X": 4}, "bf16"), "bytes"),
    Answer("3 AllGather_X([B_X]) takes", "2", US * cost.all_gather(2 * 128, V4P, 4), "us", "two hops, both ways"),
])  # fmt: skip

# %% [markdown]
# ## What have we learned?
# The book ends with a table of the four collectives. An AllReduce is a ReduceScatter and an AllGather; on a ring, an
# AllToAll takes a quarter of the time of an AllGather. The times are for 64 MB on rings of 16 v5e, and on a whole pod.
# (There an AllToAll of 64 MB takes 16 us because its farthest message goes 16 hops. A larger one is bound by bytes, and
# 16 times as fast as on one ring.)

# %%
SYNTAX = {
    "AllGather": ("[A_X, B] -> [A, B]", "V / (W_ici axes)"),
    "ReduceScatter": ("[A, B] {U_X} -> [A_X, B]", "as AllGather"),
    "AllReduce": ("[A_X, B] {U_Y} -> [A_X, B]", "2 AllGather"),
    "AllToAll": ("[A, B_X] -> [A_X, B]", "AllGather / 4, a ring"),
}
page.title("The collectives of 64 MB on v5e: one ring of 16, and a whole pod of 16x16")
times = {op: [cost.seconds(op, V, V5E, axes) for axes in (16, (16, 16))] for op in OPS}
page.table([(op, *SYNTAX[op], *(f"{US * t:.1f}" for t in times[op])) for op in OPS],
           ["operation", "syntax", "runtime", "16, us", "16x16, us"])  # fmt: skip
gather, large_A2A = times["AllGather"][0], [cost.all_to_all(100 * V, V5E, axes) for axes in (16, (16, 16))]
page.answers([
    Answer("AllReduce over AllGather", "2", times["AllReduce"][0] / gather, "times"),
    Answer("ReduceScatter over AllGather", "1", times["ReduceScatter"][0] / gather, "times"),
    Answer("AllToAll over AllGather, every message routed", "0.25", routed / gather, "times"),
    Answer("AllToAll by the formula over AllGather", "0.25", times["AllToAll"][0] / gather, "times"),
    Answer("AllGather over two axes over that over one", "0.5", times["AllGather"][1] / gather, "times"),
    Answer("AllToAll over 16x16 over that over 16, if large", "", large_A2A[1] / large_A2A[0], "times",
           "V max(axes)/(4 N W): 16 times the chips"),
    Answer("A hop of a ReduceScatter, over (V/Y) / W_ici", "1", hop / (V / 16 / V5E.ici_bw), "times",
           erratum="V/Y goes each way and W_ici is both ways': 2V/(Y W_ici), as the book has it for an AllGather"),
    Answer("An AllGather one way over V / W_ici", "1", one_way / gather, "times",
           erratum="Takeaways: one way there is half of the bidirectional bandwidth, so 2 (X - 1)/X"),
])  # fmt: skip
page.end()

# %% [markdown]
# ## Three things to try
# 1. Edit: replace `"by time, X and Y": reshard("A[B_X, D_Y]"` by `"by time, X and Y": reshard("A[B_YX, D]"`. Is one
#    AllGather of a dim over two axes any cheaper or dearer than one of two dims?
#    Answer: Neither: 46.6 us in both cases. The bytes of the whole array and the links over which they come are the
#    same.
# 2. Question: how long does AllGather_XYZ of 8.4 MB take on v4p 4x4x4 if X, Y and Z are lines, as in a smaller slice?
#    Evaluate `round(US * cost.all_gather(2 * 1024 * 4096, V4P, (4, 4, 4), wrap=False), 1)`.
#    Answer: 61.2 us, twice the 31 us of rings less what a chip already has: on lines a chip at the end receives
#    everything over one link.
# 3. Flag: run with `--plot times.svg`. How far above the model do the measured points end?
#    Answer: Hardly above: the last measured points lie on W_ici = 9e10. It is in the middle, around 1 MB, that they
#    are below the model.
