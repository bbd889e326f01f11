"""Count a run's memory, traffic and FLOPs before it runs, and refuse a run that does not fit."""

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from scaling.common.console import significant
from scaling.cost.counted import CountedStep
from scaling.cost.memory import ROOM
from scaling.mesh import AbstractMesh
from scaling.spec.sizes import format_sizes
from scaling.train.programs import step_by_symbols
from scaling.train.settings import Settings


def fullest(settings: Settings, sizes: Mapping[str, int], backend: str = "gloo") -> CountedStep:
    """Return the count of the rank that needs most memory."""
    steps = (step_by_symbols(settings, sizes, at, backend) for at in fullest_ranks(sizes))
    return max(steps, key=lambda step: step.memory)


def fullest_ranks(sizes: Mapping[str, int]) -> list[dict[str, int]]:
    """Return the coordinates of one or two ranks, one of which needs the most memory of all.

    It is a rank of the first stage, which holds the activations of most microbatches, or of the last stage, which has
    the logits.
    """
    return [busiest(sizes, stage) for stage in sorted({0, sizes.get("Z", 1) - 1})]


def busiest(sizes: Mapping[str, int], stage: int = 0) -> dict[str, int]:
    """Return the coordinates of the rank in a stage that does most work, which is the last rank along C.

    That rank sends all its tokens to other ranks, and the start of the sequence never cuts short the windows of its
    tokens. Along other axes all ranks do the same work, except that some have one more matrix in Muon's update.
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
