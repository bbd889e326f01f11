"""Measure the peak memory of a run on an AbstractMesh, event by event, as bytes of live meta tensors (Parts 5 and 6).

    mesh = AbstractMesh({"X": 1024, "Y": 8})
    with peak_memory() as memory:
        Out, saved = fsdp_tp.forward(params, In, mesh)
        fsdp_tp.backward(dOut, saved, params, mesh)
    print(memory.peak, memory.table())

Each storage that appears while the block runs counts, from the operation that makes it until the last tensor on it is
freed. So views are free, and a tensor that was made earlier (params, inputs) counts from the first operation that uses
it. Real tensors on the CPU are counted in the same way. A trace may run at the same time.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, cast

import optree
import torch
from torch import Tensor

from scaling import trace
from scaling.common.console import WIDE, table
from scaling.common.torch_private import OpMode, storage_of


@dataclass
class PeakMemory:
    """The bytes that are alive `now`, and their `peak`.

    `steps` has a list [event, bytes alive after it, peak until the next event] for each event of the trace `log`.
    """

    now: int = 0
    peak: int = 0
    steps: list[list] = field(default_factory=list)
    log: trace.Log = field(default_factory=trace.Log)

    def add(self, nbytes: int) -> None:
        """Add bytes that are now alive; a negative number frees them."""
        self.now += nbytes
        self.peak = max(self.peak, self.now)

    def ended(self) -> None:
        """Note that an operation has ended."""

    def peaks_by_line(self) -> dict[str, int]:
        """Return the peak bytes between each line and the next one, over all times that it ran.

        The key "" has the peak before the first line, if no line reaches the overall peak.
        """
        found: dict[str, int] = {}
        for event, _, peak in self.steps:
            found[line] = max(found.get(line := str(event), 0), peak)
        return found if max(found.values(), default=0) == self.peak else found | {"": self.peak}

    def table(self) -> str:
        """Return a table of the lines as run, each with the bytes alive after it and the peak until the next line."""
        rows = [(str(event), f"{now:,}", f"{peak:,}") for event, now, peak in self.steps]
        return table(rows, ["line", "bytes after", "peak"], WIDE)


class _Shape(NamedTuple):
    """The size, stride and dtype that determine a tensor on the meta device."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def as_meta(self) -> Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="meta")


def _shape_of(x: Any) -> Any:
    return _Shape(x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x


@lru_cache(maxsize=1 << 16)
def _outcome(function: Any, structure: Any, *operands: Any) -> "tuple[Any, list[_Shape | int]] | None":
    """Return the outcome of an operation on meta tensors of these shapes, or None if it is not known from them alone.

    The outcome is the result's tree structure and, for each leaf, its shape or the index of the operand that it is.
    It is None if the operation gives a view or something that is not a tensor, or changes an operand's shape. The
    outcome is cached, because torch computes it in Python, which takes as long as a small product does.
    """
    leaves = [x.as_meta() if type(x) is _Shape else x for x in operands]
    args, kwargs = cast(tuple[tuple, dict], optree.tree_unflatten(structure, leaves))
    given: tuple[list, Any] = optree.tree_flatten(function(*args, **kwargs))
    if any(_shape_of(x) != operand for x, operand in zip(leaves, operands, strict=True)):
        return None  # the operation changed an operand's shape in place, as unsqueeze_ does
    held, found = {storage_of(x) for x in leaves if isinstance(x, Tensor)}, []
    for x in given[0]:
        if not isinstance(x, Tensor) or not x.is_meta:
            return None
        same = next((i for i, operand in enumerate(leaves) if operand is x), None)
        if same is None and storage_of(x) in held:
            return None
        found.append(_shape_of(x) if same is None else same)
    return given[1], found


class _Watch(OpMode):
    """A mode that counts the storages of all tensors that operations take and return."""

    only_looks = True  # lets collectives run in the same way as without the mode

    def __init__(self, memory: PeakMemory, saw: Callable | None):
        super().__init__()
        self.memory, self.saw, self.seen = memory, saw, {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        operands: Any = args, kwargs or {}
        leaves, structure = optree.tree_flatten(operands)
        given, known = self.watch(leaves), None
        if given and all(x.is_meta for x in given):
            known = _outcome(function, structure, *map(_shape_of, leaves))
        if known is None:
            result = function(*args, **(kwargs or {}))
        else:
            made = [leaves[x] if isinstance(x, int) else x.as_meta() for x in known[1]]
            result = optree.tree_unflatten(known[0], made)
        made = self.watch([result] if isinstance(result, Tensor) else optree.tree_leaves(result))
        if self.saw is not None:
            self.saw(function, args, given, made)
        memory, events = self.memory, self.memory.log.events
        for event in events[len(memory.steps) :]:
            memory.steps.append([event, memory.now, memory.now])
        if events:
            memory.steps[-1][1:] = memory.now, max(memory.steps[-1][2], memory.now)
        return result

    def watch(self, leaves: list) -> list[Tensor]:
        """Count the storages that are new, each until it is freed; return the tensors among the leaves."""
        found = [x for x in leaves if isinstance(x, Tensor)]
        for x in found:
            key = storage_of(x)
            if key not in self.seen:
                storage = x.untyped_storage()
                nbytes = storage.nbytes()
                self.seen[key] = weakref.finalize(storage, self.forget, key, nbytes)
                self.memory.add(nbytes)
        return found

    def forget(self, key: int, nbytes: int) -> None:
        self.seen.pop(key, None)
        self.memory.add(-nbytes)


@contextmanager
def peak_memory(saw: Callable | None = None, memory: PeakMemory | None = None) -> Iterator[PeakMemory]:
    """Count the bytes that are alive while the block runs; afterwards the counts no longer change.

    Each operation calls `saw(operation, args, given, made)`, if given, with the tensors that the operation took and
    the tensors that it made. The bytes are counted in `memory`, if given, else in a new record.
    """
    memory = memory or PeakMemory()
    with trace.trace() as memory.log:
        watch = _Watch(memory, saw)
        with watch:
            yield memory
    for finalizer in list(watch.seen.values()):
        finalizer.detach()
