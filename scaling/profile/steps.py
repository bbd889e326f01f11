"""A profile of some steps of a long run, which rank 0 writes."""

from collections.abc import Iterable, Iterator

from scaling.hardware import chip
from scaling.profile.record import profile

SKIP, COUNT = 2, 5  # steps that are not profiled first, since they make buffers and connections; and steps that are


def watched(numbers: Iterable[int], where: str, rank: int, predict: str = "") -> Iterator[int]:
    """The numbers of a run's steps; some of the steps are profiled between them, and written to `where` by rank 0 (see
    `Profile.save`), beside what the chip `predict` would take, if one is named. Without a place it is the numbers
    alone. A loop that is left early writes nothing."""
    coming = iter(numbers)
    if where:
        for _, number in zip(range(SKIP), coming, strict=False):
            yield number
        with profile() as p:
            for _, number in zip(range(COUNT), coming, strict=False):
                yield number
                p.step()
        if rank == 0:
            p.save(where, chip(predict) if predict else None)
    yield from coming
