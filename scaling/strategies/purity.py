"""Checks that the forward of someone else's module has no side effects on ranks, made while it first runs.

If a module draws random numbers, all ranks draw the same ones, though their rows differ, and another mesh draws others.
If it writes to a param or a buffer, such as a running mean, it changes values that ranks do not exchange. So the first
call is watched, and refused before such an operation runs, or at its end if it has replaced a buffer. `nn.Dropout` is
allowed, with masks that belong to the elements of the whole array (`scaling.models.dropout`), so that they are the same
on every mesh.
"""

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from scaling import tree
from scaling.common.torch_private import TorchDispatchMode, storage_of, unwrapped_by_all
from scaling.models.dropout import dropout
from scaling.spec import ShardingError, parse, refuse

PURE = "a forward is a function of its params and arguments, so that all meshes compute the same"
NO_DRAW = {"p", "dropout", "dropout_p", "train", "training"}  # an operation draws nothing if one of these is 0 or False


class Watch(TorchDispatchMode):
    """A mode that refuses an operation that draws random numbers or writes to one of these tensors, before it runs."""

    only_looks = True  # the same operations run without it

    def __init__(self, held: Mapping[str, Tensor], module: nn.Module | None):
        super().__init__()
        self.held = {storage_of(unwrapped_by_all(x)): name for name, x in held.items()}
        self.names = {part: name for name, part in module.named_modules()} if module is not None else {}
        self.inside: list[nn.Module] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        arguments = func._schema.arguments
        given = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
        given |= dict(zip([argument.name for argument in arguments], args, strict=False)) | (kwargs or {})
        if torch.Tag.nondeterministic_seeded in func.tags and not _draws_nothing(given):
            fix = "module.eval(), a rate of 0, or scaling.models.dropout with the places of its rows"
            self.refuse(f"draws random numbers ({func.name()}), which every rank would draw alike for other rows", fix)
        for argument in arguments if func._schema.is_mutable else ():
            if argument.alias_info is not None and argument.alias_info.is_write:
                leaves = tree.leaves(given.get(argument.name))
                for name in (self.held.get(storage_of(unwrapped_by_all(x))) for x in leaves if isinstance(x, Tensor)):
                    if name is not None:
                        fix = "module.eval() where that keeps it, or a module that does not write"
                        self.refuse(f"writes to {name} ({func.name()}), which ranks do not tell each other", fix)
        return func(*args, **kwargs or {})

    def enter(self, part: nn.Module, _) -> None:
        """Note that a part of the module starts to run."""
        self.inside.append(part)

    def leave(self, part: nn.Module, *_) -> None:
        """Note that a part of the module has run."""
        if part in self.inside:  # else another thread's, which had entered before
            self.inside.remove(part)

    def refuse(self, what: str, fix: str) -> None:
        """Raise a ShardingError that names the part of the module that is running."""
        part = self.inside[-1] if self.inside else None
        whole = "the module" if self.names else "the function"
        name = whole if part is None else f"{self.names.get(part) or whole}: {type(part).__name__}"
        raise ShardingError(f"{name} {what}\n  rule: {PURE}\n  fix: {fix}")


@contextmanager
def refusing_effects(module: nn.Module | None, held: Mapping[str, Tensor]) -> Iterator[None]:
    """Refuse random numbers and writes to tensors that are `held` while this runs; an error names the module's part."""
    watch = Watch(held, module)
    with ExitStack() as stack:
        stack.callback(register_module_forward_pre_hook(watch.enter).remove)
        stack.callback(register_module_forward_hook(watch.leave).remove)
        before = _drawn_by_python()
        with watch:
            yield
        if _drawn_by_python() != before:
            watch.refuse(
                "draws random numbers of Python's or numpy's", "module.eval(), or draw by scaling.models.dropout"
            )
        for name, x in module.named_buffers() if module is not None else ():
            if name in held and not _same(unwrapped_by_all(x), unwrapped_by_all(held[name])):
                watch.refuse(f"replaces {name}, which ranks do not tell each other", "a module that keeps its buffers")


@contextmanager
def dropout_masks(module: nn.Module, types: Mapping[str, str], mesh, seed: int | None) -> Iterator[None]:
    """Give the module's active Dropouts masks by the place of each element in the whole array, while this runs.

    Args:
        module: The module.
        types: The type of each Dropout's input, by its name in the module.
        mesh: The mesh.
        seed: The seed of this call, or None.

    Raises:
        ShardingError: An active Dropout has no type, or there is no seed.
    """
    active = {n: part for n, part in module.named_modules() if type(part) is nn.Dropout and part.training and part.p}
    for name in active:
        if name not in types:
            what = f"{name or 'the module'}: Dropout draws random numbers, which every rank would draw alike"
            fix = f'give dropped={{"{name}": "x[B_X, D]"}}, the type of what it is given, and a seed at each call'
            raise ShardingError(f"{what}\n  rule: {PURE}\n  fix: {fix}, or module.eval()")
    if active and seed is None:
        fix = "g(params, x, seed=dropout.at_step(seed, step)): scaling.models.dropout makes one for each step"
        raise ShardingError(f"{next(iter(active))}: Dropout is given no seed\n  rule: {PURE}\n  fix: {fix}")
    try:
        for name, part in active.items():
            part.__dict__["forward"] = partial(_drop, part.p, name, parse(types[name]), mesh, seed or 0, count())
        yield
    finally:
        for part in active.values():
            part.__dict__.pop("forward", None)


def _drop(rate: float, name: str, spec, mesh, seed: int, times: "count[int]", x: Tensor) -> Tensor:
    """Return x with its elements dropped; `times` counts how often this Dropout has been used in this forward."""
    if len(spec.dims) != x.dim() or not x.dim():
        what = f"{name}: Dropout is given a tensor of shape {tuple(x.shape)}, and its type has {len(spec.dims)} dims"
        refuse(spec, what, "a type names each dim", f"give the type of what {name} is given")
    spec.check_axes(mesh)
    sizes = tuple(n * mesh.size(axes) for n, (_, axes) in zip(x.shape, spec.dims, strict=True))
    rows, *columns = (
        torch.arange(part.start, part.stop, device=x.device) for part in spec.slices(sizes, mesh, mesh.coord)
    )
    channels, positions = (columns.pop() if columns else None), torch.zeros(1, dtype=torch.int64, device=x.device)
    for size, column in zip(sizes[1:], columns, strict=False):
        positions = (positions[:, None] * size + column).flatten()
    whole = x.new_ones(len(rows), len(positions), 1 if channels is None else sizes[-1])
    kept = dropout(whole, name, next(times), rate=rate, seed=seed, samples=rows, positions=positions)
    kept = kept if channels is None else kept[..., channels]
    kept = kept.reshape(x.shape)
    return torch.where(kept > 0, x * kept, 0)


def _same(x: Tensor, y: Tensor) -> bool:
    return x is y or (x.shape == y.shape and x.dtype == y.dtype and torch.equal(x, y))


def _draws_nothing(given: Mapping[str, Any]) -> bool:
    return any(type(value) in (bool, int, float) and value == 0 for name, value in given.items() if name in NO_DRAW)


def _drawn_by_python() -> tuple:
    """Return a state that changes when Python's generator, or numpy's if it is in use, is drawn from."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else str(numpy.random.get_state(legacy=True)[1:3])
