"""The tensors of a Hugging Face checkpoint that make up each param: the order of their dims, and their scales."""

import itertools
import math
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scaling.configs import Config
from scaling.configs.hugging_face_write import kind_of
from scaling.configs.model_types import KINDS
from scaling.models.leaves import STACKED, Leaf, check_computed, types_of
from scaling.scaled.rounding import widened
from scaling.spec import FORMATS, parse


@dataclass(frozen=True)
class FileLayout:
    """The tensors of one param in a checkpoint.

    Attributes:
        name: The tensors' name, with a field such as {L} for each dim that numbers the tensors.
        groups: The dims of each tensor, which may merge several dims of the param. A "*" numbers the params that share
            the tensor.
        dims: The dims of the param.
        layers: The number in the model of each layer of the param's stack.
        joined: If a tensor holds several params along its rows, the rows of each.
        part: The index of this param in `joined` or in "*".
        parts: The size of "*".
        order: The position in the file of each coordinate of H in the param, if their orders differ.
    """

    name: str
    groups: tuple[str, ...]
    dims: tuple[str, ...]
    layers: tuple[int, ...] = ()
    joined: tuple[str, ...] = ()
    part: int = 0
    parts: int = 1
    order: tuple[int, ...] = ()

    def tensor(self, at: Mapping[str, int]) -> str:
        """Return the name of the tensor with these indices."""
        return self.name.format(**dict(at) | {dim: self.layers[at[dim]] for dim in "LGl" if dim in at})

    @property
    def numbered(self) -> list[str]:
        """The dims that number the tensors."""
        return re.findall(r"{(\w)}", self.name)

    def indices(self, ranges: Mapping[str, slice]) -> Iterator[dict[str, int]]:
        """Yield the indices, such as {"L": 3, "E": 0}, of each tensor in these ranges of dims.

        A dim without a range is left out.
        """
        dims = [dim for dim in self.numbered if dim in ranges]
        for at in itertools.product(*(range(ranges[dim].start, ranges[dim].stop) for dim in dims)):
            yield dict(zip(dims, at, strict=True))

    def tensors(self, sizes: Mapping[str, int]) -> Iterator[str]:
        """Yield the names of all tensors of the param."""
        for at in self.indices({dim: slice(0, sizes[dim]) for dim in self.numbered}):
            yield self.tensor(at)

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of this param's part of each tensor."""
        return tuple(math.prod({**sizes, "*": 1}[dim] for dim in group) for group in self.groups)

    def rows(self, sizes: Mapping[str, int], count: int | None = None) -> int:
        """Return the number of rows of the first `count` params that share a tensor; with None, of all of them."""
        return sum(math.prod(sizes[dim] for dim in group) for group in self.joined[:count])

    def stored_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of each whole tensor."""
        first, *rest = (math.prod({**sizes, "*": self.parts}[dim] for dim in group) for group in self.groups)
        return self.rows(sizes) if self.joined else first, *rest

    def read(self, tensor, ranges: Mapping[str, slice], sizes: Mapping[str, int]) -> Tensor:
        """Read the part `ranges` of one tensor, and return it with its dims in the param's order.

        If `tensor` is a slice of a file, only the rows of the part are read.
        """
        sizes, rows, part = {**sizes, "*": self.parts}, [], 0 if self.joined else self.part
        ranges = {**ranges, "*": slice(part, part + 1)}
        for first, *rest in self.groups:
            inner = math.prod(sizes[dim] for dim in rest)
            before = self.rows(sizes, self.part) if self.joined and not rows else 0
            rows.append(slice(before + ranges[first].start * inner, before + ranges[first].stop * inner))
        part, flat = tensor[tuple(rows)], "".join(self.groups)
        led = {group[0] for group in self.groups}
        part = part.reshape([ranges[d].stop - ranges[d].start if d in led else sizes[d] for d in flat])
        index: dict[str, Any] = {dim: slice(None) if dim in led else ranges[dim] for dim in flat}
        if self.order:
            index["H"] = torch.tensor(self.order)[ranges["H"]]
        part = part[tuple(index.values())]
        return part.permute([flat.index(dim) for dim in ("*", *self.dims) if dim in flat]).reshape(
            [ranges[dim].stop - ranges[dim].start for dim in self.dims if dim in flat]
        )

    def write(self, whole: Tensor) -> Tensor:
        """Return this param's part of one tensor of a file, with the dims that the file merges still separate.

        `join` makes the tensor of the parts of all params that share it.
        """
        here = [dim for dim in self.dims if dim not in self.numbered]
        if self.order:
            whole = whole.index_select(here.index("H"), torch.tensor(self.order).argsort())
        flat = "".join(self.groups)
        part = whole.permute([here.index(dim) for dim in flat if dim != "*"])
        return part.unsqueeze(flat.index("*")) if "*" in flat else part

    def join(self, parts: Sequence[Tensor], sizes: Mapping[str, int]) -> Tensor:
        """Return a file's tensor, joined from the parts of all params that share it, in their order."""
        along = 0 if self.joined else max("".join(self.groups).find("*"), 0)
        parts = [part.flatten(0, len(self.groups[0]) - 1) for part in parts] if self.joined else parts
        return torch.cat([*parts], along).reshape(self.stored_shape(sizes)).contiguous()


