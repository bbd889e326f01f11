"""Random cases of einsum, against torch.einsum in float64."""

import torch
from misuse.draw import Draw, buffer, spoiled
from misuse.hold import describe, hold

from scaling import collectives as c


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
