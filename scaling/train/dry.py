"""Count a run's memory, communication and FLOPs before it runs, by its step on an abstract mesh without data."""

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from scaling import tree
from scaling.common.torchrun import this_rank
from scaling.configs import Config
from scaling.cost.counted import CountedStep, weighted_sum
from scaling.cost.memory import ROOM
from scaling.cost.units import significant
from scaling.mesh import AbstractMesh, check_device
from scaling.spec.sizes import format_sizes
from scaling.strategies.channels import AHEAD
from scaling.trace.count import Between, counted_step
from scaling.trace.peak import peak_memory
from scaling.train.evaluate import batch_type
from scaling.train.settings import Settings, optimizer_of
from scaling.train.step import Updated, begin_state, drawn_params, gradients, parted

UPDATE = 7  # AdamW reads params, gradients and both moments, and writes all but the gradients: 4 + 3 passes


def count(
    settings: Settings, sizes: Mapping[str, int], coord: Mapping[str, int] | None = None, backend: str = "gloo",
    schedule: str | None = None, documents: bool = True,
) -> CountedStep:  # fmt: skip
    """Count the step of the rank at `coord`, by default the first, on a mesh of these sizes.

    Experts are taken to be chosen evenly.

    Args:
        settings: The settings of the run.
        sizes: The sizes of the mesh.
        coord: The rank's coordinates; an axis that is left out is at 0.
        backend: "gloo" counts the buffers of its collectives too, "abstract" only their results.
        schedule: The pipeline's schedule; None is 1F1B.
        documents: Whether a row has several documents, which attention hides from each other.
    """
    mesh = AbstractMesh(sizes, coord, backend)
    params, batch = step_shapes(settings, mesh, schedule)
    optimizer, updated = optimizer_of(settings), Updated(settings, mesh)
    frozen, trained = parted(settings, params)
    state = begin_state(settings, mesh, optimizer, trained)
    held, states = tree.nbytes(params), tree.nbytes(state)
    between = Between()
    with peak_memory(between.saw) as memory:
        tree.map(torch.Tensor.detach, params)  # so that the params are counted from the beginning
        run = gradients(settings, mesh, schedule=schedule, frozen=frozen)
        _, grads, _ = run(trained, batch if documents else [*batch[:2], None])
        shards = updated.shards(trained)
        if settings.optimizer == "muon":  # Muon's update sends, too
            optimizer.update(grads, state, shards, donate=True, specs=updated.types, mesh=mesh)
        del grads
        updated.whole(shards, trained, donate=True)
    for W in tree.leaves(shards):
        between.add("plain", UPDATE * W.nbytes)
    step = counted_step(memory.log.events, between.calls)
    peaks = {line: peak - held for line, peak in memory.peaks_by_line().items()}
    return replace(step, params=held, state=states, peaks=peaks)


def counted(
    settings: Settings, sizes: Mapping[str, int], coord: Mapping[str, int] | None = None, backend: str = "gloo",
    schedule: str | None = None, documents: bool = True, memory: bool = True,
) -> CountedStep:  # fmt: skip
    """Return the result of `count` for a deep model and many microbatches, in less time.

    A step is linear in both, so a few layers per stage and a few microbatches give the count of all of them. The memory
    of a pipeline is linear only once all stages are busy and as many messages are pending as are posted ahead.
    With `memory` and an explicit `schedule`, all layers and microbatches are run. Without `memory`, fewer layers and
    microbatches are enough.
    """
    model, Z = settings.model, sizes.get("Z", 1)
    if settings.batch % settings.microbatches or (memory and schedule):
        return count(settings, sizes, coord, backend, schedule, documents)
    chunks = {"interleaved": 2, "dualpipev": 2}.get(schedule or "", 1)
    if memory:
        few, full = (3, 3) if Z == 1 else (2, max(Z, AHEAD + 1) + 1)
    else:
        few, full = 2, 2 * Z if chunks > 1 else 2
    if Z > 1 and memory and settings.microbatches <= 2 * full:
        full = settings.microbatches  # one run of all microbatches takes less than runs of two smaller numbers
    depths = _samples(model.L, _period(model) * Z * chunks, model.dense_layers + few * Z * chunks)
    batches = _samples(settings.microbatches, Z if chunks > 1 else 1, full)
    rows, parts = settings.batch // settings.microbatches, []
    for layers, L in depths:
        for steps, M in batches:
            windows = model.window[:L] if isinstance(model.window, tuple) else model.window
            small = replace(settings, model=model.with_(L=L, window=windows), batch=rows * M, microbatches=M)
            parts.append((layers * steps, count(small, sizes, coord, backend, schedule, documents)))
    return parts[0][1] if len(parts) == 1 else weighted_sum(parts)


