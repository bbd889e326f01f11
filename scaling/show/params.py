"""Every leaf of a Transformer on a mesh, its type and its bytes on a rank: `python -m scaling.show params --help`."""

from tabulate import tabulate

from scaling import tree
from scaling.configs import MODELS, get, load
from scaling.console import Parser, complain
from scaling.cost.units import significant
from scaling.mesh import AbstractMesh
from scaling.sizes import parse_mesh
from scaling.spec import parse
from scaling.strategies.transformer import specs

DTYPES = ("bf16", "fp16", "fp32", "fp64")


def leaf_rows(config, mesh, dtype: str, zero: int = 3) -> list[tuple[str, str, str, int]]:
    """(leaf, type, local shape, bytes on a rank) of each leaf of the model's params."""
    found = []
    for where, text in tree.named_leaves(specs(config, mesh, zero=zero), "").items():
        spec = parse(text)
        sizes = dict(config.sizes)
        if axes := spec.axes_of("L"):  # stages hold a whole number of layers, the last ones perhaps one less
            parts = mesh.size(axes)
            sizes["L"] = -(-config.L // parts) * parts
        leaf = where.replace('"]["', ".").strip('[]"')
        shape = "x".join(map(str, spec.local_shape({dim: sizes[dim] for dim in spec.dim_names}, mesh)))
        found.append((leaf, text, shape, spec.nbytes({dim: sizes[dim] for dim in spec.dim_names}, mesh, dtype)))
    return found


def main(argv: "list[str] | None" = None) -> int:
    parser = Parser(prog="python -m scaling.show params", description=(__doc__ or "").split(":")[0])
    parser.add_argument("--model", default="llama3-70b", help=f"a config.json, or one of {', '.join(MODELS)}")
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
    try:
        config = load(args.model) if args.model.endswith(".json") else get(args.model)
        mesh = AbstractMesh(parse_mesh(args.mesh))
        listed = leaf_rows(config, mesh, args.dtype, args.zero)
    except (ValueError, OSError) as error:
        complain(error)
        return 1
    table = [(leaf, text, shape, f"{nbytes:,.0f}") for leaf, text, shape, nbytes in listed]
    head = ["leaf", "type", "on a rank", "bytes"]
    print(tabulate(table, head, "simple", colalign=("left", "left", "left", "right"), disable_numparse=True))
    total = sum(nbytes for *_, nbytes in listed)
    print(f"\n{config.name} on {mesh.size():,} devices ({args.mesh}): {significant(total)} bytes of params on each")
    return 0
