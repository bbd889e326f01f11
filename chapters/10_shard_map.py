# %% [markdown]
"""Part 10, "Manual sharding mode via shard_map": a program for one device, its collectives written by hand.
https://jax-ml.github.io/scaling-book/jax-stuff

    shard_map(fn, mesh, in_specs=("A[B_X, D_Y]", "W[D, F_Y]"), out_specs="Out[B_X, F_Y]")

`fn` sees one device's shards and calls psum, ppermute, axis_index ... as JAX spells them. `shard_map` returns a
function from whole arrays to whole arrays. This chapter runs the book's two examples on ranks and in one process, shows
a value's type and how gradients follow from it, and which programs are refused.
"""

# %%
from functools import partial

import torch
from torch.func import grad, vjp, vmap

from scaling.book.arrays import drawn
from scaling.book.layout import beside
from scaling.book.listing import difference
from scaling.book.page import Page
from scaling.mesh import AbstractMesh
from scaling.shard_map import (
    all_gather,
    axis_index,
    axis_size,
    dynamic_slice_in_dim,
    pcast,
    pmean,
    ppermute,
    psum,
    pvary,
    shard_map,
    vma,
)
from scaling.show import svg
from scaling.show.frames import device_grids
from scaling.spec import ShardingError, parse
from scaling.spec.sizes import format_sizes
from scaling.trace import trace

SPECS = {"in_specs": ("A[B_X, D_Y]", "W[D, F_Y]"), "out_specs": "Out[B_X, F_Y]"}
# The dims that must divide over --mesh, and their sizes.
FITS = (*SPECS["in_specs"], SPECS["out_specs"]), {"B": 8, "D": 16, "F": 8}
page = Page(__doc__, mesh="X=2,Y=2", fits=FITS, seed=True)
EXACT = 1e-12

# %% [markdown]
# ## Why write for one device?
# With `jax.jit` a program sees whole arrays, and the compiler decides what is sent. Some programs are hard to write
# that way, such as "the first four numbers of each shard", and sometimes the compiler sends more than necessary. In a
# `shard_map` the code sees one device's shard as an ordinary array, and nothing is sent but what it asks for: `psum` is
# an AllReduce, `psum_scatter` a ReduceScatter, `ppermute` a CollectivePermute. The price is that one has to write all
# of it, and to say rightly what varies from device to device; the last section shows what is refused.
#
# The picture has the arrays of the second example below, on four devices. Each device's square is the whole array, and
# only the part with a number (in a notebook, with a colour) reaches the body of the function there. Copies bear the
# number of the first device that has them. The table has the shapes. The body does not know how large the whole is, nor
# which part it has, unless it asks for `axis_index`.

# %%
SQUARE, seen = {"X": 2, "Y": 2}, [parse(text) for text in SPECS["in_specs"]]
page.title("What the body sees of the whole, on each of four devices")
page.show(beside(device_grids(each, SQUARE) for each in seen), lambda: svg.types(seen, SQUARE))
page.say()
shapes = ([each.local_shape(FITS[1], mesh) for mesh in ({"X": 1, "Y": 1}, SQUARE)] for each in seen)
page.table([(str(each), *(str([*shape]) for shape in both)) for each, both in zip(seen, shapes, strict=True)],
           ["type", "outside", "in the body"])  # fmt: skip

# %% [markdown]
# ## The first example
# On a mesh of 2 by 4, each device has 64 of 512 numbers, takes its first four, and the devices compute their mean. The
# specs may be JAX's text or types: `P(('x', 'y'))` is `x[I_{x,y}]`. With `in_process=True` one process computes all
# shards, so that a laptop can have any mesh.

# %%
EIGHT = AbstractMesh({"x": 2, "y": 4})


