# %% [markdown]
"""Part 9, profiling: from a program to the machine, XLA's operations, and a profile line by line, ours and the book's.
"How to Profile TPU Programs": https://jax-ml.github.io/scaling-book/profiling

    Tmp[B_X, T, F_Y] = x[B_X, T, D] * W_in[D, F_Y]        95.6 ms by formula on 8 TPU v2 cores, 96 in the book's profile

This chapter follows one program through the software stack, reads layouts and tiles, computes the book's example
profile by formula, predicts and measures the same block on ranks, and finds a slow rank. The worked problems are in
09_quiz.py.
"""

# %%
import math
import re
import time
from collections import Counter

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from scaling.book import hlo
from scaling.book.answers import Answer
from scaling.book.layout import beside, width
from scaling.book.page import Page
from scaling.collectives import all_gather, einsum, reduce_scatter
from scaling.common.console import integer
from scaling.common.torch_private import TorchDispatchMode, aot_graphs, inductor_code
from scaling.hardware import Chip, Measured, chip, load_chip
from scaling.measure import rates
from scaling.models.pointwise import act
from scaling.profile import profile
from scaling.show import bars, svg
from scaling.show.bars import Bar
from scaling.spec.sizes import format_sizes

page = Page(
    __doc__,
    mesh="X=1,Y=2",
    fits=(["x[D_Y]", "Q[N_Y]"], {"D": 256, "N": 8}),
    device=True,
    seed=True,
    chip=("", "a machine.toml of scaling.measure (default: measured here)"),
    compile=(0, "1: compile the program again, and print what the compiler writes", integer(0, 1)),
)
STEPS = 4 if page.small else 12
try:
    GIVEN = load_chip(page.args.chip) if page.args.chip else None
except ValueError as error:
    page.refuse(f"--chip {error}; fix: a file that python -m scaling.measure has written")

# %% [markdown]
# ## A program on its way to the machine
# A roofline says how long a line should take, and a profile how long it does. Where the two agree there is nothing to
# gain; where they don't, the profile says which line to look at. That is the method of this part. But a profile shows
# operations that nobody wrote, so it helps to know where they come from.
#
# The book's program multiplies float32 by bfloat16. JAX writes it as StableHLO, which the compiler XLA turns into HLO,
# then LLO and machine code: each of these languages is nearer to the machine. Torch has such stages, too: operations
# that run one at a time, a graph of them, two graphs for a forward and a backward pass, and code. Most operations that
# torch adds are layouts: `permute` and `view` change how a product sees its operands, and move nothing. A dispatch mode
# sees the operations one by one, `make_fx` and AOTAutograd make the graphs, and inductor writes the code.


# %%
eager: list[str] = []


class Dispatched(TorchDispatchMode):
    """Adds the names of the operations that run to `eager`."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        eager.append(function.__name__.partition(".")[0])
        return function(*args, **(kwargs or {}))


KINDS = dict.fromkeys(("view", "permute", "unsqueeze", "squeeze", "transpose"), "layout")
KINDS |= {"bmm": "product", "mm": "product", "placeholder": "input"}


def operation(node) -> str:
    return node.target.__name__.partition(".")[0] if node.op == "call_function" else node.op


def kinds(graph) -> list[tuple[str, int]]:
    """Return the number of inputs, products, changes of layout and pointwise operations."""
    return sorted(Counter(KINDS.get(operation(n), "pointwise") for n in graph.nodes if n.op != "output").items())


def listing(graph) -> str:
    """Return a graph as XLA writes its own, an operation a line: `%bmm = f32[1,16,128] bmm(%view, %view_1)`."""
    lines, short = [], {torch.float32: "f32", torch.bfloat16: "bf16"}
    for node in graph.nodes:
        operands = ", ".join(f"%{x.name}" if isinstance(x, torch.fx.Node) else str(x) for x in node.args)
        if node.op == "output":
            lines.append(f"return {', '.join(f'%{x.name}' for x in node.all_input_nodes)}")
        else:
            x, name = node.meta["val"], operation(node).replace("placeholder", "parameter")
            lines.append(f"%{node.name} = {short[x.dtype]}[{','.join(map(str, x.shape))}] {name}({operands})")
    return "\n".join(lines)


# %% [markdown]
# Inductor takes long, so the code below was written once; with `--compile 1` it is written again.


# %%
def multiply(x, y):
    return torch.einsum("bf,fd->db", x, y.to(x.dtype))


STORED = """# cpp_fused__to_copy_0
for(int64_t x0=static_cast<int64_t>(0L); x0<static_cast<int64_t>(4096L); x0+=static_cast<int64_t>(32L))
    auto tmp0 = at::vec::Vectorized<at::BFloat16>::loadu(in_ptr0 + static_cast<int64_t>(x0), static_cast<int64_t>(32));
    auto tmp1 = at::vec::convert<float,2,at::BFloat16,1>(tmp0);
