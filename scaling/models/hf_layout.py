"""The tensors of a Hugging Face checkpoint that make up each param, and the order of their dims in the files."""

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from scaling import tree
from scaling.configs import Config
from scaling.configs.hugging_face_write import kind_of
from scaling.models.leaves import JOINED, PAIRED, Leaf, leaves_of, specs_of
from scaling.spec import parse


@dataclass(frozen=True)
class FileLayout:
    """The tensors of one param in a checkpoint.

    Attributes:
        name: The tensors' name, with a field such as {L} for each dim that numbers the tensors.
        groups: The dims of each tensor, which may merge several dims of the param.
        dims: The dims of the param.
        before: The number of layers before the first layer of the param's stack.
        joined: If a tensor holds several params along its rows, the rows of each.
        part: The index of this param in `joined`.
        paired: Whether the two coordinates of a rotary plane are neighbours along H in the file; they are H/2 apart in
            the param.
    """

    name: str
    groups: tuple[str, ...]
    dims: tuple[str, ...]
    before: int = 0
    joined: tuple[str, ...] = ()
    part: int = 0
    paired: bool = False

    def tensor(self, at: Mapping[str, int]) -> str:
        """Return the name of the tensor with these indices."""
        return self.name.format(**dict(at) | ({"L": at["L"] + self.before} if "L" in at else {}))

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
        return tuple(math.prod(sizes[dim] for dim in group) for group in self.groups)

    def rows(self, sizes: Mapping[str, int], count: int | None = None) -> int:
        """Return the number of rows of the first `count` params that share a tensor; with None, of all of them."""
        return sum(math.prod(sizes[dim] for dim in group) for group in self.joined[:count])

    def stored_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of each whole tensor."""
        first, *rest = self.shape(sizes)
        return self.rows(sizes) if self.joined else first, *rest

    def read(self, tensor, ranges: Mapping[str, slice], sizes: Mapping[str, int]) -> Tensor:
        """Read the part `ranges` of one tensor, and return it with its dims in the param's order.

        If `tensor` is a slice of a file, only the rows of the part are read.
        """
        rows = []
        for first, *rest in self.groups:
            inner = math.prod(sizes[dim] for dim in rest)
            before = self.rows(sizes, self.part) if not rows else 0
            rows.append(slice(before + ranges[first].start * inner, before + ranges[first].stop * inner))
        part, flat = tensor[tuple(rows)], "".join(self.groups)
        led = {group[0] for group in self.groups}
        part = part.reshape([ranges[d].stop - ranges[d].start if d in led else sizes[d] for d in flat])
        index: dict[str, slice | Tensor] = {dim: slice(None) if dim in led else ranges[dim] for dim in flat}
        if self.paired:
            index["H"] = pairs(sizes["H"])[ranges["H"]]
        part = part[tuple(index.values())]
        return part.permute([flat.index(dim) for dim in self.dims if dim in flat])

    def write(self, whole: Tensor, sizes: Mapping[str, int]) -> Tensor:
        """Return one tensor in the file's order of dims, from the whole param at its indices."""
        here = [dim for dim in self.dims if dim not in self.numbered]
        if self.paired:
            whole = whole.index_select(here.index("H"), pairs(sizes["H"]).argsort())
        return whole.permute([here.index(dim) for dim in "".join(self.groups)]).reshape(self.shape(sizes)).contiguous()


def pairs(H: int) -> Tensor:
    """Return the position of each coordinate of a head in a file where the coordinates of a plane are neighbours."""
    return torch.arange(H).view(-1, 2).T.flatten()


def leaf_layouts(config: Config) -> dict:
    """Return the FileLayout of each param. Raise a ValueError if no class of Hugging Face's is this model."""
    specs, kind = specs_of(config), kind_of(config)

    def layout(leaf: Leaf, spec: str) -> FileLayout:
        name, dims = leaf.hf[kind] if isinstance(leaf.hf, Mapping) else leaf.hf
        param = parse(spec)
        name, joined, part = JOINED.get(kind, {}).get(param.name, (name, (), 0))
        paired = param.name in PAIRED.get(kind, ())
        return FileLayout(name, tuple(dims.split(", ")), param.dim_names, config.dense_layers, joined, part, paired)

    return tree.map(layout, leaves_of(config), specs)
