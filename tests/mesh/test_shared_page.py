"""The page that ranks share: who waits for whom in a circle, and that each place is one group's."""

import itertools
import mmap
import random

import numpy as np
import pytest

from scaling.mesh.page import DIGEST, LENGTH, PLACES, ROW, WORD, SharedPage, Wait

SIZE = 4
SETS = [[(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0, 1, 2, 3)]]


def pages(sets) -> list[SharedPage]:
    memory = mmap.mmap(-1, SharedPage.nbytes(SIZE, len(sets)))
    return [SharedPage(memory, SIZE, rank, sets) for rank in range(SIZE)]


def test_every_row_word_and_text_has_a_place_of_its_own():
    page = pages(SETS)[0]
    taken = [range(rank * ROW, (rank + 1) * ROW) for rank in range(SIZE)]
    for of_set, groups in enumerate(SETS):
        for group, ranks in enumerate(groups):
            places = page.places(of_set, group)
            assert len(places) == PLACES
            for words, texts in places:
                assert page.meetings[words] == (ranks, texts)
                taken += [range(words, words + len(ranks) * WORD), range(texts, texts + len(ranks) * LENGTH)]
    assert sorted(itertools.chain(*taken)) == [*range(len(page.memory))]


@pytest.mark.parametrize("seed", range(40))
def test_who_waits_in_a_circle(seed):
    """Against walks along who waits for whom: those of which there is one as long as there are ranks never end."""
    each, dice, number = pages([[(0, 1, 2, 3)]] * SIZE), random.Random(seed), b"\x07\x01"
    for_whom = {rank: dice.sample(range(SIZE), dice.randint(0, 2)) for rank in range(SIZE) if dice.random() < 0.8}
    waits = {}
    for rank, missing in for_whom.items():
        (first, _), *_ = each[0].places(rank, 0)
        for other in {*range(SIZE)} - {*missing}:
            at = first + other * WORD
            each[rank].memory[at : at + WORD] = bytes(DIGEST) + number
        waits[rank] = Wait(first, number)
        assert each[0].missing(waits[rank]) == sorted(missing)
        each[rank].set_wait(waits[rank])
    edges = np.array([[other in for_whom.get(rank, ()) for other in range(SIZE)] for rank in range(SIZE)], int)
    endless = [rank for rank in range(SIZE) if np.linalg.matrix_power(edges, SIZE)[rank].any()]
    assert each[1].stuck() == {rank: waits[rank] for rank in endless}
    for rank, wait in waits.items():
        each[rank].set_wait(wait, found=rank in endless)
    assert [rank for rank in range(SIZE) if each[0].has_found(rank)] == endless
    assert each[0].waits() == waits
