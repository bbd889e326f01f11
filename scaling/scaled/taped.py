"""Scaled products inside a function that a tape differentiates: a layer of experts (Parts 4 and 12).

A tape differentiates tensors. A quantized matrix is not a tensor, and rounding has no derivative. So the tape gets a
placeholder, a tensor of the matrix's shape whose elements are never read and take no memory. The gradient of the
placeholder is the matrix's. The product is one `autograd.Function`: forward it multiplies by the form of the forward
pass, backward by that of the backward pass, which `pull` is given.

    Row[R, D] {Q_D} * W[E, D, F] {Q_D} -> Tmp[R, F]     each expert its own rows; R is ragged
    dTmp[R, F] {Q_F} * W[E, D, F] {Q_F} -> dRow[R, D]
    Row[R, D] * dTmp[R, F] -> dW[E, D, F]               in the run's dtype

The last product sums over an expert's rows, and every rank has some of these rows. How many depends on which experts
its tokens choose, so blocks of rows would be cut by the mesh, and would give other numbers than on one device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import optree
import torch
from torch import Tensor

from scaling.collectives import einsum
from scaling.scaled.arrays import Scaled, quantize
from scaling.scaled.recipes import RECIPES
from scaling.spec import Spec, parse_line

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
