"""What JAX makes of the shard_map programs that the suite compares with: values and vjp in float64, or a refusal.

    pip install jax==0.10.2
    python tests/oracles/shard_map_jax.py        # counts; --write stores the answers in tests/shard_map/*.json

The programs stand in the tables: drawn at random, 60 of JAX's older steps and 60 with steps that make unreduced and
reduced values. Left out are those for which JAX 0.10 lacks a rule (NotImplementedError, a reduced value that would have
to become varying over more axes, a transpose that fails where the program itself does not), and those that it lets pass
and this project refuses on purpose: an out_spec unreduced over an axis along which the result is invariant, and the
greatest of terms of a sum over another axis. Each program's result and cotangents are stored as two weighted sums of
their elements.
"""

import argparse
import contextlib
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "shard_map"))
from programs import evaluate, filling, marks

ROOM = Path(__file__).parents[1] / "shard_map"
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_x64", True)
REFUSALS = ValueError, TypeError, jax._src.core.ShardingTypeError
GIVEN = "mesh", "inputs", "steps", "out_spec", "unreduced"


class Lib:
    """JAX's functions under the names that programs use."""

    sin, tanh, matmul, sum, reshape = jnp.sin, jnp.tanh, jnp.matmul, jnp.sum, jnp.reshape
    grad, jvp, vjp, vmap, stop = jax.grad, jax.jvp, jax.vjp, jax.vmap, jax.lax.stop_gradient
    psum, pmean, pmax, all_gather = jax.lax.psum, jax.lax.pmean, jax.lax.pmax, jax.lax.all_gather
    psum_scatter, all_to_all, ppermute = jax.lax.psum_scatter, jax.lax.all_to_all, jax.lax.ppermute
    axis_index, axis_size, pcast = jax.lax.axis_index, jax.lax.axis_size, jax.lax.pcast

    @staticmethod
    def vma(x):
        return jax.typeof(x).mat.varying


def partition(spec, unreduced=()):
    return jax.P(*(tuple(axes) if axes else None for axes in spec), unreduced={*unreduced})


def result(program: dict) -> dict:
    """What JAX says of a program: {"out", "cotangents"} as marks, with the shape of out, or {"refused"}."""
    typed = "unreduced" in program
    kind = jax.sharding.AxisType.Explicit if typed else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh(tuple(program["mesh"].values()), tuple(program["mesh"]), (kind,) * len(program["mesh"]))
    with jax.set_mesh(mesh) if typed else contextlib.nullcontext():
        inputs = [jnp.array(filling(i["shape"], n)).reshape(i["shape"]) for n, i in enumerate(program["inputs"])]
        specs = tuple(partition(i["spec"]) for i in program["inputs"])
        inputs = [jax.reshard(x, spec) for x, spec in zip(inputs, specs, strict=True)] if typed else inputs
        out_spec = partition(program["out_spec"], program.get("unreduced", ()))
        f = jax.jit(jax.shard_map(lambda *shards: evaluate(program, shards, Lib), mesh=mesh, in_specs=specs,
                                  out_specs=out_spec))  # fmt: skip
        try:
            out, pull = jax.vjp(f, *inputs)
        except REFUSALS as error:
            return {"refused": str(error).split("\n")[0][:60]}
        cotangent = jnp.array(filling(out.shape, 99)).reshape(out.shape)
        cotangent = jax.reshard(cotangent, jax.typeof(out).to_ct_aval().sharding.spec) if typed else cotangent
        whole = [jax.reshard(x, jax.P()) if typed else x for x in (out, *pull(cotangent))]
    flat = [np.asarray(x).ravel().tolist() for x in whole]
    return {"shape": list(out.shape), "out": marks(flat[0]), "cotangents": [marks(x) for x in flat[1:]]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="store the tables")
    write = parser.parse_args().write
    for path in (ROOM / "programs.json", ROOM / "typed.json"):
        programs = [{key: row[key] for key in GIVEN if key in row} for row in json.loads(path.read_text())]
        table = [program | result(program) for program in programs]
        refused = sum("refused" in row for row in table)
        print(f"{path.name}: {len(table)} programs, {refused} refused by JAX {jax.__version__}")
        if write:
            path.write_text("[\n" + ",\n".join(json.dumps(row, separators=(",", ":")) for row in table) + "\n]\n")


if __name__ == "__main__":
    main()
