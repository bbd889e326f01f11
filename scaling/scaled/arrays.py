"""The lines on arrays with scales: quantize, dequantize, and what collectives and products do with them.

An array with scales is one `Scaled`, which collectives and einsum take in place of a tensor. A collective that moves
elements moves each part by a separate line, so a part that lacks a dim is not sent along it. A collective that adds
is refused.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import optree
import torch
from optree.registry import __GLOBAL_NAMESPACE as GLOBAL_NAMESPACE
from torch import Tensor

from scaling import trace
from scaling.algebra.law import check_product, refuse_product
from scaling.algebra.rules import check_quantize, collective_steps, lines_of_parts
from scaling.collectives import Pending, all_reduce, einsum, wait
from scaling.collectives.linear import followed, who_watches
from scaling.collectives.operands import check_out
from scaling.common.torch_private import scaled_mm
from scaling.scaled.rounding import outer_scale, rounded, scales_of, widened
from scaling.spec import Format, Line, Spec, format_of, parse_line, present, refuse


@dataclass(frozen=True, eq=False)
class Scaled:
    """An array with scales on this rank, in the order of `Spec.parts`.

    Attributes:
        q: The values.
        s: Their scales.
        t: The scale of the whole array, if the format has one.
        format: The format.
        shared: The positions of the dims along which values share a scale, counted from the last, which is -1, so they
            also hold for a stack of such arrays.
        dtype: The dtype of the array that was quantized, which products and dequantize return.
    """

    q: Tensor
    s: Tensor
    t: Tensor | None
    format: Format
    shared: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The tensors that store the array: q, s, and t where the format has it."""
        return (self.q, self.s) if self.t is None else (self.q, self.s, self.t)

    @property
    def shape(self) -> torch.Size:
        """The shape of the array that was quantized."""
        sizes = [*self.q.shape]
        sizes[self.shared[-1]] *= self.format.per_byte
        return torch.Size(sizes)

    @property
    def nbytes(self) -> int:
        """The bytes of all parts."""
        return sum(part.nbytes for part in self.parts)

    @property
    def has_dtypes(self) -> bool:
        """Whether the parts have the dtypes of the format; two values in a byte are uint8."""
        names = "uint8" if self.format.per_byte > 1 else self.format.values, *self.format.scales
        return [part.dtype for part in self.parts] == [getattr(torch, name) for name in names]

    def of(self, parts: Sequence[Tensor]) -> "Scaled":
        """Return the same kind of array made of other parts."""
        return scaled_of(parts, self.format, self.shared, self.dtype)

    def wait(self) -> "Scaled":
        """Return the array, which is not in flight."""
        return self

    def check(self, spec: Spec, line: Any) -> tuple[Spec, ...]:
        """Return the types of the parts. Raise a ShardingError unless the array is of this type."""
        shared = shared_positions(spec)
        if self.shared != shared or len(spec.dims) != self.q.dim():
            dims = ", ".join(str(i % self.q.dim()) for i in self.shared)
            refuse(line, f"the array shares scales along dims {dims} of {self.q.dim()}, and {spec} says otherwise",
                   "scales along one dim do not follow from those along another",
                   "write the {Q_...} by which it was quantized, or quantize it again")  # fmt: skip
        types, sizes = spec.parts(self.format), {}
        for (dim, _), size in zip(types[0].dims, self.q.shape, strict=True):
            name, _, block = dim.partition("/")
            sizes[name] = size * int(block or 1)
        for part, own in zip(self.parts[1:], types[1:], strict=True):
            if tuple(part.shape) != (wanted := Spec("", tuple((dim, ()) for dim in own.dim_names)).global_shape(sizes)):
                what = f"scales of shape {tuple(part.shape)} for values {tuple(self.q.shape)}, not {wanted}"
                refuse(line, what, f"{own}: a block and its scale are on one rank", "give parts of one array")
        if not self.has_dtypes:
            found = ", ".join(str(part.dtype) for part in self.parts)
            what = f"parts of {found}, which are not those of {self.format.name}"
            refuse(line, what, "a format says in which dtypes values and scales are", "convert x and quantize again")
        return types

    def moved(self, call: Callable, what: tuple, mesh, async_op: bool) -> Any:
        """Run a collective's line on each part; `call` runs one line, `what` is its key (`scaling.collectives`)."""
        kind, line, *options = what
        typed = parse_line(line if "->" in line else f"{line} -> {line}")
        moves = kind in ("AllGather", "Slice", "AllToAll", "CollectivePermute")
        if not moves or not typed.operands[0].scaled:
            rule = "a sum is not quantized: terms with scales of their own cannot be added"
            rule = "the type of values with scales says so" if moves else rule
            fix = "write {Q_...} on both sides" if moves else "dequantize it first"
            refuse(f"{kind}: {line}", "the operand is values with scales", rule, fix)
        if kind != "CollectivePermute" and not typed.operands[0].same_sharding(typed.result):
            collective_steps(kind, line)
        self.check(typed.operands[0], f"{kind}: {line}")
        found = []
        for part, (own, text) in zip(self.parts, lines_of_parts(kind, str(typed), self.format), strict=True):
            found.append(call((own, text, *options), part, mesh, async_op and own != "Slice") if own else part)
        return Pending((), lambda: self.of([*map(wait, found)])) if async_op else self.of(found)

    def multiplied(self, line: str, a: Any, b: Any, out: Tensor | None, add: bool, defer: bool) -> Any:
        """Return the product of a line with at least one scaled operand (`scaling.collectives.einsum`)."""
        return Pending((), lambda: product(line, a, b)) if defer else product(line, a, b, out, add)


