# %% [markdown]
"""Part 9, the worked problems, and a quiz without end: which sharding made this trace?
"How to Profile TPU Programs": https://jax-ml.github.io/scaling-book/profiling

A trace as XLA shows it has operations with one device's shapes, and the groups of each collective. Name the strategy,
the mesh and the true sizes before you read on; `--seed 1` has another trace. Then follow Questions 1 and 2, with a
naive program and a corrected one, run and profiled.
"""

# %%
import random
import re
from itertools import product
from statistics import median
from typing import NamedTuple

import torch

from scaling import auto, cost, explicit
from scaling.book import hlo
from scaling.book.answers import Answer
from scaling.book.layout import format_number
from scaling.book.listing import SINGLE, both_passes, difference
from scaling.book.page import Page
from scaling.hardware import chip
from scaling.mesh import AbstractMesh
from scaling.profile import profile
from scaling.spec.sizes import format_sizes
from scaling.strategies import data_parallel, fsdp, fsdp_tp, tensor_parallel
from scaling.trace import trace

SIZES = {"B": 512, "D": 256, "F": 1024}  # of the program of Question 2
TYPES = ("x[B_X, D]", "W_in[D, F_Y]", "W_out[F_Y, D]")
page = Page(__doc__, mesh="X=2,Y=2", fits=(TYPES, SIZES), seed=True,
            quizzes=(40, "traces that the solver reads"))  # fmt: skip
STRATEGIES = {"data_parallel": data_parallel, "fsdp": fsdp, "tensor_parallel": tensor_parallel, "fsdp_tp": fsdp_tp}
NAMES = {"Einsum": "dot", "AllGather": "all-gather", "ReduceScatter": "reduce-scatter", "AllReduce": "all-reduce"}
V5E = chip("v5e")


# %% [markdown]
# ## The trace
# This is a training step of one layer, W_in and W_out, on a random mesh. Names and types have been removed, so it looks
# like the profile of a program that somebody else wrote. The times follow from v5e's roofline.


# %%
class Quiz(NamedTuple):
    """The question: a strategy, its mesh, and the sizes."""

    strategy: str
    mesh: dict[str, int]
    size: dict[str, int]


class Seen(NamedTuple):
    """One operation of the trace: local shapes, the groups of a collective, microseconds."""

    op: str
    operands: tuple[tuple[int, ...], ...]
    result: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    us: float


def draw(rng: random.Random) -> Quiz:
    """Return a random strategy on a random mesh, which may have either axis first."""
    name = rng.choice(list(STRATEGIES))
    axes = [axis for axis in "XY" if f"_{axis}" in " ".join(STRATEGIES[name].SPECS.values())
            or (name == "data_parallel" and axis == "X")]  # fmt: skip
    rng.shuffle(axes)
    width = 1024 * rng.randint(1, 4)
    return Quiz(name, {axis: rng.choice([2, 4, 8]) for axis in axes},
                {"B": 1024 * rng.randint(1, 8), "D": width, "F": rng.randint(2, 4) * width})  # fmt: skip


def groups(mesh: AbstractMesh, axes) -> tuple[tuple[int, ...], ...]:
    """Return the groups of ranks along some axes, one for each coordinate along the others."""
    found: dict = {}
    for at in product(*(range(n) for n in mesh.sizes.values())):
        coord = dict(zip(mesh.sizes, at, strict=True))
        rest = tuple(i for axis, i in coord.items() if axis not in axes)
        found.setdefault(rest, []).append(mesh.rank_at(coord))
    return tuple(tuple(members) for members in found.values())


# %% [markdown]
# An operation is printed as in a profile: local shapes, the ranks of a group, microseconds.


