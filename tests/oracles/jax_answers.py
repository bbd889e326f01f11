"""What JAX says of all that the suite compares with it: prints how many answers are as stored; --write stores them.

    pip install jax==0.10.2
    PYTHONPATH=. python tests/oracles/jax_answers.py typings programs shard_map

`typings` (tests/auto/typings.txt): the types that explicit mode gives results, on an abstract mesh: nothing runs; `!`
stands for a refusal.

`programs` (tests/auto/programs.json): the bytes that XLA's partitioner moves for each, compiled for eight CPU devices
with the same types for what goes in and out (of its HLO the collectives are read; each counts the bytes that a device
sends by the algorithm that is optimal in bytes, as ours do); and of explicit mode, with every result's type given, the
value and the gradients, their types and digests.

`shard_map` (tests/shard_map/*.json): values and vjp in float64, or a refusal. The programs were drawn at random, 60 of
JAX's older steps and 60 with steps that make unreduced and reduced values. Left out are those for which JAX 0.10 lacks
a rule (NotImplementedError, a reduced value that would have to become varying over more axes, a transpose that fails
where the program itself does not), and those that it lets pass and this project refuses on purpose: an out_spec
unreduced over an axis along which the result is invariant, and the greatest of terms of a sum over another axis.
"""

import argparse
import contextlib
import json
import re
import sys
from functools import partial
from math import prod
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

sys.path.insert(0, str(Path(__file__).parents[1] / "auto"))
sys.path.insert(0, str(Path(__file__).parents[1] / "shard_map"))
from beside_jax import MESH, PROGRAMS, SIZES, TYPINGS, Program, called, cases, digest, filling, programs, store, written
from programs import GIVEN, TABLES, evaluate

from scaling.spec import parse

# JAX's functions under the names that programs use
NAMES = vars(jax.lax) | vars(jax) | vars(jnp)
LIB = SimpleNamespace(
    **NAMES, permute=jnp.transpose, stop=jax.lax.stop_gradient, vma=lambda x: jax.typeof(x).mat.varying
)
REFUSAL = "sharding", "Sharding", "mesh_axis", "duplicate", "PartitionSpec", "reshape"
BYTES = {"f32": 4, "pred": 1, "s32": 4, "f64": 8, "bf16": 2}
LINE = re.compile(r"= (\(?[^=]*?\)?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(-start)?\(")


def axes_of(x) -> str:
    """`X,-`: the axes of each dim."""
    dims = [() if a is None else (a,) if isinstance(a, str) else a for a in x.sharding.spec]
    return written(dims + [()] * (len(x.shape) - len(dims)))


def typed(case) -> str:
    def run(*xs):
        function, arguments = called(case, LIB, xs)
        return function(*arguments)

    mesh = AbstractMesh(tuple(case.mesh.values()), tuple(case.mesh), axis_types=(AxisType.Explicit,) * len(case.mesh))
    with jax.sharding.use_abstract_mesh(mesh):
        shardings = [NamedSharding(mesh, PartitionSpec(*(axes or None for axes in dims))) for dims in case.typing]
        given = zip(case.shapes, shardings, strict=True)
        operands = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding) for shape, sharding in given]
        try:
            return axes_of(jax.eval_shape(run, *operands))
        except Exception as error:
            if not any(word in f"{type(error).__name__} {error}" for word in REFUSAL):
                raise
            return "!"


def typings(write: bool) -> None:
    lines, same, count = [], 0, 0
    for operation, some, stored in cases():
        answers = [typed(case) for case in some]
        same, count = same + sum(a == b for a, b in zip(answers, stored, strict=True)), count + len(answers)
        lines += [operation, " ".join(answers)]
    print(f"typings: {same} of {count} as stored")
    if write:
        TYPINGS.write_text("\n".join(lines) + "\n")


def partition(type: str) -> PartitionSpec:
    return PartitionSpec(*(axes or None for _, axes in parse(type).dims))


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


def sent(line: str) -> float:
    """Bytes that each device sends for a line of HLO."""
    match = LINE.search(line)
    if not match:
        return 0
    shapes = re.findall(r"([a-z]+\d*)\[([\d,]*)\]", match[1])
    held = sum(BYTES[kind] * prod(map(int, dims.split(","))) if dims else BYTES[kind] for kind, dims in shapes)
    if match[2] == "collective-permute":
        pairs = re.findall(r"\{(\d+),(\d+)\}", line)
        return held if any(a != b for a, b in pairs) else 0
    n = group(line)
    share = {"all-reduce": 2 * (n - 1) / n, "reduce-scatter": n - 1}
    return held * share.get(match[2], (n - 1) / n)


