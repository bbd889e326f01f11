"""Optimizers as pure functions over pytrees: `update(grads, state, params) -> (params, state)`.

Elementwise, so they run on shards as they are: the specs of the state are the params' own. Equal to torch.optim's SGD
and AdamW. Nothing is changed in place unless the caller gives its buffers away (`donate=True`).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from scaling import tree
from scaling.collectives import all_reduce
from scaling.spec import ShardingError, format_axes, mesh_sizes, parse

Schedule = float | Callable[[Tensor], "Tensor | float"]  # of the number of updates made so far, a 0-dim float64 tensor


class Optimizer(NamedTuple):
    """`init(params) -> state`, `update(grads, state, params, donate=False) -> (params, state)`, `state_specs(specs)`.

    The state is a tree: {"step": int64 scalar, "m": like params, "v": like params, "master": like params}, as far as
    the optimizer has them; `state_specs` gives its types. `donate=True` is JAX's donate_argnums for state and params:
    the caller gives the tensors away and must not read them again, since the new values are written into them.
    Gradients are only read. Nothing is recorded for autograd.
    """

    init: Callable
    update: Callable
    state_specs: Callable


def sgd(lr: Schedule, momentum=0.0, weight_decay=0.0, nesterov=False, master=False) -> Optimizer:
    """m = momentum m + (g + weight_decay p);  p = p - lr m  (nesterov: p - lr (g + weight_decay p + momentum m)).

    `master=True`: params may be bfloat16; float32 copies are kept in the state, updated, and returned rounded.
    """
    _at_least_zero(momentum=momentum, weight_decay=weight_decay)
    if nesterov and not momentum:
        raise ValueError("nesterov needs a momentum above 0")

    def step(p, g, *moment, count, rate):  # no fused kernel: on CPU it is wrong in bfloat16 (pytorch#191763)
        if weight_decay:
            g = torch._foreach_add(g, p, alpha=weight_decay)
        if momentum:
            torch._foreach_mul_(*moment, momentum)
            torch._foreach_add_(*moment, g)
            g = torch._foreach_add(g, *moment, alpha=momentum) if nesterov else moment[0]
        if isinstance(rate, Tensor):
            torch._foreach_sub_(p, torch._foreach_mul(g, rate))
        else:
            torch._foreach_sub_(p, g, alpha=rate)

    return _optimizer(step, lr, ("m",) if momentum else (), master)


def adamw(lr: Schedule, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, master=False) -> Optimizer:
    """AdamW (Loshchilov & Hutter 2017), t the number of this update, from 1:

        m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
        p = (1 - lr weight_decay) p - lr / (1 - b1^t) m / (sqrt(v) / sqrt(1 - b2^t) + eps)

    `master=True`: params may be bfloat16; float32 copies are kept in the state, updated, and returned rounded; m and v
    are float32 too. That is 2 + 12 bytes a parameter; Part 5 counts 2 + 8, without the copies.
    """
    b1, b2 = betas
    _at_least_zero(eps=eps, weight_decay=weight_decay)
    if not (0 <= b1 < 1 and 0 <= b2 < 1):
        raise ValueError(f"betas must lie in [0, 1); got {betas}")

    def step(p, g, m, v, *, count, rate):
        if _fused(p, rate) and _laid_out_alike(p, m, v):
            options = {"beta1": b1, "beta2": b2, "weight_decay": weight_decay, "eps": eps, "lr": _for_kernel(rate, p)}
            torch._fused_adamw_(p, g, m, v, [], [count.float()] * len(p), **options, amsgrad=False, maximize=False)
            return
        t = count.double()
        torch._foreach_mul_(p, 1 - rate * weight_decay)
        torch._foreach_lerp_(m, g, 1 - b1)
        torch._foreach_mul_(v, b2)
        torch._foreach_addcmul_(v, g, g, 1 - b2)
        denominator = torch._foreach_sqrt(v)
        torch._foreach_div_(denominator, (1 - b2**t).sqrt())
        torch._foreach_add_(denominator, eps)
        change = torch._foreach_mul(m, rate / (1 - b1**t))
        torch._foreach_div_(change, denominator)
        torch._foreach_sub_(p, change)

    return _optimizer(step, lr, ("m", "v"), master)


def _optimizer(step: Callable, lr: Schedule, moments: tuple[str, ...], master: bool) -> Optimizer:
    """`step(p, g, *moments, count, rate)` updates lists of tensors of one device and dtype in place."""

    def init(params):
        state = {"step": torch.zeros((), dtype=torch.int64, device=_device(params))}
        kept = tree.map(_precise_copy, params) if master else params
        state |= {name: tree.map(lambda p: torch.zeros_like(p, requires_grad=False), kept) for name in moments}
        return state | ({"master": kept} if master else {})

    @torch.no_grad()
    def update(grads, state, params, donate=False):
        _check_same(grads, params)
        count = state["step"] + 1
        rate = lr(state["step"].double()) if callable(lr) else lr
        old = [state["master"] if master else params, *(state[name] for name in moments)]
        # Out of place is in place on copies: with a fused kernel that is three new buffers and no temporaries.
        new = old if donate else [tree.map(lambda t: t.detach().clone(), part) for part in old]
        lists = [tree.leaves(part) for part in (new[0], grads, *new[1:])]
        for p, g, *rest in _by_kind(lists):
            step(p, [_laid_out_as(b, a) for a, b in zip(g, p, strict=True)], *rest, count=count, rate=rate)
        state = {"step": count} | dict(zip(moments, new[1:], strict=True))
        if not master:
            return new[0], state
        rounded = tree.map(lambda p, w: p.copy_(w) if donate else w.to(p.dtype, copy=True), params, new[0])
        return rounded, state | {"master": new[0]}

    def state_specs(specs):
        return {"step": "step[]"} | dict.fromkeys(moments + (("master",) if master else ()), specs)

    return Optimizer(init, update, state_specs)


def clip_by_global_norm(grads, specs, mesh, max_norm: float, eps: float = 1e-6):
    """(grads, norm): scaled by min(1, max_norm / (norm + eps)), norm that of the whole gradient, on every device.

    `specs` are the gradients' types: what is sharded is summed over its axes, replicas are counted once, and partial
    sums (`{U_X}`) are refused. One AllReduce of a scalar per set of axes; float32 at least. A norm that is not finite
    makes every gradient so, as in torch.nn.utils.clip_grad_norm_. Under torch.compile the specs must be strings.
    """
    if not torch.compiler.is_compiling():
        tree.paired(grads, specs, "grads")
    parts: dict[str, list[Tensor]] = {}
    for axes, grad in zip(mesh.constant(_split_over, specs), tree.leaves(grads), strict=True):
        parts.setdefault(axes, []).append(grad)
    dtype = torch.float64 if any(g.dtype == torch.float64 for g in tree.leaves(grads)) else torch.float32
    total = torch.zeros((), dtype=dtype, device=_device(grads))
    for axes, part in parts.items():
        square = torch.stack(torch._foreach_norm(part, 2, dtype=dtype)).square().sum()
        total = total + (all_reduce(f"Norm[] {{U_{axes}}} -> Norm[]", square, mesh) if axes else square)
    norm = total.sqrt()
    scale = (max_norm / (norm + eps)).clamp(max=1.0)
    return tree.map(lambda g: g * scale.to(g.dtype), grads), norm


def _split_over(mesh, specs) -> tuple[str, ...]:
    """For each leaf the axes that split it, in the mesh's order, as the notation writes them; "" if it is whole."""
    named = tree.named_leaves(specs, "grads")
    for where, spec in named.items():
        parse(spec).check_axes(mesh)
        if parse(spec).unreduced:
            fix = f"reduce it to {parse(spec).with_unreduced(())} first"
            raise ShardingError(
                f"{where}: {parse(spec)} is unreduced: norms of partial sums do not add up\n  fix: {fix}"
            )
    split = [parse(spec).axes for spec in named.values()]
    return tuple(format_axes([axis for axis in mesh_sizes(mesh) if axis in axes]) for axes in split)


