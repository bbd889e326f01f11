"""int8 weights and caches (Part 7, "Tricks"): whole numbers, and their scales as additional leaves.

    W[D, F]         -> q[D, F] int8, scale[I, F]        one scale per output channel; I, J: contracted dims, of size 1
    KV[.., S, K, H] -> KV int8, scale[.., S, K]         one scale per token and head

x is within scale / 2 of q * scale, where scale = max |x| / 127 over the elements that share it: an error of at most
1/254 of the largest. A leaf is dequantized when its layer is computed, which saves memory and no time.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from scaling import tree
from scaling.configs import Config
from scaling.models.leaves import Leaf, specs_of, types_of
from scaling.scaled.rounding import rounded, scales_of
from scaling.spec import FORMATS, Spec, parse


def quantized(x: Tensor, dims: Sequence[int] = (-1,)) -> tuple[Tensor, Tensor]:
    """Return (q int8, scale float32) of x, with one scale along `dims`, which it keeps with size 1."""
    scale, inverse = scales_of(x.abs().amax(tuple(dims), keepdim=True), FORMATS["int8"])
    return rounded(x.to(torch.float32) * inverse, FORMATS["int8"]), scale


def quantize(params: dict, config: Config) -> dict:
    """Return whole params with each matrix as {"q": int8, "scale": float32}, typed as `specs(..., int8=True)`.

    Raises:
        ValueError: A matrix has numbers that are not finite.
    """

    def leaf(summed: str, text: str, W: Tensor) -> Any:
        spec = parse(text)
        dims = [i for i, dim in enumerate(spec.dim_names) if dim in summed]
        if not dims:
            return W
        if not W.is_meta and not bool(torch.isfinite(W).all()):
            raise ValueError(f"{spec}: what is not finite has no int8 form\n  fix: look for NaN and inf in it")
        return dict(zip(("q", "scale"), quantized(W, dims), strict=True))

    return tree.map(leaf, types_of(config, summed_dims), specs_of(config), params)


def summed_dims(name: str, leaf: Leaf) -> str:
    """Return the dims that a product with this leaf sums over; for the embedding, that of the logits.

    Leaves that are not quantized have none: norms, biases, and the router.
    """
    if name in ("embed", "router"):
        return "D" if name == "embed" else ""
    return leaf.start if isinstance(leaf.start, str) else ""


def quantized_spec(summed: str, text: str) -> Any:
    """Return the types of {"q", "scale"} of a leaf of this type, or the type itself if the leaf is not quantized."""
    if not summed:
        return text
    spec, short = parse(text), dict(zip(summed, "IJ", strict=False))
    dims = tuple((short[dim], ()) if dim in short else (dim, axes) for dim, axes in spec.dims)
    return {"q": text, "scale": str(Spec("scale", dims))}


def floats(params: Any, dtype: torch.dtype) -> Any:
    """Return a layer's params, or a leaf, with int8 leaves dequantized."""
    if isinstance(params, Tensor):
        return params
    if set(params) == {"q", "scale"}:
        return params["q"].to(dtype) * params["scale"].to(dtype)
    return {name: floats(leaf, dtype) for name, leaf in params.items()}
