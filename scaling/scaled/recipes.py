"""Recipes: which products of a training step are scaled, and in which formats (Part 12).

Stored params and the optimizer's master copies keep the run's dtype. In each pass a layer's matrices are quantized
along the dims that the pass sums over, and then gathered. So a matrix has two forms, and neither can be computed from
the other. Activations and cotangents are quantized before each product. Embedding, unembedding, norms, biases and
attention itself stay in the run's dtype, and so does every sum that is reduced.

A layer of experts is differentiated by a tape, which knows tensors alone. A quantized matrix is not a tensor, and
rounding has no derivative. So the tape gets a placeholder, a tensor of the matrix's shape whose elements are never read
and take no memory. The gradient of the placeholder is the matrix's. The product is one `autograd.Function`: forward it
multiplies by the form of the forward pass, backward by that of the backward pass, which `pull` is given.

    Row[R, D] {Q_D} * W[E, D, F] {Q_D} -> Tmp[R, F]     each expert its own rows; R is ragged
    dTmp[R, F] {Q_F} * W[E, D, F] {Q_F} -> dRow[R, D]
    Row[R, D] * dTmp[R, F] -> dW[E, D, F]               in the run's dtype

The last product sums over an expert's rows, and every rank has some of these rows. How many depends on which experts
its tokens choose, so blocks of rows would be cut by the mesh, and would give other numbers than on one device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import prod
from typing import Any, NamedTuple, cast

import optree
import torch
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
    recipe: Recipe, sizes: dict, mesh, line: str, a: Any, b: Any, out: Tensor | None = None, add=False, defer=False
) -> Any:
    """Return the product of a line; plain operands are quantized first, along the dims that are summed over.

    An operand that is named as a cotangent (`dOut`) gets the recipe's format for cotangents. `sizes` has the sizes of
    the model's dims. With `defer` the product is computed when it is waited for.
    """
    if defer:
        return Pending((), partial(scaled_product, recipe, sizes, mesh, line, a, b))
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
            format = recipe.cotangents if own.name[:1] == "d" and own.name[1:2].isupper() else format
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
    """Return a matrix's type in a pass, as `matrix_of` does. The arguments are as in `gather_matrix`."""
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


@dataclass(frozen=True, eq=False)
class TapedMatrix:
    """A quantized matrix, or one for each expert, as a differentiated function gets it.

    Attributes:
        like: The placeholder on the tape.
        forward: The matrix in the form of the forward pass.
        back: All matrices in the form of the backward pass, which come before the tape is pulled.
        index: The matrix's index among them.
        precision: The recipe.
        mesh: The mesh.
        counts: The number of rows of each expert, if there is a matrix for each.
    """

    like: Any
    forward: Any
    back: list
    index: int
    precision: str
    mesh: Any
    counts: "tuple[int, ...] | None" = None

    def wait(self) -> "TapedMatrix":
        """Return the matrix, which is not in flight."""
        return self

    def grouped(self, counts: Sequence[int]) -> "TapedMatrix":
        """Return the matrices of experts that get so many rows each, one expert's after another's."""
        return replace(self, counts=tuple(counts))

    def multiplied(self, line: str, a: Tensor, b: Any, out: Any, add: bool, defer: bool) -> Any:
        """Return the product of rows and the matrix (`scaling.collectives.einsum`)."""
        return _Product.apply(a, self.like, line, self)

    def product(self, line: str, x: Tensor, W: Scaled, format: str) -> Tensor:
        """Return the product of x[R, ..], quantized along the dim that is summed over, and W."""
        typed = parse_line(line)
        (a, b), result = typed.operands, typed.result
        summed = tuple(dim for dim in a.dim_names if dim not in result.dim_names)
        a, b = replace(a, scaled=summed), replace(b, scaled=summed)
        held = replace(a, dims=((a.dims[0][0], ROWS), *a.dims[1:]))
        rows = quantize(f"{replace(held, scaled=())} -> {held}", x, self.mesh, format)
        if self.counts is None:
            return einsum(f"{a} * {b} -> {result}", rows, W)
        width, start = W.shape[-1 if b.index(summed[0]) == 0 else -2], 0
        Out = x.new_empty(len(x), width)
        for e, n in enumerate(self.counts):
            if n:
                each = Out.narrow(0, start, n)
                einsum(f"{a} * {b} -> {result}", _part(rows, 0, start, n), _part(W, 0, e), out=each)
            start += n
        return Out

    def gradient(self, line: str, x: Tensor, d: Tensor, shape: Sequence[int]) -> Tensor:
        """Return dW of this shape, in the run's dtype, from the rows of both."""
        if self.counts is None:
            return einsum(line, x, d)
        dW = x.new_zeros(shape)
        for own, x_e, d_e in zip(dW, x.split(list(self.counts)), d.split(list(self.counts)), strict=True):
            if len(x_e):
                einsum(line, x_e, d_e, out=own)
        return dW


