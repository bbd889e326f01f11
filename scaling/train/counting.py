"""Count a training step on an abstract mesh, without data: its memory, messages and FLOPs.

`train.programs` gives the same counts of a large step from programs that are traced at small sizes.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from scaling import tree
from scaling.common.limits import LIMITS, Limits
from scaling.cost.counted import CountedStep
from scaling.mesh import AbstractMesh
from scaling.trace.count import NUMBERS, Between, Numbers, counted_step
from scaling.trace.peak import PeakMemory, peak_memory
from scaling.train.settings import Settings, optimizer_of
from scaling.train.step import begin_state, drawn_params, gradients, local_shape, split_frozen, updated_part

UPDATE = 7  # AdamW reads params, gradients and both moments, and writes all but the gradients: 4 + 3 passes


def count(
    settings: Settings, sizes: Mapping[str, int], coord: Mapping[str, int] | None = None, backend: str = "gloo",
    documents: bool = True, limits: Limits = LIMITS,
) -> CountedStep:  # fmt: skip
    """Count the step of the rank at `coord`, by default the first, on a mesh of these sizes.

    Experts are taken to be chosen evenly.

    Args:
        settings: The settings of the run.
        sizes: The sizes of the mesh.
        coord: The rank's coordinates; an axis that is left out is at 0.
        backend: "gloo" counts the buffers of its collectives too, "abstract" only their results.
        documents: Whether a row has several documents, which attention hides from each other.
        limits: The thresholds at which the step's code changes.
    """
    memory = PeakMemory()
    step = counted_run(settings, AbstractMesh(sizes, coord, backend), documents, NUMBERS, memory, limits)
    return replace(step, peaks={line: peak - step.params - step.state for line, peak in memory.peaks_by_line().items()})


def counted_run(
    settings: Settings, mesh, documents: bool, numbers: Numbers, memory: PeakMemory, limits: Limits = LIMITS
) -> CountedStep:
    """Run a step on an abstract mesh, and return its count without peaks; `memory` follows the bytes that are alive."""
    params, batch = step_shapes(settings, mesh)
    optimizer, updated = optimizer_of(settings), updated_part(settings, mesh)
    frozen, trained = split_frozen(settings, params)
    state = begin_state(settings, mesh, optimizer, trained)
    held, states = (sum(numbers.of(x.nbytes) for x in tree.leaves(each)) for each in (params, state))
    between = Between()

    def saw(*operation: Any) -> None:
        between.saw(*operation)
        memory.ended()

    with peak_memory(saw, memory):
        tree.map(torch.Tensor.detach, (params, state))  # so that they are counted from the beginning
        step = gradients(settings, mesh, frozen, limits)
        _, grads, *_ = step(trained, batch if documents else [*batch[:2], None])
        shards = updated.shards(trained)
        if settings.optimizer == "muon":  # Muon's update sends, too
            scaled = {"finite": True} if "scale" in state else {}
            optimizer.update(grads, state, shards, donate=True, specs=updated.types, mesh=mesh, **scaled)
        del grads
        updated.whole(shards, trained, donate=True)
    for W in tree.leaves(shards):
        between.add("plain", UPDATE * W.nbytes)
    return replace(counted_step(memory.log.events, between, numbers), params=held, state=states)


def step_shapes(settings: Settings, mesh) -> tuple[Any, list[torch.Tensor]]:
    """Return (params, [tokens, targets, segments]) of this rank on the meta device.

    Raises:
        ShardingError: The params or the batch do not divide over the mesh.
    """
    params = drawn_params(settings, mesh, "meta")
    shape = local_shape(settings, mesh)
    return params, [torch.empty(shape, dtype=torch.int64, device="meta") for _ in range(3)]
