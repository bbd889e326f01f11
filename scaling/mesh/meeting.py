"""Meetings: the ranks of a group tell each other what they are about to do.

Each writes it into the page that they share, as a word of eight bytes and as text; once all have, they go on, or all
know who said what. That takes no message: who comes wakes the others. Meetings of a group are numbered.

A call that all have made before, after the same call, is begun before all have come: they meet when its result is
waited for. So no rank waits for another that would not do so without meetings. Should one come with another call after
all, it sends zeros for what the others have begun, whose result nobody gets: the group can still be used.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import count
from typing import Any, NamedTuple
from weakref import ref

from scaling.mesh.futex import has_futex
from scaling.mesh.page import DIGEST, LENGTH, PLACES, ROW, STATE, SharedPage, Wait
from scaling.mesh.places import (
    BEGUN,
    DECIDES,
    FILLED,
    LEFT,
    STANDS,
    MeetingPlaces,
    all_here,
    each_word,
    low_bytes,
    only,
)

NAP, LOOK = 0.05, 0.25  # seconds between looks at who has come; and, after so long, at who waits for whom
PAIRS = 1 << 14  # of calls made one after the other, that a group remembers at most
CIRCLE, ENDED, LATE = "wait for each other", "has ended", "has not come in time"


class Intent(NamedTuple):
    """What a rank is about to do."""

    digest: bytes
    text: bytes

    @staticmethod
    def of(call: str, how: str = "") -> "Intent":
        """What is compared is a digest of the call, and whether it has a `how`, which is shown before it."""
        said = f"{how}\n{call}".encode()[: LENGTH - 2]
        digest = blake2b(f"{bool(how)} {call}".encode(), digest_size=DIGEST).digest()
        return Intent(digest, len(said).to_bytes(2, "little") + said)

    @property
    def said(self) -> str:
        return self.text[2 : 2 + int.from_bytes(self.text[:2], "little")].decode(errors="replace")


class NotMet(Exception):
    """A meeting was not held in time, or never will be: why; and of each rank that has to do with it (the rank, its
    call or None, the ranks that it waits for)."""

    def __init__(self, why: str, waits: Sequence[tuple[int, str | None, list[int]]]):
        self.why, self.waits = why, list(waits)


class Refused(Exception):
    """All have come to a meeting, the next one is another; but the call cannot be made."""

    def __init__(self, meeting: "Meeting", said: Sequence[str]):
        self.meeting, self.said = meeting, said


class Differ(Refused):
    """The members are about to make different calls: `said`, in order."""


class Left(Refused):
    """Some have begun the call and given up waiting for others, or send zeros for it: `said`."""


class Posted(NamedTuple):
    """A call that this rank has told the others; whether it has begun it; and the digest of the one before."""

    number: int
    call: Intent
    begun: bool
    before: bytes


class Meeting:
    """Where the members of one group meet: group number `group` of those along `axes`, which are set number `of_set` of
    axes; its members are `ranks`, ascending."""

    def __init__(
        self, page: SharedPage, of_set: int, axes: Sequence[str], group: int, ranks: Sequence[int], timeout: float
    ):
        self.page, self.axes, self.ranks, self.timeout = page, tuple(axes), tuple(ranks), timeout
        self.places, self.size = MeetingPlaces(page, of_set, group, ranks), len(ranks)
        self.number, self.before = 0, b""  # of the last call that was posted, and its digest
        self.open: deque[Posted] = deque()  # not settled yet, ascending; all but the last one have begun
        self.lost: dict[int, BaseException] = {}  # begun, and not settled: why
        self.pairs: set[tuple[bytes, bytes]] = set()  # calls that all made, one after the other
        self.fill: dict[bytes, Callable[[], Any]] = {}  # by digest: makes the call on zeros
        self.filled: list = []  # what was begun so, whose buffers must not be freed
        page.meetings.append(self)

    def meet(self, call: Intent) -> None:
        """Wait until all members have come; return if all are about to make the same call.

        Raises Differ or Left if they are not; and NotMet, after which the next meeting is the same one.
        """
        self.settle(self.begin(call))

    def begin(self, call: Intent, fill: Callable[[], Any] | None = None) -> int:
        """Tell the others; and wait for them, unless all have made this call after the one before, so that the caller
        may begin it. Before it uses the result it calls `settle` with the number that this returns.

        `fill()` begins the call on zeros; without it this waits always. Raises as `meet`.
        """
        places = self.places
        if LEFT in places.states(self.number + 1):
            self._fill_what_others_left()
        while len(self.open) >= PLACES // 2:  # so every member has read what is now written over
            self.settle(self.open[0].number)
        self.number = number = self.number + 1
        early = (self.before, call.digest) in self.pairs and fill is not None and has_futex()
        if fill is not None:
            self.fill.setdefault(call.digest, fill)
        words = places.post(number, *call, DECIDES if early else STANDS)
        if early:  # of two ranks that decide about different calls at least one sees the other's word
            early = only(words, call.digest + low_bytes(number))
            places.set_state(number, BEGUN if early else STANDS)
        self.open.append(Posted(number, call, early, self.before))
        self.before = call.digest
        if not early:
            self.settle(number)
        return number

    def settle(self, number: int) -> None:
        """Wait until all members have come to all meetings up to this one. Raises as `meet`."""
        if number in self.lost:
            raise self.lost[number]
        while self.open and self.open[0].number <= number:
            posted = self.open[0]
            try:
                self._settle(posted)
            except BaseException as error:
                if isinstance(error, Refused) and error.meeting is self:
                    self.open.popleft()
                    self.lost[posted.number] = error
                elif isinstance(error, NotMet | Refused) and not self._may_leave():
                    continue
                self._leave(error)
                raise
            self.open.popleft()

    def _settle(self, posted: Posted) -> None:
        number, call, places = posted.number, posted.call, self.places
        everyone = (call.digest + low_bytes(number)) * self.size
        if places.words(number) != everyone:
            self._wait(call, number)
            if places.words(number) != everyone:
                self._differ(posted)
        if FILLED in places.states(number):
            if not posted.begun:
                self._fill(number, (LEFT,))
            raise Left(self, [call.said])
        if not posted.begun and len(self.pairs) < PAIRS:
            self.pairs.add((posted.before, call.digest))

    def _differ(self, posted: Posted) -> None:
        """All have come, with different calls. What some have begun the others complete; once nobody begins any more,
        all are told."""
        number, places, error = posted.number, self.places, Differ(self, [])
        while DECIDES in places.states(number):
            time.sleep(NAP / 100)
        if posted.begun:
            self._leave(error, all_but=1)
            places.set_state(number, LEFT)
        else:
            self._fill(number, (BEGUN, LEFT))
        places.wake()
        began, low = time.monotonic(), low_bytes(number)
        while not all_here(places.states(number), low) and time.monotonic() - began < self.timeout:
            if any(self.page.has_ended(rank) for rank in self.ranks):
                break
            places.flag.wait(places.flag.value, NAP / 10)
        time.sleep(0.001)  # texts are written before words, but not all processors show them in that order
        error.said = [Intent(b"", text).said for text in places.said(number)]
        raise error

    def settle_different(self) -> None:
        """Raise Differ where all have come, with different calls, to a meeting that this rank has not settled."""
        for posted in self.open:
            words = self.places.words(posted.number)
            if all_here(words, low_bytes(posted.number)) and len(set(each_word(words))) > 1:
                self.settle(posted.number)

    # Giving up

    def _may_leave(self) -> bool:
        """Take back the call that is not begun; not if all others have come to it, as then they make it."""
        if self.open[-1].begun:
            return True
        if not self.places.take_back(self.open[-1].number):
            return False
        self.open.pop()
        self.number -= 1
        return True

    def _leave(self, error: BaseException, all_but: int = 0) -> None:
        """This rank does not wait for the open calls: what it has begun others complete."""
        if len(self.open) > all_but:
            self._may_leave()
        while len(self.open) > all_but:
            number = self.open.pop().number
            self.lost[number] = error
            self.places.set_state(number, LEFT)
        self.before = b""
        self.places.wake()

    def _fill_what_others_left(self) -> None:
        while word := self._fill(self.number + 1, (LEFT,)):
            self.number += 1
            self.places.post(self.number, word[:DIGEST], bytes(2), FILLED)
            self.before = b""

    def _fill(self, number: int, states: Sequence[bytes]) -> bytes | None:
        """Make on zeros the call that a member in one of these states has begun; its word, or None if there is none."""
        places, low = self.places, low_bytes(number)
        for word, state in zip(each_word(places.words(number)), each_word(places.states(number)), strict=True):
            if word[DIGEST:] == low and state[:DIGEST] in states:
                self.filled.append(self.fill[word[:DIGEST]]())
                return word
        return None

    # Waiting

    def _wait(self, call: Intent, number: int) -> None:
        """Until all members have come."""
        low, places = low_bytes(number), self.places
        for _ in range(round(LOOK / NAP)):
            seen = places.flag.value  # before the words: who completes them changes it after
            if all_here(places.words(number), low):
                return
            places.flag.wait(seen, NAP)
        self._wait_long(Wait(call.said, self.ranks, places.at(number).words, low, self.page.serial))

    def _wait_long(self, wait: Wait) -> None:
        """Wait on, and look now and then who waits for whom."""
        page, flag, began = self.page, self.places.flag, time.monotonic()
        page.write(page.rank * ROW + STATE, wait[:])
        try:
            while True:
                seen = flag.value
                if not wait.missing(page):
                    return
                self._look(wait, time.monotonic() - began > self.timeout)
                flag.wait(seen, LOOK)
        finally:
            page.write(page.rank * ROW + STATE, None)

    def _look(self, wait: Wait, late: bool) -> None:
        """Raise NotMet if this rank's wait times out; Differ if others wait to tell it so."""
        page = self.page
        for other in page.meetings:
            if other is not self:
                other.settle_different()
        found = page.told(page.rank, wait) or page.tell(page.stuck())
        if page.rank in {rank for rank, _, _ in found}:
            raise NotMet(CIRCLE, found)
        waits, missing = page.waits(), wait.missing(page)
        if ended := [(rank, None, []) for rank in missing if page.has_ended(rank)]:
            raise NotMet(ENDED, [(page.rank, wait.call, missing), *ended])
        if late:
            others = [(rank, waits[rank].call, waits[rank].missing(page)) for rank in missing if rank in waits]
            others += [(rank, None, []) for rank in missing if rank not in waits]
            raise NotMet(LATE, [(page.rank, wait.call, missing), *others])


_meetings: dict[str, tuple[Meeting, ref]] = {}  # by name, as torch.distributed finds process groups: ops hold constants
_names = count()


def hold_meeting(made: Meeting, pg) -> str:
    """A name for a meeting, about calls on a process group; by it `meeting` finds it."""
    name = f"page {next(_names)} of group {pg.group_name}"
    _meetings[name] = made, ref(pg)
    return name


def meeting(name: str) -> Meeting | None:
    return _meetings[name][0] if name in _meetings else None


def meeting_on(pg) -> Meeting | None:
    """A meeting about calls on a process group, of whichever mesh."""
    return next((held for held, on in _meetings.values() if on() is pg), None)
