"""Random calls, right and wrong, held against what their types mean: no wrong number without an error.

    python tests/sweeps/fuzz.py calls [--cases 10000] [--seed 0] [--mesh X=2,Y=2]

Each case draws a collective, a product, or shards of a tree, a line that is legal or not, operands of any shape, dtype,
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

import torch
from misuse.draw import ODD, Draw, buffer, spoiled, typed
from misuse.entries import Entry, called, picked, tried
from misuse.hold import OP_OF, contributions, describe, expected, held, hold, is_legal

from scaling import collectives as c
from scaling import tree
from scaling.spec import ShardingError, Spec

KINDS = [*OP_OF, "ppermute", "unshard", "reshard"]
REDUCING = ("reduce_scatter", "all_reduce", "reduce")
ADDING = (*REDUCING, "broadcast", "unshard", "reshard")


def put(spec: Spec, i: int, axes) -> Spec:
    """The type with other axes on dim i."""
    return typed(((dim, axes if i == j else was) for j, (dim, was) in enumerate(spec.dims)), spec.unreduced)


def more(spec: Spec, i: int, axes) -> Spec:
    """The type with these axes behind those of dim i."""
    return put(spec, i, spec.dims[i][1] + tuple(axes))


def another(draw: Draw, kind: str, before: Spec) -> Spec:
    """The result's type, of a line that is mostly legal."""
    mesh, after, names = draw.mesh, before, [(dim, ()) for dim, _ in before.dims]
    i = draw.choice([i for i, (_, axes) in enumerate(before.dims) if axes] or [None])
    to = draw.choice([j for j in range(len(before.dims)) if j != i or kind != "all_to_all"] or [None])
    axes = before.dims[i][1] if i is not None else ()
    cut = draw.randrange(len(axes) or 1)
    if kind == "unshard":
        return typed(names)
    if kind in ("all_gather", "gather") and axes:
        after = put(before, i, axes[:cut])
        after = typed(after.dims, (*after.unreduced, *axes[cut:])) if kind == "gather" else after
    if kind in ("reduce_scatter", "scatter", "all_reduce", "broadcast"):
        taken = [axis for axis in before.unreduced if draw.maybe(0.7)] or list(before.unreduced)
        draw.shuffle(taken)
        after = typed(before.dims, {*before.unreduced} - {*taken})
        if kind in ("reduce_scatter", "scatter") and to is not None:
            after = more(after, to, taken)
    if kind == "all_to_all" and axes and to is not None:
        after = more(put(before, i, axes[:cut]), to, axes[cut:])
    if kind == "shard" and to is not None:
        free = [axis for axis in mesh.sizes if axis not in before.axes + before.unreduced]
        after = more(before, to, free[: draw.randrange(3)])
    if kind == "reshard" or draw.maybe(0.1):  # anything at all
        after = typed(names)
        for axis in draw.sample(list(mesh.sizes), len(mesh.sizes)):
            if draw.maybe(0.6) and before.dims:
                after = more(after, draw.randrange(len(before.dims)), (axis,))
            elif draw.maybe(0.2) and kind != "reshard":
                after = typed(after.dims, (*after.unreduced, axis))
    return after


def drawn_buffer(draw: Draw, shape, dtype, x, wrong: list[str]) -> tuple:
    """(out, the memory around it, whether it may be refused); why it must be is added to `wrong`."""
    out, memory, how = buffer(draw, shape, dtype, x)
    wrong += [f"out: {how}"] if how in ("shape", "dtype", "expanded", "meta", "numpy") else []
    return out, memory, how in ("operand", "leaf")


def fitting(draw: Draw, kind: str) -> tuple[Spec, list[int]]:
    """A type, mostly one that the kind can change, and the shape of its shards."""
    while True:
        before, local = draw.spec(draw.randrange(4))
        has = {"all_gather": before.axes, "gather": before.axes, "all_to_all": before.axes}
        has |= dict.fromkeys(("reduce_scatter", "all_reduce", "reduce", "scatter", "broadcast"), before.unreduced)
        if has.get(kind, True) or draw.maybe(0.2):
            return before, local


