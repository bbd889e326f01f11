"""shard_map held to what JAX says of random programs (tests/oracles/shard_map_jax.py).

python tests/shard_map/compared.py TABLE              # all shards in this process
python tests/shard_map/compared.py TABLE --ranks      # on 8 ranks
"""

import json
import sys
from pathlib import Path

import torch
from programs import evaluate, filling, marks

from scaling import shard_map as manual
from scaling.book.largest import largest
from scaling.common.console import Parser
from scaling.launch import run
from scaling.mesh import AbstractMesh, Mesh
from scaling.shard_map import shard_map
from scaling.spec import ShardingError

CLOSE = 1e-12


class Lib:
    """Torch's functions, and ours, under the names that programs use."""

    sin, tanh, matmul, sum, reshape, vmap = torch.sin, torch.tanh, torch.matmul, torch.sum, torch.reshape, torch.vmap
    psum, pmean, pmax, all_gather = manual.psum, manual.pmean, manual.pmax, manual.all_gather
    psum_scatter, all_to_all, ppermute = manual.psum_scatter, manual.all_to_all, manual.ppermute
    axis_index, axis_size, pcast = manual.axis_index, manual.axis_size, manual.pcast

    @staticmethod
    def stop(x):
        return x.detach()

    @staticmethod
    def pvary(x, axes):
        new = tuple(axis for axis in axes if axis not in manual.vma(x))
        return manual.pvary(x, new) if new else x

    @staticmethod
    def grad(f, x):
        return torch.func.grad(f)(x)

    @staticmethod
    def jvp(f, x, t):
        return torch.func.jvp(f, (x,), (t,))[1]

    @staticmethod
    def pull(f, x, cotangent):
        return torch.func.vjp(f, x)[1](cotangent)[0]


def text(spec, unreduced=()) -> str:
    entries = [repr(tuple(axes) or None) for axes in spec]
    return f"P({', '.join(entries + ([f'unreduced={ {*unreduced} }'] if unreduced else []))})"


def tensor(shape, seed: int) -> torch.Tensor:
    return torch.tensor(filling(shape, seed), dtype=torch.float64).reshape(shape)


def apart(row: dict, mesh, in_process: bool) -> float:
    """How far from JAX, relative to the largest; 0 where both refuse, infinite where one alone does."""
    inputs = [tensor(i["shape"], n) for n, i in enumerate(row["inputs"])]
    specs = tuple(text(i["spec"]) for i in row["inputs"])
    here = {"in_process": in_process}
    out_spec = text(row["out_spec"], row.get("unreduced", ()))
    program = shard_map(lambda *shards: evaluate(row, shards, Lib), mesh, specs, out_spec, **here)
    try:
        out, pull = torch.func.vjp(program, *inputs)
    except ShardingError:
        return 0.0 if "refused" in row else float("inf")
    if "refused" in row or list(out.shape) != row["shape"]:
        return float("inf")
    found = [out, *pull(tensor(out.shape, 99))]
    wanted = [row["out"], *row["cotangents"]]
    found = torch.tensor([marks(x.flatten().tolist()) for x in found], dtype=torch.float64)
    wanted = torch.tensor(wanted, dtype=torch.float64)
    return float(((found - wanted).abs() / (1 + wanted.abs())).max())


def differences(mesh, rows: list) -> list[float]:
    """On ranks: of each row, how far from JAX."""
    meshes = {}
    for row in rows:
        key = tuple(row["mesh"].items())
        if key not in meshes:
            meshes[key] = Mesh(row["mesh"])
    return [apart(row, meshes[tuple(row["mesh"].items())], False) for row in rows]


def main() -> None:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("table")
    parser.add_argument("--ranks", action="store_true")
    options = parser.parse_args()
    rows = json.loads(Path(options.table).read_text())
    if options.ranks:
        each = run(differences, {"X": 8}, rows)
        found = [largest(at) for at in zip(*each, strict=True)]
    else:
        found = [apart(row, AbstractMesh(row["mesh"]), True) for row in rows]
    wrong = [i for i, difference in enumerate(found) if not difference <= CLOSE]
    refused = sum("refused" in row for row in rows)
    right = max(d for d in found if d <= CLOSE)
    print(f"{len(rows)} programs, {refused} refused by both; at most {right:.1e} apart; beyond {CLOSE}: {wrong}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
