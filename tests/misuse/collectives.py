"""Random cases of collectives. The oracle knows what each device contributes, and reads what each gets off types."""

import torch
from misuse.draw import DTYPES, ODD, Draw, buffer, spoiled, typed
from misuse.hold import describe, hold

from scaling import collectives as c
from scaling.algebra.rules import collective_steps
from scaling.spec import ShardingError, Spec

OP_OF = {"all_gather": "AllGather", "reduce_scatter": "ReduceScatter", "all_reduce": "AllReduce", "shard": "Slice"}
OP_OF |= {"all_to_all": "AllToAll", "broadcast": "Broadcast", "reduce": "Reduce", "scatter": "Scatter"}
OP_OF |= {"gather": "Gather"}
KINDS = [*OP_OF, "ppermute", "unshard", "reshard"]
REDUCING = ("reduce_scatter", "all_reduce", "reduce")
ADDING = (*REDUCING, "broadcast", "unshard", "reshard")


def contributions(spec: Spec, local: list[int], mesh, dtype, seed: int) -> torch.Tensor:
    """[*axes of the mesh, *whole shape]: of each device the part of the array that it contributes, alike where the type
    says that devices hold replicas. Small whole numbers: sums are exact in every dtype."""
    shape = [size * mesh.size(axes) for size, (_, axes) in zip(local, spec.dims, strict=True)]
    sizes = [n if axis in spec.unreduced else 1 for axis, n in mesh.sizes.items()]
    x = torch.randint(0, 4, (*sizes, *shape), generator=torch.Generator().manual_seed(seed))
    x = x.expand(*mesh.sizes.values(), *shape)
    return torch.complex(x.float(), x.float() + 1) if dtype == torch.complex64 else x.to(dtype)


def block(x: torch.Tensor, spec: Spec, mesh, coord) -> torch.Tensor:
    """What the device at coord holds of the whole array x, whatever its dims are called."""
    return x[typed((f"D{i}", axes) for i, (_, axes) in enumerate(spec.dims)).slices(tuple(x.shape), mesh, coord)]


def held(parts: torch.Tensor, before: Spec, after: Spec, mesh, by: str) -> torch.Tensor:
    """What this rank holds of `after`, where the parts that `before` is unreduced over have been put together."""
    for axis in mesh.sizes:
        if axis in before.unreduced and axis not in after.unreduced:
            parts = reduced(parts, by)
        else:
            parts = parts[mesh.coord[axis]]
    return block(parts, after, mesh, mesh.coord)


def reduced(parts: torch.Tensor, by: str) -> torch.Tensor:
    if by in ("max", "min"):
        return parts.amax(0) if by == "max" else parts.amin(0)
    total = parts.sum(0, dtype=parts.dtype)
    return total / len(parts) if by == "mean" else total


def put(spec: Spec, i: int, axes) -> Spec:
    """The type with other axes on dim i."""
    return typed(((dim, axes if i == j else was) for j, (dim, was) in enumerate(spec.dims)), spec.unreduced)


def another(draw: Draw, kind: str, before: Spec, mesh) -> Spec:
    """The result's type, of a line that is mostly legal."""
    after, names = before, [(dim, ()) for dim, _ in before.dims]
    i = draw.choice([i for i, (_, axes) in enumerate(before.dims) if axes] or [None])
    axes = before.dims[i][1] if i is not None else ()
    cut = draw.randrange(len(axes) or 1)
    taken = [axis for axis in before.unreduced if draw.maybe(0.7)] or list(before.unreduced)
    left = [axis for axis in before.unreduced if axis not in taken]
    draw.shuffle(taken)
    if kind == "unshard":
        return typed(names)
    if kind in ("all_gather", "gather") and axes:
        after = put(before, i, axes[:cut])
        after = typed(after.dims, (*after.unreduced, *axes[cut:])) if kind == "gather" else after
    if kind in ("reduce_scatter", "scatter", "all_reduce", "broadcast"):
        after = typed(before.dims, left)
        if kind in ("reduce_scatter", "scatter") and before.dims:
            to = draw.randrange(len(before.dims))
            after = put(after, to, before.dims[to][1] + tuple(taken))
    if kind == "all_to_all" and axes and len(before.dims) > 1:
        to = draw.choice([j for j in range(len(before.dims)) if j != i])
        after = put(put(before, i, axes[:cut]), to, before.dims[to][1] + axes[cut:])
    if kind == "shard" and before.dims:
        free = [axis for axis in mesh.sizes if axis not in before.axes + before.unreduced]
        to = draw.randrange(len(before.dims))
        after = put(before, to, before.dims[to][1] + tuple(free[: draw.randrange(3)]))
    if kind == "reshard" or draw.maybe(0.1):  # anything at all
        after = typed(names)
        for axis in draw.sample(list(mesh.sizes), len(mesh.sizes)):
            if draw.maybe(0.6) and before.dims:
                to = draw.randrange(len(before.dims))
                after = put(after, to, (*after.dims[to][1], axis))
            elif draw.maybe(0.2) and kind != "reshard":
                after = typed(after.dims, (*after.unreduced, axis))
    return after


