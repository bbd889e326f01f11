# %% [markdown]
"""Part 3, "Computation With Sharded Arrays": the four cases of a product, their communication, and alternatives to it.
https://jax-ml.github.io/scaling-book/sharding#computation-with-sharded-arrays

A product is written by blocks and as outer products; every case is planned, run on ranks and compared with one device;
illegal lines are refused; alternatives are compared by bytes and time; and Questions 4 and 9 are answered. The
collectives themselves are in 03_collectives.py.
"""

# %% [markdown]
# ## What is an unreduced sum, and why is it worth having?
# A product sums over a dim. Where that dim is split over X, each device can only add up its own part. It then has one
# term of the result, in the result's full shape. The result is the sum of these terms over X, and until they are added
# up it is *unreduced*: `C[I, K] {U_X}`.
#
# The reduction is communication, and the type lets one decide when it happens. Two unreduced arrays can be added first
# and reduced once. A ReduceScatter can follow where only a shard is needed, for half the bytes of an AllReduce. And a
# gradient may stay unreduced over many microbatches. The one thing that is wrong is to apply a nonlinear function: the
# sum of the devices' `gelu` is not the `gelu` of the sum. The types are there to catch this mistake.

# %%
from bisect import bisect_left

import torch

from scaling import cost
from scaling.algebra import matmul, matmul_via, reshard
from scaling.book.answers import Answer
from scaling.book.arrays import drawn
from scaling.book.listing import difference
from scaling.book.page import Page
from scaling.collectives import all_reduce, einsum, reduce_scatter, run, shard, unshard
from scaling.cost.collectives import seconds_on
from scaling.hardware import chip
from scaling.spec import ShardingError

SIZES = {"I": 8, "J": 16, "K": 32}  # they must divide over --mesh
FITS = ("A[I_XY, J]", "A[I, J_XY]", "B[J, K_XY]"), SIZES
page = Page(__doc__, mesh="X=2,Y=2", fits=FITS, device=True, seed=True, plot=True)
EXACT, MESH = 1e-12, page.args.mesh
A, B = drawn(["A[I, J]", "B[J, K]"], SIZES, page.args.seed)
C = A @ B

# %% [markdown]
# ## Blocks, and outer products
# A product of matrices can be computed by blocks, C_00 = A_00 B_00 + A_01 B_10. If it is split along the contraction,
# it is a sum of outer products, A[:, j] times B[j, :], and each device can add up its own. A sharded product consists
# of two things only: the blocks that a device has, and the blocks that it receives.

# %%
blocks = {n: [half.chunk(2, 1) for half in x.chunk(2, 0)] for n, x in (("A", A), ("B", B))}
by_blocks = [[sum(blocks["A"][i][j] @ blocks["B"][j][k] for j in range(2)) for k in range(2)] for i in range(2)]
outer = [sum(torch.outer(A[:, j], B[j, :]) for j in own) for own in torch.arange(16).chunk(4)]  # of four devices
whole = torch.cat([torch.cat(row, 1) for row in by_blocks])
page.title("A[8, 16] B[16, 32] by blocks, and by outer products")
page.equal([
    ("C_ik = A_i0 B_0k + A_i1 B_1k, of 2 x 2 blocks", difference(whole, C), EXACT),
    ("the sum over four devices of their columns times their rows", difference(sum(outer), C), EXACT),
], "the product at once")  # fmt: skip
page.say(f"one device's sum alone is off by {difference(outer[0], C):.1f}: it is C[I, K] {{U_X}}, a term of the result")

# %% [markdown]
# ## The four cases, planned and run
# The types alone determine the communication. If the contracted dim is whole, nothing is sent (case 1). If it is split
# in one operand, that operand is gathered (case 2). If it is split in both, the result is reduced (case 3). If one axis
# splits a free dim of each operand, one of them is gathered (case 4). Compare the bytes of the two products of case 3:
# the ReduceScatter, which leaves C[I, K_X], sends half of what the AllReduce sends.

