"""What JAX's explicit mode says: of every case of tests/explicit/typings.py its type, and of every program
there its gradients, their types and their values by two projections; the tables that the suite
compares with.

    pip install jax==0.10.2
    PYTHONPATH=. python tests/oracles/explicit_jax.py types            # counts; --write stores the table
    PYTHONPATH=. python tests/oracles/explicit_jax.py gradients        # prints the types; --write stores the table

Of the first, types alone are asked for, on an abstract mesh: nothing runs. `!` stands for a refusal.
"""

import argparse
import json
import sys
from itertools import groupby
from math import prod
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

sys.path.insert(0, str(Path(__file__).parents[1] / "explicit"))
sys.path.insert(0, str(Path(__file__).parents[1] / "auto"))
from random_programs import MESH, SIZES, function
from typings import Case, cases, digest, numbers, typed_programs, written

from scaling.spec import parse

ROOM = Path(__file__).parents[1] / "explicit"
BY = f"JAX {jax.__version__}; written by tests/oracles/explicit_jax.py"
FUNCTIONS = {
    "einsum": lambda detail: lambda a, b: jnp.einsum(*detail, a, b),
    "add": lambda detail: jnp.add,
    "sum": lambda detail: lambda a: jnp.sum(a, detail),
    "amax": lambda detail: lambda a: jnp.max(a, detail),
    "permute": lambda detail: lambda a: jnp.transpose(a, detail),
    "reshape": lambda detail: lambda a: jnp.reshape(a, detail),
}


def axes_of(x) -> str:
    """`X,-`: the axes of each dim."""
    dims = [() if a is None else (a,) if isinstance(a, str) else a for a in x.sharding.spec]
    return written(dims + [()] * (len(x.shape) - len(dims)))


def answer(case: Case) -> str:
    mesh = AbstractMesh(tuple(case.mesh.values()), tuple(case.mesh), axis_types=(AxisType.Explicit,) * len(case.mesh))
    with jax.sharding.use_abstract_mesh(mesh):
        operands = [
            jax.ShapeDtypeStruct(
                shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*(a or None for a in dims)))
            )
            for shape, dims in zip(case.shapes, case.typing, strict=True)
        ]
        try:
            result = jax.eval_shape(FUNCTIONS[case.kind](case.detail), *operands)
        except Exception as error:
            known = "sharding", "Sharding", "mesh_axis", "duplicate", "PartitionSpec", "reshape"
            if not any(word in f"{type(error).__name__} {error}" for word in known):
                raise
            return "!"
    return axes_of(result)


def types(write: bool) -> None:
    lines, count = [], 0
    for (mesh, kind, detail, shapes), group in groupby(cases(), lambda c: (str(c.mesh), c.kind, c.detail, c.shapes)):
        answers = [answer(case) for case in group]
        count += len(answers)
        lines.append(f"# {kind} {detail} {shapes} {mesh}\n" + " ".join(answers))
    print(f"{count} cases with JAX {jax.__version__}, {sum(line.count('!') for line in lines)} refused")
    if write:
        (ROOM / "jax_types.txt").write_text("\n".join([f"# {BY}", *lines]) + "\n")


def partition(type: str) -> PartitionSpec:
    return PartitionSpec(*(axes or None for _, axes in parse(type).dims))


def array(shape, seed: int, type: str, mesh):
    values = numpy.array(numbers(prod(shape), seed)).reshape(shape)
    return jax.device_put(values, NamedSharding(mesh, partition(type)))


def gradients(write: bool) -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_enable_x64", True)
    mesh = jax.make_mesh(tuple(MESH.values()), tuple(MESH), axis_types=(AxisType.Explicit,) * 2)
    table = []
    with jax.set_mesh(mesh):
        for program, types in typed_programs():

            def einsum(equation, *xs, out):
                y = jnp.einsum(equation, *xs, out_sharding=partition(out))
                return jax.sharding.reshard(y, partition(out))  # an equation that changes nothing ignores out_sharding

            run = function(program, einsum, jnp.tanh, types, lambda x, t: jax.sharding.reshard(x, partition(t)))
            given = zip(program.shapes, program.in_types, strict=True)
            arguments = [array(shape, i, type, mesh) for i, (shape, type) in enumerate(given)]
            dy = array([SIZES[d] for d in parse(program.out_type).dim_names], 50, program.out_type, mesh)

            @jax.jit
            def derivatives(dy, *xs, run=run):
                y, pull = jax.vjp(run, *xs)
                return y, *pull(dy)

            found = [(axes_of(x), digest(numpy.asarray(x).ravel().tolist())) for x in derivatives(dy, *arguments)]
            table.append(found)
            print(program.in_types, [t for t, _ in found], flush=True)
    if write:
        rows = ",\n".join(json.dumps(row) for row in table)
        text = f'{{"by": {json.dumps(BY)}, "programs": [\n{rows}\n]}}\n'
        (ROOM / "jax_gradients.json").write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=WHAT)
    parser.add_argument("--write", action="store_true", help="store the table")
    args = parser.parse_args()
    WHAT[args.what](args.write)


WHAT = {"types": types, "gradients": gradients}

if __name__ == "__main__":
    main()
