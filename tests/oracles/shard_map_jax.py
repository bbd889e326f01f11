"""Random shard_map programs and what JAX makes of them: values and vjp in float64, or a refusal.

    python tests/oracles/shard_map_jax.py --seed 1 --out tests/shard_map/programs.json       # the stored table, 60
    python tests/oracles/shard_map_jax.py --seed 1 --typed --out tests/shard_map/typed.json    # 60 more, with types
    python tests/oracles/shard_map_jax.py --seed 2 --programs 500 --out FILE                  # for compared.py, once

Wants JAX 0.10 in an environment of its own; nothing else here does. Each program's result and cotangents are stored as
two weighted sums of their elements. Programs for which JAX 0.10 lacks a rule (NotImplementedError, a reduced value that
would have to become varying over more axes, a transpose that fails where the program itself does not) are left out, as
are those that it lets pass and this project refuses on purpose.
"""

import argparse
import contextlib
import json
import random
import re
import sys
from math import prod
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "shard_map"))
from programs import ALL, STEPS, TYPED, evaluate, filling, marks

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_x64", True)
REFUSALS = ValueError, TypeError, jax._src.core.ShardingTypeError
MESHES = [{"X": 4, "Y": 2}, {"X": 2, "Y": 4}, {"X": 8}, {"X": 2, "Y": 2, "Z": 2}]


class Lib:
    """JAX's functions under the names that programs use."""

    sin, tanh, matmul, sum, reshape = jnp.sin, jnp.tanh, jnp.matmul, jnp.sum, jnp.reshape
    stop, vmap = jax.lax.stop_gradient, jax.vmap

    @staticmethod
    def pvary(x, axes):
        new = tuple(axis for axis in axes if axis not in jax.typeof(x).mat.varying)
        return jax.lax.pcast(x, new, to="varying") if new else x

    @staticmethod
    def grad(f, x):
        return jax.grad(f)(x)

    @staticmethod
    def jvp(f, x, t):
        return jax.jvp(f, (x,), (t,))[1]

    @staticmethod
    def pull(f, x, cotangent):
        return jax.vjp(f, x)[1](cotangent)[0]


NAMES = ["psum", "pmean", "pmax", "all_gather", "psum_scatter", "all_to_all", "ppermute", "axis_index", "axis_size"]
NAMES += ["pcast"]
for name in NAMES:
    setattr(Lib, name, staticmethod(getattr(jax.lax, name)))


def mesh_of(program):
    names = tuple(program["mesh"])
    kind = jax.sharding.AxisType.Explicit if "unreduced" in program else jax.sharding.AxisType.Auto
    return jax.make_mesh(tuple(program["mesh"].values()), names, (kind,) * len(names))


def partition(spec, unreduced=()):
    return jax.P(*(tuple(axes) if axes else None for axes in spec), unreduced={*unreduced})


def result(program: dict) -> dict | None:
    """What JAX says of a program: {"out", "cotangents"} as marks, with the shape of out, or {"refused"}; None where it
    lacks a rule, or cannot transpose what it has computed."""
    mesh, typed = mesh_of(program), "unreduced" in program
    with jax.set_mesh(mesh) if typed else contextlib.nullcontext():
        inputs = [jnp.array(filling(i["shape"], n)).reshape(i["shape"]) for n, i in enumerate(program["inputs"])]
        specs = tuple(partition(i["spec"]) for i in program["inputs"])
        inputs = [jax.reshard(x, spec) for x, spec in zip(inputs, specs, strict=True)] if typed else inputs
        out_spec = partition(program["out_spec"], program.get("unreduced", ()))
        f = jax.jit(jax.shard_map(lambda *shards: evaluate(program, shards, Lib), mesh=mesh, in_specs=specs,
                                  out_specs=out_spec))  # fmt: skip
        try:
            jax.eval_shape(f, *inputs)
        except REFUSALS as error:
            return None if lacks_a_rule(str(error)) else {"refused": str(error).split("\n")[0][:60]}
        except NotImplementedError:
            return None
        try:
            out, pull = jax.vjp(f, *inputs)
            cotangent = jnp.array(filling(out.shape, 99)).reshape(out.shape)
            cotangents = pull(
                jax.reshard(cotangent, jax.typeof(out).to_ct_aval().sharding.spec) if typed else cotangent
            )
        except (*REFUSALS, NotImplementedError):
            return None
        whole = [jax.reshard(x, jax.P()) if typed else x for x in (out, *cotangents)]
    flat = [np.asarray(x).ravel().tolist() for x in whole]
    return {"shape": list(out.shape), "out": marks(flat[0]), "cotangents": [marks(x) for x in flat[1:]]}


