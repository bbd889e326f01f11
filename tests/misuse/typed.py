"""Random calls, right and wrong, held against what their types mean: no wrong number without an error.

    python tests/sweeps/fuzz.py calls [--cases 10000] [--seed 0] [--mesh X=2,Y=2]

Each case draws a collective, a product, or shards of a tree, a line that is legal or not, operands of any shape, dtype,
device and memory layout, buffers that fit or not or overlap, options, and a mode: under a transform of torch.func,
autograd, a tensor mode, autocast. All ranks draw the same case. It ends well if the call raises a ShardingError or a
ValueError, or if

- the result is what this rank holds by the type (computed here from what all ranks contribute), in the operand's dtype;
- the operands, and the memory around a buffer, are as they were; the result shares no memory with an operand;
- derivatives are the transpose: <w, f(x)> = <f'(w), x>, summed over the ranks.

What a transform raises is loud as well, and counted by itself. A test of the suite runs some hundred cases.
"""

from collections import Counter

import torch
from misuse.collectives import collective
from misuse.corrupt import picked
from misuse.draw import Draw, buffer, spoiled
from misuse.entries import Entry, called, tried
from misuse.hold import describe, hold

from scaling import collectives as c
from scaling import tree
from scaling.spec import Spec


def product(draw: Draw, mesh, case: int) -> str:
    """A case of einsum: of one operand or two, by a line whose dims agree or not."""
    g = torch.Generator().manual_seed(case)
    dims, sizes = draw.sample("IJKL", 4), {dim: draw.choice([0, 1, 2, 3, 5]) for dim in "IJKL"}
    a = dims[: draw.randrange(1, 4)]
    b = None if draw.maybe(0.2) else draw.sample(dims, draw.randrange(1, 4))
    every = list(dict.fromkeys([*a, *(b or [])]))
    result = draw.sample(every, draw.randrange(len(every) + 1))
    dtype = draw.choice([torch.float64, torch.float32, torch.int64, torch.int32])
    names = {dim: dim for dim in every}
    wrong = []
    if draw.maybe(0.15):
        dim = draw.choice(every)
        number = draw.choice([sizes[dim], sizes[dim] + 1])
        if str(number) not in names.values():
            names[dim] = str(number)
            wrong += ["a number is another"] if number != sizes[dim] else []

    def operand(dims) -> torch.Tensor:
        return draw.layout(torch.randint(0, 4, [sizes[dim] for dim in dims], generator=g).to(dtype))

    def text(dims) -> str:
        return f"[{', '.join(names[dim] for dim in dims)}]"

    xs = [operand(a)] + ([operand(b)] if b else [])
    letters = ",".join("".join(side) for side in (a, *([b] if b else []))) + "->" + "".join(result)
    wanted = torch.einsum(letters, *(x.double().resolve_neg() for x in xs)).to(dtype)
    line = f"A{text(a)}" + (f" * B{text(b)}" if b else "") + f" -> C{text(result)}"
    options, memory, may_refuse = {}, None, False
    if draw.maybe(0.2):
        which = draw.randrange(len(xs))
        xs[which], how = spoiled(draw, xs[which])
        alone = how == "meta" and not b  # shapes alone are multiplied without a mesh
        wrong += [how] if how and how != "sparse" and not alone else []
        wanted, may_refuse = wanted.to("meta") if alone else wanted, how in ("sparse", "meta")
    if b and draw.maybe(0.1) and not wrong:
        i = draw.randrange(2)
        shape = list(xs[i].shape)
        if shape and set(a) & set(b):
            k = draw.randrange(len(shape))
            if (a, b)[i][k] in (b, a)[i]:
                shape[k] += 1
                xs[i] = torch.zeros(shape, dtype=dtype)
                wrong.append("sizes that do not meet")
    if draw.maybe(0.4) and not wanted.is_meta:
        options["out"], memory, how = buffer(draw, wanted.shape, dtype, xs[0])
        wrong += [f"out: {how}"] if how in ("shape", "dtype", "expanded", "meta", "numpy") else []
        may_refuse = may_refuse or how in ("operand", "leaf")
        if draw.maybe(0.4):
            options["add"] = True
            wanted = wanted + 1
            if how == "operand" or how == "leaf" or wrong:
                del options["add"]
                wanted = wanted - 1
    if draw.maybe(0.05):
        wrong.append("by position")

    def run(x):
        operands = [x, *xs[1:]]
        return c.einsum(line, *operands, *([None] * 2 if "by position" in wrong else []), **options)

    what = f"einsum {line!r} {options} of {dtype} {[describe(x) for x in xs]}"
    return hold(draw, mesh, run, xs[0], wanted, wrong, may_refuse, memory, options, what, linear=False)


def drawn_tree(draw: Draw) -> dict:
    whole, specs, wanted = {}, {}, {}
    for name in "ab":
        spec, local = draw.spec(draw.mesh, draw.randrange(3))
        spec = Spec(spec.name, tuple((f"D{i}", axes) for i, (_, axes) in enumerate(spec.dims)))
        shape = [n * draw.mesh.size(axes) for n, (_, axes) in zip(local, spec.dims, strict=True)]
        whole[name] = torch.randint(0, 9, shape, generator=torch.Generator().manual_seed(draw.randrange(1 << 30)))
        specs[name] = str(spec)
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


def trees(draw: Draw, mesh, case: int) -> str:
    """Shards of a tree, and the way back; or trees that do not fit."""
    return called(draw, "tree.shard", Entry(drawn_tree, there_and_back, kinds={"both": unfit}))


CASES = [collective] * 12 + [product] * 5 + [trees]


def run(mesh, cases: int, seed: int) -> tuple[Counter, list[str]]:
    """(how often each outcome came, what was wrong) of this rank's cases, which are the same on every rank."""

    def case(number: int) -> str:
        draw = Draw.on(mesh, "", f"{seed} {number}")
        make = draw.choice(CASES)
        return f"{make.__name__}: {make(draw, mesh, number)}"

    return tried(case, cases)
