# %% [markdown]
"""Part 3, planning by time: the fastest sharding of a product, a whole algorithm from one line, Questions 5 to 7.
https://jax-ml.github.io/scaling-book/sharding#some-problems-to-work

A plan is data, so its steps can be timed on a chip's torus without running any of them. The book's FSDP + tensor
parallelism is derived from its types, run on ranks and compared with one device, and counted on 8,192 abstract chips.
"""

# %% [markdown]
# ## Why plan before running?
# A product of sharded matrices can be computed in several ways, and which is best depends on the sizes, the mesh and
# the chip. Trying them all needs the chips. But each way is a list of typed steps, and types and sizes give the bytes
# and FLOPs of each, so a plan can be timed without running it. What this leaves out are overlaps and the losses of real
# machines: it ranks plans, and one measures the best ones.

# %%
from bisect import bisect_left

import torch

from scaling.algebra import derive, matmul, matmul_via, reshard
from scaling.book.answers import Answer
from scaling.book.arrays import drawn, empty
from scaling.book.listing import difference
from scaling.book.page import Page
from scaling.collectives import run_program, shard, unshard
from scaling.cost.collectives import seconds_on
from scaling.hardware import chip
from scaling.mesh import AbstractMesh
from scaling.spec import parse
from scaling.trace.peak import peak_memory

LINE = "In[B_X, D_Y] * W_in[D_X, F_Y] * W_out[F_Y, D_X] -> Out[B_X, D_Y]"
# The dims that must divide over --mesh, and their sizes.
FITS = ("In[B_X, D_Y]", "W_in[D_X, F_Y]"), {"B": 16, "D": 16, "F": 32}
page = Page(__doc__, mesh="X=2,Y=2", fits=FITS, device=True, seed=True, plot=True)
V4P, V5E = chip("v4p"), chip("v5e")


def seconds(steps, hw, sizes, mesh, flops: bool = True) -> float:
    """Return the time of the steps in sequence, where each mesh axis is an axis of the chip's torus."""
    return sum(map(seconds_on(hw, sizes, mesh, flops=flops), steps))


# %% [markdown]
# ## Question 5: the lowest latency of C[I, K], replicated, on v4p 4x4x4
# Which sharding multiplies two matrices fastest if every chip needs the whole result, and the inputs may be sharded at
# will? For large matrices it costs least to split the work 64 ways and to gather the result. For small ones every chip
# computes everything, because that is faster than any communication. Look at where the curves cross. Options that split
# both operands, such as (5), gather the same bytes, if they gather over all three axes at once.

# %%
CUBE, OPTIONS = {"X": 4, "Y": 4, "Z": 4}, {
    "(1) A[I_XYZ, J] B[J, K], AllGather": ("A[I_XYZ, J]", "B[J, K]"),
    "(2) A[I, J] B[J, K_XYZ], AllGather": ("A[I, J]", "B[J, K_XYZ]"),
    "(3) A[I, J_XYZ] B[J_XYZ, K], AllReduce": ("A[I, J_XYZ]", "B[J_XYZ, K]"),
    "(4) A[I, J] B[J, K], replicated": ("A[I, J]", "B[J, K]"),
    "(5) A[I_XY, J] B[J, K_Z], AllGather": ("A[I_XY, J]", "B[J, K_Z]"),
}  # fmt: skip


def question_5(n: int, numbers=(1, 2, 3, 4)) -> dict[str, float]:
    """Return seconds by option for n x n matrices: the local product, then the fastest way to the whole result."""
    sizes, found = {"I": n, "J": n, "K": n}, {}
    for number in numbers:
        name = list(OPTIONS)[number - 1]
        product = matmul_via(*OPTIONS[name], None, *OPTIONS[name]).steps[-1]
        quickest = seconds_on(V4P, sizes, CUBE) if number == 5 else None  # (5) has two dims to gather at once
        sent = reshard(product.after, "C[I, K]", {"I": n, "K": n}, CUBE, cost=quickest).steps
        found[name] = seconds((product, *sent), V4P, sizes, CUBE)
    return found


