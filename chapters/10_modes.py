# %% [markdown]
"""Part 10, three modes: the compiler decides, the types decide, you decide.
"How Does Parallelism Work in JAX?": https://jax-ml.github.io/scaling-book/jax-stuff

    In[B_X, D_Y] * W_in[D_X, F_Y] * W_out[F_Y, D_X] -> Out[B_X, D_Y]

In auto mode a planner decides what is sent, and writes the listing. In explicit mode each result has a type, and lines
that need a choice are refused. In manual mode one writes one device's program. An MLP (the line above, for B tokens of
D numbers and F hidden ones) and an attention block run in all three, with equal values, gradients and collectives.
"""

# %% [markdown]
# ## Why three modes?
# Somebody has to decide where the collectives go. A compiler can choose all of them: the program stays the one-device
# program, and only a profile shows its cost. Types can choose: an operation whose result has one natural sharding takes
# it, and an operation that needs a choice is refused until it is made. Or one writes every collective, for one device's
# shards: this is the most work, and brings no surprises.
#
# The other chapters do the last, since they want to show what is sent. A prototype starts with the first, and then one
# takes over a layer by hand where the profile says that it pays.

# %%
import math
from collections import Counter

import torch
import torch.nn.functional as F
from torch.func import grad

from scaling import auto, explicit
from scaling.book.answers import Answer
from scaling.book.listing import difference
from scaling.book.page import Page
from scaling.mesh import AbstractMesh
from scaling.shard_map import all_gather, psum, psum_scatter, shard_map
from scaling.spec import ShardingError
from scaling.trace import trace

# The dims that must divide over --mesh, and their sizes.
FITS = ("In[B_X, D_Y]", "W_in[D_X, F_Y]", "W_Q[D_X, N_Y, H]"), {"B": 16, "D": 16, "F": 64, "N": 4, "H": 8}
page = Page(__doc__, mesh="X=2,Y=2", fits=FITS, device=True, seed=True)
mesh = AbstractMesh({"X": 4, "Y": 2})  # the book's

# %% [markdown]
# The table compares the three modes: which arrays the text of a program sees, whether it has types, and whether it has
# collectives.

# %%
page.title("Three modes")
page.table([
    ("auto", "the whole arrays", "no", "no", "scaling.auto.jit"),
    ("explicit", "the whole arrays", "yes", "no", "scaling.explicit"),
    ("manual", "one device's shards", "yes", "yes", "scaling.shard_map"),
], ["mode", "what a program sees", "types", "collectives", "here"])  # fmt: skip

# %% [markdown]
# ## Explicit mode
# In explicit mode an array carries its type, and every function knows the type of its result. So one sees how a value
# is sharded where it is made, and not in a profile. Communication happens only by `reshard`, or where the result's type
# is given as `out`. The types here have sizes in place of letters: 8_X is a dim of 8, split over X. The mesh is the
# book's first, X=4, Y=2.

# %%
page.title("Explicit: the type of a result")
x = explicit.array(torch.empty(8, 2), "[8_X, 2_Y]", mesh)
In = explicit.array(torch.empty(8, 2048, dtype=torch.bfloat16), "[8_X, 2048_Y]", mesh)
W = explicit.array(torch.empty(2048, 8192, dtype=torch.bfloat16), "[2048_Y, 8192]", mesh)
Out = torch.einsum("bd,df->bf", In * In, W)
texts = ["x", "x * 2", "x.mT", "x.sum(0)", "x.reshape(4, 2, 2)", 'torch.einsum("bd,df->bf", In * In, W)',
         'explicit.reshard(Out, "[8_X, 8192_Y]")']  # fmt: skip
page.table([(text, eval(text).type) for text in texts], ["expression", "its type"])

# %% [markdown]
# JAX refuses the product in the table, because its result could be made by an AllReduce or a ReduceScatter. Here the
# type `{U_Y}` says that the sum over Y is still to be taken, and the choice is a line of its own, the last in the
# table. An expression without any legal type is refused, with the cheapest line that helps. (The cases are Part 3's. In
# case 2 the contracted dim is split in one operand alone. In case 4 both operands have another dim over one axis.)