# call
extern_kernels.bmm(reinterpret_tensor(buf0, (1, 16, 256), (0, 1, 16), 0),
    reinterpret_tensor(arg1_1, (1, 256, 128), (256, 1, 256), 0), out=buf1)"""

SHOWN = re.compile(r"^cpp_fused.* = |for\(|auto tmp|bmm\(")  # lines of a loop or a product
operands = torch.ones(128, 256), torch.ones(256, 16, dtype=torch.bfloat16)
with Dispatched():
    multiply(*operands)
graph = make_fx(multiply, tracing_mode="fake")(*operands).graph
page.title("1. Eager: what runs, in order")
page.say(" ".join(eager))
page.title("2. The same as a graph (make_fx)")
page.say(listing(graph))
found = dict(kinds(graph))
page.say("\nnodes: " + ", ".join(f"{n} {kind}" for kind, n in found.items()))
page.check("the graph has what eager ran", sum(found.values()) - found["input"] == len(eager))
if not page.small:
    page.title("3. A forward and a backward graph (AOTAutograd): the view that is saved goes from one to the other")
    both = aot_graphs(multiply, operands[0].clone().requires_grad_(), operands[1])
    for name, each in zip(("forward", "backward"), both, strict=True):
        page.say(f"{name}: " + ", ".join(f"{n} {kind}" for kind, n in kinds(each)))
        page.say(listing(each).splitlines()[-1])
page.title("4. Code (inductor): the conversion is a fused loop, the layouts are views, the product is a library's")
code = inductor_code(multiply, *operands).splitlines() if page.args.compile else ()
page.say("\n".join(filter(SHOWN.search, code)) or STORED)
page.answers([
    Answer("FLOPs of the program: 2 x 128 x 256 x 16", "",
           2 * operands[0].numel() * operands[1].shape[1] / 1e6, "MFLOP", "one product"),
    Answer("Products: dots of the book's HLO, and ours", "1", found["product"], "", "with a convert and 2 inputs"),
])  # fmt: skip

# %% [markdown]
# ## How to read an XLA op
# An operation's text begins with the result's dtype and shape. Then come its layout, in braces, and the memory in which
# it is, S(0) or nothing for HBM and S(1) for VMEM. Then come the operands. A layout lists the dims from minor, whose
# neighbours are adjacent in memory, to major. T(8,128) says that the two minor dims are stored in tiles of 8 x 128, the
# size of a TPU's vector register, and padded to whole tiles; a second pair divides each tile again. Tiles matter in a
# profile because padding costs memory, and because XLA copies an array when two operations want different ones. The
# pictures show, for each element, its position in memory.

# %%
OP = (
    "%fusion.3 = bf16[32,32,4096]{2,1,0:T(8,128)(2,1)S(1)} fusion(bf16[32,32,8192]{2,1,0:T(8,128)(2,1)S(1)} "
    "%fusion.32), kind=kCustom, calls=%all-reduce-scatter.3"
)
fusion = hlo.operation(OP)
page.title("%fusion.3")
shown = [("result", fusion.result), *fusion.operands]
page.table([(name, str(x.shape), str(x.tiles), hlo.SPACES[x.space], x.nbytes) for name, x in shown],
           ["", "shape", "tiles", "in", "bytes"])  # fmt: skip
source = fusion.operands[0][1]
page.say(f"{dict(fusion.attributes)['calls']}: of {source.shape[-1]} columns, summed over 2 devices, each keeps half.")


def picture(text: str) -> str:
    """Return the position of each element in memory, counted in elements."""
    shape = hlo.parse_shape(text)
    rows, columns = shape.shape
    grid = ["  ".join(f"{shape.offset(i, j) // shape.itemsize:2}" for j in range(columns)) for i in range(rows)]
    return "\n".join([text, *grid])


page.say("\n" + beside([picture("f32[3,5]{1,0:T(2,2)}"), picture("bf16[4,8]{1,0:T(2,4)(2,1)}")], columns=width()))
small, big = hlo.parse_shape("f32[3,5]{1,0:T(2,2)}"), hlo.parse_shape("bf16[32,32,8192]{2,1,0:T(8,128)(2,1)S(1)}")
vector = hlo.parse_shape("bf16[4096]{0:T(1024)(128)(2,1)}")
page.answers([
    Answer("f32[3,5] in tiles of 2 x 2: rows in memory", "4", small.padded[0], "rows"),
    Answer("f32[3,5] in tiles of 2 x 2: columns in memory", "6", small.padded[1], "columns"),
    Answer("and it takes so many times the memory", "1.6", small.padded_bytes / small.nbytes, "times"),
    Answer("bf16[32,32,8192] in T(8,128)(2,1)", "", big.padded_bytes / big.nbytes, "times", "tiles fit: no padding"),
    Answer("bf16[4096] in T(1024)(128)(2,1): place of element 1", "", vector.offset(1), "bytes",
           "rows of 128 in pairs: next to element 0 is element 128"),
])  # fmt: skip

# %% [markdown]
# ## The example profile, by formula
# The book's example uses 4-way data and 2-way model parallelism on 8 cores of TPU v2. A profile shows one device's
# share, 8 sequences and 16,384 features. So the whole arrays, over 4 and over 2 devices, have B = 32 and F = 32,768. A
# sequence has T = 1,024 tokens, a token D = 8,192 numbers, and attention N = 32 heads of H = 256. The first rows are
# the largest line of the MLP and the ReduceScatter at its end. Both take what the formula says, so nothing is wrong
# with them. The rows after them answer the book's exercise on attention, and check its memory.

# %%
core, link = chip("v2").flops("bf16") / 2, chip("v2").bandwidth("ici", axes=1)
B, T, D, F, N, H = 32, 1024, 8192, 32768, 32, 256
ffw = 2 * B * T * D * F / (core * 8)
shard = hlo.parse_shape("bf16[8,1024,8192]")
page.title("The FFW block and attention on a TPU v2 4x2")
page.answers([
    Answer("W_in: 2 x 32 x 1024 x 8192 x 32768 FLOPs on 8 cores", "95.6", ffw * 1e3, "ms"),
    Answer("and as the book measured: share of the roofline", "", ffw / 96e-3, "", "96 ms in the profile"),
    Answer("tokens of each data-parallel shard", "8192", shard.shape[0] * shard.shape[1], "tokens"),
    Answer("ReduceScatter's array on each device", "128", shard.nbytes / 2**20, "MiB"),
    Answer("ReduceScatter over one link both ways", "1.1", shard.nbytes / link * 1e3, "ms"),
    Answer("and as measured: share of the roofline", "", shard.nbytes / link / 1.13e-3, "", "1.13 ms in the profile"),
    Answer("Exercise: W_Q[8192, 32, 256], heads over Y", "", 2 * B * T * D * N * H / (core * 8) * 1e3, "ms",
           "a quarter of W_in, since NH = D = F/4"),
    Answer("Exercise: scores and their sum, if no mask is used", "", 4 * B * T * T * N * H / (core * 8) * 1e3, "ms",
           "4BT^2NH, which is T/2D of W_Q, W_K, W_V and W_O together"),
    Answer("Memory: HBM left of 16 GB beside 7.5 GB of params", "8.5", (chip("v2").hbm_bytes - 7.5e9) / 1e9, "GB"),
])  # fmt: skip

# %% [markdown]
# ## The same block of ours, profiled
# Now the lines of the same block run on ranks, at the size of a laptop. They are predicted by this machine's own
# roofline, which consists of its FLOPs/s, its bytes/s, and the times of its collectives, all measured on the same ranks
# first. The profile has a row for each line, in milliseconds of a mean step. The time of a collective is `exposed`
# while nothing else runs, `hidden` while products run, and `waiting` until the last rank has come ("2.10 for 1" is 2.1
# ms of waiting for rank 1). `MB` is a product's operands and result, and V of a collective. `predicted` is the
# roofline's time, and `of roof` is predicted over measured. A line far below 100% deserves a look. On a machine that
# other programs use, every line may be far below it; and a product that has more of the machine to itself than when the
# roofline was measured is above it. The second table divides each rank's step into parts.

# %%
b, t, d, f, n, h = 2, 128, 256, 1024, 8, 32  # on each rank


def block(x, W, mesh):
    """x[B_X, T, D_Y] -> Q[B_X, T, N_Y, H], Out[B_X, T, D_Y]: attention's queries, and the MLP."""
    x = all_gather("x[B_X, T, D_Y] -> x[B_X, T, D]", x, mesh)
    Q = einsum("x[B_X, T, D] * W_Q[D, N_Y, H] -> Q[B_X, T, N_Y, H]", x, W["Q"])
    Tmp = einsum("x[B_X, T, D] * W_in[D, F_Y] -> Tmp[B_X, T, F_Y]", x, W["in"])
    Out = einsum("Tmp[B_X, T, F_Y] * W_out[F_Y, D] -> Out[B_X, T, D] {U_Y}", act(Tmp, "gelu"), W["out"])
    return Q, reduce_scatter("Out[B_X, T, D] {U_Y} -> Out[B_X, T, D_Y]", Out, mesh)


