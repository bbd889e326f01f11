"""What a random case is made of: types, operands in every layout and dtype, buffers that fit or not."""

import random
from dataclasses import replace
from math import prod
from typing import Any

import torch

from scaling.mesh import Mesh
from scaling.spec import Spec

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
DTYPES += [torch.int64, torch.int32, torch.uint8, torch.bool]
ODD = [torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.complex64, torch.complex128]
# these are moved, and complex ones added; their other sums are refused
MODES = ["plain"] * 6 + ["no_grad", "inference", "flops", "autocast", "leaf", "vjp", "jvp", "vmap"]
MODES += ["in graph"] * 2  # the forms that a compiler follows, run without one


class AsOnNccl(Mesh):
    """A mesh over gloo whose collectives take the ways that they take on NCCL. Unchecked: to compare calls NCCL needs a
    GPU."""

    def _make_group(self, axes):
        group = super()._make_group(axes)
        return group if group.pg is None else replace(group, backend="nccl")


def typed(dims, unreduced=(), name: str = "A") -> Spec:
    return Spec(name, tuple((dim, tuple(axes)) for dim, axes in dims), tuple(sorted(unreduced)))


class Draw(random.Random):
    """What all ranks draw alike, of calls on `mesh` that may write into `folder`."""

    mesh: Any = None
    folder = ""
    dtypes, modes, sizes = DTYPES * 3 + ODD, MODES, [0, 1, 2, 2, 4, 4, 6]

    @staticmethod
    def on(mesh, folder: str, seed) -> "Draw":
        draw = Draw(seed)
        draw.mesh, draw.folder = mesh, folder
        return draw

    def maybe(self, chance: float) -> bool:
        return self.random() < chance

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.randrange(1 << 30))

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator(), dtype=torch.float64).to(self.mesh.device)

    def whole_numbers(self, below: int, *shape: int) -> torch.Tensor:
        return torch.randint(below, shape, generator=self.generator()).to(self.mesh.device)

    def spec(self, dims: int) -> tuple[Spec, list[int]]:
        """A type over the mesh's axes, and the shape of its shards; now and then a dim is a number."""
        mesh = self.mesh
        places: list[list[str]] = [[] for _ in range(dims + 2)]  # the dims', what is unreduced, what is in no place
        for axis in self.sample([*mesh.sizes], len(mesh.sizes)):
            self.choice(places).append(axis)
        local = [self.choice(self.sizes) for _ in range(dims)]
        names = list("IJK"[:dims])
        for i, (size, axes) in enumerate(zip(local, places, strict=False)):
            number = str((size + self.maybe(0.3)) * mesh.size(axes))
            if self.maybe(0.15) and number not in names:
                names[i] = number
        return typed(zip(names, places, strict=False), places[dims]), local

    def layout(self, x: torch.Tensor) -> torch.Tensor:
        """The same values, in memory in another way."""
        how = self.choice(["plain", "plain", "turned", "gaps", "inside", "lazy"])
        if how == "turned" and x.dim() > 1:
            return x.transpose(0, -1).contiguous().transpose(0, -1)
        if how == "gaps" and x.dim():
            return torch.stack([x, x], -1)[..., 0]
        if how == "inside":
            return torch.cat([x.reshape(-1), x.reshape(-1)])[x.numel() :].view(x.shape)
        if how == "lazy" and x.is_complex():
            return x.conj().clone().conj()
        if how == "lazy" and x.dtype in (torch.float32, torch.float64):
            return torch.complex(torch.zeros_like(x), -x).conj().imag
        return x


BUFFERS = ["fits", "fits", "by columns", "shape", "shape", "dtype", "expanded", "meta", "numpy", "operand", "leaf"]


def buffer(draw: Draw, shape, dtype, x):
    """(what is given as out, the memory around it, whether it fits)."""
    how, shape = draw.choice(BUFFERS), tuple(shape)
    others = [(*shape, 1), (1, *shape), shape[1:], tuple(n + 1 for n in shape), (1,) * len(shape), (0,)]
    if how == "shape":
        shape = draw.choice([other for other in others if other != shape])
    if how == "dtype":
        dtype = draw.choice([other for other in DTYPES if other != dtype])
    n = prod(shape)
    holds = isinstance(x, torch.Tensor) and x.numel() >= n > 0 and x.dtype == dtype and x.is_contiguous()
    if not {"expanded": n > 1, "operand": holds, "leaf": dtype.is_floating_point}.get(how, True):
        how = "fits"
    memory = torch.ones(n + 8, device=draw.mesh.device).to(dtype)
    inside = memory[4 : 4 + n]
    made = {
        "by columns": lambda: inside.view(shape[::-1]).permute([*range(len(shape))][::-1]),
        "expanded": lambda: memory[4:5].view((1,) * len(shape)).expand(shape),
        "meta": lambda: inside.view(shape).to("meta"),
        "numpy": lambda: torch.ones(n).numpy(),
        "operand": lambda: x.view(-1)[:n].view(shape),
        "leaf": lambda: inside.view(shape).clone().requires_grad_(),
    }
    return made.get(how, lambda: inside.view(shape))(), memory, how
