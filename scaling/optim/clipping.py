"""Clip gradients by the norm of the whole gradient, and scale the loss of an optimizer's gradients.

For gradients that pass through float16 the loss is multiplied by a scale, so that small gradients stay in float16's
range, and the gradients are divided by the scale before they are used (Micikevicius et al. 2018, arXiv:1710.03740,
3.2). The scale adapts as in torch.amp.GradScaler. If a gradient is not finite, the step is skipped and the scale is
halved; after `interval` good steps it is doubled.
"""

import torch
from torch import Tensor

from scaling import tree
from scaling.collectives import all_reduce
from scaling.collectives.checked import alike
from scaling.common.arguments import check_within, flag, not_negative, whole
from scaling.common.limits import LIMITS
from scaling.optim.checks import check_reduced
from scaling.optim.rules import Optimizer, device_of
from scaling.spec import format_axes, mesh_sizes, parse


def clip_by_global_norm(grads, specs, mesh, max_norm: float, eps: float = 1e-6):
    """Return the gradients times min(1, max_norm / (norm + eps)), and the norm of the whole gradient (`global_norm`).

    If the norm is not finite, no gradient will be, as in torch.nn.utils.clip_grad_norm_.
    """
    alike(mesh, "clip_by_global_norm", max_norm=max_norm, eps=eps)
    norm = global_norm(grads, specs, mesh)
    return scaled_to(grads, norm, max_norm, eps), norm


def scaled_to(grads, norm: Tensor, max_norm: float, eps: float = 1e-6, donate: bool = False):
    """Return gradients of this norm times min(1, max_norm / (norm + eps)), written in place with `donate`."""
    not_negative(max_norm=max_norm, eps=eps)
    scale = (max_norm / (norm + eps)).clamp(max=1.0)
    return tree.map(lambda g: g.mul_(scale.to(g.dtype)) if donate else g * scale.to(g.dtype), grads)


def global_norm(grads, specs, mesh, row: int = LIMITS.row) -> Tensor:
    """Return the norm of the whole gradient, on every device, in float32 or float64.

    `specs` are the gradients' types: the squares of a sharded gradient are summed over its axes, replicas are counted
    once, and partial sums (`{U_X}`) are refused. There is one AllReduce of a scalar per set of axes. Under
    torch.compile the specs must be strings.
    """
    return norm_and_squares(grads, specs, mesh, row)[0]


def norm_and_squares(grads, specs, mesh, row: int = LIMITS.row) -> tuple[Tensor, list[Tensor]]:
    """Return the `global_norm`, and for each leaf the sum of the squares that this rank holds, in float64."""
    check_reduced(grads, specs, mesh)
    if not torch.compiler.is_compiling():
        tree.check_floats(grads, "grads")
        if len(devices := {str(g.device) for g in tree.leaves(grads)}) > 1:
            raise ValueError(f"grads are on {', '.join(sorted(devices))}\n  fix: move them to one device")
    dtype = torch.float64 if any(g.dtype == torch.float64 for g in tree.leaves(grads)) else torch.float32
    squares = [sum_of_squares(g, dtype, row) for g in tree.leaves(grads)]
    parts: dict[str, list[Tensor]] = {}
    for axes, square in zip(mesh.constant(_split_over, *tree.leaves(specs)), squares, strict=True):
        parts.setdefault(axes, []).append(square)
    total = torch.zeros((), dtype=dtype, device=device_of(grads))
    for axes, part in parts.items():
        square = torch.stack(part).sum().to(dtype)
        total = total + (all_reduce(f"Norm[] {{U_{axes}}} -> Norm[]", square, mesh) if axes else square)
    return total.sqrt(), squares


def sum_of_squares(x: Tensor, dtype: torch.dtype = torch.float32, row: int = LIMITS.row) -> Tensor:
    """Return the sum of x^2, a float64 scalar, of squares in `dtype`.

    It is summed row by row, because torch's vector_norm adds millions of float32 squares to a few running sums. That
    loses 0.1% if some squares are large, and another share on every mesh (as in `torch.nn.utils.clip_grad_norm_`).
    """
    flat = x.reshape(-1)
    rows = flat[: len(flat) // row * row].view(-1, row)
    rest = flat[rows.numel() :]
    squares = [torch.linalg.vector_norm(part, dim=-1, dtype=dtype).double().square().sum() for part in (rows, rest)]
    return squares[0] + squares[1]


def _split_over(mesh, *specs) -> tuple[str, ...]:
    """Return for each type the axes that split it, in the mesh's order and joined, such as "XY"; "" for none."""
    split = [parse(spec).axes for spec in specs]
    return tuple(format_axes([axis for axis in mesh_sizes(mesh) if axis in axes]) for axes in split)


def loss_scaled(rule: Optimizer, first: float = 2.0**16, interval: int = 2000) -> Optimizer:
    """Add a loss scale to the state of `rule`: "scale", in float32, and "good", the number of good steps with it.

    The scale is doubled after `interval` good steps, and halved by a step whose gradients are not finite.

    The new `update` takes gradients that are already divided by the scale, and `finite`: whether the gradients of all
    ranks are finite, which must be equal on every rank. If they are not, params and the rule's state do not change.
    """
    whole(interval=interval)
    check_within("first", first, "(0, inf)")
    if not isinstance(rule, Optimizer):
        raise ValueError(f"loss_scaled({type(rule).__name__})\n  fix: give an optimizer, such as adamw(1e-3)")

    def init(params):
        scale = torch.tensor(first, dtype=torch.float32, device=device_of(params))
        return rule.init(params) | {"scale": scale, "good": torch.zeros_like(scale, dtype=torch.int64)}

    def update(grads, state, params, *, finite: bool, **options):
        flag(finite=finite)
        if not {"scale", "good"} <= set(state):
            raise ValueError(f"the state holds {list(state)}, and no scale\n  fix: make it by this optimizer's init")
        scale, good = state["scale"], state["good"] + 1
        if not finite:
            return params, state | {"scale": scale / 2, "good": torch.zeros_like(good)}
        full = good == interval
        scale, good = torch.where(full, scale * 2, scale), good.masked_fill(full, 0)
        inner = {name: part for name, part in state.items() if name not in ("scale", "good")}
        params, inner = rule.update(grads, inner, params, **options)
        return params, inner | {"scale": scale, "good": good}

    def state_specs(specs):
        return rule.state_specs(specs) | {"scale": "scale[]", "good": "good[]"}

    return Optimizer(init, update, state_specs)