def turned_order(H: int, rotary: int, paired: bool) -> tuple[int, ...]:
    """Return the position in a file of each coordinate of a head, or () if all positions are equal.

    In this library plane i has its coordinates at i and i + H/2, and the first rotary/2 planes rotate. In files the
    first `rotary` coordinates rotate, and the two of a plane are neighbours if they are `paired`, else rotary/2 apart.
    """
    planes = torch.arange(rotary).view(-1, 2).T if paired else torch.arange(rotary).view(2, -1)
    order = torch.cat([planes, torch.arange(rotary, H).view(2, -1)], 1).flatten().tolist()
    return () if order == [*range(H)] else tuple(order)


def layer_numbers(config: Config) -> dict[str, tuple[int, ...]]:
    """Return the numbers in the model of the layers of each stack, by the dim that counts them."""
    stacks = {"L": "layers", "G": "dense", "l": "linear"}
    return {dim: tuple(l for l, kind in enumerate(config.kinds) if kind == stacks[dim]) for dim in stacks}


def leaf_layouts(config: Config) -> dict:
    """Return the FileLayout of each param. Raise a ValueError if no class of Hugging Face's is this model."""
    check_computed(config)
    kind, numbers = kind_of(config), layer_numbers(config)
    order = () if config.latent else turned_order(config.H, config.rotary, KINDS[kind].paired)

    def layout(key: str, leaf: Leaf) -> FileLayout:
        stack, *_ = of_param = parse(leaf.trained).dim_names
        name, _, dims = leaf.file.rstrip("]").partition("[")
        name, dims, joined = file_of(kind, f"model.layers.{{{stack}}}.{name}" if stack in STACKED else name, dims)
        rows, _, part = joined.partition(": ")
        parts = {"parts": int(rows)} if rows.isdecimal() else {"joined": tuple(rows.split())}
        given: Any = {"order": order if key in TURNED else ()} | parts
        return FileLayout(
            name, tuple(dims.split(", ")), of_param, numbers.get(stack, ()), part=int(part or 0), **given,
        )  # fmt: skip

    return types_of(config, layout)


TURNED = ("W_Q", "W_K", "b_Q", "b_K", "norm_Q", "norm_K")  # leaves[.., H] whose H positions turn


def file_of(kind: str, name: str, dims: str) -> Sequence[str]:
    """Return the tensors' name and dims in files of this model_type, and how params are joined in them."""
    for part, (other, theirs, joined) in KINDS[kind].joined.items():
        if part in name:
            return name.replace(part, other), theirs, joined
    for part, other in KINDS[kind].renamed.items():
        name = name.replace(part, other)
    return name, dims, ""


# Weights of a Hugging Face folder in FP8 or MXFP4: parts of them are read, multiplied by their scales

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

    `blocks`: how many rows and columns share a scale, 0 for all of them (`configs.model_types.weight_blocks`).
    """

    def __init__(self, values: Any, scales: Tensor, blocks: "tuple[int, int] | None", name: str):
        self.values, self.name = values, name
        rows, columns = values.get_shape()
        self.blocks = tuple(n or size for n, size in zip(blocks or (0, 0), (rows, columns), strict=True))
        shape = tuple(math.ceil(size / n) for size, n in zip((rows, columns), self.blocks, strict=True))
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
        blocks = slice(start // 32, math.ceil(stop / 32))
        values = widened(self.values[e, f, blocks], FORMATS["nvfp4"])  # the same values, E2M1
        scales = torch.exp2(self.exponents[e, f, blocks].to(torch.float32) - 127)
        first = 32 * blocks.start
        return (values * scales[..., None]).flatten(-2).mT[:, start - first : stop - first]