def group_of(axes, mesh, coord=None) -> int:
    """The number of this device's block along axes, the first of them major."""
    index = 0
    for axis in axes:
        index = index * mesh.sizes[axis] + (coord or mesh.coord)[axis]
    return index


def device_at(axes, index: int, mesh) -> tuple[int, ...]:
    """The coordinate of the device of this one's group over axes that holds block `index`."""
    coord = dict(mesh.coord)
    for axis in reversed(axes):
        index, coord[axis] = divmod(index, mesh.sizes[axis])
    return tuple(coord[axis] for axis in mesh.sizes)


def expected(kind, parts, before: Spec, after: Spec, mesh, by: str, root: int, axes=(), pairs=()):
    """What this rank is to get, or None where the types say nothing of it."""

    def of_device(at, spec=before):
        return block(parts[at], spec, mesh, dict(zip(mesh.sizes, at, strict=True)))

    here = tuple(mesh.coord.values())
    if kind == "ppermute":
        sources = [s for s, t in pairs if t == group_of(axes, mesh)]
        return of_device(device_at(axes, sources[0], mesh)) if sources else torch.zeros_like(of_device(here))
    if kind == "reduce":
        y, at_root = (
            held(parts, before, Spec(after.name, after.dims), mesh, by),
            group_of(before.unreduced, mesh) == root,
        )
        return y if at_root else torch.zeros_like(y)
    taken = tuple(axis for axis in before.unreduced if axis not in after.unreduced)
    if kind == "broadcast":
        return of_device(device_at(taken, root, mesh))
    if kind == "scatter":
        new = [a[len(b) :] for (_, b), (_, a) in zip(before.dims, after.dims, strict=True) if len(a) > len(b)]
        return block(parts[device_at(new[0], root, mesh)], after, mesh, mesh.coord) if len(new) == 1 else None
    if kind == "gather":
        cut = [b[len(a) :] for (_, b), (_, a) in zip(before.dims, after.dims, strict=True) if len(a) < len(b)]
        if len(cut) != 1:
            return None
        y = of_device(here, after)
        return y if group_of(cut[0], mesh) == root else torch.zeros_like(y)
    if set(after.unreduced) - set(before.unreduced):
        return None
    return held(parts, before, after, mesh, by)


def is_legal(kind: str, line: str, before: Spec, after: Spec) -> bool:
    """Whether the rules, which other tests hold against outsiders, allow a line."""
    if kind not in OP_OF or (kind == "shard" and before.same_sharding(after)):
        return True
    try:
        return bool(collective_steps(OP_OF[kind], line))
    except ShardingError:
        return False


def collective(draw: Draw, mesh, case: int) -> str:
    """A case of a collective; the outcome in a word. Raises Wrong."""
    kind = draw.choice(KINDS)
    before, local = draw.spec(mesh, draw.randrange(4))
    dtype = draw.choice(DTYPES * 3 + ODD)
    by = draw.choice(["sum", "sum", "mean", "max", "min"]) if kind in REDUCING else "sum"
    root = draw.randrange(-1, 5) if draw.maybe(0.3) else 0
    parts = contributions(before, local, mesh, dtype, case)
    x = draw.layout(held(parts, before, before, mesh, by))
    after = another(draw, kind, before, mesh)
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
    memory = None
    if kind in ("all_gather", "reduce_scatter") and draw.maybe(0.4) and isinstance(x, torch.Tensor):
        options["out"], memory, how = buffer(draw, (2,) if wanted is None else wanted.shape, dtype, x)
        wrong += [f"out: {how}"] if how in ("shape", "dtype", "expanded", "meta", "numpy") else []
        may_refuse = how in ("operand", "leaf")
    else:
        may_refuse = False
    if kind == "all_reduce" and draw.maybe(0.4):
        options["donate"] = True
        may_refuse = isinstance(x, torch.Tensor) and x.is_neg()
    if kind not in ("shard", "unshard", "reshard") and draw.maybe(0.3):
        options["async_op"] = True
    if kind != "ppermute" and draw.maybe(0.03):
        positional = [draw.choice([True, "mean", 1, None])]
        wrong.append("by position")
    if not is_legal(kind, line, before, after) or may_refuse:
        wanted_if = "may be refused"
    else:
        wanted_if = "" if root in (0, None) else "may be refused"
    call = getattr(c, kind)

    def run(x):
        return c.wait(call(line, x, mesh, *positional, **options))

    what = f"{kind} {line!r} {positional} {options} of {dtype} {describe(x)}"
    return hold(draw, mesh, run, x, wanted, wrong, bool(wanted_if), memory, options, what)
