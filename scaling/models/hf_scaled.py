"""Weights that a Hugging Face folder stores in FP8 with scales: read a part of one, multiplied by its scales."""

from collections.abc import Container
from math import ceil
from typing import Any

import torch
from torch import Tensor

SCALES = ("_scale_inv", "_scale")  # DeepSeek's name, and compressed-tensors'


def scale_of(tensor: str, names: Container[str]) -> str:
    """Return the name of a weight's scales, "" if it has none."""
    return next((tensor + ending for ending in SCALES if tensor + ending in names), "")


def is_scale(tensor: str, names: Container[str]) -> bool:
    """Return whether a tensor has a weight's scales."""
    return any(tensor.endswith(ending) and tensor.removesuffix(ending) in names for ending in SCALES)


class ScaledSlice:
    """A weight in FP8, read like a slice of a file: any part of it comes in float32, multiplied by its scales.

    `blocks`: how many rows and columns share a scale, 0 for all of them (`configs.quantized.weight_blocks`).
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
