"""Products and activations in which a row has the same bits whatever the other rows are."""

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch
from torch import Tensor

from scaling.configs import Config
from scaling.models.transformer import unstacked
from scaling.serve.int8 import floats
from scaling.serve.types import ONE
from scaling.strategies.transformer.layer import own_heads

LEAST = 8  # rows of the smallest tile
SIZES = (64, 32, 16, LEAST)
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {  # torch's silu and gelu round the end of an array differently
    "silu": lambda x: x / (1 + (-x).exp()),
    "gelu": lambda x: 0.5 * x * (1 + (x * 0.5**0.5).erf()),
    "gelu_tanh": lambda x: 0.5 * x * (1 + ((x + 0.044715 * x * x * x) * (2 / math.pi) ** 0.5).tanh()),
    "relu": torch.relu,
}


def product(x: Tensor, W: Tensor, sizes: Sequence[int] = SIZES) -> Tensor:
    """x[R, D] times W[D, ...], R a multiple of `LEAST`, in tiles of these sizes, the largest first."""
    W = W.flatten(1)
    parts, at = [], 0
    for size in sizes:
        while len(x) - at >= size:
            parts.append(x[at : at + size] @ W)
            at += size
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def agreeing(params: dict, config: Config, mesh=None) -> tuple[int, ...]:
    """The sizes of tiles in which a row has the same bits, `LEAST` among them: tried with each shape of matrix."""
    sizes = list(SIZES)
    for W in {(W.shape, W.stride()): W for W in _matrices(params, config, ONE if mesh is None else mesh)}.values():
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(SIZES[0], len(W), generator=generator).to(W)
        small = product(x, W, (LEAST,))
        sizes = [size for size in sizes if product(x, W, (size,)).equal(small)]
    return tuple(sizes)


def _matrices(params: dict, config: Config, mesh) -> list[Tensor]:
    """What the first layer (all have the same shapes) and the head multiply by: [D, ...], [N H, D], [F, D]."""
    dtype, at = params["norm"].dtype, SimpleNamespace(config=config, mesh=mesh)
    layer = floats(unstacked(params["layers"])[0], dtype)
    found = [layer["W_Q"], own_heads(layer["W_K"], at, 1), own_heads(layer["W_V"], at, 1), layer["W_O"].flatten(0, 1)]
    for mlp in (layer, layer.get("shared", {})):
        matrices = [mlp[name] for name in ("W_in", "W_gate", "W_out") if name in mlp]
        found += [W[0] if W.dim() == 3 else W for W in matrices]  # of experts, the first
    found.append(floats(params["unembed"], dtype) if "unembed" in params else floats(params["embed"], dtype).T)
    return [W.flatten(1) for W in found]
