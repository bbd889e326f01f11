"""A page of memory that all ranks of a mesh map, in which those of a group meet before a collective.

Each writes what it is about to do, as a word of eight bytes and as text, and waits until all have; then all go on, or
all know who said what. That takes no message: who comes last wakes the others. Meetings of a group are numbered, and
two in turn have a place each: nobody is two ahead of another, so no word is overwritten before all have read it.

A rank that waits for long says so in its row of the page. So one can follow who waits for whom, and where they wait for
each other, which is for ever, tell all of them.
"""

import contextlib
import mmap
import os
import pickle
import tempfile
import time
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

import torch.distributed as dist

from scaling.mesh.futex import Word

LENGTH = 480  # bytes of what a rank is about to do, its length in the first two
ROW, STATE, HALF = 4096, 64, 2048  # bytes of a rank's row, and where in it its two parts begin
LINE = 64  # bytes between the words that groups wait for
WORD, DIGEST = 8, 6  # a digest of the call, and the last two bytes of the meeting's number
NAP, LOOK = 0.05, 0.25  # seconds between looks at who has come; and, after so long, at who waits for whom


class Call(NamedTuple):
    """What a rank is about to do."""

    digest: bytes
    text: bytes

    @staticmethod
    def of(digest: bytes, text: str) -> "Call":
        said = text.encode()[: LENGTH - 2]
        return Call(digest, len(said).to_bytes(2, "little") + said)

    @property
    def said(self) -> str:
        return self.text[2 : 2 + int.from_bytes(self.text[:2], "little")].decode(errors="replace")


class NotMet(Exception):
    """A meeting was not held in time, or never will be: why; and of each rank that has to do with it (the rank, its
    call or None, the ranks that it waits for)."""

    def __init__(self, why: str, waits: Sequence[tuple[int, str | None, list[int]]]):
        super().__init__(why, waits)
        self.why, self.waits = why, list(waits)


CIRCLE, ENDED, LATE = "wait for each other", "has ended", "has not come in time"


class Page:
    """The page of one mesh: `size` rows, then for each set of axes the meetings of its groups."""

    def __init__(self, memory: mmap.mmap, size: int, rank: int):
        self.memory, self.size, self.rank, self.serial = memory, size, rank, 0
        self.set_pid(os.getpid())

    @staticmethod
    def nbytes(size: int, sets: int) -> int:
        return size * ROW + sets * Page.set_nbytes(size)

    @staticmethod
    def set_nbytes(size: int) -> int:
        return size * (LINE + 2 * WORD + 2 * LENGTH)

    # Rows: a process number, from STATE on where it waits, from HALF on what others have found out for it

    def set_pid(self, pid: int) -> None:
        self.memory[self.rank * ROW : self.rank * ROW + 8] = pid.to_bytes(8, "little")

    def has_ended(self, rank: int) -> bool:
        pid = int.from_bytes(self.memory[rank * ROW : rank * ROW + 8], "little")
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        return False

    def read(self, at: int):
        """What stands at an offset, or None if it is empty or being written."""
        stamp = self.memory[at : at + 8]
        length = int.from_bytes(self.memory[at + 8 : at + 12], "little")
        said = self.memory[at + 12 : at + 12 + length]
        if not length or stamp != self.memory[at : at + 8]:
            return None
        with contextlib.suppress(Exception):
            return pickle.loads(said)

    def write(self, at: int, what) -> None:
        """Write to an offset; None empties it."""
        said = b"" if what is None else pickle.dumps(what)
        said = said if len(said) <= HALF - STATE - 12 else b""
        self.serial += 1
        self.memory[at + 8 : at + 12] = bytes(4)
        self.memory[at + 12 : at + 12 + len(said)] = said
        self.memory[at : at + 8] = (self.serial * self.size + self.rank).to_bytes(8, "little")
        self.memory[at + 8 : at + 12] = len(said).to_bytes(4, "little")

    def waits(self) -> dict[int, "Wait"]:
        """Where each rank waits that has waited for long."""
        rows = {rank: self.read(rank * ROW + STATE) for rank in range(self.size)}
        return {rank: Wait(*row) for rank, row in rows.items() if row is not None}

    def stuck(self) -> list[tuple[int, "Wait", list[int]]]:
        """The ranks that wait for each other in a circle, and those that wait for them: (rank, where, for whom)."""
        waits = self.waits()
        missing = {rank: wait.missing(self) for rank, wait in waits.items()}
        if self.waits() != waits or missing != {rank: wait.missing(self) for rank, wait in waits.items()}:
            return []  # somebody has moved: only what did not change from one look to the next was so at one time
        stuck = {rank for rank in missing if missing[rank]}
        while free := {rank for rank in stuck if not stuck & set(missing[rank])}:
            stuck -= free
        return [(rank, waits[rank], missing[rank]) for rank in sorted(stuck)]

    def found(self, first: int, number: bytes) -> list[tuple[int, str, list[int]]]:
        """What this rank, or another one for it, has found: that it waits for ever, in this meeting; and who else."""
        told = self.read(self.rank * ROW + HALF)
        if told is not None and told[0] == (first, number):
            return told[1]
        stuck = self.stuck()
        found = [(rank, wait.call, missing) for rank, wait, missing in stuck]
        for rank, wait, _ in stuck:
            self.write(rank * ROW + HALF, ((wait.first, wait.number), found))
        return found if self.rank in {rank for rank, _, _ in stuck} else []


