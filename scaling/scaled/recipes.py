"""Recipes: which products of a training step are scaled, and in which formats (Part 12).

Stored params and the optimizer's master copies keep the run's dtype. In each pass a layer's matrices are quantized
along the dims that the pass sums over, and then gathered. So a matrix has two forms, and neither can be computed from
the other. Activations and cotangents are quantized before each product. Embedding, unembedding, norms, biases and
attention itself stay in the run's dtype, and so does every sum that is reduced.

In a layer of experts the rows of all experts are quantized together, and each expert multiplies its own.

    Row[R, D] {Q_D} * W[E, D, F] {Q_D} -> Tmp[R, F]     each expert its own rows; R is ragged
    dTmp[R, F] {Q_F} * W[E, D, F] {Q_F} -> dRow[R, D]
    Row[R, D] * dTmp[R, F] -> dW[E, D, F]               in the run's dtype

The last product sums over an expert's rows, and every rank has some of these rows. How many depends on which experts
its tokens choose, so blocks of rows would be cut by the mesh, and would give other numbers than on one device.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from math import prod
from typing import Any, NamedTuple

from torch import Tensor

from scaling.collectives import Pending, all_gather, einsum
from scaling.scaled.arrays import Scaled, check_block, quantize
from scaling.spec import Line, Spec, format_of, parse_line, present, refuse


class Recipe(NamedTuple):
    """The formats of a training step, by their names.

    Attributes:
        forward: The format of activations and weights in the forward pass.
        weights: The format of weights in the backward pass.
        cotangents: The format of cotangents.
        gradients: The format of activations in the products that give weight gradients; with "" these products stay in
            the run's dtype.
    """

    forward: str
    weights: str
    cotangents: str
    gradients: str


RECIPES = {
    "fp8-row": Recipe("fp8-row", "fp8-row", "fp8-row-e5m2", ""),  # all tokens' scale would be a maximum over ranks
    "fp8-128": Recipe("fp8-128", "fp8-128", "fp8-128", "fp8-128"),
    "mxfp8": Recipe("mxfp8-rceil", "mxfp8-rceil", "mxfp8-rceil", "mxfp8-rceil"),
    "nvfp4": Recipe("nvfp4", "mxfp8-rceil", "mxfp8-rceil", "mxfp8-rceil"),  # four bits where gradients do not pass
}


# The choice of experts is a comparison; no block of 128 divides M = C + rope; a linear layer's gates and convolutions
# are small.
UNSCALED = ("router", "W_DKV", "W_BA", "c")


class MatrixProduct(NamedTuple):
    """A product of two matrices that are reshaped arrays.

    Attributes:
        line: Its line.
        counts: For each operand and each dim of its matrix, the number of adjacent dims that are merged into it.
        whole: For each operand the slice of its dims along which blocks lie: the summed dims, from the last one that
            an axis splits. A block that reached beyond these dims would have other values than on one device.
    """

    line: Line
    counts: tuple[tuple[int, ...], ...]
    whole: tuple[slice, ...]


def matrix_of(spec: Spec, groups: Sequence[Sequence[str]], summed: Sequence[str] = ()) -> tuple[Spec, tuple[int, ...]]:
    """Return the type with each group of adjacent dims merged into one dim, and the number of dims in each.

    `summed` is the group along which the matrix's values share scales.
    """
    dims, counts = [], []
    for group in sorted((g for g in groups if g and g[0] in spec.dim_names), key=lambda g: spec.index(g[0])):
        axes = (axis for dim in group for axis in spec.axes_of(dim))
        dims.append(("".join(group), tuple(axes)))
        counts.append(len(group))
    if "".join(name for name, _ in dims) != "".join(spec.dim_names):
        refuse(spec, "it is no matrix of merged dims", "dims that are merged are adjacent", "transpose it first")
    return Spec(spec.name, tuple(dims), spec.unreduced, ("".join(summed),) if summed else ()), tuple(counts)


def as_matrix(x: Tensor, counts: Sequence[int]) -> Tensor:
    """Return x as a matrix: each of its dims merges as many adjacent dims of x as `counts` says."""
    sizes = iter(x.shape)
    return x.reshape([prod(next(sizes) for _ in range(count)) for count in counts])


@lru_cache(maxsize=1024)
def matrices_of_line(text: str, sizes: tuple) -> MatrixProduct:
    """Return an einsum's line as a product of two matrices, each with scales along the dim that is summed over."""
    line, mesh = parse_line(text), dict(sizes)
    (a, b), result = (present(spec, mesh) for spec in line.operands), present(line.result, mesh)
    summed = [dim for dim in a.dim_names if dim not in result.dim_names]
    groups = [summed, *([dim for dim in own.dim_names if dim not in summed] for own in (a, b))]
    whole = []
    for own in (a, b):
        places = [i for i, dim in enumerate(own.dim_names) if dim in summed]
        split = [i for i in places if own.dims[i][1]]
        whole.append(slice(max(split, default=places[0]), places[-1] + 1))
    (a, of_a), (b, of_b) = (matrix_of(own, groups, summed) for own in (a, b))
    return MatrixProduct(Line((a, b), matrix_of(result, groups)[0]), (of_a, of_b), tuple(whole))


