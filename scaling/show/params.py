"""Print every leaf of a Transformer on a mesh, its type and bytes on a rank: `python -m scaling.show params --help`."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from scaling.common.console import Parser, complaining, significant, table
from scaling.configs import Config, get
from scaling.configs.sources import HELP
from scaling.spec import parse
from scaling.spec.sizes import parse_mesh
from scaling.strategies.transformer.types import specs

DTYPES = ("bf16", "fp16", "fp32", "fp64")


def leaf_rows(config: Config, mesh: Mapping[str, int], dtype: str, zero: int = 3) -> list[tuple[str, str, str, int]]:
    """Return (leaf, type, local shape, bytes on a rank) of each leaf of the model's params on a mesh of these sizes.

    ShardingError if the model does not divide over the mesh. Neither torch nor optree is needed, as in a browser.
    """
    found = []
    for leaf, text in named_types(specs(config, mesh, zero=zero)):
        spec, sizes = parse(text), dict(config.sizes)
        stages = math.prod(mesh[axis] for axis in spec.axes_of("L"))
        sizes["L"] = -(-sizes["L"] // stages) * stages  # stages hold equally many; the last ones may have padding
        sizes = {dim: sizes[dim] for dim in spec.dim_names}
        shape = "x".join(map(str, spec.local_shape(sizes, mesh)))
        found.append((leaf, text, shape, spec.nbytes(sizes, mesh, dtype)))
    return found


def named_types(types: Any, above: str = "") -> Iterator[tuple[str, str]]:
    """Yield each leaf's path, its names joined by dots, and its type, in the order of the names."""
    for name, below in sorted(types.items()):
        yield from named_types(below, f"{above}{name}.") if isinstance(below, dict) else [(above + name, below)]


@complaining(ValueError, OSError)
def main(argv: "list[str] | None" = None) -> int:
    """Print the table of leaves; return the exit code."""
    parser = Parser(prog="python -m scaling.show params", description=__doc__)
    parser.add_argument("--model", default="llama3-70b", help=f"{HELP} (default llama3-70b)")
    parser.add_argument("--mesh", default="X=64,Y=8", help="axes of P, Z, X, C, Y, E and sizes (default X=64,Y=8)")
    parser.add_argument("--dtype", default="bf16", choices=DTYPES, help="dtype of the params (default bf16)")
    parser.add_argument(
        "--zero",
        type=int,
        default=3,
        choices=(0, 1, 2, 3),
        help="ZeRO stage: 0 replicates over X, 1 and 2 shard the state, 3 the params (default 3)",
    )
    args = parser.parse_args(argv)
    config = get(args.model)
    mesh = parse_mesh(args.mesh)
    listed = leaf_rows(config, mesh, args.dtype, args.zero)
    rows = [(leaf, text, shape, f"{nbytes:,.0f}") for leaf, text, shape, nbytes in listed]
    print(table(rows, ["leaf", "type", "on a rank", "bytes"]))
    total = sum(nbytes for *_, nbytes in listed)
    devices = f"{math.prod(mesh.values()):,} devices ({args.mesh})"
    print(f"\n{config.name} on {devices}: {significant(total)} bytes of params on each")
    return 0