def scaled_of(
    parts: Sequence[Any], format: Format, shared: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> Scaled:
    """Return the array with scales that is stored as these parts; the parts of a type are types."""
    q, s, *t = parts
    return Scaled(q, s, t[0] if t else None, format, shared, dtype)


@dataclass(frozen=True)
class ScaledNode:
    """The node of an array with scales in a tree's structure; it is equal for arrays of other dtypes."""

    format: Format
    shared: tuple[int, ...]
    dtype: torch.dtype = field(compare=False)


# Trees of arrays with scales are sharded, unstacked and moved as any others: the parts are their leaves.
register: Any = optree.register_pytree_node
register(
    Scaled,
    lambda x: (x.parts, ScaledNode(x.format, x.shared, x.dtype), "qst"[: len(x.parts)]),
    lambda kind, parts: scaled_of(parts, kind.format, kind.shared, kind.dtype),
    path_entry_type=optree.GetAttrEntry,
    namespace=GLOBAL_NAMESPACE,
)


def quantize(line: str, x: Any, mesh, format: "str | Format") -> Scaled:
    """`W[D_X, F] -> W[D_X, F] {Q_D}`: hold an array as values and scales.

    A scale follows from the largest of the values that share it. If axes split these values, an all_reduce takes their
    maximum over the axes; otherwise nothing is sent.

    Args:
        line: The type before and after.
        x: This rank's shard; `wait` is called on it.
        mesh: The mesh.
        format: The format or its name.

    Raises:
        ShardingError: The line is illegal, a shard cuts a block, or x is differentiated.
    """
    x, f, typed = wait(x), format_of(format), check_quantize(line)
    if not isinstance(x, Tensor) or not x.is_floating_point():
        what = f"the operand is {x.dtype if isinstance(x, Tensor) else type(x).__name__}"
        refuse(f"quantize: {line}", what, "real numbers are quantized, once", "give a tensor of floats")
    spec = present(typed.result, mesh) if mesh.drops else typed.result
    parts = spec.parts(f)
    if x.dim() != len(spec.dims):
        refuse(f"quantize: {line}", f"the operand has shape {tuple(x.shape)}", "a type names each dim", "name each dim")
    for dim, size in zip(spec.dim_names, x.shape, strict=True):
        if dim in spec.scaled:
            check_block(line, dim, size, f, 1 if dim != spec.scaled[-1] else f.per_byte)
    _refuse_differentiated(f"quantize: {line}", x)

    def run(x: Tensor) -> Sequence[Tensor]:
        return _parts(x.to(torch.float32), spec, f, mesh)

    found = _judged(line, mesh, [x], [replace(spec, scaled=())], parts, run)
    return scaled_of(found, f, shared_positions(spec), x.dtype)


def check_block(line: str, dims: str, size: int, f: Format, least: int = 1) -> None:
    """Raise a ShardingError if a rank's `size` entries of `dims` cut a block.

    If a format has no blocks, `size` must be a multiple of `least`, the number of values in a byte.
    """
    if size % (block := f.block or least):
        what = f"{size} of {dims} on each rank, in blocks of {block} ({f.name})"
        fix = f"make {dims} a multiple of {block} on each rank, split it over fewer, or choose another format"
        refuse(f"quantize: {line}", what, "a shard cuts no block", fix)


def _parts(x: Tensor, spec: Spec, f: Format, mesh) -> list[Tensor]:
    (_, of_s, *of_t), axes = spec.parts(f), spec.shared_over(f)
    outer, blocks = of_t[0] if of_t else of_s, blocks_along(x.dim(), shared_positions(spec), f)
    amax = shared_amax(x, [0] * x.dim() if of_t else blocks)
    if axes:
        held = replace(outer, name="amax", unreduced=axes)
        amax = all_reduce(f"{held} -> {held.with_unreduced(())}", amax, mesh, op="max")
    t = outer_scale(amax) if of_t else None
    s, inverse = scales_of(amax if t is None else shared_amax(x, blocks), f, t)
    y, last = x * spread(inverse, blocks, x), spec.index(spec.scaled[-1])
    q = rounded(y, f) if f.per_byte == 1 else rounded(y.movedim(last, -1), f).movedim(-1, last).contiguous()
    return [q, s] if t is None else [q, s, t]


def dequantize(line: str, x: Any, mesh) -> Tensor:
    """`W[D, F] {Q_D} -> W[D, F]`: multiply the values by their scales, in the dtype that was quantized."""
    x, typed = wait(x), check_quantize(line, back=True)
    spec = present(typed.operands[0], mesh) if mesh.drops else typed.operands[0]
    if not isinstance(x, Scaled):
        refuse(f"dequantize: {line}", f"the operand is a {type(x).__name__}", "{Q}: values and scales", "quantize it")
    parts = x.check(spec, f"dequantize: {line}")
    return _judged(line, mesh, x.parts, parts, [replace(spec, scaled=())], lambda *own: [wide(x.of(own))])[0].to(
        x.dtype
    )


def shared_positions(spec: Spec) -> tuple[int, ...]:
    """Return the positions of the dims along which values share a scale, counted from the last dim."""
    return tuple(spec.index(dim) - len(spec.dims) for dim in spec.scaled)


def wide(x: Scaled) -> Tensor:
    """Return the values times their scales in float32, or in float64 for an array of it."""
    last, f, dims = x.shared[-1], x.format, x.q.dim()
    y = widened(x.q, f) if f.per_byte == 1 else widened(x.q.movedim(last, -1), f).movedim(-1, last)
    y = y.to(torch.promote_types(x.dtype, torch.float32))
    y = y * spread(x.s.to(torch.float32).to(y.dtype), blocks_along(dims, x.shared, f), y)
    return y if x.t is None else y * x.t.to(y.dtype)


def product(line: str, a: Any, b: Any, out: Tensor | None = None, add: bool = False) -> Tensor:
    """Return the product of a line on arrays with scales, accumulated in float32.

    A GPU's kernel takes the scales out of the sum (`by_kernel`). Elsewhere the values are multiplied by them first,
    which gives the same numbers up to the rounding of float32 sums.
    """
    typed = check_product(line)
    given: Any = [x for x in (a, b) if x is not None]
    specs: list[Spec] = []
    for x, spec in zip(given, typed.operands, strict=True):
        if isinstance(x, Scaled) is not bool(spec.scaled):
            what = f"{spec} is {'values with scales' if isinstance(x, Scaled) else 'a plain tensor'}"
            refuse_product(line, what, "{Q_...} says that an array has scales", "write the type that it has")
    for x, spec in zip(given, typed.operands, strict=True):
        specs += x.check(spec, f"einsum: {line}") if isinstance(x, Scaled) else [spec]
    xs, structure = optree.tree_flatten(given)  # the parts of scaled operands
    _refuse_differentiated(f"einsum: {line}", *xs)
    plain = Line(tuple(replace(spec, scaled=()) for spec in typed.operands), typed.result, typed.contract)

    def run(*xs: Tensor) -> list[Tensor]:
        if has_kernel(*given):
            return [by_kernel(typed, *given)]
        wides: list[Tensor] = [wide(x) if isinstance(x, Scaled) else x for x in cast(list, structure.unflatten(xs))]
        dtype = torch.promote_types(wides[0].dtype, wides[-1].dtype)
        dtypes = given[0].dtype, given[-1].dtype
        return [einsum(str(plain), *(x.to(dtype) for x in wides)).to(torch.promote_types(*dtypes))]

    result = _judged(line, None, xs, specs, [typed.result], run)[0]
    if out is None:
        return result
    check_out(f"einsum: {line}", out, result.shape, result.dtype, result.device)
    return out.add_(result) if add else out.copy_(result)


def has_kernel(*xs: Any) -> bool:
    """Return whether this GPU has a kernel for the product: two matrices in FP8 by row or by tensor, into bfloat16.

    On the meta device, where a GPU's step is planned, it is as on a GPU that has the kernel.
    """
    if len(xs) < 2 or not all(isinstance(x, Scaled) and x.dtype == torch.bfloat16 for x in xs):
        return False
    if not all(x.q.is_cuda or x.q.is_meta for x in xs):
        return False
    by_row = all(x.format.values.startswith("float8") and not x.format.block and x.q.dim() == 2 for x in xs)
    of_16 = all(size % 16 == 0 for x in xs for size in x.q.shape)
    both_e5m2 = all(x.format.values == "float8_e5m2" for x in xs)
    able = by_row and of_16 and not both_e5m2
    return able and (xs[0].q.is_meta or torch.cuda.get_device_capability(xs[0].q.device) >= (8, 9))


def by_kernel(line: Line, a: Scaled, b: Scaled) -> Tensor:
    """Return the product of two matrices in bfloat16 by a GPU's kernel."""
    (summed,) = [dim for dim in line.operands[0].dim_names if dim not in line.result.dim_names]
    sides = {}
    for x, spec in ((a, line.operands[0]), (b, line.operands[1])):
        rows = x.q if spec.index(summed) == 1 else x.q.t()
        (dim,) = [dim for dim in spec.dim_names if dim != summed]
        sides[dim] = rows.contiguous(), x.s.expand(len(rows)).contiguous()
    (rows, of_rows), (columns, of_columns) = (sides[dim] for dim in line.result.dim_names)
    event = None
    if trace.open_logs:
        flops = 2 * len(rows) * columns.numel()
        event = trace.record(trace.Event("Einsum", (), line.operands, line.result, flops=flops, dtype=rows.dtype))
    if rows.is_meta:
        result = rows.new_empty(len(rows), len(columns), dtype=torch.bfloat16)
    else:
        result = scaled_mm(rows, columns, of_rows, of_columns)
    if event is not None:
        trace.done(event)
        event.memory = a.nbytes, b.nbytes, result.nbytes
    return result


def shared_amax(x: Tensor, blocks: Sequence[int]) -> Tensor:
    """Return for each scale the largest |x| of the values that share it on this rank; `blocks` as in `spread`."""
    y = x.abs()
    for i, n in reversed([*enumerate(blocks)]):
        if n == 0:
            y = y.amax(i) if y.shape[i] else y.sum(i)
        elif n > 1:
            y = y.unflatten(i, (-1, n)).amax(i + 1)
    return y


def blocks_along(dims: int, shared: tuple[int, ...], f: Format) -> list[int]:
    """Return how many entries share a scale along each of `dims` dims; 0 means all of them."""
    return [f.block if i - dims in shared else 1 for i in range(dims)]


def spread(s: Tensor, blocks: Sequence[int], like: Tensor) -> Tensor:
    """Return the scale of each element, in a shape that broadcasts to the array's; `blocks` as from `blocks_along`."""
    for i, n in enumerate(blocks):
        if n == 0:
            s = s.unsqueeze(i)
        elif n > 1:
            s = s.repeat_interleave(n, i, output_size=like.shape[i])
    return s


def _judged(line: str, mesh, xs: Sequence, specs: Sequence[Spec], results: Sequence[Spec], run: Callable) -> Sequence:
    """Return run(*xs). If the judge watches, it compares each x with its type, and gives the results their types."""
    watch = who_watches()
    return run(*xs) if watch is None else watch.parts(line, mesh, xs, specs, results, run)


def _refuse_differentiated(line: str, *xs: Tensor) -> None:
    if any(map(followed, xs)):
        refuse(line, "an operand is differentiated",
               "rounding has no derivative, and the backward's products take arrays quantized along other dims",
               "write the backward's lines, each with its own {Q_...}: the cotangent of W {Q_D} is dW")  # fmt: skip