def collective(draw: Draw, kinds=KINDS) -> str:
    """A case of a collective; the outcome in a word. Raises Wrong."""
    mesh, kind = draw.mesh, draw.choice(kinds)
    before, local = fitting(draw, kind)
    dtype = draw.choice(draw.dtypes)
    by = draw.choice(["sum", "sum", "mean", "max", "min"]) if kind in REDUCING else "sum"
    root = draw.randrange(-1, 5) if draw.maybe(0.3) else 0
    parts = contributions(draw, before, local, dtype)
    x, after = draw.layout(held(parts, before, before, mesh)), another(draw, kind, before)
    options, positional, axes, pairs, wrong, line = {}, [], (), (), [], f"{before} -> {after}"
    if kind in ("broadcast", "reduce", "scatter", "gather"):
        options["root"] = root
    if kind in ("reduce", "ppermute"):
        after, line = before, f"{before} -> {before}" if kind == "reduce" else str(before)
    if kind == "unshard":
        line = str(before)
    if kind == "ppermute":
        axes = tuple(draw.sample(list(mesh.sizes), draw.randrange(1, len(mesh.sizes) + 1)))
        n = mesh.size(axes)
        pairs = tuple(zip(draw.sample(range(n), n), draw.sample(range(n), n), strict=True))[: draw.randrange(n + 1)]
        positional = [axes[0] if len(axes) == 1 else axes, pairs]
    if by != "sum":
        options["op"] = by
    wholes = [size * mesh.size(axes) for size, (_, axes) in zip(local, before.dims, strict=True)]
    if any(dim.isdigit() and int(dim) != whole for (dim, _), whole in zip(before.dims, wholes, strict=True)):
        wrong.append("a number is another")
    adds = kind in ADDING and (set(before.unreduced) - set(after.unreduced) or kind == "reduce")
    if adds and dtype in ODD and not (dtype.is_complex and by in ("sum", "mean")):
        wrong.append("no such sum")
    if by == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        wrong.append("a mean of whole numbers")
    if draw.maybe(0.12):
        x, how = spoiled(draw, x)
        wrong += [how] if how else []
    try:
        wanted = expected(kind, parts, before, after, mesh, by, root, axes, pairs)
    except (ShardingError, RuntimeError, IndexError):  # the types do not fit each other: nothing is to be had
        wanted = None
    memory, may_refuse = None, root != 0 or not is_legal(kind, line, before, after)
    if kind in ("all_gather", "reduce_scatter") and draw.maybe(0.4) and isinstance(x, torch.Tensor):
        shape = (2,) if wanted is None else wanted.shape
        options["out"], memory, odd = drawn_buffer(draw, shape, dtype, x, wrong)
        may_refuse = may_refuse or odd
    if kind == "all_reduce" and draw.maybe(0.4):
        options["donate"] = True
        may_refuse = may_refuse or (isinstance(x, torch.Tensor) and x.is_neg())
    if kind not in ("shard", "unshard", "reshard") and draw.maybe(0.3):
        options["async_op"] = True
    if kind != "ppermute" and draw.maybe(0.03):
        positional = [draw.choice([True, "mean", 1, None])]
        wrong.append("by position")

    def run(x):
        return c.wait(getattr(c, kind)(line, x, mesh, *positional, **options))

    what = f"{kind} {line!r} {positional} {options} of {dtype} {describe(x)}"
    return hold(draw, run, x, wanted, wrong, may_refuse, memory, options, what)