# %%
CASES = [
    ("A[I, J]", "B[J, K]", "C[I, K]"),
    ("A[I_X, J]", "B[J, K]", "C[I_X, K]"),
    ("A[I, J]", "B[J, K_Y]", "C[I, K_Y]"),
    ("A[I_X, J]", "B[J, K_Y]", "C[I_X, K_Y]"),
    ("A[I, J_X]", "B[J, K]", "C[I, K]"),
    ("A[I, J_X]", "B[J_X, K]", "C[I, K]"),
    ("A[I, J_X]", "B[J_X, K]", "C[I, K_X]"),
    ("A[I_X, J]", "B[J, K_X]", "C[I_X, K]"),
    ("A[I_X, J]", "B[J, K_X]", "C[I, K_X]"),
    ("A[I_X, J_Y]", "B[J_Y, K_X]", "C[I_X, K]"),
]
RESHARDS = [("A[I_XY, J]", "A[I_X, J]"), ("A[I_XY, J]", "A[I_Y, J]"), ("A[I_X, J]", "A[I, J_X]")]
plans = [matmul(*case, mesh=MESH) for case in CASES]
moves = [reshard(*pair, {"I": 8, "J": 16}, MESH) for pair in RESHARDS]


def products(mesh) -> list[float]:
    """Return the differences from one device of each planned product and each resharding."""
    found, (a, b) = [], (x.to(mesh.device) for x in (A, B))
    for (left, right, out), plan in zip(CASES, plans, strict=True):
        got = run(plan, shard(left, a, mesh), shard(right, b, mesh), mesh)
        found.append(difference(unshard(out, got, mesh), C, mesh))
    for (before, after), plan in zip(RESHARDS, moves, strict=True):
        found.append(difference(unshard(after, run(plan, shard(before, a, mesh), mesh), mesh), A, mesh))
    return found


def said(plan) -> str:
    """Return the collectives of a plan in the book's words."""
    sent = [f"{step.op}_{''.join(step.axes)} {step.before.name}" for step in plan.collectives]
    return ", then ".join(sent) or "nothing"


# %% [markdown]
# Each row is planned, run on ranks and compared with one device. The bytes are what the plan sends. The last three rows
# are reshardings: an AllGather of the minor axis, which is the last in a subscript; of the major one, which takes a
# CollectivePermute first (03_sharding.py says why); and an AllToAll.

# %%
differences = page.on_ranks(products)
page.title("The four cases on float64 A[8, 16], B[16, 32]: bytes that each device sends")
rows = []
for case, plan, apart in zip(CASES, plans, differences, strict=False):
    line, number = f"{case[0]} * {case[1]} -> {case[2]}", " and ".join(map(str, plan.cases))
    equal = page.check(f"case {number}: {line}", apart <= EXACT)
    rows.append((number, line, said(plan), int(plan.wire_bytes(SIZES, MESH, torch.float64)), equal))
for pair, plan, apart in zip(RESHARDS, moves, differences[len(CASES) :], strict=True):
    line = f"{pair[0]} -> {pair[1]}"
    rows.append(
        ("-", line, said(plan), int(plan.wire_bytes(SIZES, MESH, torch.float64)), page.check(line, apart <= EXACT))
    )
page.table(rows, ["case", "product, or resharding", "sent", "bytes", "equal"])
page.say(f"\nThe last case in full:\n{plans[-1]}")

# %% [markdown]
# ## Which lines are refused?
# `einsum` multiplies what a device has and sends nothing. So it refuses the lines of cases 2 and 4, and lines of case 3
# that do not say `{U_X}`, and quotes the rule.

# %%
page.title("Lines that are no local product")
a, b = torch.empty(4, 8, device="meta"), torch.empty(8, 16, device="meta")
for line in (
    "A[I, J_X] * B[J, K] -> C[I, K]",
    "A[I, J_X] * B[J_X, K] -> C[I, K]",
    "A[I_X, J] * B[J, K_X] -> C[I_X, K_X]",
    "A[I_X, J] * B[J, K_X] -> C[I, K]",
):
    try:
        einsum(line, a, b)
        page.check(f"refused: {line}", False)
    except ShardingError as error:
        page.check(f"refused: {line}", "fix: " in str(error))
        page.say(f"{error}\n")

# %% [markdown]
# ## Other ways, and their cost
# The cases are the usual choice, not the only one. Case 2 may also be done as case 3: slice B, multiply, and reduce the
# partial sums. Case 4 may gather either operand. And for a whole result one may gather the operands or the result. The
# table has the bytes that a device sends, its FLOPs, and the time on v5p, each axis a ring of 4, sending and computing
# one after the other. Gathering an operand often means that devices repeat each other's work: compare the GFLOPs. In
# case 4 the choice depends on the sizes: with 16 times the rows, the other operand is the one to gather.

