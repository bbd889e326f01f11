"""Weights of a Hugging Face folder in FP8 or MXFP4: read a part of one, multiplied by its scales."""

from collections.abc import Container
from math import ceil
from typing import Any

import torch
from torch import Tensor

from scaling.scaled.rounding import widened
from scaling.spec.formats import FORMATS

SCALES = ("_scale_inv", "_scale")  # DeepSeek's name, and compressed-tensors'
BLOCKS, EXPONENTS = "_blocks", "_scales"  # the two tensors of experts' matrices in MXFP4 (GPT-OSS)


def scale_of(tensor: str, names: Container[str]) -> str:
    """Return the name of a weight's scales, "" if it has none."""
    return next((tensor + ending for ending in SCALES if tensor + ending in names), "")


def is_scale(tensor: str, names: Container[str]) -> bool:
    """Return whether a tensor has a weight's scales."""
    if tensor.endswith(EXPONENTS):
        return tensor.removesuffix(EXPONENTS) + BLOCKS in names
    return any(tensor.endswith(ending) and tensor.removesuffix(ending) in names for ending in SCALES)


class ScaledSlice:
    """A weight in FP8, read like a slice of a file: any part of it comes in float32, multiplied by its scales.

    `blocks`: how many rows and columns share a scale, 0 for all of them (`configs.hugging_face_tables.weight_blocks`).
    """

    def __init__(self, values: Any, scales: Tensor, blocks: "tuple[int, int] | None", name: str):
        self.values, self.name = values, name
        rows, columns = values.get_shape()
        self.blocks = tuple(n or size for n, size in zip(blocks or (0, 0), (rows, columns), strict=True))
        shape = tuple(ceil(size / n) for size, n in zip((rows, columns), self.blocks, strict=True))
        if blocks is None or values.get_dtype() != "F8_E4M3" or scales.numel() != shape[0] * shape[1]:
            what = f"{name}: {values.get_dtype()} of shape {(rows, columns)} with scales {tuple(scales.shape)}"
            raise ValueError(
                f"{what}; config.json says blocks of {blocks}\n  rule: a weight in F8_E4M3 has a scale for each block\n"
                "  fix: take config.json and weights from one version of the model"
            )
        self.scales = scales.to(torch.float32).reshape(shape)

    def get_shape(self) -> list[int]:
        """Return the shape of the weight."""
        return self.values.get_shape()

    def get_dtype(self) -> str:
        """Return the dtype that holds the products of values and scales, as published models are computed."""
        return "BF16"

    def __getitem__(self, part: Any) -> Tensor:
        """Return a part of the weight, W[rows, columns], given as one slice or two."""
        part = part if isinstance(part, tuple) else (part,)
        found, scales = self.values[part].to(torch.float32), self.scales
        for dim, (n, size) in enumerate(zip(self.blocks, self.get_shape(), strict=True)):
            places = torch.arange(size)[part[dim]] if dim < len(part) else torch.arange(size)
            scales = scales.index_select(dim, places // n)
        return found * scales


class PackedSlice:
    """Experts' matrices W[E, D, F] in MXFP4, read like a slice of a file: any part comes in float32, times its scales.

    The file has values[E, F, G, 16], each byte two neighbours along D, and exponents[E, F, G], each shared by 32.
    """

    def __init__(self, values: Any, exponents: Any, name: str):
        self.values, self.exponents = values, exponents
        if values.get_shape()[:3] != exponents.get_shape() or values.get_shape()[3:] != [16]:
            what = f"{name}: values {values.get_shape()} with scales {exponents.get_shape()}"
            raise ValueError(
                f"{what}\n  rule: 32 values, two in a byte, share a scale\n"
                "  fix: take config.json and weights from one version of the model"
            )

    def get_shape(self) -> list[int]:
        """Return the shape of the weights, [E, D, F]."""
        E, F, G, _ = self.values.get_shape()
        return [E, 32 * G, F]

    def get_dtype(self) -> str:
        """Return the dtype that holds the products of values and scales, as transformers makes them."""
        return "BF16"

    def __getitem__(self, part: Any) -> Tensor:
        """Return a part of the weights, W[experts, D, F], given as three slices."""
        e, d, f = part
        start, stop, _ = d.indices(self.get_shape()[1])
        blocks = slice(start // 32, ceil(stop / 32))
        values = widened(self.values[e, f, blocks], FORMATS["nvfp4"])  # the same values, E2M1
        scales = torch.exp2(self.exponents[e, f, blocks].to(torch.float32) - 127)
        first = 32 * blocks.start
        return (values * scales[..., None]).flatten(-2).mT[:, start - first : stop - first]