def lacks_a_rule(error: str) -> bool:
    """What is reduced over Y meets what varies over X and Y: JAX 0.10 casts it over Y alone, or not at all."""
    found = re.match(r"pvary cannot accept args which are reduced.* R:(?:\(([\w,]+)\)|(\w+))\S* and axes=(.*)", error)
    return bool(found) and {*(found[1] or found[2]).split(",")} != {*re.findall(r"\w+", found[3])}


def types(program: dict, shards, seen: list):
    """Notes each value's shape and axes while JAX traces."""
    values = list(shards)
    for op, *arguments in program["steps"]:
        values.append(ALL[op](Lib, values, *arguments))
    for value in values:
        of = jax.typeof(value).mat
        seen.append((value.shape, sorted(of.varying), sorted(of.unreduced), sorted(of.reduced)))
    return values[0]


def looked_at(program: dict):
    """(shape, axes over which it varies, is unreduced, is reduced) of each value; None where JAX refuses."""
    seen: list = []
    mesh = mesh_of({"mesh": program["mesh"]})
    specs = tuple(partition(i["spec"]) for i in program["inputs"])
    inputs = [jax.ShapeDtypeStruct(i["shape"], jnp.float64) for i in program["inputs"]]
    f = jax.shard_map(lambda *shards: types(program, shards, seen), mesh=mesh, in_specs=specs, out_specs=specs[0])
    try:
        jax.eval_shape(f, *inputs)  # traced alone: nothing runs
    except (*REFUSALS, NotImplementedError):
        return None
    return seen


def some(rng, mesh, most=2):
    return rng.sample(list(mesh), rng.randint(1, min(most, len(mesh))))


def draw(rng: random.Random, typed: bool) -> dict:
    mesh = rng.choice(MESHES)
    inputs = []
    for _ in range(rng.randint(1, 3)):
        axes = rng.sample(list(mesh), rng.randint(0, len(mesh)))
        cut = rng.randint(0, len(axes))
        spec = [axes[:cut], axes[cut:]]
        local = [rng.choice([1, 2, 4, 8]), rng.choice([1, 2, 4])]
        inputs.append(
            {"shape": [n * prod(mesh[a] for a in at) for n, at in zip(local, spec, strict=True)], "spec": spec}
        )
    program = {"mesh": mesh, "inputs": inputs, "steps": [], "out_spec": inputs[0]["spec"]}
    program |= {"unreduced": []} if typed else {}
    seen = looked_at(program)
    while len(program["steps"]) < rng.randint(3, 9):
        with_types = typed and rng.random() < 0.6
        step = (drawn_typed_step if with_types else drawn_step)(rng, mesh, seen)
        if step is None or (typed and unlike_jax(step, seen)):
            continue
        longer = {**program, "steps": [*program["steps"], step]}
        if (now := looked_at(longer)) is None:
            if rng.random() < (0.12 if typed else 0.04):  # a program that is refused stays, now and then
                return longer
            continue
        if prod(now[-1][0]) <= 128:
            program, seen = longer, now
    if seen[-1][3] and rng.random() < 0.9:  # no type of a whole array is reduced
        program["steps"].append(["varying", len(seen) - 1, seen[-1][3]])
        seen = looked_at(program)
    axes = seen[-1][1]
    if typed:
        program["unreduced"] = seen[-1][2] if rng.random() < 0.9 else some(rng, mesh)
        axes = [axis for axis in axes if axis not in program["unreduced"]]
    elif rng.random() < 0.3:
        axes = sorted({*axes, *some(rng, mesh)})
    rng.shuffle(axes)
    if axes and rng.random() < 0.1:
        axes = axes[1:]
    cut = rng.randint(0, len(axes))
    program["out_spec"] = [axes[:cut], axes[cut:]]
    return program


