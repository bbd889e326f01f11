"""Random programs for shard_map as data, and one reading of them for JAX and for torch.

A program is {"mesh", "inputs": [{"shape", "spec"}], "steps": [[op, operand, ...]], "out_spec"}, and maybe "unreduced",
the axes over which its result is; each step makes a value of two dims from earlier ones; the last is the result.
`evaluate` reads it with a library's own functions, `lib`.
"""

import inspect
import re
from pathlib import Path

TABLES = [Path(__file__).with_name(f"{name}.json") for name in ("programs", "typed")]
GIVEN = "mesh", "inputs", "steps", "out_spec", "unreduced"


def evaluate(program: dict, shards: list, lib) -> object:
    """The program on one device: its result. Of a step's parameters, `a` and `b` are values by their numbers."""
    values = list(shards)
    for op, *given in program["steps"]:
        _, *names = inspect.signature(STEPS[op]).parameters
        plain = (tuple(x) if isinstance(x, list) else x for x in given)
        arguments = (values[x] if name in "ab" else x for name, x in zip(names, plain, strict=True))
        values.append(STEPS[op](lib, *arguments))
    return values[-1]


def varying(lib, x, axes):
    """x, varying over all the axes."""
    new = tuple(axis for axis in axes if axis not in lib.vma(x))
    return lib.pcast(x, new, to="varying") if new else x


def inner_grad(lib, a, b, axes):
    """The gradient, inside the program, of a loss with a psum in it."""
    loss = lambda w: lib.sum(lib.sin(w * b) + (lib.psum(varying(lib, w * b, axes), axes) if axes else w))  # noqa: E731
    return lib.grad(loss)(a)


def merged(lib, x, at):
    """[n, r, c] or [r, n, c] in two dims."""
    s = x.shape
    return lib.reshape(x, (s[0] * s[1], s[2]) if at == 0 else (s[0], s[1] * s[2]))


def shifted(n, by, all_of_them):
    return [(i, (i + by) % n) for i in range(n if all_of_them else n - 1)]


def pulled_gather(lib, a, b, axes):
    """The cotangent, inside the program, of what is gathered as reduced: an unreduced one goes in."""
    gather = lambda w, to: lib.all_gather(w, axes, axis=0, tiled=True, to=to)  # noqa: E731
    terms = lib.pcast(gather(b, "varying"), axes, to="unreduced")
    return lib.vjp(lambda w: gather(w, "reduced"), a)[1](terms)[0]


# each as a function of operands and options: what it calls of the library `lib`; from "unreduced" on those that know of
# unreduced and reduced
CALLED = """
sin(a): lib.sin(a)
tanh(a): lib.tanh(a)
scale(a, by): a * by
add(a, b): a + b
mul(a, b): a * b
matmul(a, b): lib.tanh(lib.matmul(a, b))
transpose(a): a.T
index(a, axes): a * (1.0 + lib.axis_index(axes) / 8)
psum(a, axes): lib.psum(a, axes) / 4
pmean(a, axes): lib.pmean(a, axes)
pmax(a, axes): lib.pmax(lib.stop(a), axes)
pvary(a, axes): varying(lib, a, axes)
all_gather(a, axes, dim): lib.all_gather(a, axes, axis=dim, tiled=True)
gather_new(a, axes, dim): merged(lib, lib.all_gather(a, axes, axis=dim), dim)
invarying(a, axes, dim): lib.all_gather(a, axes, axis=dim, tiled=True, to="invarying")
scatter(a, axes, dim): lib.psum_scatter(a, axes, scatter_dimension=dim, tiled=True)
scatter_away(a, axes, dim): lib.reshape(lib.psum_scatter(a, axes, scatter_dimension=dim), (1, -1))
all_to_all(a, axes, cut, put): lib.all_to_all(a, axes, cut, put, tiled=True)
exchange(a, axes, cut, put): lib.all_to_all(a, axes, cut, put)
ppermute(a, axes, by, whole): lib.ppermute(a, axes, shifted(lib.axis_size(axes), by, whole))
jvp(a, b, axes): lib.jvp(lambda w: lib.psum(w * lib.sin(w), axes) / 4, (a,), (b,))[1]
vmap(a, axes): lib.vmap(lambda row: row * lib.sum(lib.psum(row, axes)))(a)
unreduced(a, axes): lib.pcast(a, axes, to="unreduced")
reduced(a, axes): lib.pcast(a, axes, to="reduced")
varying(a, axes): lib.pcast(a, axes, to="varying")
gather_reduced(a, axes, dim): lib.all_gather(a, axes, axis=dim, tiled=True, to="reduced")
times_reduced(a, b, axes): a * lib.pcast(b, axes, to="reduced")
terms(a, axes): a + lib.pcast(lib.tanh(a), axes, to="varying")
sum_rows(a): lib.reshape(lib.sum(a, 0), (1, -1))
pull(a, b, axes): lib.vjp(lambda w: lib.psum(w, axes), a)[1](b)[0]
grad_reduced(a, axes): lib.grad(lambda w: lib.sum(lib.tanh(lib.pcast(w, axes, to="varying"))))(a)
jvp_sum(a, b, axes): lib.jvp(lambda w: lib.psum(w + w, axes), (a,), (b,))[1]
vmap_terms(a): lib.vmap(lambda row: row + row)(a)
"""


def read(text: str) -> dict:
    """{name: the function of lib and these parameters} of lines `name(parameters): expression`."""
    steps = {}
    for line in text.strip().splitlines():
        name, parameters, expression = re.fullmatch(r"(\w+)\((.*?)\): (.*)", line).groups()
        steps[name] = eval(f"lambda lib, {parameters}: {expression}", globals())
    return steps


STEPS = read(CALLED) | {"grad": inner_grad, "pull_gather": pulled_gather}
