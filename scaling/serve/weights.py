"""Weights that are stored with scales (Part 7, "Tricks"), in a format of `scaling.spec.formats`: int8, FP8 or FP4.

    W_in[L, D, F_Y] {Q_D}     "int8" and "fp8-row": W_in.q[L, D, F_Y], W_in.s[L, F_Y]; "mxfp8": W_in.s[L, D/32, F_Y]

Values share scales along the dims that the product with the leaf sums over; in blocks, along the last of these. The
largest error of int8 is 1/254 of the largest value that shares the scale. A leaf is dequantized when its layer is
computed, which saves memory and no time.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import optree
import torch
from torch import Tensor

from scaling import tree
from scaling.configs import Config
from scaling.scaled import Scaled
from scaling.scaled import quantize as quantize_line
from scaling.scaled.arrays import wide
from scaling.serve.types import ONE, layer_type, shared_of, specs
from scaling.spec import Format, format_of


def quantize(params: dict, config: Config, format: str = "int8", *, mesh=None, form: str = "heads") -> dict:
    """Return this rank's params with each matrix as a `Scaled`, typed as `specs(config, mesh, form=form, format=...)`.

    Whole params that are quantized and then sharded are the same to the bit as shards that are quantized.

    Args:
        params: This rank's params, typed as `specs(config, mesh, form=form)`.
        config: The model.
        format: The format's name.
        mesh: The mesh, or None for one device.
        form: How the params are sharded.

    Raises:
        ValueError: A matrix has numbers that are not finite in float32, or a leaf is no tensor of floats.
        ShardingError: A leaf is not of its type, or a shard or the end of a dim would cut a block of the format.
    """
    stored = quantizers(config, format, mesh, form)
    tree.check(params, specs(config, mesh, form=form), config.sizes, ONE if mesh is None else mesh)
    tree.check_floats(params)
    return tree.map(lambda quantizer, W: quantizer(W), stored, params)


def quantizers(config: Config, format: str, mesh=None, form: str = "heads") -> dict:
    """Return a tree like the params, whose leaves are the functions by which `quantize` stores each."""
    f, on = format_of(format), ONE if mesh is None else mesh
    if not config.norm_gain:
        what = f"{config.name}: has norms without gains, so no param would say in which dtype it is computed"
        raise ValueError(f"{what}\n  fix: serve its weights as they are")
    types = specs(config, mesh, form=form)
    return tree.map(lambda dims, text: _quantizer(dims.split(), text, f, on), shared_of(config, f), types)


def _quantizer(dims: list[str], text: str, f: Format, mesh) -> Callable[[Tensor], Any]:
    """Return the function that stores a leaf of this type, whose values share scales along these dims."""
    if not dims:
        return lambda W: W
    stacked, spec = layer_type(text, dims)
    line = f"{replace(spec, scaled=())} -> {spec}"

    def store(W: Tensor) -> Scaled:
        if not W.is_meta and not bool(torch.isfinite(W.to(torch.float32)).all()):
            what = f"{text}: what is not finite in float32 has no {f.name} form"
            raise ValueError(f"{what}\n  fix: look for NaN, inf and numbers above 3.4e38 in it")
        if not stacked:
            return quantize_line(line, W, mesh, f)
        layers = [quantize_line(line, part, mesh, f) for part in W.unbind()]
        return layers[0].of([torch.stack(parts) for parts in zip(*(layer.parts for layer in layers), strict=True)])

    return store


def plain_leaf(params: dict) -> Tensor:
    """Return a param without scales, whose dtype and device are those of the computation."""
    return params["norm"] if "norm" in params else params["embed"]


def check_dtypes(params: Any) -> None:
    """Raise ValueError, which names the leaf, unless each has the dtypes that `quantize` gives it."""

    def is_right(x: Any) -> bool:
        return x.has_dtypes if isinstance(x, Scaled) else x.dtype in tree.FLOATS

    def is_leaf(x: Any) -> bool:
        return isinstance(x, Scaled)

    if all(map(is_right, optree.tree_leaves(params, is_leaf=is_leaf))):  # each call of prefill and decode asks
        return
    accessors, found, _ = optree.tree_flatten_with_accessor(params, is_leaf=is_leaf)
    for at, x in zip(accessors, found, strict=True):
        if not is_right(x):
            dtypes = ", ".join(str(part.dtype) for part in (x.parts if isinstance(x, Scaled) else (x,)))
            what = f"{at.codify('params')} is in {dtypes}: not what quantize returns".replace("'", '"')
            raise ValueError(f"{what}\n  fix: convert params before they are quantized, not after it")


def floats(params: Any, dtype: torch.dtype) -> Any:
    """Return a layer's params, or a leaf, with the leaves that have scales dequantized."""
    if isinstance(params, dict):
        return {name: floats(leaf, dtype) for name, leaf in params.items()}
    return wide(replace(params, dtype=dtype)).to(dtype) if isinstance(params, Scaled) else params