# %%
REFUSED = {
    "a function of a sum": lambda: Out.exp(),
    "one operand split (case 2)": lambda: explicit.reshard(In, "[8_X, 2048]") @ W,
    "two dims over one axis (case 4)": lambda: In @ In.mT,
    "a reshape that cuts a block": lambda: In.reshape(2, 4, 2048),
}
for what, call in REFUSED.items():
    try:
        page.check(f"{what} is refused", call() is None)
    except ShardingError as error:
        page.say(f"\n{what}:\n{error}")
        page.check(f"{what} is refused with a fix", "fix: reshard" in str(error))

# %% [markdown]
# ## Auto mode
# In auto mode one types the inputs and outputs, and the planner chooses all types in between. It compares the layouts
# of every value, and takes those that send the fewest bytes. The listings below are its choices: the same product ends
# with an AllReduce or a ReduceScatter, as the type of its result asks. To overrule it, one gives a value inside the
# program a type by `explicit.reshard`, which is JAX's `with_sharding_constraint`. The last rows compare both modes'
# types, shapes and collectives with those that the book prints.


# %%
def matmul_square(In, W):
    return torch.einsum("bd,df->bf", In * In, W)


def two_matmuls(x, W_in, W_out):
    hidden = explicit.reshard(torch.einsum("bd,df->bf", x, W_in), "hidden[B_X, F_Y]")
    return torch.einsum("bf,df->bd", hidden, W_out)


def meta(*shape):
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def as_jax(x):
    """Return a type as JAX prints it."""
    return x.type.replace("_", "@").replace(", ", ",")


page.title("Auto: the same product, by the type of its result")
lowered = {}
for out in ("Out[B_X, F]", "Out[B_X, F_Y]", "Out[B, F]"):
    lowered[out] = auto.jit(matmul_square, mesh, ("In[B_X, D_Y]", "W[D_Y, F]"), out).lower(
        meta(*In.shape), meta(*W.shape)
    )
    page.say(f"\n{lowered[out].listing}\n   sends {lowered[out].wire_bytes:,.0f} bytes a device")
types = ("x[B_X, D]", "W_in[D, F]", "W_out[D, F]")
tickled = auto.jit(two_matmuls, mesh, types, "Out[B_X, D]").lower(meta(8, 64), meta(64, 256), meta(64, 256))
page.say(f"\nwith the hidden array's type asked for:\n{tickled.listing}")
page.answers([
    Answer("explicit: jax.typeof(x)", "float32[8@X,2@Y]", as_jax(x)),
    Answer("explicit: jax.typeof(x * 2)", "float32[8@X,2@Y]", as_jax(x * 2)),
    Answer("explicit: jax.typeof(In)", "bfloat16[8@X,2048@Y]", as_jax(In)),
    Answer("explicit: the product, out_sharding P('X', 'Y')", "bfloat16[8@X,8192@Y]",
           as_jax(explicit.einsum("bd,df->bf", In * In, W, out="[8_X, 8192_Y]"))),
    Answer("auto: one device's In", "[2, 1024]", str([*In.local.shape])),
    Answer("auto: one device's Out", "[2, 8192]", str([*Out.local.shape])),
    Answer("auto: what reduces Out[B_X, F]", "AllReduce", lowered["Out[B_X, F]"].steps[0].op),
    Answer("explicit: what reduces Out[B_X, F_Y]", "ReduceScatter", lowered["Out[B_X, F_Y]"].steps[0].op),
])  # fmt: skip

# %% [markdown]
# ## Two blocks in three modes
# The text of auto mode is that of one device. Explicit mode adds the types, and manual mode the collectives. The book's
# examples of manual mode are in 10_shard_map.py.


# %%
def mlp(In, W_in, W_out):
    Tmp = F.gelu(torch.einsum("bd,df->bf", In, W_in))
    return torch.einsum("bf,fd->bd", Tmp, W_out)


