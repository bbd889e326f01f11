"""Whether arrays lie in each other's memory, and whether elements of one share theirs: against the places of all
elements. What is refused for it: test_refused.py."""

import random
from collections import Counter

import torch

from scaling.collectives.buffers import overlap, overlaps_itself


def view(dice: random.Random, x: torch.Tensor) -> torch.Tensor:
    """What slices, transposes and expands make of a tensor."""
    for _ in range(dice.randrange(5)):
        if not x.dim():
            break
        how, dim = dice.choice(["part", "step", "row", "turn", "expand"]), dice.randrange(x.dim())
        start = dice.randrange(x.shape[dim] + 1)
        if how == "part":
            x = x.narrow(dim, start, dice.randrange(x.shape[dim] - start + 1))
        elif how == "step":
            x = x.movedim(dim, 0)[start :: dice.choice([2, 3])].movedim(0, dim)
        elif how == "row" and start < x.shape[dim]:
            x = x.select(dim, start)
        elif how == "turn":
            x = x.transpose(0, dim)
        elif how == "expand":
            x = x[None].expand(2, *x.shape) if x.dim() < 4 else x
    return x


def test_overlap_is_exact():
    x, places, found = torch.zeros(6, 6), torch.arange(36.0).view(6, 6), Counter()
    for seed in range(200):
        (a, of_a), (b, of_b) = ([view(random.Random(2 * seed + i), t) for t in (x, places)] for i in (0, 1))
        assert overlap(a, b) == overlap(b, a) == bool({*of_a.flatten().tolist()} & {*of_b.flatten().tolist()})
        assert overlaps_itself(a) == (of_a.unique().numel() < of_a.numel())
        found[overlap(a, b), overlaps_itself(a)] += 1
    assert min(found.values()) > 5, found
    assert len(found) == 4


def test_overlap_of_what_has_other_memory_or_none_and_of_windows():
    x = torch.zeros(6, 6)
    assert not any(overlap(a, b) for a, b in [(x, x.clone()), (x.to("meta"), x.to("meta"))])
    assert overlaps_itself(x.view(-1).unfold(0, 3, 2))
    assert overlaps_itself(x.view(-1).as_strided((2, 2), (1, 1)))
