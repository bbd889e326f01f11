"""A page of memory that all ranks of a mesh on one machine map.

Each rank has a row in it, where it writes what it waits for, once it has waited for long. So one can follow who waits
for whom, and where they wait for each other, which is for ever, tell all of them. The rest of the page belongs to the
meetings of groups (`scaling.mesh.meeting`).
"""

import contextlib
import mmap
import os
import pickle
import tempfile
from typing import NamedTuple

import torch.distributed as dist

ROW, STATE, HALF = 4096, 64, 2048  # bytes of a rank's row, and where in it its two parts begin
LENGTH = 480  # bytes of a call as text, with its length in the first two
PLACES = 2  # of meetings of a group in turn, each with a word and a text of every member
WORD, DIGEST = 8, 6  # bytes of what a rank is about to do: a digest, and the last two bytes of the meeting's number


class SharedPage:
    """The page of one mesh: `size` rows, then for each set of axes the meetings of its groups."""

    def __init__(self, memory: mmap.mmap, size: int, rank: int):
        self.memory, self.size, self.rank, self.serial = memory, size, rank, 0
        self.set_pid(os.getpid())

    @staticmethod
    def nbytes(size: int, sets: int) -> int:
        return size * ROW + sets * SharedPage.set_nbytes(size)

    @staticmethod
    def set_nbytes(size: int) -> int:
        return size * PLACES * (WORD + LENGTH)

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
        """Where each rank waits that has waited for long; but those that are still to learn that it times out."""
        waits = {}
        for rank in range(self.size):
            row = self.read(rank * ROW + STATE)
            if row is not None and not self.told(rank, Wait(*row)):
                waits[rank] = Wait(*row)
        return waits

    def told(self, rank: int, wait: "Wait") -> list[tuple[int, str, list[int]]]:
        """What others have found out for a rank that waits: that it does so for ever, and who else; empty if not."""
        told = self.read(rank * ROW + HALF)
        return told[1] if told is not None and told[0] == wait.serial else []

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

    def tell(self, stuck: list[tuple[int, "Wait", list[int]]]) -> list[tuple[int, str, list[int]]]:
        """Tell all of them."""
        found = [(rank, wait.call, missing) for rank, wait, missing in stuck]
        for rank, wait, _ in stuck:
            self.write(rank * ROW + HALF, (wait.serial, found))
        return found


class Wait(NamedTuple):
    """Where a rank waits: its call, the group's ranks, where their words are in the page, the number sought; `serial`
    tells one wait of this rank from the next."""

    call: str
    ranks: tuple[int, ...]
    first: int
    number: bytes
    serial: int

    def missing(self, page: SharedPage) -> list[int]:
        """The ranks that have not come."""
        words = page.memory[self.first : self.first + WORD * len(self.ranks)]
        return [rank for i, rank in enumerate(self.ranks) if words[WORD * i + DIGEST :][:2] != self.number]


def share_page(group, nbytes: int, wanted: bool, said) -> tuple[list, mmap.mmap | None]:
    """(what each rank of a process group `said`, memory of zeros that all of them map).

    The memory is None if it is not wanted, or where the ranks are not all on one machine.
    """
    size, file, path, token = dist.get_world_size(group), None, None, os.urandom(16)
    if dist.get_rank(group) == 0 and wanted:
        file, path = _shared_file()
        os.pwrite(file, token, nbytes)
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
        if file is not None:
            os.close(file)
        if path is not None and not path.startswith("/proc/"):
            os.unlink(path)
    return [each for each, _, _ in all_said], memory


def _shared_file() -> tuple[int, str]:
    """A file in memory, and where others open it. On Linux it has no name: nothing stays behind however this ends."""
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