# %%
def trace_of(quiz: Quiz) -> list[Seen]:
    mesh, seen = AbstractMesh(quiz.mesh), []
    for event in (event for log in both_passes(STRATEGIES[quiz.strategy], quiz.size, mesh) for event in log.events):
        before = event.before if isinstance(event.before, tuple) else (event.before,)
        *operands, result = (spec.local_shape(quiz.size, mesh) for spec in (*before, event.after))
        if event.op == "Einsum":
            elements = sum(a * b for a, b in (*operands, result))
            seconds = cost.roofline(event.flops, 2 * elements, V5E.flops("bf16"), V5E.need("hbm_bw")).lower
        else:
            seconds = cost.seconds(event.op, event.nbytes, V5E, mesh.size(event.axes))
        along = groups(mesh, event.axes) if event.axes else ()
        seen.append(Seen(NAMES[event.op], tuple(operands), result, along, seconds * 1e6))
    return seen


def shown(shape) -> str:
    return f"bf16[{','.join(map(str, shape))}]"


def table(seen: list[Seen]) -> None:
    rows = []
    for op in seen:
        who = "{" + ",".join(map(str, op.groups[0])) + "}, ..." if op.groups else ""
        rows.append((op.op, ", ".join(map(shown, op.operands)), shown(op.result), who, f"{op.us:,.0f}"))
    page.table(rows, ["op", "operands", "result", "groups", "us"])


quiz = draw(random.Random(page.args.seed))
page.title(f"Quiz {page.args.seed}: one training step of In * W_in * W_out, one device's view")
table(trace_of(quiz))


# %% [markdown]
# ## How to read it
# There are six dots: two forward, and then two backward for each of them. Partial sums that are reduced *between the
# second and the third dot* belong to the forward pass. There a contracted dim was sharded, so this is tensor
# parallelism over these groups. An array that is reduced over other groups has the shape of a weight, so it is a
# gradient. Data parallelism reduces it by all-reduce, since every device keeps all params. FSDP reduces it by
# reduce-scatter, and gathers the params before each pass. The true sizes are the first dot's shapes times the sizes of
# the groups.


# %%
def read(seen: list[Seen]) -> Quiz:
    """Return the answer, from the trace alone."""
    dots = [i for i, op in enumerate(seen) if op.op == "dot"]
    forward = [op for op in seen[dots[1] : dots[2]] if op.op == "reduce-scatter"]
    mine = forward[0].groups if forward else ()
    grads = [op for op in seen[dots[3] :] if op.op in ("reduce-scatter", "all-reduce") and op.groups != mine]
    mesh = {"Y": len(mine[0])} if mine else {}
    if grads:
        mesh["X"] = len(grads[0].groups[0])
        if mine and mine[0][1] - mine[0][0] == 1:  # neighbours lie along the last axis
            mesh = {"X": mesh["X"], "Y": mesh["Y"]}
    kind = {(False, "all-reduce"): "data_parallel", (False, "reduce-scatter"): "fsdp", (True, ""): "tensor_parallel"}
    strategy = kind.get((bool(mine), grads[0].op if grads else ""), "fsdp_tp")
    (b, d), (_, f) = seen[dots[0]].operands
    return Quiz(strategy, mesh, {"B": b * mesh.get("X", 1), "D": d, "F": f * mesh.get("Y", 1)})


answer = read(trace_of(quiz))
page.title("The answer")
page.say(f"{answer.strategy} on {format_sizes(answer.mesh)}: {format_sizes(answer.size)}")
page.check("it is read rightly", answer == quiz)
page.say("its types: " + "   ".join(STRATEGIES[answer.strategy].SPECS.values()))
rng = random.Random(page.args.seed + 1)
others = [draw(rng) for _ in range(page.args.quizzes)]
right = sum(list(read(trace_of(each)).mesh.items()) == list(each.mesh.items()) and read(trace_of(each)) == each
            for each in others)  # fmt: skip
page.say(f"\nThe same reading of {len(others)} more traces: {right} right.")
page.check("all are read rightly", right == len(others))

# %% [markdown]
# ## Question 1
# The profile of Question 1 shows a fusion on one device, and an AllReduce with its groups. Eight devices, sixteen
# apart, hold the parts of one matrix, so there are sixteen such groups. A device has one row of x, without a batch dim.