def mesh_of(sizes: dict, kind: AxisType):
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))


def partitioned(program: Program) -> float:
    sharding = partial(NamedSharding, mesh_of(MESH, AxisType.Auto))
    into = tuple(sharding(partition(type)) for type in program.in_types)
    run = partial(program.run, jnp.einsum, jnp.tanh)
    jitted = jax.jit(run, in_shardings=into, out_shardings=sharding(partition(program.types[-1])))
    text = jitted.lower(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in program.shapes)).compile().as_text()
    return sum(map(sent, text.splitlines()))


def derivatives(program: Program) -> list[tuple[str, list[float]]]:
    mesh = mesh_of(MESH, AxisType.Explicit)

    def array(shape, seed: int, type: str):
        return jax.device_put(numbers(shape, seed), NamedSharding(mesh, partition(type)))

    def reshard(x, type: str):
        return jax.sharding.reshard(x, partition(type))

    def einsum(equation, *xs, out):  # an equation that changes nothing ignores out_sharding
        return reshard(jnp.einsum(equation, *xs, out_sharding=partition(out)), out)

    @jax.jit
    def both(dy, *xs):
        y, pull = jax.vjp(partial(program.run, einsum, jnp.tanh, reshard=reshard), *xs)
        return y, *pull(dy)

    with jax.set_mesh(mesh):
        given = enumerate(zip(program.shapes, program.in_types, strict=True))
        arguments = [array(shape, i, type) for i, (shape, type) in given]
        out = program.types[-1]
        dy = array([SIZES[d] for d in parse(out).dim_names], 50, out)
        return [(axes_of(x), digest(np.asarray(x).ravel().tolist())) for x in both(dy, *arguments)]


def numbers(shape, seed: int):
    return np.array(filling(shape, seed)).reshape(shape)


def of_programs(write: bool) -> None:
    stored, found = programs(), []
    for program in stored:
        slopes = [list(each) for each in derivatives(program)]
        found.append(program._replace(xla_bytes=partitioned(program), derivatives=slopes))
    print(f"programs: {sum(a == b for a, b in zip(found, stored, strict=True))} of {len(found)} as stored")
    if write:
        store(PROGRAMS, [program._asdict() for program in found])


def spec_of(spec, unreduced=()):
    return jax.P(*(tuple(axes) if axes else None for axes in spec), unreduced={*unreduced})


def result(program: dict) -> dict:
    """What JAX says of a program: the digests of the result and of each cotangent, with the result's shape, or
    {"refused"}."""
    unreduced = program.get("unreduced")
    mesh = mesh_of(program["mesh"], AxisType.Auto if unreduced is None else AxisType.Explicit)
    reshard = (lambda x, spec: x) if unreduced is None else jax.reshard
    with contextlib.nullcontext() if unreduced is None else jax.set_mesh(mesh):
        specs = tuple(spec_of(i["spec"]) for i in program["inputs"])
        inputs = [jnp.array(numbers(i["shape"], n)) for n, i in enumerate(program["inputs"])]
        f = jax.shard_map(lambda *shards: evaluate(program, shards, LIB), mesh=mesh, in_specs=specs,
                          out_specs=spec_of(program["out_spec"], unreduced or ()))  # fmt: skip
        try:
            out, pull = jax.vjp(jax.jit(f), *map(reshard, inputs, specs))
        except (ValueError, TypeError, jax._src.core.ShardingTypeError) as error:
            return {"refused": str(error).split("\n")[0][:60]}
        cotangent = reshard(jnp.array(numbers(out.shape, 99)), jax.typeof(out).to_ct_aval().sharding.spec)
        whole = [reshard(x, jax.P()) for x in (out, *pull(cotangent))]
    return {"shape": list(out.shape), "digests": [digest(np.asarray(x).ravel().tolist()) for x in whole]}


def of_shard_map(write: bool) -> None:
    for path in TABLES:
        stored = json.loads(path.read_text())
        found = [row | result(row) for row in ({key: row[key] for key in GIVEN if key in row} for row in stored)]
        print(f"{path.name}: {sum(a == b for a, b in zip(found, stored, strict=True))} of {len(found)} as stored")
        if write:
            store(path, found)


WHAT = {"typings": typings, "programs": of_programs, "shard_map": of_shard_map}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=WHAT, nargs="+")
    parser.add_argument("--write", action="store_true", help="store the answers")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_enable_x64", True)
    for what in args.what:
        WHAT[what](args.write)


if __name__ == "__main__":
    main()