# %%
V5P, TORUS = chip("v5p"), {"X": 4, "Y": 4}
CHOICES = {
    "2: A[I, J_X] * B[J, K] -> C[I, K]": [("A[I, J]", "B[J, K]"), ("A[I, J_X]", "B[J_X, K]")],
    "4: A[I_X, J] * B[J, K_X] -> C[I_X, K]": [("A[I_X, J]", "B[J, K]"), ("A[I, J]", "B[J, K_X]")],
    "1: A[I_X, J] * B[J, K_Y] -> C[I, K]": [
        ("A[I_X, J]", "B[J, K_Y]"),
        ("A[I, J]", "B[J, K_Y]"),
        ("A[I, J]", "B[J, K]"),
    ],
}
fastest = {}
for rows_of_A in (1024, 16384):
    sizes, rows = {"I": rows_of_A, "J": 8192, "K": 8192}, []
    for what, ways in CHOICES.items():
        left, right, out = (text.strip() for text in what[3:].replace("->", "*").split("*"))
        found = [matmul_via(left, right, out, *way, sizes, TORUS) for way in ways]
        seconds = [sum(map(seconds_on(V5P, sizes, TORUS), plan.steps)) for plan in found]
        fastest[what[0], rows_of_A] = said(found[seconds.index(min(seconds))])
        for plan, t in zip(found, seconds, strict=True):
            best = "fastest" if t == min(seconds) else ""
            sent = f"{plan.wire_bytes(sizes, TORUS, 'bf16') / 1e6:,.1f}"
            rows.append((what, said(plan), sent, f"{plan.flops(sizes, TORUS) / 1e9:,.1f}", f"{1e6 * t:,.0f}", best))
            what = ""
    page.title(f"bf16 A[{rows_of_A}, 8192] B[8192, 8192] on v5p, X = Y = 4")
    page.table(rows, ["case", "sent", "MB", "GFLOPs", "us", ""])

# %% [markdown]
# ## Question 4: gather the weights, or reduce the result
# To multiply X[B, D] by Y[D_X, F] on a ring of four v5p there are two strategies. (Here X and Y are matrices, and the
# subscript X is the ring.) Strategy 1 gathers Y, and every device repeats the whole product. Strategy 2 multiplies
# shards and adds up the results. Both plans are timed with computing and sending overlapped. Below B = 2550 both
# strategies wait for bytes, 2DF for the gathered weights against 4BF for the AllReduce of the result, so with a small
# batch the second is far better.


# %%
def strategies(B: int, D: int = 8192, F: int = 32768) -> tuple[cost.Roofline, ...]:
    """Return strategies 1 and 2, planned on four v5p, as rooflines; the bytes of an AllReduce count twice."""
    sizes, axis, found = {"B": B, "D": D, "F": F}, {"X": 4}, []
    for local in (("X[B, D]", "Y[D, F]"), ("X[B, D_X]", "Y[D_X, F]")):
        plan = matmul_via("X[B, D]", "Y[D_X, F]", "Z[B, F]", *local)
        nbytes = plan.gather_bytes(sizes, axis, "bf16")
        found.append(cost.roofline(plan.flops(sizes, axis), nbytes, V5P.flops(), V5P.bandwidth("ici")))
    return tuple(found)


def first(holds, step: int = 1) -> int:
    """Return the smallest multiple of `step` from which on a condition holds."""
    multiples = range(step, 2**18, step)
    return multiples[bisect_left(multiples, True, key=holds)]


turn = first(lambda B: strategies(B)[0].bound == "compute")
batches = sorted({turn, *(4 * round(2 ** (i / 2)) for i in range(2, 25))})
page.chart(
    "question-4",
    {f"strategy {n + 1}": [(B, strategies(B)[n].lower) for B in batches] for n in (0, 1)},
    "batch in tokens", "seconds", "Question 4: X[B, 8192] Y[8192_X, 32768] on four v5p",
    marks=[("x", turn, f"strategy 1 is compute-bound from B = {turn}")], height=14,
)  # fmt: skip

# %% [markdown]
# First both strategies by the book's formulas at B = 128, then the sizes at which the better strategy changes.

