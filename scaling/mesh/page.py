"""A page of memory that all ranks of a mesh on one machine map.

It has a row for each rank and, for each set of axes, the places where the groups along them meet
(`scaling.mesh.meeting`). A rank that has waited for long writes into its row in which meeting it waits. So every rank
can follow who waits for whom, and detect ranks that wait for each other for ever.
"""

import mmap
import os
import tempfile
from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist

ROW, WAITS, FOUND = 64, 8, 24  # bytes of a rank's row: process id, its wait, whether it has found a deadlock
LENGTH = 480  # bytes of a call's text, whose first two are its length
PLACES = 2  # a group's meetings alternate between two places, each with a word and a text of every member
WORD, DIGEST = 8, 6  # bytes of a word: a digest of the call, then the last two bytes of the meeting's number


class Wait(NamedTuple):
    """A meeting in which a rank waits: the offset of its words, and the last two bytes of its number."""

    words: int
    number: bytes


class SharedPage:
    """The page of one mesh: `size` rows, then the meetings of the groups along each set of axes.

    `sets` gives each set of axes as the ranks of each of its groups.
    """

    def __init__(self, memory: mmap.mmap, size: int, rank: int, sets: Sequence[Sequence[tuple[int, ...]]]):
        self.memory, self.size, self.rank, self.sets = memory, size, rank, sets
        self.meetings: dict[int, tuple[tuple[int, ...], int]] = {}  # {offset of words: (members, offset of texts)}
        for of_set, groups in enumerate(sets):
            for group, ranks in enumerate(groups):
                self.meetings |= {words: (ranks, texts) for words, texts in self.places(of_set, group)}
        self.set_pid(os.getpid())

    @staticmethod
    def nbytes(size: int, sets: int) -> int:
        """Return the size of a page for this many ranks and sets of axes."""
        return size * ROW + sets * size * PLACES * (WORD + LENGTH)

    def places(self, of_set: int, group: int) -> list[tuple[int, int]]:
        """Return the offsets of the words and of the texts for each of a group's alternating meetings."""
        words = self.nbytes(self.size, of_set)
        texts, first = words + PLACES * self.size * WORD, group * len(self.sets[of_set][group])
        firsts = [turn * self.size + first for turn in range(PLACES)]
        return [(words + first * WORD, texts + first * LENGTH) for first in firsts]

    def calls(self, words: int) -> list[bytes]:
        """Return the call texts of a meeting's members."""
        ranks, texts = self.meetings[words]
        return [self.memory[at : at + LENGTH] for at in range(texts, texts + len(ranks) * LENGTH, LENGTH)]

    # Rows

    def set_pid(self, pid: int) -> None:
        """Write this rank's process id."""
        self.memory[self.rank * ROW : self.rank * ROW + 8] = pid.to_bytes(8, "little")

    def has_ended(self, rank: int) -> bool:
        """Return whether a rank's process has ended."""
        pid = int.from_bytes(self.memory[rank * ROW : rank * ROW + 8], "little")
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        return False

    def set_wait(self, wait: Wait | None, found: bool = False) -> None:
        """Write where this rank waits (None: nowhere), and whether it has `found` that this wait never ends."""
        at, (words, number) = self.rank * ROW, wait or Wait(0, bytes(2))
        self.memory[at + WAITS : at + FOUND + 1] = words.to_bytes(FOUND - WAITS - 2, "little") + number + bytes([found])

    def has_found(self, rank: int) -> bool:
        """Return whether a rank has found that its wait never ends."""
        return self.memory[rank * ROW + FOUND] == 1

    def waits(self) -> dict[int, Wait]:
        """Return {rank: the meeting in which it waits} of the ranks that have waited for long."""
        waits = {}
        for rank in range(self.size):
            row = self.memory[rank * ROW + WAITS : rank * ROW + FOUND]
            if (words := int.from_bytes(row[:-2], "little")) in self.meetings:
                waits[rank] = Wait(words, row[-2:])
        return waits

    def missing(self, wait: Wait) -> list[int]:
        """Return the ranks that have not come to a meeting."""
        ranks, _ = self.meetings[wait.words]
        words = self.memory[wait.words : wait.words + WORD * len(ranks)]
        return [rank for i, rank in enumerate(ranks) if words[WORD * i + DIGEST :][:2] != wait.number]

    def stuck(self) -> dict[int, Wait]:
        """Return {rank: its wait} of the ranks in a circle of waits, and of the ranks that wait for these."""
        waits = self.waits()
        missing = {rank: self.missing(wait) for rank, wait in waits.items()}
        if self.waits() != waits or missing != {rank: self.missing(wait) for rank, wait in waits.items()}:
            return {}  # a rank has moved on: only facts equal in two readings were true at one time
        stuck = {rank for rank in missing if missing[rank]}
        while free := {rank for rank in stuck if not stuck & set(missing[rank])}:
            stuck -= free
        return {rank: waits[rank] for rank in sorted(stuck)}


def share_page(group, nbytes: int, wanted: bool, message) -> tuple[list, mmap.mmap | None]:
    """Return (the messages of all ranks of a process group, memory of zeros that all of them map).

    The memory is None if it is not wanted, or if the ranks are not all on one machine.
    """
    size, file, path, token = dist.get_world_size(group), None, None, os.urandom(16)
    if dist.get_rank(group) == 0 and wanted:
        file, path = _shared_file()
        os.pwrite(file, token, nbytes)
    try:
        messages: list = [None] * size
        dist.all_gather_object(messages, (message, path, token), group=group)
        (_, path_of_all, token), memory = messages[0], None
        if path_of_all is not None:
            memory = _map(path_of_all, nbytes, token)
            mapped: list = [None] * size
            dist.all_gather_object(mapped, memory is not None, group=group)
            memory = memory if all(mapped) else None
    finally:
        if file is not None:
            os.close(file)
        if path is not None and not path.startswith("/proc/"):
            os.unlink(path)
    return [each for each, _, _ in messages], memory


def _shared_file() -> tuple[int, str]:
    """Return a file in memory and the path at which others open it.

    On Linux the file has no name, so that nothing stays behind however this process ends.
    """
    if not hasattr(os, "memfd_create"):
        return tempfile.mkstemp(prefix=f"ranks-{os.getpid()}-")
    file = os.memfd_create("ranks")
    return file, f"/proc/{os.getpid()}/fd/{file}"


def _map(path: str, nbytes: int, token: bytes) -> mmap.mmap | None:
    try:
        with open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), nbytes + len(token))
    except OSError:
        return None
    return memory if memory[nbytes:] == token else None