def spread_pays_from() -> int:
    """Return the smallest multiple of 64 from which option (1) is faster than (4)."""
    multiples = range(64, 2**16, 64)

    def pays(n: int) -> bool:
        spread, replicated = question_5(n, (1, 4)).values()
        return spread < replicated

    return multiples[bisect_left(multiples, True, key=pays)]


# %% [markdown]
# First the curves by n, then all five options for small and for large matrices, then the book's answers.

# %%
least = spread_pays_from()
ns = sorted({least, 896, 960, *(64 * 2**i for i in range(9))})
by_n = {n: question_5(n) for n in ns}
curves = {name: [(n, found[name]) for n, found in by_n.items()] for name in list(OPTIONS)[1:4]}
page.chart(
    "question-5", curves, "n = I = J = K", "seconds", "Question 5 on v4p 4x4x4; (1) is as (2)",
    marks=[("x", least, f"n = {least:,}")], height=14,
)  # fmt: skip
small_n, large = (question_5(n, (1, 2, 3, 4, 5)) for n in (256, 8192))
page.table([(name, f"{1e6 * small_n[name]:.1f}", f"{1e6 * t:,.1f}") for name, t in large.items()],
           ["option", "n = 256, us", "n = 8192, us"])  # fmt: skip
four = dict(list(large.items())[:4])
fastest = " = ".join(name[:3] for name, t in four.items() if t == min(four.values()))
exact = V4P.flops() / V4P.bandwidth("ici", 3) * 64 / 63
page.answers([
    Answer("5 the fastest of the four, n = 8192", "(1) = (2)", fastest),
    Answer("5 splitting both operands changes the cost", "no",
           "no" if min(large.values()) == min(four.values()) else "yes"),
    Answer("5 its time, computing and then sending", "", 1e6 * min(large.values()), "us", "2n^3/(64 C) + 2n^2/(3 W)"),
    Answer("5 spreading out pays from n = ", "", least, "",
           f"a multiple of 64; 2n^3/C (1 - 1/64) = 2n^2/(3W) at n = {exact:.1f}, bound by bandwidth"),
])  # fmt: skip

# %% [markdown]
# ## Question 6: three products on a v5e 4x4
# For three products the planner decides what to send, and the chip's numbers say how long that takes and from which
# size on computing takes longer. A v5e wraps round at 16 only, so these axes are lines of 4. The AllGather of an array
# of V bytes then takes 3/4 V / 4.5e10 seconds, three hops of a quarter each over a link of 4.5e10 bytes/s. The last
# product is the one of inference, and it sends nothing.

# %%
SQUARE, n = {"X": 4, "Y": 4}, 2**14
PARTS = {
    "6a": ("A[I_X, J_Y]", "B[J_Y, K]", "C[I_X, K]", "J"),
    "6b": ("A[I_X, J]", "B[J_X, K_Y]", "C[I_X, K_Y]", "I"),
    "6c": ("A[I_X, J]", "B[J, K_Y]", "C[I_X, K_Y]", ""),
}
sizes, rows, answers = {"I": n, "J": n, "K": n}, [], []
for part, (a, b, out, dim) in PARTS.items():
    plan = matmul(a, b, out, mesh=SQUARE)
    sent = ", ".join(f"{s.op}_{''.join(s.axes)}({s.before})" for s in plan.collectives) or "nothing"
    comms, math = seconds(plan.steps, V5E, sizes, SQUARE, False), plan.flops(sizes, SQUARE) / V5E.flops()
    rows.append((part, f"{a} * {b} -> {out}", sent, f"{1e6 * comms:,.0f}", f"{1e6 * math:,.0f}"))
    answers += [
        Answer(f"{part} time of sending, I = J = K = 2^14", "", 1e6 * comms, "us", f"sent: {sent}"),
        Answer(f"{part} time of computing", "", 1e6 * math, "us", "2 IJK / (16 C)"),
    ]
    if dim:
        answers.append(Answer(f"{part} compute-bound from {dim} =", "", comms / math * n, "",
                              f"sending does not grow with {dim}"))  # fmt: skip
