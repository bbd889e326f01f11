"""Meetings: before a collective, the ranks of a group tell each other what they are about to do.

Each writes it into the page that they share, as a word of eight bytes and as text, and waits until all have; then all
go on, or all know who said what. That takes no message: who comes last wakes the others. Meetings of a group are
numbered, and two in turn have a place each: nobody is two ahead of another, so no word is overwritten before all have
read it.
"""

import time
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from scaling.mesh.futex import Word
from scaling.mesh.page import DIGEST, LENGTH, LINE, ROW, STATE, WORD, SharedPage, Wait

NAP, LOOK = 0.05, 0.25  # seconds between looks at who has come; and, after so long, at who waits for whom
CIRCLE, ENDED, LATE = "wait for each other", "has ended", "has not come in time"


class Intent(NamedTuple):
    """What a rank is about to do."""

    digest: bytes
    text: bytes

    @staticmethod
    def of(digest: bytes, text: str) -> "Intent":
        said = text.encode()[: LENGTH - 2]
        return Intent(digest, len(said).to_bytes(2, "little") + said)

    @property
    def said(self) -> str:
        return self.text[2 : 2 + int.from_bytes(self.text[:2], "little")].decode(errors="replace")


class NotMet(Exception):
    """A meeting was not held in time, or never will be: why; and of each rank that has to do with it (the rank, its
    call or None, the ranks that it waits for)."""

    def __init__(self, why: str, waits: Sequence[tuple[int, str | None, list[int]]]):
        super().__init__(why, waits)
        self.why, self.waits = why, list(waits)


class Meeting:
    """Where the members of one group meet: group number `group` of those along the set of axes number `axes`, whose
    members are `ranks`, ascending."""

    def __init__(self, page: SharedPage, axes: int, group: int, ranks: Sequence[int], timeout: float):
        base, size = page.size * ROW + axes * page.set_nbytes(page.size), len(ranks)
        self.page, self.memory, self.ranks, self.size, self.timeout = page, page.memory, tuple(ranks), size, timeout
        self.number = 0
        self.flag = Word(page.memory, base + group * LINE)
        words, me = base + page.size * LINE, self.ranks.index(page.rank)
        texts = words + 2 * page.size * WORD
        halves = [half * page.size + group * size for half in (0, 1)]
        self.first = [words + half * WORD for half in halves]
        self.texts = [texts + half * LENGTH for half in halves]
        self.word = [first + me * WORD for first in self.first]
        self.text = [first + me * LENGTH for first in self.texts]

    def meet(self, call: Intent) -> list[str] | None:
        """Wait until all members have come. None if all are about to make the same call; else what each said.

        Raises NotMet; the next meeting is then the same one.
        """
        self.number += 1
        half, number, memory = self.number & 1, (self.number & 0xFFFF).to_bytes(2, "little"), self.memory
        at, mine = self.text[half], call.digest + number
        memory[at : at + len(call.text)] = call.text
        at = self.word[half]
        memory[at : at + WORD] = mine
        first, everyone, naps = self.first[half], mine * self.size, 0
        last = first + len(everyone)
        while True:
            seen = self.flag.value  # before the words: who writes the last one sets it after
            words = memory[first:last]
            if words == everyone or self._all_here(words, number):
                break
            if naps < LOOK / NAP:
                naps += 1
                self.flag.wait(seen, NAP)
            else:
                self._wait_long(Wait(call.said, self.ranks, first, number, self.page.serial), at)
        if seen != self.number & 0xFFFFFFFF:
            self.flag.set(self.number & 0xFFFFFFFF)
        if words == everyone:
            return None
        time.sleep(0.001)  # texts are written before words, but not all processors show them in that order
        places = [self.texts[half] + i * LENGTH for i in range(self.size)]
        return [Intent(b"", memory[at : at + LENGTH]).said for at in places]

    def _all_here(self, words: bytes, number: bytes) -> bool:
        return words[DIGEST::WORD] == number[:1] * self.size and words[DIGEST + 1 :: WORD] == number[1:] * self.size

    def _wait_long(self, wait: Wait, word: int) -> None:
        """Wait on, and look now and then who waits for whom. After the timeout this rank's word is taken back."""
        page, began = self.page, time.monotonic()
        page.write(page.rank * ROW + STATE, wait[:])
        try:
            while True:
                seen = self.flag.value
                if not wait.missing(page):
                    return
                self._look(wait, time.monotonic() - began > self.timeout)
                self.flag.wait(seen, LOOK)
        except BaseException:
            self.number -= 1
            self.memory[word : word + WORD] = bytes(WORD)
            raise
        finally:
            page.write(page.rank * ROW + STATE, None)

    def _look(self, wait: Wait, late: bool) -> None:
        """Raise NotMet if this rank's wait times out."""
        page = self.page
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


_meetings: dict[str, Meeting] = {}  # by name, as torch.distributed finds process groups: ops hold constants alone
_names = count()


def hold_meeting(made: Meeting) -> str:
    """A name for a meeting, by which `meeting` finds it."""
    name = f"page {next(_names)}"
    _meetings[name] = made
    return name


def meeting(name: str) -> Meeting | None:
    return _meetings.get(name)
