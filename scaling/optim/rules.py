"""SGD and AdamW: steps in place on lists of tensors, and the pure update around such a step."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from scaling import tree
from scaling.collectives.checked import alike
from scaling.collectives.operands import extent, overlaps_itself
from scaling.common.arguments import check_within, flag, not_negative
from scaling.common.torch_private import fused_adamw_
from scaling.optim.checks import check_apart, check_like, check_reduced, check_state

# a number, or a function of the number of updates made so far, a 0-dim float64 tensor
LearningRate = float | Callable[[Tensor], "Tensor | float"]


class Optimizer(NamedTuple):
    """Functions `init(params) -> state`, `update(grads, state, params, ...) -> (params, state)`, `state_specs(specs)`.

    The state is a tree {"step": int64 scalar, "m": like params, "v": like params, "master": like params}, with the
    parts that the optimizer has; `state_specs` gives its types. Gradients are only read, and nothing is recorded for
    autograd. `update` has these options, by name:

    `specs`, `mesh`: The gradients' types, `W[D_X, F]`, as a tree like params, and the mesh. Muon needs them.
    ShardingError if a gradient is unreduced, `dW[D, F] {U_X}`, since each rank would add its partial sum.

    `donate=True`: Like JAX's donate_argnums for state and params. The caller gives the tensors away and must not read
    them again, since the new values are written into them.
    """

    init: Callable
    update: Callable
    state_specs: Callable


def sgd(lr: LearningRate, momentum=0.0, weight_decay=0.0, nesterov=False, master=False, *, mask=None) -> Optimizer:
    """Return SGD, as torch.optim's.

        m = momentum m + (g + weight_decay p);  p = p - lr m  (nesterov: p - lr (g + weight_decay p + momentum m))

    With `master=True` params may be bfloat16: float32 copies are kept in the state, updated, and returned rounded.
    `mask` says which leaves decay, by a tree of bools like params or a function from params to one; by default all do.
    """
    not_negative(momentum=momentum, weight_decay=weight_decay)
    flag(nesterov=nesterov)
    if nesterov and not momentum:
        raise ValueError("nesterov needs a momentum above 0\n  fix: give one, or nesterov=False")

    def step(p, g, *moment, count, rate, decay):  # not the fused kernel, wrong in bfloat16 on CPU (pytorch#191763)
        for i in range(len(p)):
            change = g[i].add(p[i], alpha=decay) if decay else g[i]
            if momentum:
                m = moment[0][i].mul_(momentum).add_(change)
                change = change.add(m, alpha=momentum) if nesterov else m
            if isinstance(rate, Tensor):
                p[i].sub_(change * rate)
            else:
                p[i].sub_(change, alpha=rate)

    given = {"momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
    return pure(by_kind(step, weight_decay, mask), lr, ("m",) if momentum else (), master, given)


def adamw(lr: LearningRate, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, master=False, *, mask=None) -> Optimizer:
    """Return AdamW (Loshchilov & Hutter 2017), where t is the number of the update, from 1.

        m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
        p = (1 - lr weight_decay) p - lr / (1 - b1^t) m / (sqrt(v) / sqrt(1 - b2^t) + eps)

    With `master=True` params may be bfloat16: float32 copies are kept in the state, updated, and returned rounded, and
    m and v are float32 too. That is 2 + 12 bytes per parameter; Part 5 counts 2 + 8, without the copies.
    `mask` says which leaves decay, by a tree of bools like params or a function from params to one; by default all do.
    """
    not_negative(eps=eps, weight_decay=weight_decay)
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"betas must be two numbers; got {betas!r}\n  fix: give (0.9, 0.999), say")
    b1, b2 = betas
    for i, beta in enumerate(betas):
        check_within(f"betas[{i}]", beta, "[0, 1)")

    def step(p, g, m, v, *, count, rate, decay):
        if _fused(p, rate) and _laid_out_alike(p, m, v):
            rate = rate.float() if isinstance(rate, Tensor) and p[0].is_cuda else rate
            options = {"beta1": b1, "beta2": b2, "eps": eps, "weight_decay": decay, "lr": rate}
            fused_adamw_(p, g, m, v, count.float(), **options)
            return
        compiling = torch.compiler.is_compiling()
        in_m, in_v = (_compiled_corrections if compiling else _corrections)(count, b1, b2).unbind()
        for i in range(len(p)):
            p[i].mul_(1 - rate * decay)
            m[i].lerp_(g[i], 1 - b1)
            v[i].mul_(b2).addcmul_(g[i], g[i], value=1 - b2)
            p[i].sub_(m[i] * (rate / in_m) / (v[i].sqrt() / in_v.sqrt() + eps))

    given = {"betas": betas, "eps": eps, "weight_decay": weight_decay}
    return pure(by_kind(step, weight_decay, mask), lr, ("m", "v"), master, given)


def _corrections(count: Tensor, b1: float, b2: float) -> Tensor:
    """Return [1 - b1^t, 1 - b2^t] in float64."""
    t = count.double()
    return torch.stack([1 - b1**t, 1 - b2**t])


# The compiler sees this as a single op; otherwise it would compute the powers again for every few elements of params.
_compiled_corrections = torch.library.custom_op("scaling::adamw_corrections", _corrections, mutates_args=())
_compiled_corrections.register_fake(lambda count, b1, b2: count.new_empty(2, dtype=torch.float64))


def by_kind(step: Callable, weight_decay: float, mask) -> Callable:
    """Turn an elementwise `step(p, g, *moments, count, rate, decay)` into the step that `pure` takes.

    The given step is called with lists of leaves that have one device and dtype and that all decay or all do not,
    because the fused kernel takes one such list at a time.
    """

    def run(lists: list[list[Tensor]], params, count, rate, specs, mesh) -> None:
        kinds: dict = {}
        for decays, *row in zip(_decaying(mask, params), *lists, strict=True):
            kinds.setdefault((row[0].device, row[0].dtype, decays), []).append(row)
        for (_, _, decays), rows in kinds.items():
            columns = map(list, zip(*rows, strict=True))
            step(*columns, count=count, rate=rate, decay=weight_decay if decays else 0.0)

    return run


def pure(step: Callable, lr: LearningRate, moments: tuple[str, ...], master: bool, given: dict) -> Optimizer:
    """Return the optimizer around a step in place.

    `step(lists, params, count, rate, specs, mesh)` updates the lists of the leaves of params, gradients and moments.
    `given` has the optimizer's options, which must be equal on all ranks.
    """
    if not callable(lr):
        not_negative(lr=lr)
    flag(master=master)

    def init(params):
        tree.check_floats(params, "params")
        state = {"step": torch.zeros((), dtype=torch.int64, device=device_of(params))}
        kept = params
        if master:
            kept = tree.map(lambda p: p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True), params)
        state |= {name: tree.map(torch.zeros_like, kept) for name in moments}
        return state | ({"master": kept} if master else {})

    @torch.no_grad()
    def update(grads, state, params, *, donate=False, specs=None, mesh=None):
        names = (("master",) if master else ()) + moments
        if sorted(state) != sorted(("step", *names)):
            found = f"the state holds {list(state)}, not {['step', *names]}"
            raise ValueError(f"{found}\n  fix: make it by this optimizer's init")
        flag(donate=donate)
        check_like(params, grads=grads, **{f'state["{name}"]': state[name] for name in names})
        check_state(state, state["master"] if master else params, moments)
        if specs is not None:
            check_reduced(grads, specs, mesh)
        if mesh is not None:
            alike(mesh, "an optimizer's update", lr=lr, master=master, **given)
        count = state["step"] + 1
        rate = lr(state["step"].double()) if callable(lr) else lr
        if not (isinstance(rate, Tensor) and (rate.device.type != "cpu" or torch.compiler.is_compiling())):
            not_negative(lr=rate)  # not checked on another device, where it would have to wait for the value
        old = [state["master"] if master else params, *(state[name] for name in moments)]
        if donate and not torch.compiler.is_compiling():
            check_apart(params, {name: state[name] for name in names}, grads)
        # Without `donate` the step runs in place on copies: with a fused kernel, three new buffers and no temporaries.
        new = old if donate else [tree.map(lambda t: t.detach().clone(), part) for part in old]
        p, g, *rest = (tree.leaves(part) for part in (new[0], grads, *new[1:]))
        step([p, [*map(_laid_out_as, p, g)], *rest], params, count, rate, specs, mesh)
        state = {"step": count} | dict(zip(moments, new[1:], strict=True))
        if not master:
            return new[0], state
        rounded = tree.map(lambda p, w: p.copy_(w) if donate else w.to(p.dtype, copy=True), params, new[0])
        return rounded, state | {"master": new[0]}

    def state_specs(specs):
        return {"step": "step[]"} | dict.fromkeys(moments + (("master",) if master else ()), specs)

    return Optimizer(init, update, state_specs)


def _decaying(mask, params) -> list[bool]:
    """Return for each leaf whether it decays."""
    if mask is None:
        return [True] * len(tree.leaves(params))
    mask = mask(params) if callable(mask) else mask
    decays, places = tree.leaves(mask), list(tree.named_leaves(params))
    if list(tree.named_leaves(mask)) != places or not all(isinstance(each, bool) for each in decays):
        raise ValueError(f"mask must be a bool for each of {places}; found {mask!r:.200}\n  fix: give True or False")
    return decays


def _laid_out_as(p: Tensor, t: Tensor) -> Tensor:
    """Return t in the dtype and the memory order of p, as a copy if these differ."""
    if t.dtype == p.dtype and t.stride() == p.stride():
        return t
    return torch.empty_like(p).copy_(t)


def _laid_out_alike(p: list[Tensor], *parts: list[Tensor]) -> bool:
    """Return whether all tensors are dense and in their params' memory order, in which the fused kernel reads them."""
    dense = all(a.is_contiguous() or (extent(a) == a.nbytes and not overlaps_itself(a)) for a in p)
    return dense and all(a.stride() == b.stride() for part in parts for a, b in zip(p, part, strict=True))


def _fused(p: list[Tensor], rate) -> bool:
    """Return whether to use torch's single kernel for the whole update.

    Under torch.compile the compiler fuses the plain form instead. On CUDA the kernel reads a rate that is a tensor as
    float32, which would spoil a float64 update.
    """
    device, dtype = p[0].device.type, p[0].dtype
    exact = device == "cpu" or not isinstance(rate, Tensor) or dtype != torch.float64
    return device in ("cpu", "cuda") and dtype.is_floating_point and exact and not torch.compiler.is_compiling()


def device_of(params) -> torch.device:
    """Return the device of a tree's first tensor, the CPU for a tree without tensors."""
    return next(iter(tree.leaves(params)), torch.empty(0)).device