def scaled_product(
    recipe: Recipe, sizes: dict, mesh, line: str, a: Any, b: Any, out: Tensor | None = None, add=False, defer=False,
    counts: Sequence[int] | None = None,
) -> Any:  # fmt: skip
    """Return the product of a line; plain operands are quantized first, along the dims that are summed over.

    An operand that is named as a cotangent (`dOut`) gets the recipe's format for cotangents. `sizes` has the sizes of
    the model's dims. With `defer` the product is computed when it is waited for. With `counts` the line is one
    expert's, as in `product_by_expert`.
    """
    if defer:
        return Pending((), partial(scaled_product, recipe, sizes, mesh, line, a, b))
    if counts is not None:
        product = product_by_expert(recipe, mesh, line, a, b, counts)
        return product if out is None else out.add_(product)
    typed = parse_line(line)
    of_weight = isinstance(b, Scaled)
    unscaled = {typed.operands[1].name, typed.result.name[1:]} & {*UNSCALED}  # of the product, or of its gradient
    if unscaled or not (of_weight or recipe.gradients):
        return einsum(line, a, b) if out is None else einsum(line, a, b, out=out, add=add)
    product, held, known = matrices_of_line(line, tuple(mesh.sizes.items())), [], {}
    of_each = zip((a, b), product.line.operands, typed.operands, product.counts, product.whole, strict=True)
    for x, spec, own, counts, whole in of_each:
        if not isinstance(x, Scaled):
            known |= dict(zip(own.dim_names, x.shape, strict=True))
            format = recipe.forward if of_weight else recipe.gradients
            format = recipe.cotangents if _is_cotangent(own) else format
            plain = Spec(spec.name, spec.dims)
            quantized = f"{plain} -> {spec}"
            check_block(quantized, " ".join(own.dim_names[whole]), prod(x.shape[whole]), format_of(format))
            x = quantize(quantized, as_matrix(x, counts), mesh, format)
        held.append(x)
    result = einsum(str(product.line), *held)
    outputs = [dim for dim in typed.result.dim_names if dim not in known]
    known |= {dim: -1 if dim == outputs[0] else sizes[dim] for dim in outputs}  # heads are split, not their dims
    result = result.reshape([known[dim] for dim in typed.result.dim_names])
    return result if out is None else out.add_(result) if add else out.copy_(result)


def products_of(precision: str, sizes: dict, mesh) -> Callable:
    """Return the function einsum(line, a, b, out=, add=) of a recipe, for a layer's products."""
    return partial(scaled_product, RECIPES[precision], sizes, mesh)


