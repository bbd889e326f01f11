"""int8 weights and caches (Part 7, "Tricks"): whole numbers, and scales as leaves beside them.

    W[D, F]         -> q[D, F] int8, scale[I, F]        one scale an output channel; I, J: contracted dims, of size 1
    KV[.., S, K, H] -> KV int8, scale[.., S, K]         one a token and head
x is within scale / 2 of q * scale, with scale = max |x| / 127 over what shares it: an error of at most 1/254 of the
largest. A leaf is multiplied out when its layer is computed: memory is saved, time is not.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from scaling import tree
from scaling.configs import Config
from scaling.models.leaves import Leaf, specs_of, types_of
from scaling.spec import Spec, parse


def quantized(x: Tensor, dims: Sequence[int] = (-1,)) -> tuple[Tensor, Tensor]:
    """(q int8, scale float32) of x, one scale along `dims`, which it keeps with size 1."""
    scale = x.abs().amax(tuple(dims), keepdim=True).to(torch.float32) / 127
    return (x / torch.where(scale == 0, 1, scale)).round().clamp(-127, 127).to(torch.int8), scale


def quantize(params: dict, config: Config) -> dict:
    """The params, whole, with each matrix as {"q": int8, "scale": float32}: typed as `specs(..., int8=True)`.

    ValueError for numbers that are not finite.
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
    """The dims that a product with this leaf sums over, of the embedding that of the logits; none of leaves that stay
    as they are: norms, biases, and the router."""
    if name in ("embed", "router"):
        return "D" if name == "embed" else ""
    return leaf.start if isinstance(leaf.start, str) else ""


def quantized_spec(summed: str, text: str) -> Any:
    """The types of {"q", "scale"} of a leaf of this type, or the type of one that stays as it is."""
    if not summed:
        return text
    spec, short = parse(text), dict(zip(summed, "IJ", strict=False))
    dims = tuple((short[dim], ()) if dim in short else (dim, axes) for dim, axes in spec.dims)
    return {"q": text, "scale": str(Spec("scale", dims))}


def floats(params: Any, dtype: torch.dtype) -> Any:
    """A layer's params, or a leaf, with what is int8 multiplied out."""
    if isinstance(params, Tensor):
        return params
    if set(params) == {"q", "scale"}:
        return params["q"].to(dtype) * params["scale"].to(dtype)
    return {name: floats(leaf, dtype) for name, leaf in params.items()}
