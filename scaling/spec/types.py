"""The book's sharding notation as data: `W[D_X, F_Y] {U_Z}` (Part 3, "A unified notation for sharding").

`parse` reads one type, `parse_line` an arrow between types. A type says for each dim of an array which mesh axes the
dim is split over (in `I_XY` X is major, so device (x, y) holds block x*|Y| + y). It also says over which axes the array
is still unreduced (`{U_Z}` means that every device along Z holds a partial sum). Devices along an axis that the type
does not mention hold replicas. This is plain Python, which needs neither torch nor devices.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from scaling.spec.reader import ShardingError, read_line, read_type, refuse
from scaling.spec.sizes import Format, bytes_of_parts, dtype_bytes, format_of, format_sizes, mesh_sizes, parts_of


def present(spec: "str | Spec", mesh) -> "Spec":
    """Return the type without the axes that the mesh lacks or has with size 1."""
    spec, sizes = parse(spec), mesh_sizes(mesh)
    return spec.without([axis for axis in spec.named_axes if sizes.get(axis, 1) == 1])


def format_axes(axes: Sequence[str]) -> str:
    """Format mesh axes: `("X", "Y")` gives "XY"; long names get braces, so `("data", "model")` gives "{data,model}"."""
    short = all(len(axis) == 1 and axis.isupper() for axis in axes)
    return "".join(axes) if short else "{" + ",".join(axes) + "}"


def block_index(axes: Sequence[str], coord: Mapping[str, int], mesh) -> int:
    """Return which block of a dim split over `axes` the device at `coord` holds: x * |Y| + y for `I_XY` (row-major)."""
    sizes, index = mesh_sizes(mesh), 0
    for axis in axes:
        index = index * sizes[axis] + coord[axis]
    return index


@dataclass(frozen=True)
class Spec:
    """One type. `W[D_X, F] {U_Y}` has `name` "W", `dims` (("D", ("X",)), ("F", ())) and `unreduced` ("Y",).

    An array without a name has the name "". A dim may be a number, which is also its size (`KV[2, B, S]`).
    `unreduced` is kept sorted. `W[D_X, F] {Q_D}` has `scaled` ("D",), the dims along which values share a scale.
    """

    name: str
    dims: tuple[tuple[str, tuple[str, ...]], ...]
    unreduced: tuple[str, ...] = ()
    scaled: tuple[str, ...] = ()

    def __str__(self) -> str:
        dims = ", ".join(dim + ("_" + format_axes(axes) if axes else "") for dim, axes in self.dims)
        text = f"{self.name}[{dims}]" + (f" {{U_{format_axes(self.unreduced)}}}" if self.unreduced else "")
        if not self.scaled:
            return text
        return text + (" {Q}" if self.scaled == self.dim_names else f" {{Q_{','.join(self.scaled)}}}")

    def parts(self, format: "str | Format") -> "tuple[Spec, ...]":
        """Return the types of the arrays that store an array with scales: its values, and one or two scales.

        `W[D_X, F] {Q_D}` is in "mxfp8" `W.q[D_X, F]` and `W.s[D/32_X, F]`, in "fp8-row" `W.q[D_X, F]` and `W.s[F]`.
        """
        if not self.scaled:
            return (self,)
        named = parts_of(self.dims, self.scaled, format_of(format))
        return tuple(Spec(f"{self.name}.{letter}", dims) for letter, dims in zip("qst", named, strict=False))

    def shared_over(self, format: "str | Format") -> tuple[str, ...]:
        """Return the axes that split what shares the outermost scale: only a maximum over all of them gives it.

        No axis splits a block, so there are none unless that scale is of a whole dim.
        """
        return tuple(sorted({*self.axes} - {*self.parts(format)[-1].axes}))

    @property
    def dim_names(self) -> tuple[str, ...]:
        """The names of the dims, in order."""
        return tuple(dim for dim, _ in self.dims)

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that some dim is split over, in order of their appearance."""
        return tuple(axis for _, axes in self.dims for axis in axes)

    def axes_of(self, dim: str) -> tuple[str, ...]:
        """Return the axes that `dim` is split over, which are () also for a dim that this array does not have."""
        return dict(self.dims).get(dim, ())

    def index(self, dim: str) -> int:
        """Return the position of a dim; ValueError if the array does not have it."""
        return self.dim_names.index(dim)

    def same_sharding(self, other: "Spec") -> bool:
        """Return whether all but the arrays' names is equal: dims, their axes, the unreduced axes, the scales' dims."""
        return (self.dims, self.unreduced, self.scaled) == (other.dims, other.unreduced, other.scaled)

    def with_name(self, name: str) -> "Spec":
        """Return this type under another name."""
        return replace(self, name=name)

    def with_axes(self, dim: str, axes: Sequence[str]) -> "Spec":
        """Return this type with `dim` split over `axes` instead."""
        return replace(self, dims=tuple((d, tuple(axes) if d == dim else a) for d, a in self.dims)).validated()

    def with_unreduced(self, axes: Iterable[str]) -> "Spec":
        """Return this type with `axes` as its unreduced axes."""
        return replace(self, unreduced=tuple(sorted(axes))).validated()

    def stacked(self, dim: str) -> "Spec":
        """Return the type of several such arrays stacked along a new first dim: W[D_X, F] -> W[L, D_X, F]."""
        return replace(self, dims=((dim, ()), *self.dims)).validated()

    def whole(self) -> "Spec":
        """Return the type of the whole array on every device: W[D_X, F] {U_Y} -> W[D, F]."""
        return replace(self, dims=tuple((dim, ()) for dim in self.dim_names), unreduced=())

    def validated(self) -> "Spec":
        """Return this type; ShardingError if it uses a dim or a mesh axis twice, or a name that cannot be written."""
        spec = parse(str(self))
        if not spec.same_sharding(replace(self, unreduced=tuple(sorted(self.unreduced)))):
            raise ShardingError(
                f"{self.dims}, unreduced over {self.unreduced}: reads as {spec}, which is another type\n"
                f"  fix: name an axis by one capital letter or by a word such as data, a dim without an underscore"
            )
        return spec

    @property
    def named_axes(self) -> tuple[str, ...]:
        """All axes that the type mentions, in dims or in {U}."""
        return self.axes + self.unreduced

    def without(self, axes: Collection[str]) -> "Spec":
        """Return the type without these axes."""

        def rest(named: Iterable[str]) -> tuple[str, ...]:
            return tuple(axis for axis in named if axis not in axes)

        return replace(self, dims=tuple((dim, rest(of)) for dim, of in self.dims), unreduced=rest(self.unreduced))

    def replicated(self, mesh) -> tuple[str, ...]:
        """Return the mesh axes that this type does not mention, along which every device holds the same values."""
        self.check_axes(mesh)
        return tuple(axis for axis in mesh_sizes(mesh) if axis not in self.named_axes)

    def cotangent(self, mesh=()) -> "Spec":
        """Return the type of the array's cotangent, such as `dW` of `W`.

        The cotangent is split where the array is split, replicated where the array is unreduced, and unreduced where
        the array is replicated. The last holds for the axes of `mesh`, which is a mesh or some of its axes' names.
        Without any axes the cotangent is reduced. That of an array with scales has none.
        """
        axes = mesh if isinstance(mesh, (tuple, list)) else mesh_sizes(mesh)
        unreduced = tuple(sorted({*axes} - {*self.named_axes}))
        return replace(self, name="d" + self.name, unreduced=unreduced, scaled=())

    def placements(self, mesh) -> tuple:
        """Return DTensor's placements, one per mesh axis: "A[I_X, J] {U_Y}" -> (Shard(0), Partial()).

        If a dim's axes have another order than the mesh's, as in `I_YX`, the placement is a strided shard.
        """
        from torch.distributed.tensor import Partial, Replicate, Shard
        from torch.distributed.tensor.placement_types import _StridedShard

        self.check_axes(mesh)
        sizes, found = mesh_sizes(mesh), dict[str, Any](dict.fromkeys(self.unreduced, Partial()))
        order = list(sizes)
        for position, (_, axes) in enumerate(self.dims):
            for n, axis in enumerate(axes):  # the factor: blocks made by more major axes that come later in the mesh
                factor = math.prod(sizes[major] for major in axes[:n] if order.index(major) > order.index(axis))
                found[axis] = Shard(position) if factor == 1 else _StridedShard(position, split_factor=factor)
        return tuple(found.get(axis, Replicate()) for axis in order)

    @staticmethod
    def from_placements(placements: Sequence, mesh, dims: Sequence[str], name: str = "") -> "Spec":
        """Return the type of DTensor's placements; `mesh` gives the axes' names and sizes, `dims` the dims' names.

        Raises:
            ShardingError: The notation lacks a placement: a reduction other than a sum, or a stride that no order of a
                dim's axes makes.
        """
        from torch.distributed.tensor import Partial, Replicate
        from torch.distributed.tensor.placement_types import Shard, _StridedShard

        sizes, unreduced, axes_of = mesh_sizes(mesh), [], [[] for _ in dims]
        for axis, placement in reversed([*zip(sizes, placements, strict=True)]):  # a factor counts later axes' blocks
            kind = type(placement)
            if kind in (Shard, _StridedShard) and -len(dims) <= placement.dim < len(dims):
                axes = axes_of[placement.dim]
                blocks = [math.prod(sizes[other] for other in axes[:n]) for n in range(len(axes) + 1)]
                if (factor := getattr(placement, "split_factor", 1)) in blocks:
                    axes.insert(blocks.index(factor), axis)
                    continue
            elif kind is Replicate:
                continue
            elif kind is Partial and placement.reduce_op == "sum":
                unreduced.append(axis)
                continue
            raise ShardingError(
                f"{placement} over {axis}: only Shard of one of the {len(dims)} dims, Replicate and Partial('sum') "
                f"are types of this notation\n  fix: redistribute the DTensor to such a placement first"
            )
        return Spec(name, tuple(zip(dims, map(tuple, axes_of), strict=True)), tuple(sorted(unreduced))).validated()

    def check_axes(self, mesh) -> None:
        """Raise ShardingError if the type names an axis that the mesh lacks, or is not the type of one array."""
        if self.scaled:
            refuse(self, "one plain array has this type, with {Q}", "an array with scales is its values and its scales",
                   "quantize it by a line, W[D_X, F] -> W[D_X, F] {Q_D}, whose result has that type")  # fmt: skip
        sizes = mesh_sizes(mesh)
        for axis in self.named_axes:
            if axis not in sizes:
                raise ShardingError(
                    f"{self}: unknown mesh axis {axis}: the mesh has {format_sizes(sizes)}\n"
                    f"  fix: use one of its axes, or give the mesh the axis (of size 1 if need be)"
                )

    def global_shape(self, sizes) -> tuple[int, ...]:
        """Return the shape of the whole array; `sizes` is {"D": 8, "F": 16} or that shape as a sequence of ints."""
        if not isinstance(sizes, Mapping):
            if len(sizes) != len(self.dims):
                what = f"{self}: has {len(self.dims)} dims, but the sizes given are {tuple(sizes)}"
                raise ShardingError(f"{what}\n  fix: name each dim of the array once")
            sizes = dict(zip(self.dim_names, sizes, strict=True))
        shape = []
        for dim, _ in self.dims:
            size = sizes[dim] if dim in sizes else int(dim) if dim.isdigit() else None
            whole, _, block = dim.partition("/")
            if size is None and block and isinstance(of := sizes.get(whole), int):
                if of % int(block):
                    refuse(self, f"dim {whole} of size {of} is no multiple of its block, {block}",
                           "every scale is of a whole block", f"pad {whole}, or use another format")  # fmt: skip
                size = of // int(block)
            if not isinstance(size, int) or isinstance(size, bool) or size < 0:
                what = f"{self}: dim {dim} needs a size, an int >= 0; got {size!r} in {dict(sizes)}"
                raise ShardingError(f"{what}\n  fix: give each dim its size")
            if dim.isdigit() and size != int(dim):
                what = f"{self}: dim {dim} says its own size, but the array has {size} there"
                raise ShardingError(f"{what}\n  fix: give it a name")
            shape.append(size)
        return tuple(shape)

    def local_shape(self, sizes, mesh) -> tuple[int, ...]:
        """Return the shape of one device's shard, each dim divided by its axes' sizes; `sizes` as in `global_shape`."""
        self.check_axes(mesh)
        local, axis_sizes = [], mesh_sizes(mesh)
        for (dim, axes), size in zip(self.dims, self.global_shape(sizes), strict=True):
            parts = math.prod([axis_sizes[axis] for axis in axes])  # a list, because Dynamo can trace it
            if size % parts:
                product = " * ".join(f"{axis}={axis_sizes[axis]}" for axis in axes)
                whole, _, block = dim.partition("/")
                raise ShardingError(
                    f"{self}: dim {dim} of size {size} does not divide into {parts} blocks ({product})\n"
                    + ("  rule: a shard cuts no block\n" if block else "")
                    + f"  fix: make {whole} a multiple of {parts * int(block or 1)}, "
                    f"or use fewer devices along {format_axes(axes)}"
                )
            local.append(size // parts)
        return tuple(local)

    def slices(self, sizes, mesh, coord: Mapping[str, int]) -> tuple[slice, ...]:
        """Return the index ranges that the device at `coord`, such as {"X": 3, "Y": 0}, holds; X is major in `I_XY`."""
        local, axis_sizes = self.local_shape(sizes, mesh), mesh_sizes(mesh)
        for axis in self.axes:
            if not 0 <= coord.get(axis, -1) < axis_sizes[axis]:
                what = f"{self}: coordinate {dict(coord)} needs {axis} in 0..{axis_sizes[axis] - 1}"
                raise ShardingError(f"{what}\n  fix: give mesh.coord, or a place on each axis of the type")
        blocks = [block_index(axes, coord, axis_sizes) for _, axes in self.dims]
        return tuple(slice(block * size, (block + 1) * size) for block, size in zip(blocks, local, strict=True))

    def nbytes(self, sizes, mesh, dtype) -> float:
        """Return the bytes that one device holds, as an int where possible (int4 and fp4 have half a byte).

        For an array with scales, `dtype` is its format, and the bytes of all its parts are counted.
        """
        if self.scaled:
            parts = zip(self.parts(dtype), bytes_of_parts(format_of(dtype)), strict=True)
            return _whole(sum(part.nbytes(sizes, mesh, each) for part, each in parts))
        return _whole(math.prod(self.local_shape(sizes, mesh)) * dtype_bytes(dtype))

    def total_nbytes(self, sizes, mesh, dtype) -> float:
        """Return the bytes over the whole mesh, counting every replica and every partial sum."""
        return _whole(self.nbytes(sizes, mesh, dtype) * math.prod(mesh_sizes(mesh).values()))


@dataclass(frozen=True)
class Line:
    """An arrow between types, `A[I, J_X] * B[J_X, K] -> C[I, K] {U_X}`; `contract` has the dims written as `*_J`."""

    operands: tuple[Spec, ...]
    result: Spec
    contract: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " * ".join(map(str, self.operands)) + f" -> {self.result}"


@lru_cache(maxsize=65536)
def _parse(text: str) -> Spec:
    return Spec(*read_type(text))


def parse(text: "str | Spec") -> Spec:
    """Read one type: `W[D, F_X]`, `In[B_{XY}, D]`, `In[B_{data,model}, D]`, `[B, D]`, `Loss[] {U_XY}`.

    The book's other spellings are read too (`{ U_XY }`, `{U.Y}`); str() gives the canonical one.

    Raises:
        ShardingError: The syntax is wrong, or a dim or an axis is used twice; a caret marks the character.
    """
    return text if isinstance(text, Spec) else _parse(_text(text))


@lru_cache(maxsize=65536)
def _parse_line(text: str) -> Line:
    operands, result, contract = read_line(text)
    return Line(tuple(Spec(*operand) for operand in operands), Spec(*result), contract)


def parse_line(text: "str | Line") -> Line:
    """Read an arrow, `A[I_X, J] -> A[I, J]` or `A[I, J] * B[J, K] -> C[I, K]`; `*` may be `·`, and name its dim, `*_J`.

    Only the syntax and each single type are checked here. `scaling.collectives` and `scaling.algebra` check which lines
    are legal.

    Raises:
        ShardingError: The syntax is wrong, or one of the types is.
    """
    return text if isinstance(text, Line) else _parse_line(_text(text))


def _text(text) -> str:
    if not isinstance(text, str):  # checked before the cache, which would fail on a value that is not hashable
        raise ShardingError(f"a type is written as a string such as 'W[D, F_X]'; got {text!r}\n  fix: give a string")
    return text


def _whole(number: float) -> float:
    return int(number) if number == int(number) else number