def mlp_explicit(In, W_in, W_out):
    In = explicit.reshard(In, "In[B_X, D]")
    W_in = explicit.reshard(W_in, "W_in[D, F_Y]")
    Tmp = F.gelu(torch.einsum("bd,df->bf", In, W_in))
    W_out = explicit.reshard(W_out, "W_out[F_Y, D]")
    return explicit.reshard(torch.einsum("bf,fd->bd", Tmp, W_out), "Out[B_X, D_Y]")


def mlp_manual(In, W_in, W_out):
    In = all_gather(In, "Y", axis=1, tiled=True)
    W_in = all_gather(W_in, "X", axis=0, tiled=True)
    Tmp = F.gelu(torch.einsum("bd,df->bf", In, W_in))
    W_out = all_gather(W_out, "X", axis=1, tiled=True)
    return psum_scatter(torch.einsum("bf,fd->bd", Tmp, W_out), "Y", scatter_dimension=1, tiled=True)


# %% [markdown]
# Attention splits its heads over Y. Explicit and manual mode use the text of auto mode in between.


# %%
def attention(x, W_Q, W_K, W_V, W_O):
    Q, K, V = (torch.einsum("btd,dnh->btnh", x, W) for W in (W_Q, W_K, W_V))
    P = torch.softmax(torch.einsum("btnh,bsnh->bnts", Q, K) / Q.shape[-1] ** 0.5, -1)
    return torch.einsum("btnh,nhd->btd", torch.einsum("bnts,bsnh->btnh", P, V), W_O)


def attention_explicit(x, W_Q, W_K, W_V, W_O):
    x = explicit.reshard(x, "x[B_X, T, D]")
    W_Q, W_K, W_V = (explicit.reshard(W, "W[D, N_Y, H]") for W in (W_Q, W_K, W_V))
    Out = attention(x, W_Q, W_K, W_V, explicit.reshard(W_O, "W_O[N_Y, H, D]"))
    return explicit.reshard(Out, "Out[B_X, T, D_Y]")


def attention_manual(x, W_Q, W_K, W_V, W_O):
    x = all_gather(x, "Y", axis=2, tiled=True)
    W_Q, W_K, W_V = (all_gather(W, "X", axis=0, tiled=True) for W in (W_Q, W_K, W_V))
    Out = attention(x, W_Q, W_K, W_V, all_gather(W_O, "X", axis=2, tiled=True))
    return psum_scatter(Out, "Y", scatter_dimension=2, tiled=True)


BLOCKS = {  # the texts, the types of inputs and output, and the shapes
    "MLP": (
        (mlp, mlp_explicit, mlp_manual), ("In[B_X, D_Y]", "W_in[D_X, F_Y]", "W_out[F_Y, D_X]"), "Out[B_X, D_Y]",
        ((64, 16), (16, 64), (64, 16)),
    ),
    "attention": (
        (attention, attention_explicit, attention_manual),
        ("x[B_X, T, D_Y]", "W_Q[D_X, N_Y, H]", "W_K[D_X, N_Y, H]", "W_V[D_X, N_Y, H]", "W_O[N_Y, H, D_X]"),
        "Out[B_X, T, D_Y]", ((16, 4, 16), *((16, 4, 8),) * 3, (4, 8, 16)),
    ),
}  # fmt: skip

# %% [markdown]
# Values and gradients are compared with one device's. The last tables of each block count what each mode sent in the
# forward pass and in both passes, from the shards of its arguments to the shards of its gradients. `shard_map` returns
# whole arrays and has to send something for that, which the others do not. So two programs that only return whole
# arrays are counted as well, and subtracted. Single numbers, such as the loss, are not counted.


# %%
def moved(log) -> Counter:
    """Count how often this rank sent each (collective over axes, bytes) in a trace."""
    events = [event for event in log.collectives() if event.wire_bytes and event.nbytes > 8]
    return Counter((event.op + "_" + "".join(event.axes), event.wire_bytes) for event in events)