@partial(shard_map, mesh=EIGHT, in_specs="P(('x', 'y'))", out_specs="P()", in_process=True)
def slice_and_average(x):
    assert x.shape == (512 // 8,)
    return pmean(x[:4], axis_name=("x", "y"))


numbers = torch.arange(512.0, dtype=torch.float64)
found = slice_and_average(numbers)
page.title("slice_and_average of 0 ... 511")
page.say(f"{found.tolist()}: the mean of x[:4], x[64:68], x[128:132] and so on")
page.check("slice_and_average", torch.equal(found, numbers.view(8, 64)[:, :4].mean(0)))

# %% [markdown]
# ## The second example: a collective matmul
# This program computes A[B_X, D_Y] * W[D, F_Y] -> Out[B_X, F_Y] without an AllGather, for which the product would have
# to wait. Each device begins with its own columns of A and the matching rows of W. Then it receives the next columns
# from its right neighbour; they can travel while it multiplies. `axis_index` differs by device, so Python cannot branch
# on it; it is a tensor, at which a slice may start.


# %%
def collective_matmul(lhs, rhs):
    size, idx, chunk = axis_size("Y"), axis_index("Y"), lhs.shape[1]
    accum = 0
    for i in range(size):
        update = lhs @ dynamic_slice_in_dim(rhs, (idx + i) % size * chunk, chunk)
        if i < size - 1:  # a circular shift to the left
            lhs = ppermute(lhs, axis_name="Y", perm=[(j, (j - 1) % size) for j in range(size)])
        accum = accum + update
    return accum


def gathered_first(lhs, rhs):
    return all_gather(lhs, "Y", axis=1, tiled=True) @ rhs


A, W, dOut = drawn([*FITS[0]], FITS[1], page.args.seed)
dense, pull_dense = vjp(torch.matmul, A, W)
wanted = {"Out": dense, **dict(zip(("dA", "dW"), pull_dense(dOut), strict=True))}


def runs(mesh, in_process=False) -> tuple[dict[str, float], dict[str, list[str]]]:
    """Return differences of both programs from one device's, and the collectives of each, forward and backward."""
    differences, collectives = {}, {}
    for name, program in (("collective matmul", collective_matmul), ("AllGather first", gathered_first)):
        with trace() as log:
            out, pull = vjp(shard_map(program, mesh, **SPECS, in_process=in_process), A, W)
            got = {"Out": out, **dict(zip(("dA", "dW"), pull(dOut), strict=True))}
        real_mesh = None if in_process else mesh
        differences |= {f"{name}: {key}": difference(x, wanted[key], real_mesh) for key, x in got.items()}
        collectives[name] = [f"{event.op} over {''.join(event.axes)}" for event in log.events]
    return differences, collectives


page.title(f"A[8, 16] W[16, 8] on the ranks of {format_sizes(page.args.mesh)}")
on_ranks, sent = page.on_ranks(runs)
page.equal([(name, off, EXACT) for name, off in on_ranks.items()])

# %% [markdown]
# ## The same in one process
# The same code runs in one process. Each mesh axis is a level of `torch.func.vmap`, over one device on a rank, and over
# all devices in one process. So the lists of collectives are equal, too. In the list, forward and then backward, only
# the CollectivePermutes are the program's. The others are shard_map's own. It splits whole arrays (Slice) at the
# beginning of each pass, and joins them (AllGather) at its end. In the backward pass it sums dW over X (AllReduce),
# because all devices along X have the same W.

# %%
here, sent_here = runs(AbstractMesh(page.args.mesh), in_process=True)
page.title("All shards in one process")
page.equal([(name, off, EXACT) for name, off in here.items()])
page.say(f"\ncollective matmul, all collectives: {', '.join(sent['collective matmul'])}")
page.check("ranks and one process have the same collectives", sent == sent_here)

# %% [markdown]
# ## How gradients follow from types
# A value *varies* over an axis, or it is *invariant*: the same on all devices along it. `vma(x)` (varying mesh axes)
# names the axes over which x varies. In JAX a gradient has the type of its value. So W below, which is the same on
# every device of X, has a gradient that is the same everywhere: the sum over X, although no psum is written. This is
# because W first becomes varying (`pvary`) where it is multiplied with x, which varies over X, and the transpose of
# `pvary` is a psum.
#
# In the notation of the other chapters the sum is a line, `all_reduce("dW[D] {U_X} -> dW[D]", ...)`, because one may
# want to delay it or to write a ReduceScatter. JAX has a type for this, too. A *reduced* value is the same on all
# devices, and its gradient is *unreduced*, `{U_X}`: then the caller writes the psum, or a psum_scatter instead.

# %%
FOUR = AbstractMesh({"X": 4, "Y": 2})
x, w = drawn(["x[B, D]", "W[D]"], {"B": 8, "D": 6}, page.args.seed)
types: dict[str, set[str]] = {}


@partial(shard_map, mesh=FOUR, in_specs=("W[D]", "x[B_X, D]"), out_specs="dW[D]", in_process=True)
def gradient(w, x):
    by_law = grad(lambda w: (x @ w).sin().sum())(w)
    own = grad(lambda w: (x @ w).sin().sum())(pvary(w, "X"))  # each device's own, not summed
    types.update({"x": vma(x), "w": vma(w), "x @ w": vma(x @ w), "psum(x, X)": vma(psum(x, "X"))})
    types.update({"all_gather(x, X)": vma(all_gather(x, "X")), "axis_index(Y)": vma(axis_index("Y"))})
    types.update({"dW": vma(by_law), "dW of pvary(w)": vma(own)})
    return by_law


@partial(shard_map, mesh=FOUR, in_specs=("W[D]", "x[B_X, D]"), out_specs="dW[D]", in_process=True)
def by_hand(w, x):
    terms = grad(lambda w: (x @ w).sin().sum())(pcast(w, "X", to="reduced"))  # {U_X}
    return psum(terms, "X")


one = grad(lambda w: (x @ w).sin().sum())
found = gradient(w, x)
page.title("Over which axes values vary, on a mesh X=4, Y=2")
page.table([(name, *(sorted(axes) or ["none: invariant"])) for name, axes in types.items()], ["value", "varies over"])
page.say()
page.equal([
    ("the gradient, summed by its type", difference(found, one(w)), EXACT),
    ("the same with its psum written out", difference(by_hand(w, x), one(w)), EXACT),
    ("the gradient of that, from outside", difference(grad(lambda w: gradient(w, x).square().sum())(w),
                                                 grad(lambda w: one(w).square().sum())(w)), EXACT),
    ("a batch of weights by vmap", difference(vmap(gradient, (0, None))(torch.stack([w, -w]), x)[1], one(-w)), EXACT),
])  # fmt: skip
page.check("the gradient is invariant", not types["dW"] and types["dW of pvary(w)"] == {"X"})

# %% [markdown]
# ## Which programs are refused?
# Like JAX's `check_vma`, shard_map refuses a program before it returns anything: a result whose out_spec claims that
# all devices hold the same, where they may not; a sum over two axes, of which the value varies along one alone; a
# device that branches on its own value. The second example is surprising. The result of all_gather is the same
# everywhere, but it is typed as varying, since its transpose is a psum_scatter.

# %%
REFUSED = {
    "each device's rows as if they were all's": lambda x: x,
    "gathered, and typed as varying": lambda x: all_gather(x, "X", tiled=True),
    "a sum over X, and over Y where nothing varies": lambda x: psum(x, ("X", "Y")),
    "Python decides by a value that varies": lambda x: x if x.sum() > 0 else -x,
}
page.title("Refused")
for what, program in REFUSED.items():
    try:
        shard_map(program, FOUR, "x[B_X, D]", "x[B, D]", in_process=True)(x)
        refused = ""
    except ShardingError as error:
        refused = str(error)
    page.say(f"{what}:\n    " + refused.replace("\n", "\n    "))
    page.check(f"refused: {what}", bool(refused))
page.end()

# %% [markdown]
# ## Three things to try
# 1. Edit: replace `psum(x, ("X", "Y"))` by `psum(x, "X")`. Why is it not refused now, and what does it return?
#    Answer: Because x varies over X alone, a sum over X is over values of one type. It returns the sum of all devices'
#    shards, which is invariant over X. So nothing is refused, and the chapter ends with the word FAILED, because
#    it expects a refusal.
# 2. Question: how often does the collective matmul send to its neighbour, forward and backward? Evaluate
#    `sent["collective matmul"].count("CollectivePermute over Y")`.
#    Answer: Twice: one hop forward and one backward, as Y = 2.
# 3. Flag: run with `--mesh X=1,Y=4`. Which collectives become more, and which send nothing any more?
#    Answer: The CollectivePermutes over Y, six in place of two, one for each hop in both passes, and the AllReduces
#    over X, four in place of two. The collectives over X stay in the list, but along an axis of size 1 they send
#    nothing.