# %%
one, two = strategies(128)
page.say()
page.same([
    ("strategy 1: FLOPs of a device", "2BDF", 2 * 128 * 8192 * 32768, one.flops),
    ("strategy 1: bytes gathered", "2DF", 2 * 8192 * 32768, one.nbytes),
    ("strategy 2: FLOPs of a device", "2BDF/X", 2 * 128 * 8192 * 32768 // 4, two.flops),
    ("strategy 2: bytes of its AllReduce", "2 * 2BF", 4 * 128 * 32768, two.nbytes),
], ["Question 4, B = 128, X = 4", "the book's", "value", "planned"])  # fmt: skip
page.answers([
    Answer("4 strategy 1 is compute-bound from B =", "2550", turn, "tokens"),
    Answer("4 strategy 2 is compute-bound from D/X =", "5100",
           first(lambda D: strategies(64, D)[1].bound == "compute", 4) / 4),
    Answer("4 B = 1000: strategy 2 moves less from D = 2B =", "2000",
           first(lambda D: strategies(1000, D)[1].comms <= strategies(1000, D)[0].comms, 4)),
    Answer("4 B = 4000: strategy 2 moves in less than strategy 1 computes from D =", "5100",
           first(lambda D: strategies(4000, D)[1].comms < strategies(4000, D)[0].math, 4)),
    Answer("4 the planner's choice at B = 128", "AllReduce",
           matmul("X[B, D]", "Y[D_X, F]", "Z[B, F]", {"B": 128, "D": 8192, "F": 32768}, {"X": 4}).collectives[0].op),
])  # fmt: skip

# %% [markdown]
# ## Question 9: the partial sums, index by index
# To see what a partial sum is, follow the indices of A[N, M_X] B[M, K]. Device x computes o_kj, the sum of a_ki b_ij
# over its own i. Then the devices' sums are added up, either whole (part 1), or so that each device keeps some of the
# rows or columns (part 2).


# %%
def own_sums(own, device):
    """O[N, K] {U_X}: the sum of a_ki b_ij over a rank's own i."""
    o = torch.zeros(8, 32, dtype=torch.float64, device=device)
    for i in own:
        o += A[:, i, None].to(device) * B[None, i, :].to(device)
    return o


def question_9(mesh) -> tuple[list[int], list[float]]:
    """Return this rank's i, and the differences of its sums from A B: after an AllReduce, and two ReduceScatters."""
    n, x = mesh.sizes["X"], mesh.coord["X"]
    own = list(range(x * 16 // n, (x + 1) * 16 // n))
    o = own_sums(own, mesh.device)
    whole = all_reduce("O[N, K] {U_X} -> O[N, K]", o, mesh)
    rows = unshard("O[N_X, K]", reduce_scatter("O[N, K] {U_X} -> O[N_X, K]", o, mesh), mesh)
    columns = unshard("O[N, K_X]", reduce_scatter("O[N, K] {U_X} -> O[N, K_X]", o, mesh), mesh)
    return own, [difference(found, C, mesh) for found in (whole, rows, columns)]


own, differences = page.on_ranks(question_9)
page.title(f"Question 9: o_kj = sum of a_ki b_ij; on device 0 i runs over {own}")
names = ("9.1 AllReduce: O[N, K]", "9.2 ReduceScatter: O[N_X, K]", "9.2 ReduceScatter: O[N, K_X]")
page.equal([(name, apart, EXACT) for name, apart in zip(names, differences, strict=True)])
sizes, axis = {"N": 64, "M": 512, "K": 128}, {"X": 4}
gather = matmul_via("A[N, M_X]", "B[M, K]", "C[N, K]", "A[N, M]", "B[M, K]")
scatter = matmul_via("A[N, M_X]", "B[M, K]", "C[N_X, K]", "A[N, M_X]", "B[M_X, K]")
ratio = gather.gather_bytes(sizes, axis, 2) / scatter.gather_bytes(sizes, axis, 2)
page.answers(
    [Answer("9.3 gathering A first over scattering after: M/K = 512/128", "4", ratio, "times", "NM to NK scalars")]
)
page.end()

# %% [markdown]
# ## Three things to try
# 1. Edit: replace `"A[I_X, J_Y]", "B[J_Y, K_X]", "C[I_X, K]"` by `"A[I_X, J_Y]", "B[J_X, K_Y]", "C[I_X, K_Y]"`. Which
#    cases are these, and which arrays are moved in how many steps?
#    Answer: Case 2, twice: Y splits the contracted dim of A, and X that of B. A is gathered over Y and then B over X,
#    two steps before the product, and nothing comes after it.
# 2. Question: from how many rows on is gathering B, of 8192 x 8192, cheaper than gathering A for case 4? Evaluate
#    `fastest["4", 1024], fastest["4", 16384]`.
#    Answer: From about 6,600 rows on. Gathering A sends A and then a part of C, 15.7 MB for each 1,024 rows, while
#    gathering B sends 100.7 MB at any number of rows.
# 3. Flag: run with `--mesh X=4,Y=1`. Which of the bytes grow, and which line sends nothing any more?
#    Answer: Those over X, where a device lacks 3/4 of an array and not 1/2; only the AllToAll sends less, since each
#    chunk is smaller. `A[I_XY, J] -> A[I_X, J]` sends nothing, because it gathers over Y alone.
