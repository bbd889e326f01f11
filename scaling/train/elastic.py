"""Go on with fewer devices: a lost node halves P, then X, and the global batch stays the same.

Under `torchrun --nnodes 1:2 --max-restarts 3 ... -m scaling.train --resume` each start reads the number of ranks. Y, C,
Z and E do not change, because the model is split over them so that it fits. Each remaining rank takes more microbatches
of the same size, so that activations need no more memory than before.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from scaling.common.torchrun import this_rank
from scaling.spec.sizes import format_sizes
from scaling.train.settings import Settings

GIVE = ("P", "X")  # the axes that are halved, in this order


def fitted(sizes: Mapping[str, int], world: int) -> dict[str, int]:
    """Return the mesh on `world` ranks, with P halved as often as needed and possible, and then X.

    Raises:
        ValueError: No such mesh has `world` ranks.
    """
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
    """Return whether torchrun has restarted the run on a mesh `on` whose ranks need no more memory than before.

    The run began on the mesh `sizes`. If only P is shorter, each rank holds the same shards and the same rows of a
    microbatch.
    """
    again = this_rank().restarts > 0
    return again and all(on[axis] == size for axis, size in sizes.items() if axis != "P")


def shared(settings: Settings, sizes: Mapping[str, int], on: Mapping[str, int]) -> Settings:
    """Return the settings with the microbatches multiplied by the factor by which P and X shrank."""
    more = prod(sizes.get(axis, 1) // on.get(axis, 1) for axis in GIVE)
    return replace(settings, microbatches=settings.microbatches * more)


def loss_note(before: Settings, after: Settings) -> str:
    """Return a warning if more microbatches change the loss, or "" if they do not.

    Experts are balanced, and filled up to their capacity, over the tokens of one microbatch on all ranks. Both are not
    linear in the tokens, so smaller microbatches give another loss.
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