def drawn_step(rng, mesh, seen):
    op = rng.choice(list(STEPS))
    a = b = len(seen) - 1 if rng.random() < 0.7 else rng.randrange(len(seen))
    if op in ("add", "mul", "matmul", "grad", "jvp"):
        wanted = seen[a][0]
        fits = [i for i, (s, *_) in enumerate(seen) if (s[0] == wanted[1] if op == "matmul" else s == wanted)]
        if not fits:
            return None
        b = rng.choice(fits)
    axes, dim = some(rng, mesh), rng.randint(0, 1)
    rest = {
        "sin": [], "tanh": [], "transpose": [], "scale": [round(rng.uniform(-1, 1), 2)], "add": [b], "mul": [b],
        "matmul": [b], "grad": [b, axes if rng.random() < 0.7 else []], "jvp": [b, axes],
        "all_to_all": [axes, dim, rng.randint(0, 1)], "exchange": [axes, dim, rng.randint(0, 1)],
        "ppermute": [axes, rng.randint(1, 3), rng.random() < 0.7],
    }  # fmt: skip
    with_dim = ("all_gather", "gather_new", "invarying", "scatter", "scatter_away")
    return [op, a, *rest.get(op, [axes, dim] if op in with_dim else [axes])]


def drawn_typed_step(rng, mesh, seen):
    op = rng.choice(list(TYPED))
    a = b = len(seen) - 1 if rng.random() < 0.7 else rng.randrange(len(seen))
    shape, varies, summed, same = seen[a]
    if op in ("times_reduced", "pull", "pull_gather", "jvp_sum"):
        b = rng.choice([i for i, of in enumerate(seen) if of[0] == shape])
    fitting = {"unreduced": varies, "gather_reduced": varies, "pull_gather": varies, "varying": same}
    fitting |= {"times_reduced": summed, "grad_reduced": same, "terms": same, "pull": summed, "jvp_sum": summed}
    axes = fitting.get(op, [axis for axis in mesh if axis not in (*varies, *summed, *same)])
    if rng.random() < 0.15:
        axes = some(rng, mesh)
    elif op in ("unreduced", "reduced", "gather_reduced", "pull_gather") and axes:
        axes = rng.sample(axes, rng.randint(1, len(axes)))
    if op in ("sum_rows", "vmap_terms"):
        return [op, a]
    if not axes:
        return None
    if op in ("times_reduced", "pull", "pull_gather", "jvp_sum"):
        return [op, a, b, axes]
    return [op, a, axes, rng.randint(0, 1)] if op == "gather_reduced" else [op, a, axes]


def unlike_jax(step, seen) -> bool:
    """Steps of which JAX 0.10 and this project have different rules on purpose: a number times what is reduced, which
    JAX refuses, and a product of two that are reduced, which it types invariant, and then cannot transpose."""
    op, *rest = step
    places = rest[:2] if op in ("add", "mul", "matmul", "grad", "jvp", "pull", "times_reduced") else rest[:1]
    reduced = [bool(seen[i][3]) for i in places]
    numbers = op in ("scale", "psum", "jvp", "vmap", "index", "grad", "gather_new", "scatter_away")
    return any(reduced) if numbers else op == "matmul" and all(reduced)


def lets_pass(program: dict) -> bool:
    """What JAX 0.10 computes and this project refuses on purpose: an out_spec unreduced over an axis along which the
    result is invariant, where JAX adds up the copies; and the greatest of terms of a sum over another axis."""
    seen = looked_at(program)
    _, varies, summed, _ = seen[-1]
    greatest = any(op == "pmax" and seen[rest[0]][2] for op, *rest in program["steps"])
    return greatest or not {*program.get("unreduced", ())} <= {*varies, *summed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--typed", action="store_true", help="with steps that make unreduced and reduced values")
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    rng, table = random.Random(options.seed), []
    while len(table) < options.programs:
        program = draw(rng, options.typed)
        if (found := result(program)) is not None and ("refused" in found or not lets_pass(program)):
            table.append({**program, **found})
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in table)
    Path(options.out).write_text(f"[\n{lines}\n]\n")
    refused = sum("refused" in row for row in table)
    print(f"{len(table)} programs, {refused} refused by JAX {jax.__version__}: {options.out}")


if __name__ == "__main__":
    main()
