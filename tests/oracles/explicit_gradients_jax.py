"""What JAX's explicit mode gives as gradients of every program of tests/explicit/gradient_programs.py: their types, and
their values by two projections; the table that the suite compares with.

    pip install jax==0.10.2
    PYTHONPATH=. python tests/oracles/explicit_gradients_jax.py            # prints the types; --write stores the table
"""

import json
import sys
from math import prod
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from storing import asked_to_store

sys.path.insert(0, str(Path(__file__).parents[1] / "explicit"))
from gradient_programs import digest, function, numbers, typed_programs
from random_programs import MESH, SIZES

from scaling.spec import parse

TABLE = Path(__file__).parents[1] / "explicit" / "jax_gradients.json"


def partition(type: str) -> PartitionSpec:
    return PartitionSpec(*(axes or None for _, axes in parse(type).dims))


def array(shape, seed: int, type: str, mesh):
    values = numpy.array(numbers(prod(shape), seed)).reshape(shape)
    return jax.device_put(values, NamedSharding(mesh, partition(type)))


def axes_of(x) -> str:
    """`X,-`: the axes of each dim."""
    dims = [*x.sharding.spec] + [None] * x.ndim
    return ",".join("-" if a is None else a if isinstance(a, str) else "".join(a) or "-" for a in dims[: x.ndim])


def main() -> None:
    write = asked_to_store(__doc__, TABLE)
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_enable_x64", True)
    mesh = jax.make_mesh(tuple(MESH.values()), tuple(MESH), axis_types=(AxisType.Explicit,) * 2)
    table = []
    with jax.set_mesh(mesh):
        for program, types in typed_programs():

            def einsum(equation, *xs, out):
                y = jnp.einsum(equation, *xs, out_sharding=partition(out))
                return jax.sharding.reshard(y, partition(out))  # an equation that changes nothing ignores out_sharding

            run = function(program, types, einsum, lambda x, t: jax.sharding.reshard(x, partition(t)), jnp.tanh)
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
        head = json.dumps(f"JAX {jax.__version__}; written by tests/oracles/{Path(__file__).name}")
        TABLE.write_text(f'{{"by": {head}, "programs": [\n{rows}\n]}}\n')


if __name__ == "__main__":
    main()