def gather_matrix(precision: str, x: Tensor, stored: Spec, used: Spec, inputs: str, mesh, back: bool) -> Any:
    """Start to gather a matrix, quantized for a pass; return it, pending.

    Args:
        precision: The recipe.
        x: This rank's shard.
        stored: Its type.
        used: Its gathered type, which may be the same.
        inputs: The dims that the forward pass sums over; the backward pass sums over the others.
        mesh: The mesh.
        back: Whether it is gathered for the backward pass.
    """
    (before, counts), (after, _) = (form_of(present(spec, mesh), inputs, back) for spec in (stored, used))
    format = RECIPES[precision].weights if back else RECIPES[precision].forward
    W = quantize(f"{Spec(before.name, before.dims)} -> {before}", as_matrix(x, counts), mesh, format)
    return W if before == after else all_gather(f"{before} -> {after}", W, mesh, async_op=True)


def form_of(W: Spec, inputs: str, back: bool) -> tuple[Spec, tuple[int, ...]]:
    """Return a stored array's type as a matrix of the forward or (`back`) the backward pass, as `matrix_of` does.

    The arguments are as in `gather_matrix`.
    """
    dims = [dim for dim in W.dim_names if dim != "E"]  # each expert has a matrix
    groups = [[dim for dim in dims if (dim in inputs) is which] for which in (True, False)]
    return matrix_of(W, [["E"], *groups], groups[back])


def check_matrix(precision: str, stored: Spec, inputs: str, sizes: dict, mesh) -> None:
    """Raise a ShardingError if a rank's shard of a matrix cuts a block in either pass, as `gather_matrix` would."""
    recipe, local = RECIPES[precision], dict(zip(stored.dim_names, stored.local_shape(sizes, mesh), strict=True))
    for back, format in enumerate((recipe.forward, recipe.weights)):
        held, _ = form_of(present(stored, mesh), inputs, bool(back))
        size = prod(local[dim] for dim in stored.dim_names if dim != "E" and (dim in inputs) is not bool(back))
        check_block(f"{Spec(held.name, held.dims)} -> {held}", held.scaled[0], size, format_of(format))


ROWS = ("P", "X", "E", "C")  # the axes that split the tokens, and so the rows


def product_by_expert(recipe: Recipe, mesh, line: str, x: Tensor, W: Scaled, counts: Sequence[int]) -> Tensor:
    """Multiply each expert's rows of x[R, ..] by its matrix W[E, ..]; `line` is the line of one expert.

    All rows are quantized together, along the dim that is summed over.
    """
    typed = parse_line(line)
    (a, b), result = typed.operands, typed.result
    summed = tuple(dim for dim in a.dim_names if dim not in result.dim_names)
    a, b = Spec(a.name, ((a.dims[0][0], ROWS), *a.dims[1:]), (), summed), replace(b, scaled=summed)
    format = recipe.cotangents if _is_cotangent(a) else recipe.forward
    rows = quantize(f"{replace(a, scaled=())} -> {a}", x, mesh, format)
    a = replace(typed.operands[0], scaled=summed)
    Out, start = x.new_empty(len(x), W.shape[-1 if b.index(summed[0]) == 0 else -2]), 0
    for e, n in enumerate(counts):
        if n:
            einsum(f"{a} * {b} -> {result}", _part(rows, 0, start, n), _part(W, 0, e), out=Out.narrow(0, start, n))
        start += n
    return Out


def _is_cotangent(spec: Spec) -> bool:
    return spec.name[:1] == "d" and spec.name[1:2].isupper()


def _part(x: Scaled, dim: int, start: int, n: int | None = None) -> Scaled:
    """Return entry `start` of a stack, or n rows from there on; a scale of the whole array is that of each part."""

    def cut(part: Tensor) -> Tensor:
        if not part.dim():
            return part
        return part.select(dim, start) if n is None else part.narrow(dim, start, n)

    return x.of([*map(cut, x.parts)])
