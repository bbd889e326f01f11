"""Random calls, right and wrong, held against what their types mean: no wrong number without an error.

Each case draws a collective or a product, a line that is legal or not, operands of any shape, dtype,
device and memory layout, buffers that fit or not or overlap, options, and a mode: under a transform of torch.func,
autograd, a tensor mode, autocast. All ranks draw the same case. It ends well if the call raises a ShardingError or a
ValueError, or if

- the result is what this rank holds by the type (computed here from what all ranks contribute), in the operand's dtype;
- the operands, and the memory around a buffer, are as they were; the result shares no memory with an operand;
- derivatives are the transpose: <w, f(x)> = <f'(w), x>, summed over the ranks.

What a transform raises is loud as well, and counted by itself. A test of the suite runs some hundred cases, and
benchmarks/gpu.py runs collectives on GPUs.
"""

from collections import Counter
from contextlib import suppress
from itertools import chain

import torch
from misuse.entries import ODD, Draw, tried, typed
from misuse.hold import Case, contributions, describe, expected, held, is_legal, spoiled

from scaling import collectives as c
from scaling.algebra.rules import CALLS
from scaling.spec import ShardingError, Spec

KINDS = [*CALLS, "ppermute", "unshard", "reshard"]
REDUCING = ("reduce_scatter", "all_reduce", "reduce")
ADDING = (*REDUCING, "broadcast", "unshard", "reshard")
TAKES = dict.fromkeys(("all_gather", "gather", "all_to_all"), "axes")  # what a type has that the kind can change
TAKES |= dict.fromkeys(("reduce_scatter", "all_reduce", "reduce", "scatter", "broadcast"), "unreduced")


def moved(draw: Draw, before: Spec) -> Spec:
    """The type with some axes in other places: another dim, among what is unreduced, or none."""
    free = [axis for axis in draw.mesh.sizes if axis not in before.axes + before.unreduced]
    places = [list(axes) for _, axes in before.dims] + [list(before.unreduced), free]
    for axis in draw.sample([*draw.mesh.sizes], len(draw.mesh.sizes)):
        if draw.maybe(0.5):
            next(place for place in places if axis in place).remove(axis)
            draw.choice(places).append(axis)
    return typed(zip(before.dim_names, places, strict=False), places[-2])


def another(draw: Draw, kind: str, before: Spec) -> Spec:
    """The result's type, of a line that is mostly legal."""
    if kind in ("unshard", "reshard"):
        return typed((dim, axes if kind == "reshard" else ()) for dim, axes in moved(draw, before).dims)
    for _ in range(60):
        after = moved(draw, before)
        if is_legal(kind, f"{before} -> {after}", before, after) or draw.maybe(0.01):
            break
    return after


def fitting(draw: Draw, kind: str) -> tuple[Spec, list[int]]:
    """A type, mostly one that the kind can change, and the shape of its shards."""
    while True:
        before, local = draw.spec(draw.randrange(4))
        if kind not in TAKES or getattr(before, TAKES[kind]) or draw.maybe(0.2):
            return before, local


def line_of(draw: Draw, kind: str, before: Spec) -> tuple[Spec, str, list]:
    """(the result's type, the line, what follows the mesh)."""
    if kind == "ppermute":
        axes = draw.sample(list(draw.mesh.sizes), draw.randrange(1, len(draw.mesh.sizes) + 1))
        n = draw.mesh.size(axes)
        pairs = list(zip(draw.sample(range(n), n), draw.sample(range(n), n), strict=True))[: draw.randrange(n + 1)]
        return before, str(before), [axes[0] if len(axes) == 1 else tuple(axes), pairs]
    after = before if kind == "reduce" else another(draw, kind, before)
    return after, str(before) if kind == "unshard" else f"{before} -> {after}", []


def drawn(draw: Draw, kind: str) -> tuple[Case, Spec, Spec, str, list]:
    """(a call of a collective, the types before and after, the line, what follows the mesh)."""
    mesh = draw.mesh
    before, local = fitting(draw, kind)
    dtype = draw.choice(draw.dtypes)
    by = draw.choice(["sum", "sum", "mean", "max", "min"]) if kind in REDUCING else "sum"
    root = draw.randrange(-1, 5) if draw.maybe(0.3) else 0
    parts = contributions(draw, before, local, dtype)
    after, line, positional = line_of(draw, kind, before)
    case = Case(draw, draw.layout(held(parts, before, before, mesh)))
    case.may_refuse = root != 0 or not is_legal(kind, line, before, after)
    if kind in ("broadcast", "reduce", "scatter", "gather"):
        case.options["root"] = root
    if by != "sum":
        case.options["op"] = by
    wholes = [size * mesh.size(axes) for size, (_, axes) in zip(local, before.dims, strict=True)]
    if any(dim.isdigit() and int(dim) != whole for (dim, _), whole in zip(before.dims, wholes, strict=True)):
        case.wrong.append("a number is another")
    adds = kind in ADDING and (set(before.unreduced) - set(after.unreduced) or kind == "reduce")
    if adds and dtype in ODD and not (dtype.is_complex and by in ("sum", "mean")):
        case.wrong.append("no such sum")
    if by == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        case.wrong.append("a mean of whole numbers")
    with suppress(ShardingError, RuntimeError, IndexError):  # of types that do not fit each other nothing is to be had
        case.wanted = expected(kind, parts, before, after, mesh, by, root, *positional)
    return case, before, after, line, positional


