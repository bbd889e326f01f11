"""The typed collectives on a mesh that may lack some of their axes: those, and axes of size 1, drop out of a line.

One listing then serves every mesh: on {"X": 4} the line "y[B_PX, T_CY, D] -> y[B_PX, T_C, D]" is nothing at all, on
{"X": 2, "Y": 2} it is the AllGather "y[B_X, T_Y, D] -> y[B_X, T, D]".
"""

from functools import lru_cache

from torch import Tensor

from scaling import collectives
from scaling.collectives.masks import zeroed
from scaling.spec import Line, Spec, parse, parse_line


def present(spec: "str | Spec", mesh) -> Spec:
    """The type without the axes that the mesh lacks or has with size 1."""
    return _present(parse(spec), _real(mesh))


def _real(mesh) -> tuple[str, ...]:
    return tuple(axis for axis, size in mesh.sizes.items() if size > 1)


@lru_cache(maxsize=4096)
def _present(spec: Spec, real: tuple[str, ...]) -> Spec:
    dims = tuple((dim, tuple(axis for axis in axes if axis in real)) for dim, axes in spec.dims)
    return Spec(spec.name, dims, tuple(axis for axis in spec.unreduced if axis in real))


@lru_cache(maxsize=4096)
def _line(text: str, real: tuple[str, ...]) -> str:
    """The line without the axes that are not real; "" if both its types are then the same."""
    line = parse_line(text)
    before, after = _present(line.operands[0], real), _present(line.result, real)
    return "" if before.same_sharding(after) else str(Line((before,), after))


def _left(mesh, text: str) -> str:
    return _line(text, _real(mesh))


def _summed(mesh, text: str) -> str:
    """The type without the axes that are not real; "" if it is then no partial sum."""
    spec = present(text, mesh)
    return str(spec) if spec.unreduced else ""


def _apply(collective, text: str, x: Tensor, mesh, **options):
    line = mesh.constant(_left, text)
    return collective(line, x, mesh, **options) if line else x


def all_gather(line: str, x: Tensor, mesh, **options):
    """`scaling.collectives.all_gather` over those axes of the line that the mesh has."""
    return _apply(collectives.all_gather, line, x, mesh, **options)


def all_reduce(line: str, x: Tensor, mesh, **options):
    """`scaling.collectives.all_reduce` over those axes of the line that the mesh has."""
    return _apply(collectives.all_reduce, line, x, mesh, **options)


def all_to_all(line: str, x: Tensor, mesh, **options):
    """`scaling.collectives.all_to_all` over those axes of the line that the mesh has."""
    return _apply(collectives.all_to_all, line, x, mesh, **options)


def masked(line: str, x: Tensor, mask: Tensor, mesh) -> Tensor:
    """`scaling.collectives.masked` over those axes of the type that the mesh has; without any the mask alone."""
    line = mesh.constant(_summed, line)
    return collectives.masked(line, x, mask, mesh) if line else zeroed(x, mask)


def reduce_scatter(line: str, x: Tensor, mesh, **options):
    """`scaling.collectives.reduce_scatter` over those axes of the line that the mesh has."""
    return _apply(collectives.reduce_scatter, line, x, mesh, **options)


def shard(line: str, x: Tensor, mesh) -> Tensor:
    """`scaling.collectives.shard` over those axes of the line that the mesh has."""
    return _apply(collectives.shard, line, x, mesh)
