"""What a run takes, before it is run: the same step on an abstract mesh, where tensors have shapes and no data."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from scaling import tree
from scaling.cost.units import significant
from scaling.mesh import AbstractMesh
from scaling.models import transformer as model
from scaling.sizes import format_sizes
from scaling.spec import parse
from scaling.strategies import transformer
from scaling.strategies.axes import present
from scaling.strategies.transformer.stages import slots_of
from scaling.trace.peak import peak_memory
from scaling.train.settings import DTYPES, Settings, optimizer_of
from scaling.train.step import gradients

ROOM = 0.95  # of a device's memory, what is planned with


@dataclass(frozen=True)
class Counts:
    """Of one rank, in bytes: params, the optimizer's state, the most at once in a step beside them (`step`), what it
    sends in a step; and FLOPs of its lines and the number of its collectives."""

    params: int
    state: int
    step: int
    sent: int
    flops: int
    collectives: int

    @property
    def memory(self) -> int:
        return self.params + self.state + self.step


def count(
    settings: Settings, sizes: Mapping[str, int], coord: Mapping[str, int] | None = None, backend: str = "gloo"
) -> Counts:
    """Of the rank at `coord`, by default the first, of a mesh of these sizes; experts as if chosen evenly.

    `backend`: "gloo" counts the buffers of its collectives too, "abstract" their results alone.
    """
    mesh = AbstractMesh(sizes, coord, backend)
    params, batch = step_shapes(settings, mesh)
    optimizer = optimizer_of(settings)
    state = optimizer.init(params)
    held, states = tree.nbytes(params), tree.nbytes(state)
    with peak_memory() as memory:
        tree.map(torch.Tensor.detach, params)  # so that they count from the beginning
        _, grads, _ = gradients(settings, mesh)(params, batch)
        if settings.optimizer == "muon":  # whose update sends, too
            optimizer.update(
                grads, state, params, donate=True, specs=transformer.specs(settings.model, mesh), mesh=mesh
            )
    log = [event for event, _, _ in memory.steps]
    return Counts(
        held, states, memory.peak - held, sum(event.wire_bytes for event in log),
        sum(event.flops for event in log), sum(event.op not in ("Einsum", "Slice") for event in log),
    )  # fmt: skip


def local_shape(settings: Settings, mesh) -> tuple[int, ...]:
    """Of this rank's tokens."""
    return parse(str(present("t[B_PXE, T_C]", mesh))).local_shape({"B": settings.batch, "T": settings.seq}, mesh)


def step_shapes(settings: Settings, mesh) -> tuple[Any, list[torch.Tensor]]:
    """(params, [tokens, targets, segments]) of this rank, on the meta device. ShardingError if they do not divide."""
    config = settings.model
    types, slots = transformer.specs(config, mesh), slots_of(config, mesh, None)
    params = model.init(config, 0, DTYPES[settings.dtype], "meta", mesh=mesh, specs=types, slots=slots)
    shape = local_shape(settings, mesh)
    return params, [torch.empty(shape, dtype=torch.int64, device="meta") for _ in range(3)]


def fullest(settings: Settings, sizes: Mapping[str, int], backend: str = "gloo") -> Counts:
    """Of the rank that needs most memory: one of the first stage, which holds the activations of most microbatches, or
    of the last, which has the logits."""
    stages = {0, sizes.get("Z", 1) - 1}
    found = [count(settings, sizes, {"Z": z} if z else None, backend) for z in sorted(stages)]
    return max(found, key=lambda counts: counts.memory)


def fullest_memory(settings: Settings, sizes: Mapping[str, int], backend: str = "gloo") -> float:
    """`fullest(...).memory`, of a deep model in less time: without stages its layers are alike, so that three and four
    of them say what all take."""
    model = settings.model
    if sizes.get("Z", 1) > 1 or model.L <= 4 or isinstance(model.window, tuple):
        return fullest(settings, sizes, backend).memory
    three, four = (fullest(replace(settings, model=model.with_(L=L)), sizes, backend).memory for L in (3, 4))
    return three + (four - three) * (model.L - 3)


def table(counts: Counts, sizes: Mapping[str, int]) -> str:
    rows = [
        ("params", f"{counts.params:,} bytes"),
        ("optimizer's state", f"{counts.state:,} bytes"),
        ("most at once in a step, beside these", f"{counts.step:,} bytes"),
        ("together", f"{counts.memory:,} bytes"),
        ("sent in a step", f"{counts.sent:,} bytes"),
        ("collectives", f"{counts.collectives}"),
        ("its lines' products", f"{significant(counts.flops)} FLOPs"),
    ]
    width = max(len(what) for what, _ in rows)
    which = "the fullest" if sizes.get("Z", 1) > 1 else "each"
    lines = [f"{which} of {AbstractMesh(sizes).size()} ranks of {format_sizes(sizes)}:"]
    return "\n".join([*lines, *(f"  {what:<{width}}  {value}" for what, value in rows)])


def refuse_too_large(settings: Settings, sizes: Mapping[str, int], available: float) -> Counts:
    """What the fullest rank takes. ValueError that says the largest batch that fits, if that is more bytes than there
    are for it."""
    counts = fullest(settings, sizes)
    if (needed := counts.memory) <= ROOM * available:
        return counts
    least = settings.microbatches
    for axis in ("P", "X", "E"):
        least *= sizes.get(axis, 1)
    batch = settings.batch // 2 // least * least
    while batch and fullest(replace(settings, batch=batch), sizes).memory > ROOM * available:
        batch = batch // 2 // least * least
    fit = f"--batch {batch}" if batch else "more ranks along X, or a smaller model: no batch fits"
    raise ValueError(
        f"a rank needs {needed / 1e9:.2f} GB, and there are {available / 1e9:.2f} GB for it\n"
        f"  fix: {fit}; or give more --microbatches, or --remat block"
    )


def memory_of_rank(device: str, ranks: int) -> float:
    """Bytes for each of so many ranks of this machine."""
    if device == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    if not (info := Path("/proc/meminfo")).exists():
        return float("inf")
    free = next(line for line in info.read_text().splitlines() if line.startswith("MemAvailable"))
    return int(free.split()[1]) * 1024 / ranks
