"""The functions between the matmuls, activations and RMSNorm, with derivatives written out or by autograd's tape.

Each works on every row alone, so it also holds on shards of the other dims. `vjp` is the exception: it differentiates
any function.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import optree
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge

from scaling import tree
from scaling.common.arguments import one_of
from scaling.common.torch_private import fused_norm, fused_norm_vjp, in_transform, tape_gradients

XIELU = {"beta": 0.5, "eps": -1e-6}  # the constants of xIELU, which each layer of an Apertus file stores


def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor) -> Tensor:
    """Return x/2 + softplus(alpha_p) x^2 of a positive x, else x/2 + (1/2 + softplus(alpha_n)) (e^x - 1 - x).

    The two numbers are learned (Huang and Schlag 2024, arxiv.org/abs/2411.13010).
    """
    rest = (torch.expm1(x.clamp(max=XIELU["eps"])) - x) * (F.softplus(alpha_n) + XIELU["beta"])
    return torch.where(x > 0, F.softplus(alpha_p) * x * x, rest) + x * XIELU["beta"]


ACTIVATIONS = ("none", "relu", "gelu")  # of the book's MLP; a Transformer has the other functions, too
FUNCTIONS: dict[str, tuple[Callable, Callable]] = {  # x -> y, and (dy, x) -> dx in one kernel
    "none": (lambda x: x, lambda dy, x: dy),
    "relu": (F.relu, lambda dy, x: dy * (x > 0)),
    "relu2": (lambda x: F.relu(x).square(), lambda dy, x: dy * 2 * x.clamp(min=0)),
    "gelu": (F.gelu, torch.ops.aten.gelu_backward),
    "gelu_tanh": (partial(F.gelu, approximate="tanh"), partial(torch.ops.aten.gelu_backward, approximate="tanh")),
    "silu": (F.silu, torch.ops.aten.silu_backward),
    "xielu": (xielu, lambda dy, *inputs: vjp(xielu, *inputs)[1](dy)),  # of x and two learned numbers
}
EPS = 1e-6  # added to the mean square in RMSNorm


def check_activation(activation: str) -> None:
    """Raise a ValueError for an unknown activation."""
    one_of("activation", activation, ACTIVATIONS)


def act(x: Tensor, activation: str) -> Tensor:
    """Apply none: x; relu: max(x, 0); or gelu: x Phi(x) = x (1 + erf(x / sqrt 2)) / 2, exactly and not by tanh."""
    check_activation(activation)
    return FUNCTIONS[activation][0](x)


def act_vjp(x: Tensor, dy: Tensor, activation: str) -> Tensor:
    """Return dy times d act / d x; relu has the slope 1 where x > 0, and 0 at 0."""
    check_activation(activation)
    return FUNCTIONS[activation][1](dy, x)


def second_moment(activation: str) -> float:
    """Return E[act(z)^2] for a standard normal z (gelu: from E[Phi(z)^2] = 1/3)."""
    check_activation(activation)
    return {"none": 1.0, "relu": 0.5, "gelu": 1 / 3 + 1 / (2 * math.pi * math.sqrt(3))}[activation]


def soft_cap(x: Tensor, cap: float | None) -> Tensor:
    """Return cap tanh(x / cap), which lies within the cap (Gemma 2); without a cap, return x."""
    return x if cap is None else cap * torch.tanh(x / cap)


def mean_square(x: Tensor) -> Tensor:
    """Return the mean of x^2 over the last dim, [..., 1], in float32 or wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).square().mean(-1, keepdim=True)


def rms_norm(x: Tensor, mean_square_x: Tensor | None = None, *, gain: Tensor | None = None, eps: float = EPS) -> Tensor:
    """Return y = x / sqrt(mean(x^2) + eps) over the last dim, times the learned gain[D] if there is one.

    If x is only a shard of that dim, give `mean_square_x`[..., 1], the mean of squares over the whole of it.
    """
    if gain is not None and mean_square_x is None and not torch.compiler.is_compiling() and in_transform() is None:
        return _RMSNorm.apply(x, gain, eps) if torch.is_grad_enabled() else gained_norm(x, gain, eps)[0]
    r = torch.rsqrt((mean_square(x) if mean_square_x is None else mean_square_x) + eps)
    return (x * r if gain is None else x * r * gain).to(x.dtype)  # rounded once


