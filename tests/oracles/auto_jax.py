"""What XLA's partitioner moves for each random program of tests/auto: the table that the suite compares with.

    pip install jax==0.10.2
    PYTHONPATH=. python tests/oracles/auto_jax.py            # prints the bytes; --write stores the table

The program is compiled for eight CPU devices with the same types for what goes in and out. Of its HLO the collectives
are read; each counts the bytes that a device sends by the algorithm that is optimal in bytes, as ours do.
"""

import argparse
import json
import re
import sys
from math import prod
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

sys.path.insert(0, str(Path(__file__).parents[1] / "auto"))
from random_programs import MESH, Program, function, programs

from scaling.spec import parse

TABLE = Path(__file__).parents[1] / "auto" / "xla_bytes.json"
BYTES = {"f32": 4, "pred": 1, "s32": 4, "f64": 8, "bf16": 2}
LINE = re.compile(r"= (\(?[^=]*?\)?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(-start)?\(")


def group(line: str) -> int:
    """The devices of each group: `{{0,1},{2,3}}`, `[4,2]<=[8]` or `mesh['a'=4,'b'=2] {'a'}`, with parts `'a':(1)2`."""
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return len(listed[1].split(","))
    if counted := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(counted[1])
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\].*? \{('[^}]*)\}", line):
        sizes = dict(re.findall(r"('\w+')=(\d+)", named[1]))
        parts = re.findall(r"('\w+')(?::\(\d+\)(\d+))?", named[2])
        return prod(int(part or sizes[axis]) for axis, part in parts)
    raise ValueError(f"no groups in {line}")


def sent(line: str) -> tuple[str, float]:
    """(the collective of a line of HLO, bytes that each device sends), or ("", 0)."""
    match = LINE.search(line)
    if not match:
        return "", 0
    shapes = re.findall(r"([a-z]+\d*)\[([\d,]*)\]", match[1])
    held = sum(BYTES[kind] * prod(map(int, dims.split(","))) if dims else BYTES[kind] for kind, dims in shapes)
    if match[2] == "collective-permute":
        pairs = re.findall(r"\{(\d+),(\d+)\}", line)
        return match[2], held if any(a != b for a, b in pairs) else 0
    n = group(line)
    share = {
        "all-gather": (n - 1) / n,
        "all-reduce": 2 * (n - 1) / n,
        "reduce-scatter": n - 1,
        "all-to-all": (n - 1) / n,
    }
    return match[2], held * share[match[2]]


def compiled(program: Program, mesh) -> list[tuple[str, float]]:
    def sharding(type: str) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*(axes or None for _, axes in parse(type).dims)))

    run = function(program, jnp.einsum, jnp.tanh)
    jitted = jax.jit(run, in_shardings=tuple(map(sharding, program.in_types)), out_shardings=sharding(program.out_type))
    text = jitted.lower(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in program.shapes)).compile().as_text()
    return [found for found in map(sent, text.splitlines()) if found[0]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="store the table")
    write = parser.parse_args().write
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = jax.make_mesh(tuple(MESH.values()), tuple(MESH), axis_types=(AxisType.Auto,) * 2)
    table = {}
    for seed, program in programs():
        found = compiled(program, mesh)
        table[seed] = sum(nbytes for _, nbytes in found)
        print(seed, program.in_types, program.out_type, round(table[seed]), [op for op, _ in found])
    if write:
        head = {"jax": jax.__version__, "by": "tests/oracles/auto_jax.py"}
        TABLE.write_text(json.dumps(head | {"bytes": table}) + "\n")


if __name__ == "__main__":
    main()
