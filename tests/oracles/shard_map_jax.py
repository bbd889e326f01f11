"""Random shard_map programs and what JAX makes of them: values and vjp in float64, or a refusal.

    python tests/oracles/shard_map_jax.py --seed 1 --out tests/shard_map/programs.json       # the stored table, 60
    python tests/oracles/shard_map_jax.py --seed 2 --programs 500 --out FILE                  # for compared.py, once

Wants JAX 0.10 in an environment of its own; nothing else here does. Each program's result and cotangents are stored as
two weighted sums of their elements.
"""

import argparse
import json
import random
import sys
from math import prod
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "shard_map"))
from programs import STEPS, evaluate, filling, marks

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_x64", True)
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


NAMES = ["psum", "pmean", "pmax", "all_gather", "psum_scatter", "all_to_all", "ppermute", "axis_index", "axis_size"]
for name in NAMES:
    setattr(Lib, name, staticmethod(getattr(jax.lax, name)))


def mesh_of(program):
    names = tuple(program["mesh"])
    return jax.make_mesh(tuple(program["mesh"].values()), names, (jax.sharding.AxisType.Auto,) * len(names))


def partition(spec):
    return jax.P(*(tuple(axes) if axes else None for axes in spec))


def result(program: dict) -> dict | None:
    """What JAX says of a program: {"out", "cotangents"} as marks, with the shape of out, or {"refused"}; None where it
    cannot transpose what it has computed."""
    mesh = mesh_of(program)
    inputs = [jnp.array(filling(i["shape"], n)).reshape(i["shape"]) for n, i in enumerate(program["inputs"])]
    specs = tuple(partition(i["spec"]) for i in program["inputs"])
    f = jax.jit(jax.shard_map(lambda *shards: evaluate(program, shards, Lib), mesh=mesh, in_specs=specs,
                              out_specs=partition(program["out_spec"])))  # fmt: skip
    try:
        out, pull = jax.vjp(f, *inputs)
    except ValueError as error:
        return {"refused": str(error).split("\n")[0][:60]}
    try:
        cotangents = pull(jnp.array(filling(out.shape, 99)).reshape(out.shape))
    except ValueError:  # JAX 0.10's transpose of an untiled all_to_all between two dims has the wrong shape
        return None
    flat = [np.asarray(x).ravel().tolist() for x in (out, *cotangents)]
    return {"shape": list(out.shape), "out": marks(flat[0]), "cotangents": [marks(x) for x in flat[1:]]}


def types(program: dict, shards, seen: list):
    """Notes each value's shape and axes while JAX traces."""
    values = list(shards)
    for op, *arguments in program["steps"]:
        values.append(STEPS[op](Lib, values, *arguments))
    seen.extend((v.shape, sorted(jax.typeof(v).mat.varying)) for v in values)
    return values[0]


def looked_at(program: dict):
    """(shape, axes) of each value; None where JAX refuses."""
    seen: list = []
    mesh = mesh_of(program)
    specs = tuple(partition(i["spec"]) for i in program["inputs"])
    inputs = [jax.ShapeDtypeStruct(i["shape"], jnp.float64) for i in program["inputs"]]
    f = jax.shard_map(lambda *shards: types(program, shards, seen), mesh=mesh, in_specs=specs, out_specs=specs[0])
    try:
        jax.eval_shape(f, *inputs)  # traced alone: nothing runs
    except (ValueError, TypeError):
        return None
    return seen


def some(rng, mesh, most=2):
    return rng.sample(list(mesh), rng.randint(1, min(most, len(mesh))))


def draw(rng: random.Random) -> dict:
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
    seen = looked_at(program)
    while len(program["steps"]) < rng.randint(3, 9):
        step = drawn_step(rng, mesh, seen)
        if step is None:
            continue
        longer = {**program, "steps": [*program["steps"], step]}
        if (now := looked_at(longer)) is None:
            if rng.random() < 0.04:  # a program that is refused stays, now and then
                return longer
            continue
        if prod(now[-1][0]) <= 128:
            program, seen = longer, now
    axes = seen[-1][1]
    if rng.random() < 0.3:
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
        fits = [i for i, (s, _) in enumerate(seen) if (s[0] == wanted[1] if op == "matmul" else s == wanted)]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    rng, table = random.Random(options.seed), []
    while len(table) < options.programs:
        program = draw(rng)
        if (found := result(program)) is not None:
            table.append({**program, **found})
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in table)
    Path(options.out).write_text(f"[\n{lines}\n]\n")
    refused = sum("refused" in row for row in table)
    print(f"{len(table)} programs, {refused} refused by JAX {jax.__version__}: {options.out}")


if __name__ == "__main__":
    main()