def _samples(whole: int, unit: int, least: int) -> list[tuple[int, int]]:
    """Return [(weight, size)] whose weighted counts sum to the count at size `whole`.

    A count is linear in the size from `least` on, so two sizes that differ by a unit are enough. If `whole` is less
    than two units larger than the first of them, it is the only size.
    """
    first = least + (whole - least) % unit
    times = (whole - first) // unit
    return [(1, whole)] if times <= 1 else [(1 - times, first), (times, first + unit)]


def _period(model: Config) -> int:
    """Return the number of layers after which their attention windows repeat."""
    windows = model.windows
    return next(p for p in range(1, len(windows) + 1) if windows[p:] == windows[:-p])


def local_shape(settings: Settings, mesh) -> tuple[int, ...]:
    """Return the shape of this rank's tokens."""
    return batch_type(mesh).local_shape({"B": settings.batch, "T": settings.seq}, mesh)


def step_shapes(settings: Settings, mesh, schedule: str | None = None) -> tuple[Any, list[torch.Tensor]]:
    """Return (params, [tokens, targets, segments]) of this rank on the meta device.

    Raises:
        ShardingError: The params or the batch do not divide over the mesh.
    """
    params = drawn_params(settings, mesh, "meta", schedule)
    shape = local_shape(settings, mesh)
    return params, [torch.empty(shape, dtype=torch.int64, device="meta") for _ in range(3)]


def fullest(
    settings: Settings, sizes: Mapping[str, int], backend: str = "gloo", enough: float = float("inf")
) -> CountedStep:
    """Return the count of the rank that needs most memory, or of one that needs more than `enough` bytes.

    That rank is in the first stage, which holds the activations of most microbatches, or in the last stage, which has
    the logits.
    """
    first = counted(settings, sizes, busiest(sizes), backend)
    if (Z := sizes.get("Z", 1)) == 1 or first.memory > enough:
        return first
    return max(first, counted(settings, sizes, busiest(sizes, Z - 1), backend), key=lambda step: step.memory)


def busiest(sizes: Mapping[str, int], stage: int = 0) -> dict[str, int]:
    """Return the coordinates of the rank in a stage that does most work, which is the last rank along C.

    That rank sends all its tokens to other ranks, and the start of the sequence never cuts its windows. Ranks do not
    differ along other axes, except that some multiply one more matrix in Muon's update.
    """
    return {axis: at for axis, at in (("Z", stage), ("C", sizes.get("C", 1) - 1)) if axis in sizes}


def table(counts: CountedStep, sizes: Mapping[str, int]) -> str:
    """Return a table of the memory, communication and FLOPs of a rank in a step."""
    over = counts.by_axes()
    rows = [
        ("params", f"{counts.params:,} bytes"),
        ("optimizer's state", f"{counts.state:,} bytes"),
        ("most at once in a step, beside these", f"{counts.step:,} bytes"),
        ("together", f"{counts.memory:,} bytes"),
        ("sent in a step", f"{counts.sent:,} bytes"),
        *((f"  over {axes}", f"{calls.sent:,} bytes in {calls.number}") for axes, calls in over.items() if calls.sent),
        ("collectives", f"{counts.collectives}"),
        ("products and attention", f"{significant(counts.flops)} FLOPs"),
    ]
    width = max(len(what) for what, _ in rows)
    which = "the fullest" if any(sizes.get(axis, 1) > 1 for axis in "ZC") else "each"
    lines = [f"{which} of {AbstractMesh(sizes).size()} ranks of {format_sizes(sizes)}:"]
    return "\n".join([*lines, *(f"  {what:<{width}}  {value}" for what, value in rows)])


def refuse_too_large(settings: Settings, sizes: Mapping[str, int], available: float) -> CountedStep:
    """Return the count of the rank that needs most memory, and check that it fits into `available` bytes.

    Raises:
        ValueError: The rank does not fit; the message names a smaller batch that does, if there is one.
    """
    counts = fullest(settings, sizes)
    if (needed := counts.memory) <= ROOM * available:
        return counts
    least = settings.microbatches * prod(sizes.get(axis, 1) for axis in "PXE")
    batch = settings.batch // 2 // least * least
    while batch and fullest(replace(settings, batch=batch), sizes).memory > ROOM * available:
        batch = batch // 2 // least * least
    fit = f"--batch {batch}" if batch else "more ranks along X, or a smaller model: no batch fits"
    shard = ", or --zero 3" if settings.zero < 3 and sizes.get("X", 1) > 1 else ""
    raise ValueError(
        f"a rank needs {needed / 1e9:.2f} GB, and there are {ROOM * available / 1e9:.2f} GB for it\n"
        f"  fix: {fit}; or give more --microbatches, or --remat block{shard}"
    )


def memory_of_rank(device: str, ranks: int) -> float:
    """Return the bytes of memory available to each of `ranks` ranks on this machine."""
    check_device(device)
    if device == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    ranks = this_rank().local_size or ranks
    if not (info := Path("/proc/meminfo")).exists():
        return float("inf")
    free = next(line for line in info.read_text().splitlines() if line.startswith("MemAvailable"))
    return int(free.split()[1]) * 1024 / ranks
