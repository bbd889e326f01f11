"""The order of layouts that are equally fast: the one rule of the planner and of training runs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from scaling.hardware import Chip

COMPLEXITY = {"pod": 0, "data": 0, "fsdp": 1, "tensor": 2, "expert": 2, "context": 2, "pipe": 3}
TIE = 0.03  # forecasts that are longer than the shortest by at most this share count as equal


def effort(sizes: Mapping[str, int], chip: Chip | None = None) -> tuple[int, int]:
    """Return how much a mesh asks of the network, and of those who run it.

    The first number counts the axes that layers wait for (tensor, expert, context) and that reach beyond a node. The
    second is the complexity of the layout: replicas or shards count little, both together count more, and
    stages count most.
    """
    inner, beyond = 1, 0
    for axis in ("tensor", "expert", "context"):  # from the innermost
        inner *= (size := sizes.get(axis, 1))
        beyond += size > 1 and chip is not None and chip.kind == "gpu" and inner > chip.node_gpus
    both = sizes.get("data", 1) > 1 and sizes.get("fsdp", 1) > 1
    return beyond, both + sum(COMPLEXITY[axis] for axis, n in sizes.items() if n > 1)


def settle_ties(order: Sequence, seconds: Callable[[Any], float], effort_of: Callable[[Any], Any]) -> list:
    """Return `order`, which is sorted by seconds, with the least effort among the fastest moved to the front.

    The fastest layouts take at most a share TIE longer than the first.
    """
    as_fast = [one for one in order if seconds(one) <= (1 + TIE) * seconds(order[0])]
    first = min(as_fast, key=effort_of, default=None)
    return [first, *(one for one in order if one is not first)] if order else []


def simplest_first(chosen: list[tuple], unsure: float = TIE) -> list[tuple]:
    """Return the (rank, network, layout) in order of rank, with ties settled.

    Of the layouts that fit and take at most a share `unsure` longer than the first, the fastest with the least `effort`
    is moved to the front. If several such layouts tie, it is the one that takes least time without overlap.
    """
    order = sorted(chosen, key=lambda one: one[0])
    near = [one for one in order if one[0][0] == 0 and one[0][1] <= (1 + unsure) * order[0][0][1]]
    if not near:
        return order
    efforts = [effort(layout.sizes, network and network.chip) for _, network, layout in near]
    simple = [one for one, each in zip(near, efforts, strict=True) if each == min(efforts)]
    first = settle_ties(simple, lambda one: one[0][1], lambda one: one[0][2])[0]
    return [first, *(one for one in order if one is not first)]
