"""Judge a strategy: its functions return the types in SPECS, and `backward` is the derivative of `forward`.

Its `update` must also equal the optimizer's. Types are judged on an abstract mesh; errors that no type shows are found
by comparing numbers on one device.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaling.check.findings import fault_text, place_of_function
from scaling.check.watched import shard_of
from scaling.collectives.linear import Pending, watcher, who_watches
from scaling.common.torch_private import without_modes
from scaling.mesh.meshes import Mesh
from scaling.optim import sgd
from scaling.spec import Spec, parse
from scaling.strategies.stack import Strategy

LAYERS = {"L": 2}
NEAR = 1e-3  # relative to the largest element: float32, through two layers
RATE = 0.1  # the learning rate of the update that is tried
ONE_BUCKET = 1 << 40  # bytes of a bucket that holds all layers


class Passes(NamedTuple):
    """A strategy's functions, with one signature for all files.

    Attributes:
        forward: (params, In, mesh) -> (Out, saved), or None.
        backward: (dOut, saved, params, mesh) -> (dIn, grads), or None.
        update: (grads, params, mesh) -> new params by plain SGD, or None if it does not differ from one device's.
        types: the types of the params.
        grads: the types of the gradients.
        places: the lines of the forward and of the backward.
        ways: options of the backward, which are all run: ZeRO's stages.
    """

    forward: Callable | None
    backward: Callable | None
    update: Callable | None
    types: Mapping[str, Spec]
    grads: Mapping[str, Spec]
    places: tuple[str, str]
    ways: tuple[dict[str, Any], ...] = ({},)


def _passes(module: Any, keep: bool) -> Passes:
    """Return a file's functions unchanged, or a layer's listing on two layers with gelu, norm and residual.

    Without `keep` the backward gathers again the arrays that it needs, and reduces all gradients in one bucket.
    """
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

        places = place_of_function(own or back), place_of_function(back or own)
        return Passes(own and forward, back and backward, None, weights, weights, places)
    strategy = getattr(module, "STRATEGY", None) or Strategy(module.SPECS, module.forward, module.backward)
    types = {W: spec.stacked("L") for W, spec in weights.items()}
    grads = {W: parse(spec).stacked("L") for W, spec in (strategy.GRADS or {}).items()} or types

    def through(params: Any, In: Tensor, mesh: Any) -> tuple[Any, Any]:
        return strategy.forward(params, In, mesh, "gelu", True, True, keep)

    options = {} if keep else {"bucket_bytes": ONE_BUCKET}
    of_users = {name: f for name in ("backward", "init", "update") if (f := getattr(module, name, None))}
    if not hasattr(module, "STRATEGY"):  # its backward is one layer's
        of_users = {}

    own_backward = of_users.get("backward", strategy.backward)
    ways = ({}, {"stage": 1}) if "stage" in inspect.signature(own_backward).parameters else ({},)

    def back_through(*given: Any, **way: Any) -> tuple[Any, dict]:
        dIn, found = own_backward(*given, **options, **way)
        return dIn, {W: torch.stack(dW) if isinstance(dW, list) else dW for W, dW in found.items()}

    def update(found: Mapping[str, Tensor], params: Mapping[str, Tensor], mesh: Any) -> Mapping[str, Tensor]:
        optimizer, of_layers = sgd(RATE), {W: [*dW.unbind()] for W, dW in found.items()}
        state = of_users["init"](optimizer, params, mesh)
        return of_users["update"](optimizer, of_layers, state, params, mesh)[0]

    updates = update if {"init", "update"} <= {*of_users} else None
    later = strategy.layer_backward, strategy.reduce, strategy.reduce_slow
    places = _place_in(module, strategy.layer_forward, strategy.gather), _place_in(module, *later)
    return Passes(through, back_through, updates, types, grads, places, ways)


def _place_in(module: Any, *functions: "Callable | None") -> str:
    """Return the place of the first of these functions that the module defines, or its first line."""
    places = map(place_of_function, filter(None, functions))
    own = [place for place in places if place.startswith(f"{module.__file__}:")]
    return own[0] if own else f"{module.__file__}:1"


def run_layers(name: "str | Any", keep: bool, mesh: Any) -> None:
    """Run a strategy on an abstract mesh, to compare its results with SPECS, and on one device, to compare numbers."""
    module = import_module(f"scaling.strategies.{name}") if isinstance(name, str) else name
    watch, found, sizes = who_watches(), _passes(module, keep), dict(LAYERS)
    assert watch is not None
    forward_place, backward_place = found.places

    def given(spec: Any, where: str = "x") -> Tensor:
        return watch.typed(shard_of(spec, mesh, sizes), spec, where, mesh)

    params = {W: given(spec, f'["{W}"]') for W, spec in found.types.items()}
    In, Out = parse(module.SPECS["In"]), parse(module.SPECS["Out"])
    saved = given(In)
    if found.forward:
        made, saved = found.forward(params, saved, mesh)
        watch.check_declared(made, Out, f"forward returns Out, SPECS says {Out}", forward_place)
    if not found.backward:
        return
    grads: dict = {}
    for way in found.ways[::-1]:
        dIn, grads = found.backward(given(Out), saved, params, mesh, **way)
        watch.check_declared(dIn, In, f"backward returns dIn, SPECS says {In}", backward_place)
        if set(grads) != set(found.grads):
            fix = f"fix: one of each of {sorted(found.grads)}"
            raise ValueError(f"backward returns gradients of {sorted(grads)}\n  {fix}")
        for W, dW in grads.items():
            watch.check_declared(
                dW, found.grads[W], f"backward returns d{W}, SPECS says {found.grads[W]}", backward_place
            )
    if found.update:
        for W, new in found.update(grads, params, mesh).items():
            watch.check_declared(
                new, found.types[W], f"update returns {W}, SPECS says {found.types[W]}", backward_place
            )
    if not found.forward or watch.report.findings:
        return
    try:
        wrong = list(wrong_numbers(found, In, mesh))
    except TimeoutError:  # the limit of the whole file
        raise
    except Exception as error:
        watch.skip(f"backward is not compared with forward's derivative: {error}".splitlines()[0], backward_place)
        return
    for what in wrong:
        text = f"backward returns another {what} than the derivative of forward, on one device"
        if what.startswith("new "):
            text = f"update returns another {what} than the optimizer alone, on one device"
        watch.find("derivative", fault_text(text, "derivative", f"see the lines that make {what}"), "", backward_place)


def wrong_numbers(found: Passes, In: Spec, mesh: Any) -> Iterator[str]:
    """Yield the results that differ from torch.func.vjp of `forward` ("dIn", "dW_in") or from plain SGD ("new W_in").

    The numbers are drawn, and the mesh has one device, where collectives are the identity.
    """
    one, sizes = Mesh(dict.fromkeys(mesh.sizes, 1)), dict(LAYERS)
    for dim in [dim for spec in (In, *found.types.values()) for dim in spec.dim_names]:
        sizes.setdefault(dim, int(dim) if dim.isdigit() else len(sizes) + 2)

    def forward(params: dict, x: Tensor) -> tuple[Tensor, Any]:
        assert found.forward is not None
        return found.forward(params, x, one)

    with with_numbers() as generator:

        def drawn(shape: Sequence[int]) -> Tensor:
            return torch.randn(shape, generator=generator)

        params = {W: drawn(spec.global_shape(sizes)) for W, spec in found.types.items()}
        x = drawn(In.global_shape(sizes))
        Out, pull, *_ = torch.func.vjp(lambda *given: forward(*given)[0], params, x)
        dOut = drawn(Out.shape)
        wanted, dx = pull(dOut)
        assert found.backward is not None
        dIn, grads = found.backward(dOut, forward(params, x)[1], params, one)
        updated = found.update(grads, params, one) if found.update else {}
    results = [("dIn", dIn, dx), *((f"d{W}", grads[W], wanted[W]) for W in params)]
    results += [(f"new {W}", new, params[W] - RATE * grads[W]) for W, new in updated.items()]
    for name, given, due in results:
        given = given.wait() if isinstance(given, Pending) else given
        if given.shape != due.shape or not (given - due).abs().max() <= NEAR * due.abs().max():
            yield name


@contextmanager
def with_numbers() -> Iterator[torch.Generator]:
    """Compute with numbers inside the block, which the judge does not watch; yield a generator of them."""
    token = watcher.set(None)
    try:
        with without_modes():
            yield torch.Generator().manual_seed(0)
    finally:
        watcher.reset(token)