class Wait(NamedTuple):
    """Where a rank waits: its call, the group's ranks, where their words are in the page, and the number sought."""

    call: str
    ranks: tuple[int, ...]
    first: int
    number: bytes

    def missing(self, page: Page) -> list[int]:
        """The ranks that have not come."""
        words = page.memory[self.first : self.first + WORD * len(self.ranks)]
        return [rank for i, rank in enumerate(self.ranks) if words[WORD * i + DIGEST :][:2] != self.number]


class Meeting:
    """Where the members of one group meet: group number `group` of those along the set of axes number `axes`, whose
    members are `ranks`, ascending."""

    def __init__(self, page: Page, axes: int, group: int, ranks: Sequence[int], timeout: float):
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

    def meet(self, call: Call) -> list[str] | None:
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
                self._wait_long(Wait(call.said, self.ranks, first, number), at)
        if seen != self.number & 0xFFFFFFFF:
            self.flag.set(self.number & 0xFFFFFFFF)
        if words == everyone:
            return None
        time.sleep(0.001)  # texts are written before words, but not all processors show them in that order
        places = [self.texts[half] + i * LENGTH for i in range(self.size)]
        return [Call(b"", memory[at : at + LENGTH]).said for at in places]

    def _all_here(self, words: bytes, number: bytes) -> bool:
        return words[DIGEST::WORD] == number[:1] * self.size and words[DIGEST + 1 :: WORD] == number[1:] * self.size

    def _wait_long(self, wait: Wait, word: int) -> None:
        """Wait on, and look now and then who waits for whom. If in vain, this rank's word is taken back."""
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
        """Raise NotMet if this rank waits in vain."""
        page = self.page
        if found := page.found(wait.first, wait.number):
            raise NotMet(CIRCLE, found)
        waits, missing = page.waits(), wait.missing(page)
        if ended := [(rank, None, []) for rank in missing if page.has_ended(rank)]:
            raise NotMet(ENDED, [(page.rank, wait.call, missing), *ended])
        if late:
            others = [(rank, waits[rank].call, waits[rank].missing(page)) for rank in missing if rank in waits]
            others += [(rank, None, []) for rank in missing if rank not in waits]
            raise NotMet(LATE, [(page.rank, wait.call, missing), *others])


def share(group, nbytes: int, wanted: bool, said) -> tuple[list, mmap.mmap | None]:
    """(what each rank of a process group `said`, memory of zeros that all of them map).

    The memory is None if it is not wanted, or where the ranks are not all on one machine.
    """
    size, rank, path, token = dist.get_world_size(group), dist.get_rank(group), None, os.urandom(16)
    if rank == 0 and wanted:
        folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        file, path = tempfile.mkstemp(prefix=f"ranks-{os.getpid()}-", dir=folder)
        os.pwrite(file, token, nbytes)
        os.close(file)
    try:
        all_said: list = [None] * size
        dist.all_gather_object(all_said, (said, path, token), group=group)
        (_, path_of_all, token), memory = all_said[0], None
        if path_of_all is not None:
            memory = _map(path_of_all, nbytes, token)
            mapped: list = [None] * size
            dist.all_gather_object(mapped, memory is not None, group=group)
            memory = memory if all(mapped) else None
    finally:
        if path is not None:
            os.unlink(path)
    return [each for each, _, _ in all_said], memory


def _map(path: str, nbytes: int, token: bytes) -> mmap.mmap | None:
    try:
        with open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), nbytes + len(token))
    except OSError:
        return None
    return memory if memory[nbytes:] == token else None


_meetings: dict[str, Meeting] = {}  # by name, as torch.distributed finds process groups: ops hold constants alone
_names = count()


def held(made: Meeting) -> str:
    """A name for a meeting, by which `meeting` finds it."""
    name = f"page {next(_names)}"
    _meetings[name] = made
    return name


def meeting(name: str) -> Meeting | None:
    return _meetings.get(name)
