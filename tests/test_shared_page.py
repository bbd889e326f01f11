"""The page that ranks share: what one writes the others read, who has ended, who waits for whom in a circle."""

import itertools
import mmap
import os
import pickle
import random
import subprocess

import numpy as np
import pytest

from scaling.mesh.page import DIGEST, HALF, ROW, STATE, WORD, SharedPage, Wait

SIZE = 4
SPOTS = [
    (rank, rank * ROW + at, nbytes) for rank in range(SIZE) for at, nbytes in ((STATE, HALF - STATE), (HALF, HALF))
]


def pages(sets: int = 1) -> list[SharedPage]:
    memory = mmap.mmap(-1, SharedPage.nbytes(SIZE, sets))
    return [SharedPage(memory, SIZE, rank) for rank in range(SIZE)]


def test_what_a_rank_writes_is_read_by_all_and_changes_nothing_else():
    each, wanted = pages(), {}
    for (rank, at, nbytes), n in itertools.product(SPOTS, (0, 7, 300)):
        what = [rank, "x" * n]
        before = np.frombuffer(each[0].memory[:], np.uint8)
        each[n % SIZE].write(at, what)
        changed = np.flatnonzero(before != np.frombuffer(each[0].memory[:], np.uint8))
        assert at <= changed.min() <= changed.max() < at + nbytes
        wanted[at] = what
        assert all(page.read(at) == said for page in each for at, said in wanted.items())
    each[0].write(SPOTS[2][1], None)
    assert [each[1].read(at) is None for _, at, _ in SPOTS] == [i == 2 for i in range(len(SPOTS))]


def test_what_has_no_room_on_the_page_is_not_written():
    page, at = pages()[1], ROW + STATE
    found = []
    for n in range(HALF - STATE - 40, HALF - STATE):
        page.write(at, "x" * n)
        assert page.read(at) in (None, "x" * n)
        found.append(page.read(at) is not None)
        room = len(pickle.dumps("x" * n)) + 12 <= HALF - STATE  # a stamp and a length stand before it
        assert found[-1] is room
    assert {*found} == {True, False}


@pytest.mark.parametrize("late", range(1, 5))
def test_what_changes_while_it_is_read_is_not_taken_for_what_was_written(late):
    """Another rank writes in the midst of the `late`-th look at the memory, which is then half old and half new."""
    other, reader, looks = pages()[2], pages()[0], itertools.count(1)
    old, new = [1] * 40, [2] * 40

    class Memory:
        def __getitem__(self, at):
            seen = other.memory[at]
            if next(looks) == late:
                other.write(STATE, new)
            half = len(seen) // 2
            return seen[:half] + other.memory[at][half:]

    reader.memory = Memory()
    other.write(STATE, old)
    assert reader.read(STATE) in (None, old, new)


def test_each_write_can_be_told_from_those_before():
    """By its stamp: also from those of other ranks, and of the same thing."""
    each, stamps = pages(), set()
    for page, _ in itertools.product(each, range(3)):
        page.write(STATE, "the same")
        stamps.add(page.memory[STATE : STATE + 8])
    assert len(stamps) == 3 * SIZE


def test_who_has_ended():
    each = pages()
    assert {int.from_bytes(each[0].memory[rank * ROW : rank * ROW + 8], "little") for rank in range(SIZE)} == {
        os.getpid()
    }
    ended = subprocess.Popen(["true"])
    ended.wait()
    each[2].memory[2 * ROW : 2 * ROW + 8] = ended.pid.to_bytes(8, "little")
    assert [each[0].has_ended(rank) for rank in range(SIZE)] == [False, False, True, False]
    each[2].set_pid(os.getpid())
    assert not each[1].has_ended(2)


@pytest.mark.parametrize("seed", range(40))
def test_who_waits_in_a_circle(seed):
    """Against walks along who waits for whom: those of which there is one as long as there are ranks never end."""
    each, dice, number = pages(), random.Random(seed), b"\x07\x01"
    for_whom = {rank: dice.sample(range(SIZE), dice.randint(0, 2)) for rank in range(SIZE) if dice.random() < 0.8}
    waits = {}
    for rank, missing in for_whom.items():
        first = SIZE * ROW + rank * SIZE * WORD
        for other in {*range(SIZE)} - {*missing}:
            at = first + other * WORD
            each[rank].memory[at : at + WORD] = bytes(DIGEST) + number
        waits[rank] = Wait(f"call {rank}", tuple(range(SIZE)), first, number, rank + 5)
        assert waits[rank].missing(each[0]) == sorted(missing)
        each[rank].write(rank * ROW + STATE, waits[rank][:])
    edges = np.array([[other in for_whom.get(rank, ()) for other in range(SIZE)] for rank in range(SIZE)], int)
    endless = [rank for rank in range(SIZE) if np.linalg.matrix_power(edges, SIZE)[rank].any()]
    assert each[1].waits() == waits
    found = each[1].stuck()
    assert found == [(rank, waits[rank], sorted(for_whom[rank])) for rank in endless]
    told = each[1].tell(found)
    assert told == [(rank, f"call {rank}", sorted(for_whom[rank])) for rank in endless]
    for rank, wait in waits.items():
        assert each[2].told(rank, wait) == (told if rank in endless else [])
        assert each[2].told(rank, wait._replace(serial=99)) == []
    assert each[2].waits() == {rank: wait for rank, wait in waits.items() if rank not in endless}
