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
        mesh, axes = self.mesh, list(self.mesh.sizes)
        self.shuffle(axes)
        of_dims: list[list[str]] = [[] for _ in range(dims)]
        unreduced = []
        for axis in axes:
            where = self.randrange(dims + 2)
            if where < dims:
                of_dims[where].append(axis)
            elif where == dims:
                unreduced.append(axis)
        local = [self.choice(self.sizes) if self.maybe(0.9) else 4 for _ in range(dims)]
        names = []
        for i, name in enumerate("IJK"[:dims]):
            whole = local[i] * mesh.size(of_dims[i])
            number = str(whole if self.maybe(0.7) else whole + mesh.size(of_dims[i]))
            names.append(number if self.maybe(0.15) and number not in names else name)
        return typed(zip(names, of_dims, strict=True), unreduced), local

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


def buffer(draw: Draw, shape, dtype, x):
    """(what is given as out, the memory around it, whether it fits)."""
    how = draw.choice(
        ["fits", "fits", "by columns", "shape", "shape", "dtype", "expanded", "meta", "numpy", "operand", "leaf"]
    )
    shape = tuple(shape)
    if how == "shape":
        other = draw.choice([(*shape, 1), (1, *shape), shape[1:], tuple(n + 1 for n in shape), (1,) * len(shape), (0,)])
        if other == shape:
            how = "fits"
        shape = other
    if how == "dtype":
        dtype = draw.choice([d for d in DTYPES if d != dtype])
    n = prod(shape)
    memory = torch.ones(n + 8, device=draw.mesh.device).to(dtype)
    out = memory[4 : 4 + n].view(shape)
    if how == "by columns" and len(shape) > 1:
        out = memory[4 : 4 + n].view(shape[::-1]).permute(*reversed(range(len(shape))))
    if how == "expanded" and n > 1:
        out = memory[4:5].view((1,) * len(shape)).expand(shape)
    elif how == "expanded":
        how = "fits"
    if how == "meta":
        out = out.to("meta")
    if how == "numpy":
        out = torch.ones(n).numpy()
    may_hold = isinstance(x, torch.Tensor) and x.numel() >= n > 0 and x.dtype == dtype and x.is_contiguous()
    if how == "operand" and may_hold:
        out = x.view(-1)[:n].view(shape)
    elif how == "operand":
        how = "fits"
    if how == "leaf":
        out = out.clone().requires_grad_() if dtype.is_floating_point else out
        how = "leaf" if dtype.is_floating_point else "fits"
    return out, memory, how


def spoiled(draw: Draw, x: torch.Tensor):
    """(an operand that is none of its type, why), or x as it is."""
    how = draw.choice(["a dim more", "flat", "numpy", "list", "none", "meta", "sparse"])
    if (how == "flat" and x.dim() == 1) or (how == "sparse" and not (x.dim() and x.dtype == torch.float32)):
        return x, ""
    return {
        "a dim more": lambda: x[None],
        "flat": lambda: x.reshape(-1),
        "numpy": lambda: torch.zeros(x.shape).numpy(),
        "list": lambda: [0.0] * 4,
        "none": lambda: None,
        "meta": lambda: x.to("meta"),
        "sparse": lambda: x.contiguous().to_sparse(),
    }[how](), how
