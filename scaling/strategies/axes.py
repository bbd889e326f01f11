"""The typed collectives on a mesh that may lack some of their axes: those, and axes of size 1, drop out of a line.

One listing then serves every mesh: on {"X": 4} the line "y[B_PX, T_CY, D] -> y[B_PX, T_C, D]" is nothing at all, on
{"X": 2, "Y": 2} it is the AllGather "y[B_X, T_Y, D] -> y[B_X, T, D]". What is left of a line is found out once a mesh.
"""

import torch
from torch import Tensor

from scaling import collectives
from scaling.collectives.masks import zeroed
from scaling.spec import Line, Spec, parse, parse_line


def present(spec: "str | Spec", mesh) -> Spec:
    """The type without the axes that the mesh lacks or has with size 1."""
    spec, real = parse(spec), [axis for axis, size in mesh.sizes.items() if size > 1]
    dims = tuple((dim, tuple(axis for axis in axes if axis in real)) for dim, axes in spec.dims)
    return Spec(spec.name, dims, tuple(axis for axis in spec.unreduced if axis in real))


def real_line(text: str, mesh) -> str:
    """What is left of a line, or of a type with a {U}, on this mesh: "" if nothing is to be done."""
    if torch.compiler.is_compiling():
        return mesh.constant(_left, text)
    found = mesh.lines.get(text)
    if found is None:
        found = mesh.lines[text] = _left(mesh, text)
    return found


def _left(mesh, text: str) -> str:
    if "->" not in text:
        spec = present(text, mesh)
        return str(spec) if spec.unreduced else ""
    line = parse_line(text)
    before, after = present(line.operands[0], mesh), present(line.result, mesh)
    return "" if before.same_sharding(after) else str(Line((before,), after))


def all_gather(line: str, x: Tensor, mesh, **options):
    """`scaling.collectives.all_gather` over those axes of the line that the mesh has."""
    line = real_line(line, mesh)
    return collectives.all_gather(line, x, mesh, **options) if line else x


def all_reduce(line: str, x: Tensor, mesh, **options):
    """`scaling.collectives.all_reduce` over those axes of the line that the mesh has."""
    line = real_line(line, mesh)
    return collectives.all_reduce(line, x, mesh, **options) if line else x


def all_to_all(line: str, x: Tensor, mesh, **options):
    """`scaling.collectives.all_to_all` over those axes of the line that the mesh has."""
    line = real_line(line, mesh)
    return collectives.all_to_all(line, x, mesh, **options) if line else x


def masked(line: str, x: Tensor, mask: Tensor, mesh) -> Tensor:
    """`scaling.collectives.masked` over those axes of the type that the mesh has; without any the mask alone."""
    line = real_line(line, mesh)
    return collectives.masked(line, x, mask, mesh) if line else zeroed(x, mask)


def reduce_scatter(line: str, x: Tensor, mesh, **options):
    """`scaling.collectives.reduce_scatter` over those axes of the line that the mesh has."""
    line = real_line(line, mesh)
    return collectives.reduce_scatter(line, x, mesh, **options) if line else x


def shard(line: str, x: Tensor, mesh) -> Tensor:
    """`scaling.collectives.shard` over those axes of the line that the mesh has."""
    line = real_line(line, mesh)
    return collectives.shard(line, x, mesh) if line else x