def in_explicit(text, types, out, whole, mesh):
    """Return (Out, gradients, the collectives of the forward and of both passes) of a function of arrays."""
    arrays = [explicit.array(x, type, mesh) for x, type in zip(whole, types, strict=True)]
    with trace() as forward:
        Out = text(*arrays)
    with trace() as both:
        grads = explicit.grad(lambda arrays: text(*arrays).square().sum())(arrays)
    return Out.whole(), [g.whole() for g in grads], moved(forward), moved(both)


def in_manual(text, types, out, whole, mesh):
    def loss(*shards):
        return psum(text(*shards).square().sum(), ("X", "Y"))

    def listed(fn, *args):
        with trace() as log:
            result = fn(*args)
        return result, moved(log)

    Out, forward = listed(shard_map(text, mesh, types, out), *whole)
    forward -= listed(shard_map(lambda x: x, mesh, (out,), out), Out)[1]
    total = grad(lambda whole: shard_map(loss, mesh, types, "[]")(*whole))
    sums = grad(lambda whole: shard_map(sum_of_all, mesh, types, "[]")(*whole))
    grads, both = listed(total, whole)
    return Out, grads, forward, both - listed(sums, whole)[1]


def sum_of_all(*shards):
    """Return a number whose gradient sends nothing but the gradients of the arguments."""
    return psum(sum(x.sum() for x in shards), ("X", "Y"))


# %% [markdown]
# Each block runs in all three modes, from the same arrays.


# %%
def three_modes(mesh, seed):
    """Return {block: rows of (mode, differences of values and gradients, what this rank sent)}."""
    found = {}
    for name, (texts, types, out, shapes) in BLOCKS.items():
        rng = torch.Generator().manual_seed(seed)
        whole = [(torch.randn(s, generator=rng, dtype=torch.float64) / 4).to(mesh.device) for s in shapes]
        Out, grads = texts[0](*whole), grad(lambda whole, f=texts[0]: f(*whole).square().sum())(whole)
        program = auto.jit(texts[0], mesh, types, out)
        modes = (("auto", in_explicit, program), ("explicit", in_explicit, texts[1]), ("manual", in_manual, texts[2]))
        rows = []
        for mode, run, text in modes:
            got, got_grads, *lists = run(text, types, out, whole, mesh)
            rows.append((mode, difference(got, Out, mesh), difference(got_grads, grads, mesh), *lists))
        found[name] = rows, program.lower(*whole).listing
    return found


ranks = math.prod(page.args.mesh.values())
for name, (rows, listing) in (page.on_ranks(three_modes, page.args.seed) or {}).items():
    page.title(f"{name}, in three modes")
    page.say(f"the listing of auto mode:\n{listing}\n")
    page.equal([(f"{mode}: {what}", off, 1e-12) for mode, *offs, _, _ in rows
                for what, off in zip(("Out", "gradients"), offs, strict=True)])  # fmt: skip
    for number, passes in ((3, "forward"), (4, "both passes")):
        lists = [row[number] for row in rows]
        same = page.check(
            f"{name}: equal lists, {passes}", all(found == lists[1] for found in lists) and any(lists) == (ranks > 1)
        )
        lines = sorted(set().union(*lists))
        page.say()
        page.table(
            [(*line, *(found[line] for found in lists)) for line in lines],
            [f"{passes}, equal: {same}", "bytes", "auto", "explicit", "manual"],
        )
page.end()

# %% [markdown]
# ## Three things to try
# 1. Edit: replace `hidden[B_X, F_Y]` by `hidden[B_X, F]`. Which transfer is saved?
#    Answer: The AllReduce over Y, and both slices: three lines are left. Each device along Y now computes the whole
#    hidden array, so the FLOPs are Y times as many.
# 2. Question: how many bytes would each device send to make the product whole on all of them? Evaluate
#    `lowered["Out[B, F]"].wire_bytes`.
#    Answer: 131,072: 16,384 in a ReduceScatter over Y, and 114,688 in an AllGather over X and Y.
# 3. Flag: run with `--mesh X=4,Y=1`. Which lines are left?
#    Answer: AllGather_X of the weights in the forward pass, and with it ReduceScatter_X of their gradients in the
#    backward. No line over Y is left, because each device has whole activations.
