"""A run that goes on with fewer devices: a lost node halves P, then X, and the global batch stays.

Under `torchrun --nnodes 1:2 --max-restarts 3 ... -m scaling.train --resume` each start finds out how many ranks there
are. Y, C, Z and E stay as they are: over them a model is split so that it fits. Each remaining rank takes more
microbatches of the same size, so that memory stays as it was too.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from scaling.common.torchrun import this_rank
from scaling.spec.sizes import format_sizes
from scaling.train.settings import Settings

GIVE = ("P", "X")  # the axes that become shorter, in this order


def fitted(sizes: Mapping[str, int], world: int) -> dict[str, int]:
    """The mesh on so many ranks: P halved as often as it must and can be, then X. ValueError if that does not fit."""
    found = dict(sizes)
    for axis in GIVE:
        while prod(found.values()) > world and found.get(axis, 1) % 2 == 0:
            found[axis] //= 2
    if prod(found.values()) != world:
        raise ValueError(
            f"the mesh {format_sizes(sizes)} does not fit {world} ranks (WORLD_SIZE): halving P, then X, leads to "
            f"{format_sizes(found)}\n  fix: start as many ranks as the mesh has, or half, or a quarter of them"
        )
    return found


def fits_as_before(sizes: Mapping[str, int], on: Mapping[str, int]) -> bool:
    """Whether this is a restart by torchrun on a mesh `on` whose ranks need no more memory than those of `sizes`, on
    which the run began: where P alone is shorter, each holds the same shards and the same rows of a microbatch."""
    again = this_rank().restarts > 0
    return again and all(on[axis] == size for axis, size in sizes.items() if axis != "P")


def shared(settings: Settings, sizes: Mapping[str, int], on: Mapping[str, int]) -> Settings:
    """The settings with as many more microbatches as the mesh `on` has fewer ranks along P and X than `sizes`."""
    more = prod(sizes.get(axis, 1) // on.get(axis, 1) for axis in GIVE)
    return replace(settings, microbatches=settings.microbatches * more)


def loss_note(before: Settings, after: Settings) -> str:
    """Return what to say where more microbatches change the loss; "" where they do not.

    Experts are balanced, and filled up to their capacity, over the tokens of a microbatch of all ranks: terms that are
    not linear in the tokens, so fewer at a time give other ones.
    """
    config, fewer = before.model, after.microbatches > before.microbatches
    balanced = config.aux_coef > 0 and config.balance_by == "batch"
    if not fewer or config.E == 1 or not (balanced or config.capacity is not None):
        return ""
    what = " and ".join(["aux_coef"] * balanced + ["capacity"] * (config.capacity is not None))
    return (
        f"{after.microbatches} microbatches in place of {before.microbatches}: the experts' {what} hold for each of "
        "them, so losses differ a little from those of the mesh that was asked for"
    )
