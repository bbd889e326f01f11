"""The places of meetings on the page that ranks share: who is where, who goes on, who leaves."""

import ctypes
import itertools
import mmap
from functools import partial

from scaling.mesh.page import LENGTH, LINE, ROW, WORD, SharedPage
from scaling.mesh.places import (
    BEGUN,
    DECIDES,
    FILLED,
    GONE,
    LEFT,
    STANDS,
    MeetingPlaces,
    all_here,
    each_word,
    low_bytes,
    only,
)


def test_on_the_page_each_rank_has_places_of_its_own():
    sets, size = [[(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0, 1, 2, 3)]], 4
    nbytes = SharedPage.nbytes(size, len(sets))
    memory = mmap.mmap(-1, nbytes)
    start = ctypes.addressof(ctypes.c_uint32.from_buffer(memory))
    taken = [(rank * ROW, ROW) for rank in range(size)]
    for i, groups in enumerate(sets):
        for number, ranks in enumerate(groups):
            each = [MeetingPlaces(SharedPage(memory, size, rank), i, number, ranks) for rank in ranks]
            assert len({places.flag.address for places in each}) == 1  # who comes wakes the others
            assert each[0].flag.address % 64 == 0
            taken.append((each[0].flag.address - start, LINE))  # in a line of the processor's cache by itself
            for turn in zip(*(places.places for places in each), strict=True):
                mine = [(at.word, at.state, at.text) for at in turn]
                assert {(at.words, at.states, at.texts) for at in turn} == {mine[0]}
                assert {(at.end, at.states_end) for at in turn} == {(mine[-1][0] + WORD, mine[-1][1] + WORD)}
                taken += [(at, n) for three in mine for at, n in zip(three, (WORD, WORD, LENGTH), strict=True)]
    taken.sort()
    assert all(at + n <= after for (at, n), (after, _) in itertools.pairwise([*taken, (nbytes, 0)]))


COMES, ASKS, WAITS, AWAY = range(
    4
)  # a member of a meeting: comes now; has come, and wants to leave; waits; never comes


def in_turn(each, number, doing, order, nested) -> bool:
    """What members do at one meeting, in this order; `nested[i]`: how many of the next ones come in between what the
    i-th writes and what it reads. Checks what each of them believes after it; whether somebody has left."""
    ready, after, looks, gone_on, left, fenced = list(order), iter(nested), [], set(), set(), {}
    low, flag = low_bytes(number), each[0].flag

    def here() -> bool:
        return all_here(each[0].words(number), low)

    def next_one() -> None:
        looks.append((flag.value, here()))
        rank = ready.pop(0) if ready else None
        if rank is not None and doing[rank] == ASKS:
            if each[rank].take_back(number):
                left.add(rank)
            else:
                assert not left
        elif rank is not None and all_here(each[rank].post(number, b"digest", b"text", STANDS), low):
            gone_on.add(rank)

    def between(rank: int) -> None:
        fenced[rank] = each_word(each[0].words(number))[rank] == b"digest" + low
        for _ in range(next(after, 0)):
            next_one()

    for rank, (places, what) in enumerate(zip(each, doing, strict=True)):
        places._order = lambda: None
        if what in (ASKS, WAITS):
            places.post(number, b"digest", b"text", STANDS)
        places._order = partial(between, rank)
    while ready:
        next_one()
    assert fenced == {rank: doing[rank] == COMES for rank in order}  # each has written before it reads
    assert not (left and gone_on)
    assert left or AWAY in doing or here()
    assert AWAY not in doing or left == {rank for rank, what in enumerate(doing) if what == ASKS}
    if here():
        assert all(seen or value != flag.value for value, seen in looks)  # who looked before is woken
    for rank, word in enumerate(each_word(each[0].words(number))):
        assert (word == b"digest" + low) is (rank not in left and doing[rank] != AWAY)
    return bool(left)


def test_who_leaves_a_meeting_was_seen_by_nobody_who_goes_on():
    """Every order of what three members do, each also between what another writes and what it reads."""
    memory, number, left = mmap.mmap(-1, SharedPage.nbytes(3, 1)), itertools.count(0xFFFF - 100), []
    each = [MeetingPlaces(SharedPage(memory, 3, rank), 0, 0, range(3)) for rank in range(3)]
    for doing in itertools.product(range(4), repeat=3):
        acting = [rank for rank, what in enumerate(doing) if what in (COMES, ASKS)]
        for order in itertools.permutations(acting):
            for nested in itertools.product(range(3), repeat=max(0, len(acting) - 1)):
                left.append(in_turn(each, next(number), doing, order, nested))
    assert {*left} == {True, False}


def test_states_have_their_meeting_s_number_once_nothing_is_begun_early_any_more():
    memory, number = mmap.mmap(-1, SharedPage.nbytes(2, 1)), 5
    each = [MeetingPlaces(SharedPage(memory, 2, rank), 0, 0, range(2)) for rank in range(2)]
    for states in itertools.product((DECIDES, BEGUN, STANDS, LEFT, FILLED, GONE), repeat=2):
        for posted in itertools.product((True, False), repeat=2):
            for places, state, at_once in zip(each, states, posted, strict=True):
                places.post(number, b"digest", b"text", state if at_once else DECIDES)
                if not at_once:
                    places.set_state(number, state)
            found = each[0].states(number)
            assert tuple(state[:6] for state in each_word(found)) == states
            assert all_here(found, low_bytes(number)) is not bool({DECIDES, BEGUN} & {*states})


def test_of_the_words_of_one_meeting_all_are_the_same():
    def word(call, number):
        return call + low_bytes(number)

    every = [word(call, number) for call in (b"call 1", b"call 2") for number in (1, 2, 257)]
    for mine, *others in itertools.product(every, repeat=3):
        same = all(other == mine for other in others if int.from_bytes(other[6:]) == int.from_bytes(mine[6:]))
        assert only(b"".join([mine, *others]), mine) is same
