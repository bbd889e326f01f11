"""A strategy, run by the judge: what its functions return is what SPECS says."""

import inspect
from importlib import import_module
from typing import Any

import torch

from scaling.check.compared import place_of_function
from scaling.check.watched import shard_of
from scaling.collectives.linear import who_watches
from scaling.spec import parse
from scaling.strategies.stack import Strategy

LAYERS = {"L": 2}


def run_layers(name: "str | Any", keep: bool, mesh: Any) -> None:
    """Two layers with gelu, norm and residual, forward and backward: what they return is what SPECS says."""
    module = import_module(f"scaling.strategies.{name}") if isinstance(name, str) else name
    watch, forward = who_watches(), getattr(module, "forward", None)
    assert watch is not None
    plain = not hasattr(module, "STRATEGY") and "params" in inspect.signature(forward or module.backward).parameters
    weights = {W: parse(spec) for W, spec in module.SPECS.items() if W not in ("In", "Out")}
    stacked = weights if plain else {W: spec.stacked("L") for W, spec in weights.items()}

    sizes = dict(LAYERS)

    def given(spec: Any, where: str = "x") -> torch.Tensor:
        return watch.typed(shard_of(spec, mesh, sizes), spec, where, mesh)

    params = {W: given(spec, f'["{W}"]') for W, spec in stacked.items()}
    In, Out = parse(module.SPECS["In"]), parse(module.SPECS["Out"])
    if plain:
        made, saved = forward(params, given(In), mesh) if forward else None, given(In)
        made, saved = made if isinstance(made, tuple) else (made, saved)
        place = place_of_function(forward or module.backward)
        if forward:
            watch.told(made, Out, f"forward returns Out, SPECS says {Out}", place)
        if hasattr(module, "backward"):
            found = module.backward(given(Out), saved, params, mesh)
            dIn, grads = (
                found if isinstance(found[-1], dict) else (found[0], dict(zip(weights, found[1:], strict=True)))
            )
            _told(watch, dIn, In, grads, weights, place)
        return
    strategy = getattr(module, "STRATEGY", None) or Strategy(module.SPECS, module.forward, module.backward)
    place = f"{module.__file__}:1"
    made, saved = strategy.forward(params, given(In), mesh, "gelu", True, True, keep)
    watch.told(made, Out, f"forward returns Out, SPECS says {Out}", place)
    dIn, grads = strategy.backward(given(Out), saved, params, mesh)
    _told(
        watch, dIn, In, grads, {W: parse(s).stacked("L") for W, s in (strategy.GRADS or {}).items()} or stacked, place
    )


def _told(watch: Any, dIn: Any, In: Any, grads: Any, types: dict, place: str) -> None:
    """What backward returns, beside what SPECS says."""
    watch.told(dIn, In, f"backward returns dIn, SPECS says {In}", place)
    if set(grads) != set(types):
        raise ValueError(f"backward returns gradients of {sorted(grads)}\n  fix: one of each of {sorted(types)}")
    for W, dW in grads.items():
        watch.told(dW, types[W], f"backward returns d{W}, SPECS says {types[W]}", place)
