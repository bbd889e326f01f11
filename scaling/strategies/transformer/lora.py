"""Adapters in the layers of a step: the gradients of A and B without that of W.

For a product Out = x (W + s A B), the gradient of the weight is dW = x^T dOut, and

    dA = s dW B^T = x^T (dOut sB^T)        dB = s A^T dW = (x sA)^T dOut

so that dW, as large as W, is never computed: only products with the rank r.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from scaling import tree
from scaling.collectives import einsum
from scaling.common.torch_private import constant
from scaling.models.adapters import merged_layer
from scaling.models.layer import Context, in_place, seen_heads
from scaling.models.leaves import KV_HEADS, Leaf
from scaling.models.lora import Lora, product_line
from scaling.spec import Spec, parse_line


def adapted(gather: Callable, structure: Any, lora: Lora, leaves: Mapping[str, Leaf], types: Mapping) -> Callable:
    """Return `gather(leaves, mesh)` for layers with adapters: it gathers W + s A B, and returns s A and s B with it.

    A B is added to the stored shards before these are gathered. The gradients of A and B need s A and s B.

    Args:
        gather: `gather(leaves, mesh)` without adapters.
        structure: The tree of a layer's leaves, with "lora".
        lora: The adapters.
        leaves: {name: the row of `models.leaves`} of the matrices that have adapters.
        types: The stored types of the layers' leaves, by name.
    """
    lines = {name: _product_line(str(types[name]), leaf.start) for name, leaf in leaves.items()}

    def f(leaves: Sequence[Tensor], mesh) -> Any:
        W = structure.unflatten(leaves)
        scaled = tree.map(lambda x: x * lora.scale, W["lora"])
        return gather(tree.leaves(merged_layer(W, W["lora"], lines, lora.scale) | {"lora": scaled}), mesh)

    return f


@constant
def _product_line(weight: str, inputs: Any) -> str:
    return product_line(weight, inputs, stacked=False)


def factor_gradients(W: dict, name: str, line: str, a: Tensor, b: Tensor, at: Context) -> dict[str, Any]:
    """Return {name: the gradients of the adapter's A and B} by the line of dW, or {} if the matrix has no adapter.

    A rank may use only some of the KV heads; the gradients of the others are 0.
    """
    if name not in W["lora"]:
        return {}
    own = W["lora"][name]
    if name not in KV_HEADS:
        return {name: adapter_gradients(own, line, a, b)}
    found = adapter_gradients(own | {"B": seen_heads({name: own["B"]}, at)[name]}, line, a, b)
    return {name: found | {"B": in_place(found["B"], own["B"], at)}}


def adapter_gradients(own: Mapping[str, Tensor], line: str, a: Tensor, b: Tensor) -> dict[str, Tensor]:
    """Return dA and dB for the line of dW, "x[..] * dOut[..] -> dW[..]" with its operands in either order.

    `own` has the layer's A and B, times s.
    """
    first, down, dA, up, dB = _lines(line, own["A"].dim() - 1)
    x, dOut = (a, b) if first else (b, a)
    return {
        "A": einsum(dA, x, einsum(down, dOut, own["B"])),
        "B": einsum(dB, einsum(up, x, own["A"]), dOut),
    }


def expert_factor_gradients(
    W: dict, name: str, line: str, a: Tensor, b: Tensor, counts: Sequence[int]
) -> dict[str, dict[str, Tensor]]:
    """Return {name: the gradients of each expert's A and B} from the rows of all experts, or {} without an adapter."""
    if name not in W.get("lora", ()):
        return {}
    own = zip(W["lora"][name]["A"], W["lora"][name]["B"], a.split(counts), b.split(counts), strict=True)
    each = [adapter_gradients({"A": A, "B": B}, line, *rows) for A, B, *rows in own]
    return {name: tree.map(lambda *own: torch.stack(own), *each)}


@lru_cache(maxsize=4096)
@constant
def _lines(line: str, inputs: int) -> tuple[bool, str, str, str, str]:
    """Return whether x comes first in the line, and the lines of dOut B^T, dA, x A and dB.

    The first `inputs` dims of W are inputs.
    """
    parsed = parse_line(line)
    dims, r = parsed.result.dims, ("r", ())
    first = dims[0][0] in parsed.operands[0].dim_names
    x, dOut = parsed.operands if first else parsed.operands[::-1]
    h = Spec("h", (*(dim for dim in x.dims if dim in dOut.dims), r))
    A, B = Spec("A", (*dims[:inputs], r)), Spec("B", (r, *dims[inputs:]))
    low, high = _product(dOut, B, h), _product(x, A, h)
    dA, dB = _product(x, low, A), _product(high, dOut, B)
    return first, f"{dOut} * {B} -> {low}", f"{x} * {low} -> {dA}", f"{x} * {A} -> {high}", f"{high} * {dOut} -> {dB}"


def _product(a: Spec, b: Spec, out: Spec) -> Spec:
    """Return the type of a product with the dims of `out`.

    It is unreduced over each axis that an operand is unreduced over, and over each axis that splits a summed dim.
    """
    summed = [axis for dim, axes in a.dims if dim not in out.dim_names for axis in axes]
    return out.with_unreduced(dict.fromkeys([*a.unreduced, *b.unreduced, *summed]))