def product(draw: Draw) -> str:
    """A case of einsum: of one operand or two, by a line whose dims agree or not."""
    dims, sizes = draw.sample("IJKL", 4), {dim: draw.choice([0, 1, 2, 3, 5]) for dim in "IJKL"}
    of = [dims[: draw.randrange(1, 4)]] + ([] if draw.maybe(0.2) else [draw.sample(dims, draw.randrange(1, 4))])
    every = list(dict.fromkeys(dim for each in of for dim in each))
    result = draw.sample(every, draw.randrange(len(every) + 1))
    dtype = draw.choice([torch.float64, torch.float32, torch.int64, torch.int32])
    names, wrong = {dim: dim for dim in every}, []
    if draw.maybe(0.15):
        dim = draw.choice(every)
        number = draw.choice([sizes[dim], sizes[dim] + 1])
        names[dim] = str(number)
        wrong += ["a number is another"] if number != sizes[dim] else []

    def text(dims) -> str:
        return f"[{', '.join(names[dim] for dim in dims)}]"

    xs = [draw.layout(draw.whole_numbers(4, *(sizes[dim] for dim in each)).to(dtype)) for each in of]
    letters = ",".join(map("".join, of)) + "->" + "".join(result)
    wanted = torch.einsum(letters, *(x.double().resolve_neg() for x in xs)).to(dtype)
    line = " * ".join(name + text(each) for name, each in zip("AB", of, strict=False)) + f" -> C{text(result)}"
    options, memory, may_refuse, alone = {}, None, False, len(of) == 1
    if draw.maybe(0.2):
        which = draw.randrange(len(xs))
        xs[which], how = spoiled(draw, xs[which])
        if how == "meta" and alone:  # shapes alone are multiplied without a mesh
            wanted, may_refuse = wanted.to("meta"), True
        else:
            wrong += [how] if how and how != "sparse" else []
            may_refuse = how == "sparse"
    common = [] if alone else [dim for dim in of[0] if dim in of[1]]
    if common and not wrong and draw.maybe(0.1):
        i = draw.randrange(2)
        meeting = draw.choice(common)
        xs[i] = torch.zeros([sizes[dim] + (dim == meeting) for dim in of[i]], dtype=dtype)
        wrong.append("sizes that do not meet")
    if draw.maybe(0.4) and not wanted.is_meta:
        options["out"], memory, odd = drawn_buffer(draw, wanted.shape, dtype, xs[0], wrong)
        may_refuse = may_refuse or odd
        if draw.maybe(0.4) and not (odd or wrong):
            options["add"], wanted = True, wanted + 1
    by_position = draw.maybe(0.05)
    wrong += ["by position"] if by_position else []

    def run(x):
        return c.einsum(line, x, *xs[1:], *([None] * 2 if by_position else []), **options)

    what = f"einsum {line!r} {options} of {dtype} {[describe(x) for x in xs]}"
    return hold(draw, run, xs[0], wanted, wrong, may_refuse, memory, options, what, linear=False)


def drawn_tree(draw: Draw) -> dict:
    whole, specs, wanted = {}, {}, {}
    for name in "ab":
        spec, local = draw.spec(draw.randrange(3))
        spec = Spec(spec.name, tuple((f"D{i}", axes) for i, (_, axes) in enumerate(spec.dims)))
        shape = [n * draw.mesh.size(axes) for n, (_, axes) in zip(local, spec.dims, strict=True)]
        whole[name], specs[name] = draw.whole_numbers(9, *shape), str(spec)
        wanted[name] = whole[name][spec.slices(tuple(shape), draw.mesh, draw.mesh.coord)], whole[name]
    return {"mesh": draw.mesh, "both": (whole, specs), "wanted": wanted}


def there_and_back(mesh, both) -> dict:
    """{name: (its shard, the whole)}; what is changed afterwards is no memory of the tree."""
    shards = tree.shard(*both, mesh)
    back = tree.unshard(shards, both[1], mesh)
    found = {name: (shards[name].clone(), back[name].clone()) for name in shards}
    tree.map(lambda x: x.add_(1), (shards, back))
    return found


def unfit(draw: Draw, both):
    """A tree that does not fit its types."""
    whole, specs = both
    a, no_tensor = whole["a"], draw.choice([whole["a"].numpy(), 3.0, "a"])
    wrong = [("missing", ({"a": a}, specs)), ("extra", (whole | {"c": a}, specs))]
    wrong += [("dims", (whole | {"a": a[None]}, specs)), ("no tensor", (whole | {"a": no_tensor}, specs))]
    wrong += [("unreduced", (whole, specs | {"a": "A[D_Y] {U_X}"}))]
    if draw.mesh.size() > 1:
        wrong += [("divides", (whole | {"a": torch.ones(3, 5)}, specs | {"a": "A[D_X, F_Y]"}))]
    wrong += [("axis", (whole | {"a": torch.ones(4)}, specs | {"a": "A[D_W]"}))]
    return picked(draw, wrong, [])


def trees(draw: Draw) -> str:
    """Shards of a tree, and the way back; or trees that do not fit."""
    return called(draw, "tree.shard", Entry(drawn_tree, there_and_back, kinds={"both": unfit}))


CASES = [collective] * 12 + [product] * 5 + [trees]


def run(mesh, cases: int, seed: int) -> tuple[Counter, list[str]]:
    """(how often each outcome came, what was wrong) of this rank's cases, which are the same on every rank."""

    def case(number: int) -> str:
        draw = Draw.on(mesh, "", f"{seed} {number}")
        make = draw.choice(CASES)
        return f"{make.__name__}: {make(draw)}"

    return tried(case, cases)