def collective(draw: Draw, kinds=KINDS) -> str:
    """A case of a collective; the outcome in a word. Raises Wrong."""
    kind = draw.choice(kinds)
    case, _, _, line, positional = drawn(draw, kind)
    dtype = case.x.dtype
    if draw.maybe(0.12):
        case.x, how = spoiled(draw, case.x)
        case.wrong += [how] if how else []
    if kind in ("all_gather", "reduce_scatter") and draw.maybe(0.4) and isinstance(case.x, torch.Tensor):
        case.out((2,) if case.wanted is None else case.wanted.shape, dtype)
    if kind == "all_reduce" and draw.maybe(0.4):
        case.options["donate"] = True
        case.may_refuse |= isinstance(case.x, torch.Tensor) and (case.x.is_neg() or case.x.is_conj())
    if kind not in ("shard", "unshard", "reshard") and draw.maybe(0.3):
        case.options["async_op"] = True
    if kind != "ppermute" and draw.maybe(0.03):
        positional = [draw.choice([True, "mean", 1, None])]
        case.wrong.append("by position")

    def run(x):
        return c.wait(getattr(c, kind)(line, x, draw.mesh, *positional, **case.options))

    return case.hold(run, f"{kind} {line!r} {positional} of {dtype}")


def einsum(draw: Draw) -> str:
    """A case of einsum: of one operand or two, by a line whose dims agree or not."""
    dims, sizes = draw.sample("IJKL", 4), {dim: draw.choice([0, 1, 2, 3, 5]) for dim in "IJKL"}
    of = [dims[: draw.randrange(1, 4)]] + ([] if draw.maybe(0.2) else [draw.sample(dims, draw.randrange(1, 4))])
    every = list(dict.fromkeys(chain(*of)))
    result = draw.sample(every, draw.randrange(len(every) + 1))
    dtype = draw.choice([torch.float64, torch.float32, torch.int64, torch.int32])
    names, wrong, alone = {dim: dim for dim in every}, [], len(of) == 1
    if draw.maybe(0.15):
        dim, more = draw.choice(every), draw.choice([0, 1])
        names[dim] = str(sizes[dim] + more)
        wrong += ["a number is another"] * more
    texts = [f"[{', '.join(names[dim] for dim in dims)}]" for dims in (*of, result)]
    line = " * ".join(map("{}{}".format, "AB", texts[:-1])) + f" -> C{texts[-1]}"
    xs = [draw.layout(draw.whole_numbers(4, *(sizes[dim] for dim in each)).to(dtype)) for each in of]
    letters = ",".join(map("".join, of)) + "->" + "".join(result)
    wanted = torch.einsum(letters, *(x.double().resolve_neg() for x in xs)).to(dtype)
    may_refuse = False
    if draw.maybe(0.2):
        which = draw.randrange(len(xs))
        xs[which], how = spoiled(draw, xs[which])
        if how == "elsewhere" and alone:  # shapes alone are multiplied without a mesh
            wanted, may_refuse = wanted.to("meta"), True
        else:
            wrong += [how] if how not in ("", "sparse") else []
            may_refuse = how == "sparse"
    common = [] if alone else [dim for dim in of[0] if dim in of[1]]
    if common and not wrong and draw.maybe(0.1):
        i, meeting = draw.randrange(2), draw.choice(common)
        xs[i] = torch.zeros([sizes[dim] + (dim == meeting) for dim in of[i]], dtype=dtype)
        wrong.append("sizes that do not meet")
    case = Case(draw, xs[0], wanted, wrong, may_refuse)
    if draw.maybe(0.4) and not wanted.is_meta:
        how = case.out(wanted.shape, dtype)
        if draw.maybe(0.4) and how in ("fits", "by columns") and not case.wrong:
            case.options["add"], case.wanted = True, wanted + 1
    more = [None] * 2 if draw.maybe(0.05) else []
    case.wrong += ["by position"] if more else []

    def run(x):
        return c.einsum(line, x, *xs[1:], *more, **case.options)

    return case.hold(run, f"einsum {line!r} {[describe(x) for x in xs]} of {dtype}", linear=False)


def run(mesh, cases: int, seed: int) -> tuple[Counter, list[str]]:
    """(how often each outcome came, what was wrong) of this rank's cases, which are the same on every rank."""

    def case(number: int) -> str:
        draw = Draw.on(mesh, "", f"{seed} {number}")
        make = draw.choice([collective, collective, einsum])
        return f"{make.__name__}: {make(draw)}"

    return tried(case, cases)
