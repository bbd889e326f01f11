"""What a variable can hold while code is read and not run: the values of the static type checker, and how they meet.

A value that nothing is known about is None. What is known of an array is its type; a guess (`sure` False) is what a
function that is not followed most likely returned: it is held against a declared type only if the dims are the same.
"""

from dataclasses import dataclass, replace

from scaling.spec import Spec, format_axes


@dataclass(frozen=True)
class Array:
    """A shard of a known type; `pending`: still under way, to be waited for."""

    spec: Spec
    sure: bool = True
    pending: bool = False


@dataclass(frozen=True)
class Many:
    """A tuple or list of known length."""

    items: tuple


@dataclass(frozen=True)
class Each:
    """A list, an iterator or a stack of layers, all of whose items are alike."""

    item: object


@dataclass(frozen=True)
class Tree:
    """A dict by constant keys, such as params and gradients."""

    items: tuple[tuple[str, object], ...]

    def get(self, key):
        return dict(self.items).get(key)


@dataclass(frozen=True)
class Text:
    """A string that is known: the type of a line may be kept in a variable."""

    text: str


def merge(a, b):
    """What holds after either of two branches: the one that is known, or what both agree on."""
    if a is None or b is None or a == b:
        return b if a is None else a
    if isinstance(a, Array) and isinstance(b, Array):
        alike = a.spec.same_sharding(b.spec) and a.pending == b.pending
        return replace(a, sure=a.sure and b.sure) if alike else None
    if isinstance(a, Many) and isinstance(b, Many) and len(a.items) == len(b.items):
        return Many(tuple(map(merge, a.items, b.items)))
    if isinstance(a, Each) and isinstance(b, Each):
        return Each(merge(a.item, b.item))
    return None


def partly_reduced(a, b) -> str:
    """What is wrong with a value that is one of two arrays, of which one is a partial sum and the other is not."""
    if not isinstance(a, Array) or not isinstance(b, Array) or a.spec.dim_names != b.spec.dim_names:
        return ""
    if a.spec.unreduced == b.spec.unreduced:
        return ""
    return f"it is {a.spec} or {b.spec}\n  rule: a value is unreduced over the same axes whichever way it is made"


def element(value):
    """What iterating over a value, or indexing it by a variable, gives."""
    if isinstance(value, Each):
        return value.item
    if isinstance(value, Many):
        held = None
        for item in value.items:
            if held is not None and item is not None and merge(held, item) is None:
                return None
            held = merge(held, item)
        return held
    return None


def as_array(value) -> "Array | None":
    """A value as an operand: a stack of layers may stand for what its layers are."""
    if isinstance(value, Each) and isinstance(value.item, Array):
        return replace(value.item, sure=False)
    return value if isinstance(value, Array) else None


def guess(values) -> "Array | None":
    """What a function that is not followed returns of typed arguments: the same type, if they agree on it.

    Its result is unreduced where any argument is: it may be linear in that one.
    """
    arrays = [a for a in map(as_array, values) if a is not None and not a.pending]
    if not arrays or any(a.spec.dims != arrays[0].spec.dims for a in arrays):
        return None
    unreduced = sorted({axis for a in arrays for axis in a.spec.unreduced})
    first = arrays[0].spec
    if any(axis in first.axes for axis in unreduced):
        return None
    return Array(Spec(first.name, first.dims, tuple(unreduced)), sure=False)


def difference(held: Array, declared: Spec) -> str:
    """What is wrong about using an array as the declared type, and the fix; "" if nothing is."""
    if held.pending:
        return "it is still under way\n  rule: what async_op=True returns is waited for\n  fix: .wait() for it first"
    spec = held.spec
    if spec.same_sharding(declared):
        return ""
    if spec.dim_names != declared.dim_names:
        if not held.sure:
            return ""
        return "the dims differ\n  rule: an operand has the dims that its type says, in their order"
    over = [axis for axis in spec.unreduced if axis not in declared.unreduced]
    if over and spec.dims == declared.dims:
        axes = format_axes(over)
        return (
            f"it is still unreduced over {axes}\n  rule: a partial sum stays {{U_{axes}}} until it is reduced\n"
            f"  fix: reduce_scatter or all_reduce it over {axes}"
        )
    over = [axis for axis in declared.unreduced if axis not in spec.unreduced]
    if over and spec.dims == declared.dims:
        return f"it is not unreduced over {format_axes(over)}\n  rule: what is reduced already is not reduced again"
    for (dim, was), (_, says) in zip(spec.dims, declared.dims, strict=True):
        if was != says:
            a, b = (format_axes(axes) if axes else "no axis" for axes in (was, says))
            return f"{dim} is split over {a}, not over {b}\n  rule: only a collective changes how an array is split"
    return "the unreduced axes differ\n  rule: only a reduction removes axes from {U}"