class _RMSNorm(torch.autograd.Function):
    """`rms_norm` with its derivative written out, which halves the passes over memory. For torch.autograd only."""

    @staticmethod
    def forward(ctx, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        y, r = gained_norm(x, gain, eps)
        ctx.save_for_backward(x, gain, r)
        ctx.eps = eps
        return y

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple:
        x, gain, r = ctx.saved_tensors
        if torch.is_grad_enabled():  # to be differentiated again
            _, vjp_fn, *_ = torch.func.vjp(lambda x, gain: rms_norm(x, gain=gain, eps=ctx.eps), x, gain)
            return *vjp_fn(dy), None
        return *gained_norm_vjp(x, gain, r, dy), None


def gained_norm(x: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (x r gain, r[..., 1]) with r = 1 / sqrt(mean(x^2) + eps); `gained_norm_vjp` needs this r."""
    if _one_kernel(x, gain):
        return fused_norm(x, gain, eps)
    r = mean_square(x).add_(eps).rsqrt_()  # vector_norm would read x once, but it rounds differently from Hugging Face
    return (x * r).mul_(gain).to(x.dtype), r


def gained_norm_vjp(x: Tensor, gain: Tensor, r: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Return (dx, dgain): dx = r gain dy - r^3 x mean(x gain dy), dgain = sum over the rows of r x dy."""
    if _one_kernel(x, gain):
        return fused_norm_vjp(x, gain, r, dy)
    along = (dy * x).to(gain.dtype)
    dgain = r.flatten().to(along.dtype) @ along.flatten(0, -2)
    total = (along @ gain)[..., None]
    dx = (dy * gain).to(r.dtype).mul_(r)
    return dx.addcmul_(x, r**3 * total, value=-1 / x.shape[-1]).to(x.dtype), dgain


def _one_kernel(x: Tensor, gain: Tensor) -> bool:
    """Return whether to call torch's fused kernels, one for each pass, where the lines here launch six.

    On a GPU a step then takes a twelfth less time (docs/speed.md). They are not used under a compiler, which fuses the
    lines itself, or under torch.func, which knows the derivatives of the lines.
    """
    alike = x.is_cuda and gain.dtype == x.dtype
    return alike and not torch.compiler.is_compiling() and in_transform() is None


def rms_norm_vjp(x: Tensor, dy: Tensor) -> Tensor:
    """Return dx = r dy - r^3 x mean(x dy), with r = 1 / sqrt(mean(x^2) + EPS), which depends on every x of the row."""
    along = (x * dy).to(torch.promote_types(x.dtype, torch.float32)).mean(-1, keepdim=True)
    r = torch.rsqrt(mean_square(x) + EPS)
    return (r * dy - r**3 * along * x).to(x.dtype)


def vjp(f: Callable, *primals) -> tuple[Any, Callable[..., tuple]]:
    """Return (f(*primals), vjp_fn) over trees of tensors: vjp_fn(cotangents) -> a cotangent of each primal.

    This equals torch.func.vjp, which costs more per collective and whose first call imports the compiler, so that every
    rank that torchrun starts would wait for it. A tensor that the result does not depend on, or that holds whole
    numbers, gets a cotangent of zeros. Under a compiler torch.func.vjp is used.
    """
    if torch.compiler.is_compiling():
        return torch.func.vjp(f, *primals)  # pyright: ignore[reportReturnType]
    inputs, structure = optree.tree_flatten(cast(Any, primals))
    kinds, entering, edges = [], {}, []  # `vjp_fn` keeps no input that the tape does not keep
    for i, x in enumerate(inputs):
        kinds.append((x.shape, x.dtype, x.device))
        if x.is_floating_point():
            entering[i] = x
    with torch.enable_grad():
        entered, floats = _Enter.apply(torch.empty(0, requires_grad=True), *entering.values()), [*entering]
        for i, x in zip(floats, entered, strict=True):
            inputs[i] = x
            edges.append(GradientEdge(x.grad_fn, x.output_nr))
        out = f(*cast(tuple, structure.unflatten(inputs)))
    results = tree.leaves(out)

    def vjp_fn(cotangents) -> tuple:
        found = tape_gradients(results, edges, tree.leaves(cotangents))
        known, grads = dict(zip(floats, found, strict=True)), []
        for i, (shape, dtype, device) in enumerate(kinds):
            d = known.get(i)
            grads.append(torch.zeros(shape, dtype=dtype, device=device) if d is None else d)
        return cast(tuple, structure.unflatten(grads))

    return tree.map(Tensor.detach, out), vjp_fn


class _Enter(torch.autograd.Function):
    """The start of a tape. It returns its inputs, and the tape does not keep them, as it would keep leaves."""

    @staticmethod
    def forward(ctx, token: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        return inputs
