"""Products and activations in which a row has the same bits whatever the other rows are."""

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn.functional import pad as padded

from scaling.configs import Config
from scaling.models.transformer import unstacked
from scaling.serve.int8 import floats
from scaling.serve.types import ONE
from scaling.strategies.transformer.heads import own_heads

TILE = 8  # rows of the tile with which the others are compared
SIZES = (64, 32, 16, TILE, 4)
BLOCK = 64  # keys, which queries see together
WIDTH = 8  # what rows and columns of a matrix are filled up to a multiple of
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {  # torch's silu and gelu round the end of an array differently
    "silu": lambda x: x / (1 + (-x).exp()),
    "gelu": lambda x: 0.5 * x * (1 + (x * 0.5**0.5).erf()),
    "gelu_tanh": lambda x: 0.5 * x * (1 + ((x + 0.044715 * x * x * x) * (2 / math.pi) ** 0.5).tanh()),
    "relu": torch.relu,
}


def product(x: Tensor, W: Tensor, sizes: Sequence[int] = SIZES) -> Tensor:
    """x[R, D] times W[D, ...], R a multiple of the least of `sizes`, in tiles of these sizes, the largest first.

    Where D or the columns of W are no multiple of 8, zeros fill them up: on some processors a product of 6 columns, or
    over 6, gives a row other bits by its place in the tile.
    """
    W = W.flatten(1)
    D, F = W.shape
    if D % WIDTH or F % WIDTH:
        W = padded(W, (0, -F % WIDTH, 0, -D % WIDTH))
        return product(padded(x, (0, -D % WIDTH)), W, sizes)[:, :F].contiguous()
    parts, at = [], 0
    for size in sizes:
        while len(x) - at >= size:
            parts.append(x[at : at + size] @ W)
            at += size
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def agreeing(params: dict, config: Config, mesh=None) -> tuple[int, ...]:
    """The sizes of tiles in which a row has the same bits at each place, `TILE` among them: tried with each shape of
    matrix, and those below `TILE` with a block of keys too. ValueError if there are none on this machine."""
    sizes = [size for size in SIZES if size >= TILE or _same_attention(size, config.H, params["norm"])]
    for W in {(W.shape, W.stride()): W for W in _matrices(params, config, ONE if mesh is None else mesh)}.values():
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(SIZES[0], len(W), generator=generator).to(W)
        small = product(x, W, (TILE,))
        sizes = [size for size in sizes if _same_rows(x, W, size, small)]
        if TILE not in sizes:
            raise ValueError(
                f"batch-invariant: here a product with {tuple(W.shape)} gives a row other bits by its place in a tile\n"
                f"  fix: leave the batch-invariant mode out, or use another dtype than {W.dtype}"
            )
    return tuple(sizes)


def _same_rows(x: Tensor, W: Tensor, size: int, rows: Tensor) -> bool:
    """Whether x W in tiles of this size has these rows, also where x's are moved on by 1 and by 3 places."""
    return all(product(x.roll(by, 0), W, (size,)).equal(rows.roll(by, 0)) for by in (0, 1, 3))


def _same_attention(size: int, H: int, like: Tensor) -> bool:
    """Whether queries have the same scores and sums of values in tiles of this size as in those of `TILE`."""
    g = torch.Generator().manual_seed(0)
    q, p, k, v = (
        torch.randn(8, *shape, generator=g).to(like) for shape in ((TILE, H), (TILE, BLOCK), (BLOCK, H), (BLOCK, H))
    )
    return all(torch.cat([part @ b for part in a.split(size, 1)], 1).equal(a @ b) for a, b in ((q, k.mT), (p, v)))


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
