"""A strategy, run by the judge: what its functions return is what SPECS says, and `backward` is the derivative of
`forward`. The first is judged by types; the second, which no type tells, by numbers on one device."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaling.check.findings import said
from scaling.check.places import place_of_function
from scaling.check.watched import shard_of
from scaling.collectives.linear import Pending, watcher, who_watches
from scaling.common.torch_private import without_modes
from scaling.mesh.meshes import Mesh
from scaling.spec import Spec, parse
from scaling.strategies.stack import Strategy

LAYERS = {"L": 2}
NEAR = 1e-3  # of the largest element: float32, through two layers


class Passes(NamedTuple):
    """forward(params, In, mesh) -> (Out, saved) and backward(dOut, saved, params, mesh) -> (dIn, grads), or None; the
    types of params and of grads, and where they stand."""

    forward: Callable | None
    backward: Callable | None
    types: Mapping[str, Spec]
    grads: Mapping[str, Spec]
    place: str


def _passes(module: Any, keep: bool) -> Passes:
    """Those of a file as they are written; of a layer's listing those of two layers with gelu, norm and residual."""
    own: Any = getattr(module, "forward", None)
    back: Any = getattr(module, "backward", None)
    weights = {W: parse(spec) for W, spec in module.SPECS.items() if W not in ("In", "Out")}
    if not hasattr(module, "STRATEGY") and "params" in inspect.signature(own or back).parameters:

        def forward(params: Any, In: Tensor, mesh: Any) -> tuple[Any, Any]:
            made = own(params, In, mesh)
            return made if isinstance(made, tuple) else (made, In)

        def backward(dOut: Any, saved: Any, params: Any, mesh: Any) -> tuple[Any, dict]:
            found = back(dOut, saved, params, mesh)
            return found if isinstance(found[-1], dict) else (found[0], dict(zip(weights, found[1:], strict=True)))

        place = place_of_function(own or back)
        return Passes(own and forward, back and backward, weights, weights, place)
    strategy = getattr(module, "STRATEGY", None) or Strategy(module.SPECS, module.forward, module.backward)
    types = {W: spec.stacked("L") for W, spec in weights.items()}
    grads = {W: parse(spec).stacked("L") for W, spec in (strategy.GRADS or {}).items()} or types

    def through(params: Any, In: Tensor, mesh: Any) -> tuple[Any, Any]:
        return strategy.forward(params, In, mesh, "gelu", True, True, keep)

    return Passes(through, strategy.backward, types, grads, f"{module.__file__}:1")


def run_layers(name: "str | Any", keep: bool, mesh: Any) -> None:
    """Both passes on an abstract mesh, and on one device: what they return is what SPECS says, and the derivative."""
    module = import_module(f"scaling.strategies.{name}") if isinstance(name, str) else name
    watch, found, sizes = who_watches(), _passes(module, keep), dict(LAYERS)
    assert watch is not None

    def given(spec: Any, where: str = "x") -> Tensor:
        return watch.typed(shard_of(spec, mesh, sizes), spec, where, mesh)

    params = {W: given(spec, f'["{W}"]') for W, spec in found.types.items()}
    In, Out = parse(module.SPECS["In"]), parse(module.SPECS["Out"])
    saved = given(In)
    if found.forward:
        made, saved = found.forward(params, saved, mesh)
        watch.told(made, Out, f"forward returns Out, SPECS says {Out}", found.place)
    if not found.backward:
        return
    dIn, grads = found.backward(given(Out), saved, params, mesh)
    watch.told(dIn, In, f"backward returns dIn, SPECS says {In}", found.place)
    if set(grads) != set(found.grads):
        raise ValueError(f"backward returns gradients of {sorted(grads)}\n  fix: one of each of {sorted(found.grads)}")
    for W, dW in grads.items():
        watch.told(dW, found.grads[W], f"backward returns d{W}, SPECS says {found.grads[W]}", found.place)
    if not found.forward or watch.report.findings:
        return
    try:
        wrong = list(not_derivatives(found, In, mesh))
    except TimeoutError:  # of the whole file
        raise
    except Exception as error:
        watch.skip(f"backward is not compared with forward's derivative: {error}".splitlines()[0], found.place)
        return
    for what in wrong:
        text = f"backward returns another {what} than the derivative of forward, on one device"
        watch.find("derivative", said(text, "derivative", f"see the lines that make {what}"), "", found.place)


def not_derivatives(found: Passes, In: Spec, mesh: Any) -> Iterator[str]:
    """Which results of `backward` are not those of torch.func.vjp of `forward`, for drawn numbers on a mesh of one
    device, where collectives are the identity: "dIn", "dW_in"."""
    one, generator, sizes = Mesh(dict.fromkeys(mesh.sizes, 1)), torch.Generator().manual_seed(0), dict(LAYERS)
    for dim in [dim for spec in (In, *found.types.values()) for dim in spec.dim_names]:
        sizes.setdefault(dim, int(dim) if dim.isdigit() else len(sizes) + 2)

    def forward(params: dict, x: Tensor) -> tuple[Tensor, Any]:
        assert found.forward is not None
        return found.forward(params, x, one)

    def drawn(shape: Sequence[int]) -> Tensor:
        return torch.randn(shape, generator=generator)

    token = watcher.set(None)
    try:
        with without_modes():
            params = {W: drawn(spec.global_shape(sizes)) for W, spec in found.types.items()}
            x = drawn(In.global_shape(sizes))
            Out, pull, *_ = torch.func.vjp(lambda *given: forward(*given)[0], params, x)
            dOut = drawn(Out.shape)
            wanted, dx = pull(dOut)
            assert found.backward is not None
            dIn, grads = found.backward(dOut, forward(params, x)[1], params, one)
    finally:
        watcher.reset(token)
    for name, given, due in [("In", dIn, dx), *((W, grads[W], wanted[W]) for W in params)]:
        given = given.wait() if isinstance(given, Pending) else given
        if given.shape != due.shape or not (given - due).abs().max() <= NEAR * due.abs().max():
            yield f"d{name}"
