"""Convert types to and from other notations: DTensor placements and JAX's PartitionSpec (Part 3, in code).

DTensor has one placement per mesh axis, `[Shard(0), Replicate()]`. Axes that split one dim split it in the mesh's
order, so a mesh (X, Y) has `I_XY`; for `I_YX`, `Spec.placements` gives a strided shard. JAX lists the axes of each dim,
in any order.
"""

import ast
from collections.abc import Sequence

from torch.distributed.tensor import Placement

from scaling.common.arguments import shortened
from scaling.spec import ShardingError, Spec, mesh_sizes, parse
from scaling.spec.sizes import check_axis


def to_placements(spec: "str | Spec", mesh) -> tuple[Placement, ...]:
    """Return DTensor's placements of a type, one per mesh axis: "A[I_X, J] {U_Y}" -> (Shard(0), Partial()).

    Raises:
        ShardingError: A dim's axes have another order than the mesh's, for which `Spec.placements` has strided shards.
    """
    spec = parse(spec)
    spec.check_axes(mesh)
    order = list(mesh_sizes(mesh))
    for dim, axes in spec.dims:
        if [*axes] != sorted(axes, key=order.index):
            raise ShardingError(
                f"{spec}: DTensor splits a dim over mesh axes in the mesh's order, which is {', '.join(order)}; "
                f"{dim} has {', '.join(axes)}\n  fix: reshard {dim} first, or give the mesh its axes in that order"
            )
    return spec.placements(mesh)


def from_placements(placements: Sequence[Placement], mesh, dims: Sequence[str], name: str = "") -> Spec:
    """Return the type of DTensor's placements, as `Spec.from_placements` does."""
    return Spec.from_placements(placements, mesh, dims, name)


def to_partition_spec(spec: "str | Spec") -> str:
    """Write a type as JAX does: "A[I_XY, J]" -> "P(('X', 'Y'), None)"; unreduced axes are `unreduced={'Z'}`."""
    spec = parse(spec)
    entries = [repr(axes if len(axes) > 1 else axes[0] if axes else None) for _, axes in spec.dims]
    if spec.unreduced:
        entries.append("unreduced={" + ", ".join(map(repr, spec.unreduced)) + "}")
    return f"P({', '.join(entries)})"


def from_partition_spec(text: str, dims: Sequence[str], name: str = "") -> Spec:
    """Read the type of an array with these dims from JAX's text: `P('X', None)`, `PartitionSpec(('X', 'Y'))`.

    Dims that the text leaves out are not split, as in JAX.

    Raises:
        ShardingError: The text is not a PartitionSpec of at most these dims, or has an axis that types cannot name.
            JAX's `P('XY')`, for example, is split over one axis of that name, but `A[I_XY]` over X and Y.
    """
    entries, unreduced = _read_partition_spec(text)
    fix = "write P(...) with None, an axis or a tuple of axes for each dim, and maybe unreduced={'X'}"
    if entries is None or len(entries) > len(dims):
        raise ShardingError(f"{shortened(repr(text))} is not a PartitionSpec of {len(dims)} dims\n  fix: {fix}")
    for axis in (*(axis for axes in entries for axis in axes), *unreduced):
        if isinstance(axis, str) and len(axis) > 1 and axis.isupper() and axis.isalpha():
            split = ", ".join(map(repr, axis))
            raise ShardingError(
                f"{shortened(text)}: {axis!r} is one axis to JAX, but types read it as the axes {', '.join(axis)}\n"
                f"  fix: write ({split}) if those are meant, or give the axis a name such as {axis.lower()}"
            )
        check_axis(axis)
    entries += [()] * (len(dims) - len(entries))
    return Spec(name, tuple(zip(dims, entries, strict=True)), tuple(sorted(unreduced))).validated()


def _read_partition_spec(text: str) -> tuple[list[tuple] | None, tuple]:
    """Return the axes of each entry, and the unreduced axes; the first is None if the text is not a PartitionSpec."""
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or ast.unparse(call.func).split(".")[-1] not in ("P", "PartitionSpec"):
            return None, ()
        entries = [ast.literal_eval(argument) for argument in call.args]
        keywords = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (AttributeError, SyntaxError, ValueError, TypeError, MemoryError, RecursionError):  # if nested too deep
        return None, ()
    unreduced = keywords.pop("unreduced", ())
    if keywords or not isinstance(unreduced, (set, tuple, list)):
        return None, ()
    if not all(entry is None or isinstance(entry, (str, tuple)) for entry in entries):
        return None, ()
    return [() if entry is None else (entry,) if isinstance(entry, str) else entry for entry in entries], (*unreduced,)