# %%
FUSION = (
    "%fusion.1 = bf16[4096]{0:T(1024)(128)(2,1)} fusion(bf16[4096,8192]{1,0:T(8,128)(2,1)} %param.1, "
    "bf16[8192]{0:T(1024)(128)(2,1)} %reduce.6), kind=kLoop, calls=%fused_computation.1"
)
GROUPS = "replica_groups={{0,16,32,48,64,80,96,112}, ...}"
op = hlo.operation(FUSION)
members = [int(rank) for rank in re.findall(r"\d+", GROUPS)]
(_, W), (_, x) = op.operands
page.title("Question 1: two matrix multiplications")
page.say(f"each device: {shown(x.shape)} * {shown(W.shape)} -> {shown(op.result.shape)}, over the dim of {x.shape[0]}")
page.say("then the second, 'wf,bf->bw', contracts f, which is sharded: partial sums, hence the AllReduce.")
each = 2 * W.shape[0] * W.shape[1]
page.answers([
    Answer("1 model parallelism", "8", len(members), "ways"),
    Answer("1 rows of w1 on a device", "4096", W.shape[0]),
    Answer("1 rows of w1 in all", "32768", W.shape[0] * len(members)),
    Answer("1 columns of w1", "8192", W.shape[1]),
    Answer("1 groups of eight", "", members[1] - members[0], "groups",
           "a group's ranks are 16 apart; the book's 8 rows of x would then be two groups' each"),
    Answer("1 FLOPs per byte of the fusion", "", each / (2 * sum(W.shape) + W.nbytes), "",
           "one row against a matrix: bound by reading it, wherever it runs, as in decoding"),
])  # fmt: skip

# %% [markdown]
# ## Question 2: a naive program, and a corrected one
# A layer runs in auto mode on the ranks of --mesh, so the planner inserts the collectives (10_modes.py). In the naive
# program the array between its two products loses the split of the batch, as may happen when a compiler guesses. The
# mended program differs by that type alone; `explicit.reshard` is JAX's `with_sharding_constraint`. Before you read on:
# how many times as many FLOPs does a device compute in the naive one?


# %%
def program(between: str, mesh):
    """x[B_X, D], W_in[D, F_Y], W_out[F_Y, D] -> Out[B_X, D], with the array between the products typed as asked."""

    def layer(x, W_in, W_out):
        Tmp = explicit.reshard(torch.einsum("bd,df->bf", x, W_in), between)
        return x + torch.einsum("bf,fd->bd", torch.relu(Tmp), W_out)

    return auto.jit(layer, mesh, TYPES, "Out[B_X, D]")


def profiled(mesh) -> dict:
    """Return {program: (its lines, the profile's table, ms a step, a rank's FLOPs, its bytes sent, its result)}."""
    rng = torch.Generator().manual_seed(page.args.seed)
    whole = [torch.randn(SIZES[a], SIZES[b], generator=rng) / SIZES[a] ** 0.5 for a, b in ("BD", "DF", "FD")]
    given = [explicit.array(x.to(mesh.device), spec, mesh) for x, spec in zip(whole, TYPES, strict=True)]
    found = {}
    for name, between in PROGRAMS.items():
        step = program(between, mesh)
        with trace() as log:
            Out = step(*given)
        with profile() as p:
            for _ in range(3 if page.small else 10):
                step(*given)
                p.step()
        ms = 1e3 * median(part.step for part in p.parts(mesh.rank))
        listing = step.lower(*given).listing
        counts = [(f"{n / 1e6:.2f}" if n else "" for n in (each.flops, each.nbytes)) for each in p.lines()]
        lines = [(each.line, f"{1e3 * each.seconds:.2f}", *both) for each, both in zip(p.lines(), counts, strict=True)]
        found[name] = listing, lines, ms, log.flops, log.wire_bytes, Out.whole().cpu()
    return found


PROGRAMS = {"naive": "Tmp[B, F_Y]", "mended": "Tmp[B_X, F_Y]"}
runs = page.on_ranks(profiled)

# %% [markdown]
# The naive program gathers x, and each device computes the first product for all rows of the batch, |X| times its
# FLOPs. Then it drops the rows of the others. Lines 1 and 4 of its listing do that, and the tables show their cost; the
# mended program has neither. How much time this saves depends on what binds on this machine.