page.title(f"Question 6, bf16, I = J = K = {n}")
page.table(rows, ["", "product", "sent", "sending us", "computing us"])
page.answers(answers)

# %% [markdown]
# ## Question 7: a block In * W_in * W_out on four v5e with 300 MB each
# Two strategies are possible for a block whose batch is small, B = 128 tokens. FSDP gathers weights, which then do not
# fit. Tensor parallelism keeps them split and moves the activations, which are small. (Both are the subject of Part 5;
# here `derive` writes their steps from the types.) The last rows show the bound of tensor parallelism: neither sending
# nor computing, but reading a quarter of the weights from HBM.

# %%
BLOCK, QUAD = {"B": 128, "D": 8192, "F": 32768}, {"X": 2, "Y": 2}
LINES = {
    "FSDP": "In[B_X, D] * W_in[D_XY, F] * W_out[F, D_XY] -> Out[B_X, D]",
    "TP": "In[B, D_XY] * W_in[D, F_XY] * W_out[F_XY, D] -> Out[B, D_XY]",
}
comms, held, read, math = {}, {}, {}, {}
for name, line in LINES.items():
    program = derive(line)
    page.title(f"Question 7, {name}: {line}")
    page.say("\n".join(f"{i}. {step}" for i, step in enumerate(program.forward, 1)))
    products = [step for step in program.forward if step.op == "Einsum"]
    comms[name] = seconds(program.forward, V5E, BLOCK, QUAD, False)
    weights = [step.before[1].nbytes(BLOCK, QUAD, "bf16") for step in products]
    held[name], read[name] = max(weights) / 1e6, sum(weights) / V5E.hbm_bw
    math[name] = sum(step.flops(BLOCK, QUAD) for step in products) / V5E.flops()
slowest = {"sending": comms["TP"], "computing": math["TP"], "HBM": read["TP"]}
page.answers([
    Answer("7 bytes of one weight", "536e6", parse("W[D, F]").nbytes(BLOCK, {}, "bf16"), "bytes"),
    Answer("7 bytes of In", "2e6", parse("In[B, D]").nbytes(BLOCK, {}, "bf16"), "bytes"),
    Answer("7 the one that sends less", "TP", min(comms, key=comms.get)),
    Answer("7 FSDP: one weight on a chip, gathered", "", held["FSDP"], "MB", "more than 300"),
    Answer("7 TP: both weights on a chip", "", 2 * held["TP"], "MB", "a quarter of each; 300 are free"),
    Answer("7 FSDP: sending", "", 1e3 * comms["FSDP"], "ms", "both weights gathered over two lines of 2"),
    Answer("7 TP: sending", "", 1e6 * comms["TP"], "us", "AllGather of In, ReduceScatter of Out"),
    Answer("7 TP: computing", "", 1e6 * math["TP"], "us", "4BDF / 4 / C"),
    Answer("7 TP: reading its weights from HBM", "", 1e6 * read["TP"], "us", "4DF / 4 / 8.2e11"),
    Answer("7 TP: bound by", "", max(slowest, key=slowest.get), "", "128 tokens are fewer than v5e's 240"),
])  # fmt: skip

# %% [markdown]
# ## From one line: FSDP + tensor parallelism
# A whole training step need not be planned by hand. The types of In, the weights and Out determine which gathers and
# reductions the forward pass needs; the law of cotangents (notation.md) then determines the backward pass. The result
# is the book's listing of Part 5.

# %%
program, small = derive(LINE), FITS[1]
page.title("Derived from its types")
page.say(program)
types = [*program.operands, program.out.with_name("dOut")]
whole = drawn({t.name: str(t) for t in types}, small, page.args.seed)
leaves = [whole[t.name].clone().requires_grad_() for t in program.operands]
Out = leaves[0] @ leaves[1] @ leaves[2]
wanted = {"Out": Out.detach()}
wanted |= dict(
    zip((f"d{t.name}" for t in program.operands), torch.autograd.grad(Out, leaves, whole["dOut"]), strict=True)
)


