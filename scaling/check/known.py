"""The judge's memory: the type of each array that it has seen, and its reports."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scaling.check.findings import MACHINERY, PAGE_TOOLS, Finding, Judgement, place_of_call, place_parts, real_path
from scaling.check.held import HeldType, Pieces, any_dim, dims_of_type, dims_of_view, pieces_of, untyped
from scaling.collectives.linear import watcher
from scaling.common.torch_private import is_wrapped, storage_of, unwrapped_by_all
from scaling.spec import Spec, present


@dataclass
class HeldMemory:
    """A storage and its type.

    The array `keep` in it has the type `held`; `unset` is true if nothing was written to it yet.
    """

    keep: Tensor
    held: HeldType
    pieces: Pieces
    unset: bool = False


class KnownArrays:
    """Knows each array's type by its memory, and reports findings and unjudged places."""

    def __init__(self, report: Judgement, sizes: "Mapping[str, int] | None" = None):
        self.report = report
        self.memory: dict[int, HeldMemory] = {}
        self.twins: dict[int, tuple[Tensor, Tensor]] = {}  # {id of a CPU tensor: (the tensor, its meta tensor)}
        self.quiet = 0
        self.ones: set[str] = set()  # axes that split a dim into parts of one element: no view shows which dim
        self.sizes: dict[str, int] | None = None if sizes is None else dict(sizes)  # None: no mesh is known yet
        self.files: dict[str, str] = {}  # {real path: name} of the judged files; if empty, every file is judged
        self.run = ""  # the judged file that is run, at whose first line faults are shown that no judged line led to

    def live(self, spec: Spec) -> Spec:
        """Return the type without the axes that the mesh lacks or has of size 1."""
        return spec if self.sizes is None else present(spec, self.sizes)

    def size(self, axis: str) -> int:
        """Return the size of a mesh axis, and 0 if no mesh is known."""
        return 0 if self.sizes is None else self.sizes.get(axis, 1)

    def held(self, x: Tensor) -> HeldType:
        """Return the known type of an array."""
        x = unwrapped_by_all(x)
        known, shape = self.memory.get(storage_of(x)), tuple(x.shape)
        if known is None or known.unset:
            return untyped(shape)
        if 1 in shape and shape == tuple(known.keep.shape) and x.stride() == known.keep.stride():
            return known.held  # a dim of one element cannot be found by its stride
        dims, known.pieces = dims_of_view(known.pieces, shape, x.stride())
        return known.held._replace(dims=dims)

    def give(self, x: Tensor, held: HeldType, unset: bool = False) -> None:
        """Note the type of an array."""
        x = unwrapped_by_all(x)
        shape = tuple(x.shape)
        if held.shape != shape:
            held = held._replace(dims=tuple(map(any_dim, shape)))
        self.memory[storage_of(x)] = HeldMemory(x, held, pieces_of(shape, x.stride(), held.dims), unset)

    def declare(self, x: Tensor, spec: Spec, place: str, parts: str = "") -> None:
        """Give x the type of a line; extra leading dims come from vmap or from stacked layers."""
        x, spec = unwrapped_by_all(x), self.live(spec)
        if x.dim() < len(spec.dims):
            return
        sizes = x.shape[x.dim() - len(spec.dims) :]
        self.ones |= {axis for n, (_, axes) in zip(sizes, spec.dims, strict=True) if n == 1 for axis in axes}
        dims = *self.held(x).dims[: x.dim() - len(spec.dims)], *dims_of_type(sizes, spec)
        self.give(x, HeldType(dims, frozenset(spec.unreduced), parts, "line", spec.name, place))

    def shown_at(self, place: str) -> str:
        """Return the line at which something at `place` is shown: the innermost judged line that led to it."""
        file, _ = place_parts(place)
        return place if not self.files or real_path(file) in self.files else place_of_call(self.files) or place

    def find(self, rule: str, text: str, made: str = "", place: str = "", shown: str = "") -> None:
        """Report a broken rule.

        Args:
            rule: the rule's name.
            text: the mistake, the rule and the fix, in words.
            made: the place that made the operand.
            place: the place of the fault, if it is not the running call.
            shown: the judged line that led there, if it is not on the running stack.
        """
        place = place or place_of_call()
        if place.startswith(PAGE_TOOLS):
            if rule != "partial-plus-whole":
                return
            shown = shown or place_of_call(self.files, (*MACHINERY, PAGE_TOOLS))
        shown = shown or self.shown_at(place)
        file, line = place_parts(shown)
        name = self.files.get(real_path(file), self.run) if self.files else file
        if not name:  # no file is run: the fault belongs to a module of the library that was not asked for
            return
        if real_path(name) != real_path(file):
            line, shown = 1, ""
        text += f"\n  the value was made at {made}" if made else ""
        text += f"\n  it is computed at {place}" if place != shown else ""
        found = Finding(name, line, text, rule)
        if not self.quiet and found not in self.report.findings:
            self.report.findings.append(found)

    def skip(self, why: str, place: str = "") -> None:
        """Report an unjudged line, and the reason."""
        place = place or place_of_call()
        shown = self.shown_at(place)
        entry = shown, why if place == shown else f"{why} (at {place})"
        if not self.quiet and not place.startswith(PAGE_TOOLS) and entry not in self.report.unjudged:
            self.report.unjudged.append(entry)

    @contextmanager
    def silence(self) -> Iterator[None]:
        """Report nothing inside the block."""
        token = watcher.set(None)
        self.quiet += 1
        try:
            yield
        finally:
            self.quiet -= 1
            watcher.reset(token)

    def meta(self, x: Any) -> Any:
        """Return a CPU tensor's twin on the meta device, which an abstract mesh's line takes; else x itself."""
        if not isinstance(x, Tensor) or is_wrapped(x):
            return x
        with self.silence():
            return self.twin(x)

    def twin(self, x: Tensor) -> Tensor:
        """Return a tensor's twin on the meta device."""
        if x.is_meta:
            return x
        kept = self.twins.get(id(x))
        if kept is None or kept[1].shape != x.shape:
            other = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
            self.give(other, self.held(x))
            kept = self.twins[id(x)] = x, other
        return kept[1]
