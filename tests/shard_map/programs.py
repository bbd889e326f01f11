"""Random programs for shard_map as data, and one reading of them for JAX and for torch.

A program is {"mesh", "inputs": [{"shape", "spec"}], "steps": [[op, operand, ...]], "out_spec"}, and maybe "unreduced",
the axes over which its result is; each step makes a value of two dims from earlier ones; the last is the result.
`evaluate` reads it with a library's own functions, `lib`. TYPED has the steps that know of unreduced and reduced.
"""

import math


def evaluate(program: dict, shards: list, lib) -> object:
    """The program on one device: its result."""
    values = list(shards)
    for op, *arguments in program["steps"]:
        values.append(ALL[op](lib, values, *(tuple(x) if isinstance(x, list) else x for x in arguments)))
    return values[-1]


def varying(lib, x, axes):
    """x, varying over all the axes."""
    new = tuple(axis for axis in axes if axis not in lib.vma(x))
    return lib.pcast(x, new, to="varying") if new else x


def inner_grad(lib, v, a, b, axes):
    """The gradient, inside the program, of a loss with a psum in it."""
    loss = lambda w: lib.sum(lib.sin(w * v[b]) + (lib.psum(varying(lib, w * v[b], axes), axes) if axes else w))  # noqa: E731
    return lib.grad(loss)(v[a])


def merged(lib, x, at):
    """[n, r, c] or [r, n, c] in two dims."""
    s = x.shape
    return lib.reshape(x, (s[0] * s[1], s[2]) if at == 0 else (s[0], s[1] * s[2]))


def shifted(n, by, all_of_them):
    return [(i, (i + by) % n) for i in range(n if all_of_them else n - 1)]


STEPS = {
    "sin": lambda lib, v, a: lib.sin(v[a]),
    "tanh": lambda lib, v, a: lib.tanh(v[a]),
    "scale": lambda lib, v, a, b: v[a] * b,
    "add": lambda lib, v, a, b: v[a] + v[b],
    "mul": lambda lib, v, a, b: v[a] * v[b],
    "matmul": lambda lib, v, a, b: lib.tanh(lib.matmul(v[a], v[b])),
    "transpose": lambda lib, v, a: v[a].T,
    "index": lambda lib, v, a, axes: v[a] * (1.0 + lib.axis_index(axes) / 8),
    "psum": lambda lib, v, a, axes: lib.psum(v[a], axes) / 4,
    "pmean": lambda lib, v, a, axes: lib.pmean(v[a], axes),
    "pmax": lambda lib, v, a, axes: lib.pmax(lib.stop(v[a]), axes),
    "pvary": lambda lib, v, a, axes: varying(lib, v[a], axes),
    "all_gather": lambda lib, v, a, axes, dim: lib.all_gather(v[a], axes, axis=dim, tiled=True),
    "gather_new": lambda lib, v, a, axes, dim: merged(lib, lib.all_gather(v[a], axes, axis=dim), dim),
    "invarying": lambda lib, v, a, axes, dim: lib.all_gather(v[a], axes, axis=dim, tiled=True, to="invarying"),
    "scatter": lambda lib, v, a, axes, dim: lib.psum_scatter(v[a], axes, scatter_dimension=dim, tiled=True),
    "scatter_away": lambda lib, v, a, axes, dim: lib.reshape(
        lib.psum_scatter(v[a], axes, scatter_dimension=dim), (1, -1)
    ),
    "all_to_all": lambda lib, v, a, axes, cut, put: lib.all_to_all(v[a], axes, cut, put, tiled=True),
    "exchange": lambda lib, v, a, axes, cut, put: lib.all_to_all(v[a], axes, cut, put),
    "ppermute": lambda lib, v, a, axes, by, whole: lib.ppermute(v[a], axes, shifted(lib.axis_size(axes), by, whole)),
    "grad": inner_grad,
    "jvp": lambda lib, v, a, b, axes: lib.jvp(lambda w: lib.psum(w * lib.sin(w), axes) / 4, (v[a],), (v[b],))[1],
    "vmap": lambda lib, v, a, axes: lib.vmap(lambda row: row * lib.sum(lib.psum(row, axes)))(v[a]),
}


def pulled_gather(lib, v, a, b, axes):
    """The cotangent, inside the program, of what is gathered as reduced: an unreduced one goes in."""
    gather = lambda w, to: lib.all_gather(w, axes, axis=0, tiled=True, to=to)  # noqa: E731
    terms = lib.pcast(gather(v[b], "varying"), axes, to="unreduced")
    return lib.vjp(lambda w: gather(w, "reduced"), v[a])[1](terms)[0]


TYPED = {
    "unreduced": lambda lib, v, a, axes: lib.pcast(v[a], axes, to="unreduced"),
    "reduced": lambda lib, v, a, axes: lib.pcast(v[a], axes, to="reduced"),
    "varying": lambda lib, v, a, axes: lib.pcast(v[a], axes, to="varying"),
    "gather_reduced": lambda lib, v, a, axes, dim: lib.all_gather(v[a], axes, axis=dim, tiled=True, to="reduced"),
    "times_reduced": lambda lib, v, a, b, axes: v[a] * lib.pcast(v[b], axes, to="reduced"),
    "terms": lambda lib, v, a, axes: v[a] + lib.pcast(lib.tanh(v[a]), axes, to="varying"),
    "sum_rows": lambda lib, v, a: lib.reshape(lib.sum(v[a], 0), (1, -1)),
    "pull": lambda lib, v, a, b, axes: lib.vjp(lambda w: lib.psum(w, axes), v[a])[1](v[b])[0],
    "pull_gather": pulled_gather,
    "grad_reduced": lambda lib, v, a, axes: lib.grad(lambda w: lib.sum(lib.tanh(lib.pcast(w, axes, to="varying"))))(
        v[a]
    ),
    "jvp_sum": lambda lib, v, a, b, axes: lib.jvp(lambda w: lib.psum(w + w, axes), (v[a],), (v[b],))[1],
    "vmap_terms": lambda lib, v, a: lib.vmap(lambda row: row + row)(v[a]),
}
ALL = STEPS | TYPED


def filling(shape, seed: int) -> list:
    """The numbers of an array, in order: no generator, so that all libraries have the same."""
    return [math.sin(1.3 * i + 0.7 * seed + 0.1) for i in range(math.prod(shape))]


def marks(numbers: list) -> list[float]:
    """Two sums that tell arrays apart: all elements, weighted."""
    return [sum(x * math.cos(k * i + k) for i, x in enumerate(numbers)) for k in (0.37, 1.91)]
