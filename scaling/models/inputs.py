"""Check the inputs of a Transformer before they are used: ids, weights and segments of a batch, and params.

Arrays that torch would broadcast, cast or truncate are refused, since the loss would belong to another batch or model.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from scaling import tree
from scaling.common.torch_private import any_modes, assert_later, is_tracked, is_wrapped, modes, unwrapped
from scaling.configs import Config
from scaling.mesh import AbstractMesh
from scaling.models.leaves import specs_of

IDS = (torch.int64, torch.int32)


def _readable(x: Tensor) -> bool:
    """Return whether values of x can be read now: x is not traced, not mapped by vmap and not on the meta device."""
    if torch.compiler.is_compiling():
        return False
    while is_tracked(x):  # as is everything that is computed inside torch.func.grad
        x = unwrapped(x)
    return not (x.is_meta or is_wrapped(x) or (any_modes() and modes()))


def check_ids(name: str, ids: Any, shape: tuple[int, ...] | None = None) -> None:
    """Raise a ValueError unless `ids` is a tensor [B, T] of int64 or int32, and of `shape` if that is given."""
    if not isinstance(ids, Tensor) or ids.dtype not in IDS:
        found = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        what = f"{name} must be whole numbers, a tensor of int64 or int32; got {found}"
        raise ValueError(f"{what}\n  fix: give torch.as_tensor(...).long()")
    if ids.dim() != 2:
        raise ValueError(f"{name} must be [B, T]; got {list(ids.shape)}\n  fix: give a row for each sequence")
    if shape is not None and ids.shape != shape:
        raise ValueError(
            f"{name} must be {list(shape)}, as the tokens; got {list(ids.shape)}\n  fix: one for each token"
        )


def check_range(name: str, ids: Tensor, V: int, counts: Tensor | None = None) -> None:
    """Raise a ValueError unless the ids lie in the vocabulary, if their values can be read.

    Where `counts` is 0 an id may be anything. On a GPU the check is an assertion that fails there later, as in torch's
    own embedding, because reading a value would wait for all queued work.
    """
    if not _readable(ids) or not ids.numel():
        return
    if ids.is_cuda:
        inside = (ids >= 0) & (ids < V)
        assert_later((inside if counts is None else inside | (counts == 0)).all(), f"{name} must lie in 0..{V - 1}")
        return
    low, high = torch.aminmax(ids)
    if int(low) >= 0 and int(high) < V:
        return
    outside = (ids < 0) | (ids >= V)
    if counts is not None and _readable(counts):
        outside = outside & (counts != 0)
    if bool(outside.any()):
        found = int(ids[outside][0])
        raise ValueError(f"{name} must lie in 0..{V - 1}: that is the vocabulary; found {found}\n  fix: give other ids")


def check_weights(weights: Any, targets: Tensor) -> None:
    """Raise a ValueError unless `weights` are real, with the targets' shape [B, T] and device: nothing is broadcast."""
    if not _beside(weights, targets) or weights.is_complex():
        wanted = f"real numbers {list(targets.shape)} on {targets.device}"
        raise ValueError(f"weights must be {wanted}; got {_found(weights)}\n  fix: one for each target")


def _beside(x: Any, targets: Tensor, *devices: torch.device) -> bool:
    dense = isinstance(x, Tensor) and x.layout is torch.strided
    return dense and x.shape == targets.shape and x.device in (targets.device, *devices)


def _found(x: Any) -> str:
    return f"{x.dtype} {list(x.shape)} on {x.device}" if isinstance(x, Tensor) else type(x).__name__


def check_segments(segments: Any, tokens: Tensor) -> None:
    """Raise a ValueError unless `segments` are integers with the tokens' shape [B, T], on their device or the host."""
    beside = _beside(segments, tokens, torch.device("cpu"))
    if not beside or segments.dtype == torch.bool or segments.dtype.is_floating_point:
        raise ValueError(
            f"segments must be integers {list(tokens.shape)} on {tokens.device}; got {_found(segments)}\n"
            "  fix: give the number of the document that each token belongs to"
        )


_types = lru_cache(maxsize=256)(specs_of)


def check_params(params: Any, config: Config) -> None:
    """Raise a ValueError that names the leaf unless these are the whole params of this model."""
    fix = "give the config of these params, or params of this one: models.transformer.init(config)"
    tree.check(params, _types(config), config.sizes, AbstractMesh({}), fix=fix)
    tree.check_floats(params)
