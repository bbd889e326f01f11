"""Convert types to and from JAX's PartitionSpec, which lists the axes of each dim in any order (Part 3, in code).

`Spec.placements` and `Spec.from_placements` convert them to and from DTensor's placements.
"""

import ast
from collections.abc import Sequence

from scaling.common.arguments import shortened
from scaling.spec import ShardingError, Spec, parse
from scaling.spec.sizes import check_axis


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