def arrays(mesh):
    """Return this rank's shards, random."""
    rng, Y = torch.Generator().manual_seed(page.args.seed + mesh.rank), mesh.sizes["Y"]
    shapes = {"x": (b, t, d // Y), "Q": (d, n // Y, h), "in": (d, f // Y), "out": (f // Y, d)}
    made = {name: torch.randn(shape, generator=rng).to(mesh.device) for name, shape in shapes.items()}
    return made.pop("x"), made


# %% [markdown]
# These lines measure the machine on the same ranks: products, pointwise operations between them, and collectives at
# three sizes.


# %%
def calibrated(mesh) -> Chip:
    """Return a chip with this machine's rates, measured on all ranks at once, and its collectives over Y."""
    repeats, Y, measured = (3 if page.small else 15), mesh.sizes["Y"], []
    shapes, volumes = (rates.SHAPES[:3], rates.VOLUMES[:5]) if page.small else (rates.SHAPES, rates.VOLUMES)
    calls = {
        "AllGather": (lambda V: torch.ones(V // (4 * Y)), lambda x: all_gather("x[D_Y] -> x[D]", x, mesh)),
        "ReduceScatter": (lambda V: torch.ones(V // 4), lambda x: reduce_scatter("x[D] {U_Y} -> x[D_Y]", x, mesh)),
    }
    for op, (make, call) in calls.items() if Y > 1 else ():
        points = []
        for V in (2**14, 2**19, 2**21):
            x = make(V)
            points.append((V, rates.timed(lambda x=x, call=call: call(x), mesh, repeats)))
        measured.append(Measured(op, Y, *rates.fit(points)))
    rate, _ = rates.matmuls(mesh, "fp32", repeats, shapes)
    _, memory = rates.fit(rates.bytewise(mesh, repeats, rates.between_matmuls, volumes))
    return Chip("here", "cpu", peaks=(("fp32", rate),), hbm_bw=memory, measured=tuple(measured))


# %% [markdown]
# To draw a step, each line becomes bars in the row of its rank.


# %% tags=["hide-input"]
def lanes(step: int, timelines) -> list[Bar]:
    """Return a step's bars: products (P), collectives (C), and the time in which a collective waits for a rank (w)."""
    steps, drawn = [timeline.steps[step] for timeline in timelines], []
    began = min(each.start for each in steps)
    for each in steps:
        row = f"rank {each.timeline.rank}"
        for run in each.runs:
            kind = "collective" if run.communicates else "product"
            drawn += [Bar(row, kind[0].upper(), start - began, end - began, kind) for start, end in run.held]
            if run.waiting:
                first = run.held[0][0] - began
                drawn.append(Bar(row, "w", first, first + run.waiting, "waits"))
    return drawn


# %% [markdown]
# First some steps are profiled. In five more the last rank comes 30 ms late, and the profile has to name it.


# %%
def run(mesh):
    """Return (the table, the steps' parts, their seconds by an outer clock, FLOPs, slow ranks, memory, bars)."""
    x, W = arrays(mesh)
    machine = GIVEN or calibrated(mesh)
    block(x, W, mesh)
    outside = []
    with profile() as p:
        for _ in range(STEPS):
            began = time.perf_counter()
            block(x, W, mesh)
            p.step()
            outside.append(time.perf_counter() - began)
    with profile(ops=False, memory=False) as late:
        for _ in range(5):
            if mesh.rank == mesh.size() - 1:
                time.sleep(0.03)
            block(x, W, mesh)
            late.step()
    flops = {line.run.after.split("[")[0]: line.flops for line in p.lines() if line.flops}
    memory = [(moment.line, moment.live, moment.peak) for moment in p.memory() if moment.line]
    drawn = lanes(-1, late.timelines)
    return p.table(machine, columns=width()), p.parts(mesh.rank), outside, flops, late.stragglers(), memory, drawn


table, parts, outside, flops, slow, memory, drawn = page.on_ranks(run)
Y = page.args.mesh["Y"]
page.title(f"A step of the block on {format_sizes(page.args.mesh)}, mean of {STEPS}")
page.say(table)
page.say("\npredicted: by the roofline, measured on all ranks at once; of roof: predicted over measured.")
wanted = {"Q": 2 * b * t * d * n * h / Y, "Tmp": 2 * b * t * d * f / Y, "Out": 2 * b * t * d * f / Y}
page.say()
page.same([(name, "2 x tokens x sizes / |Y|", value, flops[name]) for name, value in wanted.items()],
          ["FLOPs of a rank", "formula", "value", "counted"])  # fmt: skip
page.check("the parts add up to the step", all(math.isclose(part.total, part.step) for part in parts))
off = sorted(abs(part.total / seconds - 1) for part, seconds in zip(parts, outside, strict=True))
page.check("and to the step of a clock outside, within 2% where nothing else ran between", off[0] < 0.02)
page.say(f"\nthe parts' sum is {off[STEPS // 2]:.2%} off the step that a clock outside has")

# %% [markdown]
# ## Memory
# When a program runs out of memory, one asks which arrays were there at that moment. For each line of the block, the
# table has the bytes that are live after it, and the most until the next line. More than half of the peak are the two
# widest arrays, Tmp[B_X, T, F_Y] and its GELU, which is computed between the last two products.

# %%
page.title("Live tensors in the first step, without params and x")
page.table(memory, ["line", "bytes after", "most until the next"])

# %% [markdown]
# ## A slow rank
# The last rank sleeps 30 ms before the block. All others wait for it in the next collective. That collective looks
# slow, but nearly all of its time is waiting (w), and the sleeping rank itself has no collective then. The picture has
# a row for each rank, and time goes to the right.

# %%
page.title("The last step: P products, C collectives, w waiting for another rank")
colours = {"product": "#86aef0", "collective": "#f5a45d", "waits": "#d8d8d8"}
lines = bars.text(drawn, width() - 10, idle=" ", fill="")
page.show(lines, lambda: svg.time_lines([("the last step", drawn)], colours, "in s"))
page.title("Who is late, and where")
ranks = math.prod(page.args.mesh.values())
page.say("\n".join(map(str, slow)) or "No rank waits for another.")
if Y > 1:  # collectives are over Y
    slowest = max(slow, key=lambda each: each.seconds, default=None)  # a busy machine slows other ranks as well
    named = slowest is not None and (slowest.rank, slowest.inside) == (ranks - 1, False)
    page.check("the slow rank is named first, with its line", named)
page.end()

# %% [markdown]
# ## Three things to try
# 1. Edit: replace `if mesh.rank == mesh.size() - 1:` by `if mesh.rank == 0:`: the first rank is late then, and is
#    named; the check wants the last.
#    Answer: "rank 0 is 30.1 ms slow before x[B_X, T, D] = AllGather_Y(x[B_X, T, D_Y])", for which the other rank waits.
#    The check that wants the last rank says FAILED.
# 2. Question: how much memory does a float32 array of 3 x 129 take in tiles of 8 x 128? Evaluate
#    `hlo.parse_shape("f32[3,129]{1,0:T(8,128)}").padded_bytes`: 5.3 times its 1,548 bytes.
#    Answer: 8,192: the rows fill one tile, and the columns two, of 4,096 bytes each.
# 3. Flag: run with `--mesh Y=4`: products a half as long, collectives longer, and three ranks that wait for one. With
#    `python -m scaling.profile DIR chapters/05_dp.py` a chapter writes DIR/trace.json, for ui.perfetto.dev.
#    Answer: The page names rank 3 and the line before which it sleeps, and the others wait for it about 30 ms. A rank's
#    products have 8.4e6 and 3.4e7 FLOPs, half of those with two ranks.