def _part(x: Scaled, dim: int, start: int, n: int | None = None) -> Scaled:
    """Return entry `start` of a stack, or n rows from there on; a scale of the whole array is that of each part."""

    def cut(part: Tensor) -> Tensor:
        if not part.dim():
            return part
        return part.select(dim, start) if n is None else part.narrow(dim, start, n)

    return x.of([*map(cut, x.parts)])


class _Product(torch.autograd.Function):
    """Rows times a TapedMatrix; of its inputs the tape keeps the rows alone."""

    @staticmethod
    def forward(x: Tensor, like: Tensor, line: str, W: TapedMatrix) -> Tensor:
        return W.product(line, x, W.forward, RECIPES[W.precision].forward)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, like, ctx.line, W = inputs
        ctx.W, ctx.shape = replace(W, like=None, forward=None), like.shape
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx, d):
        (x,), W, typed = ctx.saved_tensors, ctx.W, parse_line(ctx.line)
        (a, b), c = typed.operands, typed.result
        dc = Spec(f"d{c.name}", c.dims)
        summed = [axis for dim, axes in c.dims if dim not in a.dim_names for axis in axes]
        da = Spec(f"d{a.name}", a.dims).with_unreduced(summed)
        dx = W.product(f"{dc} * {b} -> {da}", d, W.back[W.index], RECIPES[W.precision].cotangents)
        dW = W.gradient(f"{a} * {dc} -> {Spec(f'd{b.name}', b.dims)}", x, d, ctx.shape)
        return dx, dW, None, None


def vjp_of_scaled(vjp: Callable, precision: str, mesh, f: Callable, *args: Any) -> tuple[Any, Callable]:
    """Return (f(*args), pull), as `vjp` does, of args that may have quantized matrices.

    pull(cotangents, back) -> a cotangent of each arg; `back` are the same args with the matrices in the form of the
    backward pass.
    """
    leaves, structure = optree.tree_flatten(cast(Any, args), is_leaf=_is_scaled)
    index = [i for i, x in enumerate(leaves) if _is_scaled(x)]
    if not index:
        return vjp(f, *args)
    back: list = []
    given = {i: leaves[i] for i in index}
    for i in index:
        leaves[i] = given[i].q.new_empty((), dtype=given[i].dtype).expand(given[i].shape)

    def run(*leaves: Tensor) -> Any:
        taped: list = [*leaves]
        for k, i in enumerate(index):
            taped[i] = TapedMatrix(leaves[i], given[i], back, k, precision, mesh)
        return f(*structure.unflatten(taped))

    out, pull_leaves = vjp(run, *leaves)

    def pull(cotangents: Any, forms: Any) -> Any:
        back.extend(filter(_is_scaled, optree.tree_leaves(forms, is_leaf=_is_scaled)))
        try:
            return structure.unflatten(pull_leaves(cotangents))
        finally:
            back.clear()

    return out, pull


def _is_scaled(x: Any) -> bool:
    return isinstance(x, Scaled)