# %%
for name, (listing, lines, *_) in runs.items():
    page.title(f"{name}: {PROGRAMS[name]} between the products")
    page.say(f"{listing}\n")
    page.table(lines, ["line", "ms", "MFLOP", "MB"])
page.title("Both")
page.table([(name, f"{ms:.2f}", flops, sent) for name, (_, _, ms, flops, sent, _) in runs.items()],
           ["program", "ms a step", "FLOPs of a device", "bytes sent"])  # fmt: skip
(_, _, _, most, _, Out), (_, _, _, least, _, same) = runs.values()
X, Y = (page.args.mesh[axis] for axis in "XY")
page.say()
each = 2 * SIZES["B"] * SIZES["D"] * SIZES["F"] // (X * Y)  # of one product, split over all devices
page.same([("mended", "2 products of 2 B D F / (X Y)", 2 * each, least),
           ("naive", "one of 2 B D F / Y, one of 2 B D F / (X Y)", each * X + each, most)],
          ["FLOPs of a device", "formula", "value", "counted"])  # fmt: skip
page.say()
page.equal([("the mended program's result", difference(same, Out), SINGLE)], "the naive one")

# %% [markdown]
# ## Question 2: the book's profile
# The sizes of the example in 09_profiling.py can be read from its profile alone: they are the local shapes times the
# mesh. At the roofline of eight cores of a TPU v2, each part's share of the time is its share of the FLOPs. So the MLP
# should take two thirds of a layer; if a profile shows another share, that part is the one to look at.

# %%
core, X, Y = chip("v2").flops("bf16") / 2, 4, 2
(b, T, D), (_, f) = (hlo.parse_shape(text).shape for text in ("bf16[8,1024,8192]", "bf16[8192,16384]"))
heads, H = 32, 256
B, F = b * X, f * Y
ms = {"W_in and W_out": 4 * B * T * D * F, "W_Q, W_K, W_V, W_O": 8 * B * T * D * heads * H,
      "scores and their sum": 4 * B * T * T * heads * H}  # fmt: skip
ms = {name: flops / (core * X * Y) * 1e3 for name, flops in ms.items()}
layer = sum(ms.values())
page.title("Question 2: each part of the layer at the roofline, forward")
page.table(
    [(name, format_number(each), f"{each / layer:.0%}") for name, each in ms.items()], ["part", "ms", "of the layer"]
)
page.answers([
    Answer("2 batch size", "32", B, "sequences"),
    Answer("2 d_model", "8192", D),
    Answer("2 d_ff", "32768", F),
    Answer("2 model parallelism: features of W_in over a device's", "2", F // f, "ways"),
    Answer("2 share of attention, with as many KV heads as heads", "", (layer - ms["W_in and W_out"]) / layer, "",
           "no mask used to skip work; the MLP has two matrices, as the profile shows"),
    Answer("2 a layer at the roofline, by the example's sizes", "", layer, "ms",
           "so the problem's 184 and 67 ms are of other sizes; the first is at most 67/184 = 36% of the roofline"),
])  # fmt: skip
page.end()

# %% [markdown]
# ## Three things to try
# 1. Edit: replace `op.groups != mine` by `op.groups == mine`: then partial sums of activations pass for gradients.
#    Answer: Only 2 of the 40 traces are read rightly, and both checks fail. With tensor parallelism the reduce-scatter
#    of an activation is taken for that of a gradient, so X gets the groups of Y. Without it `mine` is empty, and no
#    gradient is found.
# 2. Question: on how many devices did Question 1 run at least? Evaluate `len(members) * (members[1] - members[0])`.
#    Answer: 128: a group has eight members, which are 16 apart.
# 3. Flag: run with `--seed 2`, and cover the screen below the trace: which two facts decide?
#    Answer: Between the first four dots nothing is sent, so no dim that is contracted there is split. The all-reduces
#    at the end have the shapes of the weights, over groups of two: data parallelism on X=2.
