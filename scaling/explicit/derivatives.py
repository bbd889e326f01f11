"""Derivatives of functions of arrays, typed by the law of cotangents (notation.md).

Over a mesh axis the cotangent of a split array is split, that of a replicated array is unreduced, and that of an
unreduced array is replicated. So the gradient of a weight W[D, F] in a loss `[] {U_X}` is dW[D, F] {U_X}: data
parallelism's AllReduce is a `reshard` that the caller writes.
"""

from collections.abc import Callable
from typing import Any

import optree
import torch

from scaling.algebra.layouts import layout, spec_of
from scaling.common.arguments import whole_numbers
from scaling.explicit.arrays import Array, array, reshard
from scaling.spec import ShardingError


def vjp(f: Callable, *primals) -> tuple:
    """Return (f(*primals), pull): `pull(dy)` gives a cotangent for each primal, as arrays and trees of arrays.

    `dy` is typed as the cotangent of f's result, a single array; another type is resharded to it. The cotangents'
    types follow from the primals'. It is built on torch.func.vjp, so calls may be nested.
    """
    everything: Any = primals
    flat, structure = optree.tree_flatten(everything)
    at = [i for i, x in enumerate(flat) if isinstance(x, Array)]
    made = []

    def on_shards(*shards):
        filled = list(flat)
        for i, shard in zip(at, shards, strict=True):
            filled[i] = Array(shard, flat[i].layout, flat[i].shape, flat[i].mesh)
        result = f(*optree.tree_unflatten(structure, filled))
        if not isinstance(result, Array):
            raise ShardingError(
                f"the function returns a {type(result).__name__}, not an Array\n  fix: return one Array"
            )
        made[:] = [result]
        return result.local

    for i in at:
        if not flat[i].dtype.is_floating_point:
            raise ShardingError(
                f"vjp in {flat[i].type}\n  rule: derivatives are of floats\n  fix: convert it, x.float()"
            )
    local, pull, *_ = torch.func.vjp(on_shards, *(flat[i].local for i in at))
    y = Array(local, made[0].layout, made[0].shape, made[0].mesh)

    def pulled(dy: Array):
        like = isinstance(dy, Array) and dy.mesh is y.mesh and dy.shape == y.shape and dy.dtype == y.dtype
        if not like:
            given = f"{dy.type} on {dy.mesh}" if isinstance(dy, Array) else type(dy).__name__
            fix = "array(dy, ..., y.mesh), of the result's shape and dtype"
            raise ShardingError(f"the cotangent of {y.type} on {y.mesh} is an Array like it; got {given}\n  fix: {fix}")
        shards = pull(reshard(dy, layout(spec_of(y.layout).cotangent(y.mesh))).local)
        found: list = [None] * len(flat)
        for i, shard in zip(at, shards, strict=True):
            x = flat[i]
            found[i] = Array(shard, layout(spec_of(x.layout).cotangent(x.mesh)), x.shape, x.mesh)
        return optree.tree_unflatten(structure, found)

    return y, pulled


def grad(f: Callable, argnums: int | tuple[int, ...] = 0) -> Callable:
    """Return the gradient of a scalar function, as torch.func.grad does, typed.

    It is taken in one argument, an array or a tree of arrays, or in several. The loss may still be unreduced,
    `[] {U_XY}`, each device's own terms; then nothing is sent for it. A loss replicated along an axis counts once.
    """
    numbers = whole_numbers("argnums", [argnums] if isinstance(argnums, int) else argnums)

    def gradient(*args):
        if any(not -len(args) <= i < len(args) for i in numbers):
            raise ShardingError(
                f"grad in argnums={argnums} of {len(args)} arguments\n  fix: name arguments that are given"
            )

        def of_these(*xs):
            filled = list(args)
            for i, x in zip(numbers, xs, strict=True):
                filled[i] = x
            return f(*filled)

        loss, pull = vjp(of_these, *(args[i] for i in numbers))
        if loss.shape:
            raise ShardingError(
                f"grad of {loss.type}\n  rule: grad differentiates a scalar\n  fix: sum the result, or use vjp"
            )
        one = torch.ones((), dtype=loss.dtype, device=loss.mesh.device)
        grads = pull(array(one, "[]", loss.mesh))
        return grads[0] if isinstance(argnums, int) else grads

    return gradient
