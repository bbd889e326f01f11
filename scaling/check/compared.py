"""An array beside the type that a line says: what broke which rule; and where the call stands."""

import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

import scaling
from scaling.check.findings import said
from scaling.check.held import DimPart, HeldType, axes_along, name_along, size_along
from scaling.common.torch_private import is_wrapped, unwrapped
from scaling.spec import ShardingError, Spec, format_axes, parse_line

OWN = str(Path(scaling.__file__).parent / "")
ROOMS = "check/", "collectives/", "trace/", "tree.py", "common/torch_private.py", "strategies/axes.py"
ENGINE = tuple(f"{OWN}/{room}" for room in ROOMS)
PODS = "P"  # the slow axis: a line without it is the program of each pod
RAGGED = "R"  # a dim without axes that has another size on each rank: the rows of an expert


def without_pods(held: HeldType) -> "frozenset[str] | None":
    return None if held.unreduced is None else held.unreduced - {PODS}


def axes_in(line: str) -> set[str]:
    """The mesh axes that a line names; of what is no line, pods too."""
    try:
        typed = parse_line(line if "->" in line else f"{line} -> {line}")
    except ShardingError:
        return set()
    return {axis for spec in (*typed.operands, typed.result) for axis in (*spec.axes, *spec.unreduced)}


def type_without(spec: Spec, axes: Any) -> Spec:
    dims = tuple((dim, tuple(a for a in of if a not in axes)) for dim, of in spec.dims)
    return Spec(spec.name, dims, tuple(a for a in spec.unreduced if a not in axes))


def not_whole(held: HeldType) -> HeldType:
    """The same, of whose dims without axes it is not said that they are whole."""
    return replace(held, dims=tuple(tuple(p._replace(axes=p.axes or None) for p in dim) for dim in held.dims))


def at_hand(held: HeldType, axes: Any, how: str = "any") -> HeldType:
    """The same of any place along these axes; "drop": without them."""

    def of(piece: DimPart) -> DimPart:
        if not piece.axes or not {*piece.axes} & {*axes}:
            return piece
        return piece._replace(axes=None if how == "any" else tuple(a for a in piece.axes if a not in axes))

    unreduced = None if held.unreduced is None or how == "any" else held.unreduced - {*axes}
    return replace(held, dims=tuple(tuple(map(of, dim)) for dim in held.dims), unreduced=unreduced)


def dim_part(n: int, dim: str, axes: tuple[str, ...]) -> DimPart:
    return DimPart(int(n), dim, None if dim == RAGGED and not axes else axes)


def unwrapped_by_all(x: Any) -> Any:
    """What torch.func has wrapped."""
    while isinstance(x, Tensor) and is_wrapped(x):
        x = unwrapped(x)
    return x


def broken_rule(
    held: HeldType, declared: Spec, by: str, params: set[str], names: set[str], ones: set[str]
) -> "tuple[str, str] | None":
    """(rule, what is wrong and the fix) about using an array as the declared type; None if nothing is."""
    dims = held.dims[len(held.dims) - len(declared.dims) :]
    if params and held.name in params and declared.name in params and held.name != declared.name:
        return "wrong-name", said(f"it is {held.name}", "wrong-name", f"give {declared.name}")
    named_once = [name_along(dim) for dim in dims]
    for dim, wanted in zip(dims, declared.dim_names, strict=True):
        name = name_along(dim)
        if name and name != wanted and name in names and size_along(dim) > 1 and named_once.count(name) == 1:
            named = [name_along(d) or "?" for d in dims]
            fix = "give the operands in the order of their types, and transpose what must be"
            return "dims", said(f"the dims differ: {named} and {list(declared.dim_names)}", "dims", fix)
    blocks = {axis for dim, (_, axes) in zip(dims, declared.dims, strict=True) if size_along(dim) == 1 for axis in axes}
    if held.through and declared.unreduced:
        what = f"{held.through} is not known to be linear"
        fix = f"reduce it over {format_axes(declared.unreduced)} before {held.through}"
        return "nonlinear", said(what, "nonlinear", fix)
    if held.unreduced is not None and held.made != "of nothing":
        over, gone = held.unreduced - {*declared.unreduced} - blocks, {*declared.unreduced} - held.unreduced
        if over:
            axes = format_axes(sorted(over))
            fix = f"reduce_scatter or all_reduce it over {axes}"
            detail = f"a partial sum stays {{U_{axes}}} until it is reduced"
            return "unreduced", said(f"it is still unreduced over {axes}", "unreduced", fix, detail)
        if gone and held.made == "seed":
            what = f"the derivative of what is summed over {format_axes(sorted(gone))} already"
            return "loss", said(what, "loss", "differentiate the sum's own terms, and reduce the value afterwards")
        if gone:
            what = f"it is not unreduced over {format_axes(sorted(gone))}"
            return "reduced-twice", said(what, "reduced-twice", "drop the reduction, or the {U} of this type")
        if by and held.parts and held.unreduced and by != held.parts and "root" not in (held.parts, by):
            return "how-reduced", said(
                f"its parts make a {held.parts}, and op={by!r}", "how-reduced", f"op={held.parts!r}"
            )
    for dim, (name, says) in zip(dims, declared.dims, strict=True):
        was = axes_along(dim)
        if was is not None and size_along(dim) > 1 and set(was) != set(says) and set(was) ^ set(says) <= ones:
            continue
        if (
            was is not None
            and name != RAGGED
            and was != says
            and name != "1"
            and not (set(says) & blocks and set(says) & (held.unreduced or set()))
        ):
            a, b = (format_axes(axes) if axes else "no axis" for axes in (was, says))
            fix = "let the type say how the array is split, or all_gather, reduce_scatter or shard it first"
            return "split", said(f"{name} is split over {a}, not over {b}", "split", fix)
    return None


def place_of_call() -> str:
    """file:line of the innermost call outside the machinery."""
    frame: Any = traceback.walk_stack(None)
    for each, line in frame:
        file = each.f_code.co_filename
        if (
            not file.startswith(ENGINE)
            and "/torch/" not in file
            and "/optree/" not in file
            and "contextlib" not in file
            and not file.startswith("<frozen")
        ):
            return f"{file}:{line}"
    return ""


def raised_at(error: BaseException) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ENGINE)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