def _by_kind(lists: list[list[Tensor]]):
    """The same lists once for each (device, dtype) of the first: the fused and foreach kernels take one at a time."""
    kinds: dict = {}
    for row in zip(*lists, strict=True):
        kinds.setdefault((row[0].device, row[0].dtype), []).append(row)
    for rows in kinds.values():
        yield [list(column) for column in zip(*rows, strict=True)]


def _laid_out_as(p: Tensor, t: Tensor) -> Tensor:
    """t in the dtype and the memory order of p, copied if need be."""
    if t.dtype == p.dtype and t.stride() == p.stride():
        return t
    return torch.empty_like(p).copy_(t)


def _laid_out_alike(p: list[Tensor], *parts: list[Tensor]) -> bool:
    """Whether every tensor is dense and in the same memory order as its param: the fused kernel walks memory."""
    dense = all(a.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(a) for a in p)
    return dense and all(a.stride() == b.stride() for part in parts for a, b in zip(p, part, strict=True))


def _fused(p: list[Tensor], rate) -> bool:
    """Whether to use torch's one kernel for the whole update: under torch.compile the compiler fuses the plain form.

    On CUDA the kernel takes a rate that is a tensor as float32, which would spoil a float64 update.
    """
    device, dtype = p[0].device.type, p[0].dtype
    exact = device == "cpu" or not isinstance(rate, Tensor) or dtype != torch.float64
    return device in ("cpu", "cuda") and dtype.is_floating_point and exact and not torch.compiler.is_compiling()


def _for_kernel(rate, p: list[Tensor]):
    return rate.float() if isinstance(rate, Tensor) and p[0].device.type == "cuda" else rate


def _check_same(grads, params) -> None:
    """ValueError that names the leaf at which `grads` is not like `params`."""
    found, wanted = tree.leaves(grads), tree.leaves(params)
    if len(found) == len(wanted) and all(g.shape == p.shape for g, p in zip(found, wanted, strict=True)):
        return
    found, wanted = tree.named_leaves(grads, "grads"), tree.named_leaves(params, "grads")
    for where in wanted | found:
        g, p = (tuple(side[where].shape) if where in side else "nothing" for side in (found, wanted))
        if g != p:
            raise ValueError(f"{where}: the gradient has shape {g}, its param {p}: give the grads of these params")


def _precise_copy(p: Tensor) -> Tensor:
    return p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)


def _device(params) -> torch.device:
    found = tree.leaves(params)
    return found[0].device if found else torch.device("cpu")


def _at_least_zero(**values: float) -> None:
    for name, value in values.items():
        if value < 0:
            raise ValueError(f"{name} must be at least 0; got {value}")