def derived(mesh) -> dict[str, float]:
    """Return the differences of the derived algorithm's result and gradients from one device's."""
    inputs = {t.name: shard(str(t), whole[t.name].to(mesh.device), mesh) for t in types}
    Out, grads = run_program(program, inputs, inputs.pop("dOut"), mesh)
    found = {"Out": unshard(str(program.out), Out, mesh)}
    found |= {f"d{t.name}": unshard(str(t), grads[t.name], mesh) for t in program.operands}
    return {name: difference(x, wanted[name], mesh) for name, x in found.items()}


page.say()
page.equal([(name, apart, 1e-12) for name, apart in page.on_ranks(derived).items()])

# %% [markdown]
# ## The same on 8,192 abstract chips
# Types and sizes are enough to count bytes, FLOPs and memory line by line, because meta tensors have no data and an
# abstract mesh of 1024 x 8 has no devices. V is the bytes of the array that a collective gathers or reduces, on one
# chip, and the last column what the chip holds after the line. The backward has no AllGather of In, because
# `keep_gathered=True` keeps the one of the forward. The layer has the D and F of LLaMA-3 70B, but only two matrices, as
# in Part 5. LLaMA's MLPs are gated and have a second W_in, so the last two rows add it.

# %%
LARGE, ABSTRACT = {"B": 1 << 20, "D": 8192, "F": 28672}, AbstractMesh({"X": 1024, "Y": 8})
B, D, F, X, Y = *LARGE.values(), *ABSTRACT.sizes.values()
program = derive(LINE, keep_gathered=True)
inputs = empty({spec.name: str(spec) for spec in (*program.operands, program.out)}, LARGE, ABSTRACT)
with peak_memory() as memory:
    run_program(program, inputs, inputs.pop("Out"), ABSTRACT)
page.title("One layer, 1M tokens, on a mesh of 1024 x 8: one chip's share")
rows = [(str(e), *(f"{x:,.1f}" for x in (e.nbytes / 1e6, e.flops / 1e9, now / 1e6))) for e, now, _ in memory.steps]
page.table(rows, ["line", "V, MB", "GFLOPs", "MB held"])
page.say(f"peak {memory.peak / 1e6:,.1f} MB\n")
moved = [(e, e.nbytes if e.wire_bytes else 0) for e, _, _ in memory.steps]
up = [(e, n) for e, n in moved if "W_in" in str(e) and "W_out" not in str(e)]  # the bytes of a second W_in
total, flops = sum(n for _, n in moved), sum(e.flops for e, _ in moved)
page.same([
    ("bytes of all collectives", "8BD/X + 12DF/Y", 8 * B * D // X + 12 * D * F // Y, total),
    ("FLOPs", "12BDF/(XY)", 12 * B * D * F // (X * Y), flops),
    ("gated: bytes", "8BD/X + 18DF/Y", 8 * B * D // X + 18 * D * F // Y, total + sum(n for _, n in up)),
    ("gated: FLOPs", "18BDF/(XY)", 18 * B * D * F // (X * Y), flops * 3 // 2),
], ["forward and backward", "formula", "value", "counted"])  # fmt: skip
page.end()

# %% [markdown]
# ## Three things to try
# 1. Edit: replace `W_out[F_Y, D_X] -> Out[B_X, D_Y]"` by `W_out[F_Y, D_X] -> Out[B_X, D]"`. What becomes of the
#    ReduceScatter of Out, and of the gradients' equality?
#    Answer: An AllReduce takes its place, because Out is now wanted whole on every device along Y. The gradients are
#    still equal to one device's: dOut then arrives whole, too, and the backward loses its first AllGather.
# 2. Question: how long does option (1) of Question 5 take for n = 1024, against 7.8 us for replicated computing?
#    Evaluate `round(1e6 * next(iter(question_5(1024).values())), 2)`.
#    Answer: 7.9 us, a little more than the 7.8: at this size it just does not pay to send.
# 3. Flag: run with `--mesh X=4,Y=1`. Is the derived algorithm still equal to one device's?
#    Answer: Yes. Along Y there is one device, so the lines over Y send nothing, and what is left is FSDP.
