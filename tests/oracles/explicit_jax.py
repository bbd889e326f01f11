"""What JAX's explicit mode says of every case of tests/explicit/typings.py: the table that the suite compares with.

    pip install jax==0.10.2
    PYTHONPATH=. python tests/oracles/explicit_jax.py            # counts; --write stores the table

Types alone are asked for, on an abstract mesh: nothing runs. `!` stands for a refusal.
"""

import argparse
import sys
from itertools import groupby
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

sys.path.insert(0, str(Path(__file__).parents[1] / "explicit"))
from typings import Case, cases, written

TABLE = Path(__file__).parents[1] / "explicit" / "jax_types.txt"
FUNCTIONS = {
    "einsum": lambda detail: lambda a, b: jnp.einsum(*detail, a, b),
    "add": lambda detail: jnp.add,
    "sum": lambda detail: lambda a: jnp.sum(a, detail),
    "amax": lambda detail: lambda a: jnp.max(a, detail),
    "permute": lambda detail: lambda a: jnp.transpose(a, detail),
    "reshape": lambda detail: lambda a: jnp.reshape(a, detail),
}


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
    dims = [() if a is None else (a,) if isinstance(a, str) else a for a in result.sharding.spec]
    return written(dims + [()] * (len(result.shape) - len(dims)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"store {TABLE.name}")
    lines, count = [], 0
    for (mesh, kind, detail, shapes), group in groupby(cases(), lambda c: (str(c.mesh), c.kind, c.detail, c.shapes)):
        answers = [answer(case) for case in group]
        count += len(answers)
        lines.append(f"# {kind} {detail} {shapes} {mesh}\n" + " ".join(answers))
    print(f"{count} cases with JAX {jax.__version__}, {sum(line.count('!') for line in lines)} refused")
    if parser.parse_args().write:
        TABLE.write_text(
            f"# JAX {jax.__version__}; written by tests/oracles/explicit_jax.py\n" + "\n".join(lines) + "\n"
        )


if __name__ == "__main__":
    main()
