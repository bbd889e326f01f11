"""Meetings: the ranks of a group tell each other which call they are about to make, and wait until all have done so.

Each rank writes the meeting's number and a digest of its call into the page of memory that they share, and the call as
text. If all digests are equal, all make the same call, and go on. Otherwise every rank can report who calls what. No
message is sent between the ranks of one machine.
"""

import os
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from threading import Lock
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from scaling.common.torch_private import process_group, without_modes
from scaling.mesh.abstract import Group
from scaling.mesh.lost import RankEnded, raise_lost
from scaling.mesh.page import DIGEST, LENGTH, PLACES, WORD, SharedPage, Wait
from scaling.spec import ShardingError

CIRCLE, ENDED, LATE = "wait for each other", "has ended", "has not come in time"
SAME_LINES = "all ranks of a group run the same lines in the same order, on shards of one shape and dtype"
MESHES = "a mesh is made by all ranks alike"

LET_OTHERS_RUN = getattr(os, "sched_yield", lambda: time.sleep(0))
SPINS, NAP, LOOK = 20, 5e-5, 0.25  # looks before the first nap; seconds of a nap, and between checks for deadlock
TAG = 1 << 19  # messages of a meeting have their own tag, so that no collective receives them
PATIENCE = 10.0  # seconds that ranks which wait in a circle stay, so that all see it, even on a busy machine


class Intent(NamedTuple):
    """The call that a rank is about to make: the digest that is compared, and the text that is shown."""

    digest: bytes
    text: bytes

    @staticmethod
    def of(call: str, how: str = "") -> "Intent":
        """Return the intent of a call; `how`, if any, says how it is run.

        The digest covers the call and whether there is a `how`; the text shows the `how` before the call.
        """
        message = f"{how}\n{call}".encode()[: LENGTH - 2]
        digest = blake2b(f"{bool(how)} {call}".encode(), digest_size=DIGEST).digest()
        return Intent(digest, len(message).to_bytes(2, "little") + message)


def message_in(text: bytes) -> str:
    """Return the text of an Intent as its rank wrote it."""
    return text[2 : 2 + int.from_bytes(text[:2], "little")].decode(errors="replace")


class Meeting:
    """The place where the members of one group along `axes`, set number `of_set` of the page, meet.

    A group's meetings alternate between two places. Nobody overwrites a place before all members have read it, because
    whoever returns to it has passed the meeting in between, to which every member came after leaving this one.
    """

    def __init__(self, page: SharedPage, of_set: int, axes: Sequence[str], timeout: float):
        groups = page.sets[of_set]
        group = next(number for number, ranks in enumerate(groups) if page.rank in ranks)
        self.page, self.axes, self.ranks, self.timeout = page, tuple(axes), groups[group], timeout
        self.size, self.me, self.number, self.fence = len(self.ranks), self.ranks.index(page.rank), 0, Lock()
        self.places = page.places(of_set, group)

    def meet(self, call: Intent) -> None:
        """Wait until all members have come; return if all are about to make the same call.

        If not all have come, the next call meets at the same number again.

        Raises:
            ShardingError: the members make different calls (all of them raise it), or ranks wait in a circle.
            RankEnded: a rank that has not come has ended.
            TimeoutError: a rank has not come in time.
        """
        self.number = number = self.number + 1
        (words, texts), memory = self.places[number % PLACES], self.page.memory
        text = texts + self.me * LENGTH
        word = call.digest + (number % 0xFFFF + 1).to_bytes(2, "little")  # never 0, as in unwritten memory
        memory[text : text + len(call.text)] = call.text
        self._write(words, word)
        end, everyone = words + self.size * WORD, word * self.size
        if memory[words:end] != everyone:
            self._wait_for_others(words, word)
            if memory[words:end] != everyone:
                time.sleep(0.001)  # texts are written before words, but some processors reorder that
                raise different(self.axes, self.ranks, [message_in(text) for text in self.page.calls(words)])

    def _write(self, words: int, word: bytes) -> None:
        """Write this rank's word."""
        at = words + self.me * WORD
        self.page.memory[at : at + WORD] = word
        with self.fence:  # a memory fence: later reads are not older than this write
            pass

    def _wait_for_others(self, words: int, word: bytes) -> None:
        """Wait until all members have come."""
        looks, began = 0, time.monotonic()
        low, high = word[DIGEST : DIGEST + 1] * self.size, word[DIGEST + 1 :] * self.size
        while time.monotonic() - began < LOOK:
            seen = self.page.memory[words : words + self.size * WORD]
            if seen[DIGEST::WORD] == low and seen[DIGEST + 1 :: WORD] == high:
                return
            LET_OTHERS_RUN() if looks < SPINS else time.sleep(NAP)
            looks += 1
        wait = Wait(words, word[DIGEST:])
        self.page.set_wait(wait)
        try:
            self._wait_long(wait, word)
        finally:
            self.page.set_wait(None)

    def _wait_long(self, wait: Wait, word: bytes) -> None:
        """Keep waiting, and check now and then who waits for whom."""
        began = looked = time.monotonic()
        while self.page.missing(wait):
            if (now := time.monotonic()) - looked > LOOK:
                looked = now
                error = self._look(wait, now - began > self.timeout)
                if error is not None and self._take_back(wait, word):
                    raise error
            time.sleep(20 * NAP)

    def _take_back(self, wait: Wait, word: bytes) -> bool:
        """Take this rank's word back, unless all others have come, since one of them may have seen it and gone on."""
        self._write(wait.words, bytes(WORD))
        if self.page.missing(wait) == [self.page.rank]:
            self._write(wait.words, word)
            return False
        self.number -= 1
        return True

    def _look(self, wait: Wait, late: bool) -> Exception | None:
        """Return the error to raise if the missing ranks will never come or have not come in time, else None."""
        page, me, stuck = self.page, self.page.rank, self.page.stuck()
        if me in stuck:
            found = [self._waiting(rank, each) for rank, each in stuck.items()]
            self._let_all_find(stuck)
            return not_met(CIRCLE, found, self.timeout)
        waits, missing = page.waits(), page.missing(wait)
        if ended := [(rank, None, []) for rank in missing if page.has_ended(rank)]:
            return not_met(ENDED, [self._waiting(me, wait), *ended], self.timeout)
        if late:
            others = [self._waiting(rank, waits[rank]) for rank in missing if rank in waits]
            others += [(rank, None, []) for rank in missing if rank not in waits]
            return not_met(LATE, [self._waiting(me, wait), *others], self.timeout)
        return None

    def _waiting(self, rank: int, wait: Wait) -> tuple[int, str, list[int]]:
        """Return (rank, its call, the ranks that it waits for)."""
        member = self.page.meetings[wait.words][0].index(rank)
        return rank, message_in(self.page.calls(wait.words)[member]), self.page.missing(wait)

    def _let_all_find(self, stuck: Mapping[int, Wait]) -> None:
        """Stay until all ranks of the circle have found it, since the first to leave would break it for the others."""
        page, began = self.page, time.monotonic()
        page.set_wait(stuck[page.rank], found=True)
        while time.monotonic() - began < PATIENCE:
            waits = page.waits()
            unaware = [rank for rank, wait in stuck.items() if waits.get(rank) == wait and not page.has_found(rank)]
            if all(page.has_ended(rank) for rank in unaware):
                break
            time.sleep(NAP)


class MeetingByMessages:
    """A meeting of ranks that share no memory, as across machines: each sends its call to every other rank.

    This can take as long as a small collective. The process group is referred to by name, so that `_meetings` can drop
    both together.
    """

    def __init__(self, pg: dist.ProcessGroup, axes: Sequence[str]):
        self.group, self.axes = pg.group_name, tuple(axes)

    def meet(self, call: Intent) -> None:
        """Wait until the calls of all members are here; return if they are equal.

        Over gloo each call is a separate message if there are several others, so that an error can name those who are
        late.

        Raises:
            ShardingError: the calls differ.
            RankEnded: a member has ended.
            TimeoutError: some members have not come in time; it names them.
        """
        pg = process_group(self.group)
        size, me, on_cpu = dist.get_world_size(pg), dist.get_rank(pg), dist.get_backend(pg) == "gloo"
        one_by_one = on_cpu and size > 2
        device = "cpu" if on_cpu else torch.device("cuda", torch.cuda.current_device())
        with without_modes():  # an active mode would take these ops for the program's
            text = bytearray((call.digest + call.text).ljust(DIGEST + LENGTH))
            mine = torch.frombuffer(text, dtype=torch.uint8).to(device)
            calls = torch.zeros(size, len(mine), dtype=torch.uint8, device=device)
            began, member = time.monotonic(), -1
            try:
                if one_by_one:
                    calls[me] = mine
                    others = [(me + hop) % size for hop in range(1, size)]
                    works = [(other, pg.recv([calls[other]], other, TAG)) for other in reversed(others)]
                    works += [(other, pg.send([mine], other, TAG)) for other in others]
                    for member, work in works:  # noqa: B007 (the error names the member whose work fails)
                        work.wait()
                else:
                    dist.all_gather(list(calls), mine, group=pg)
            except RuntimeError as error:
                late = [other for other in range(size) if one_by_one and not calls[other].any()]
                closed = [member] if member >= 0 else []
                raise_lost(error, message_in(call.text).partition("\n")[2], pg, began, late, closed, SAME_LINES)
            if not bool((calls[:, :DIGEST] == mine[:DIGEST]).all()):
                messages = [message_in(bytes(each[DIGEST:])) for each in calls.tolist()]
                raise different(self.axes, dist.get_process_group_ranks(pg), messages)


_meetings: "WeakKeyDictionary[Any, Meeting | MeetingByMessages]" = WeakKeyDictionary()  # by process group


def hold_meeting(made: Meeting | MeetingByMessages, pg) -> None:
    """Register the meeting that compares calls on a process group; `meeting` finds it."""
    _meetings[pg] = made


def meeting(pg) -> Any:
    """Return the meeting for calls on a process group, whichever mesh made it; None if they are not compared."""
    return None if pg is None else _meetings.get(pg)


def agree(group: Group, call: str, x: Tensor | None = None) -> None:
    """Raise a ShardingError on every rank of the group unless all make the same call, on x of one shape and dtype."""
    if not torch.compiler.is_compiling():
        meeting(group.pg).meet(Intent.of(call) if x is None else intent_on(call, x.shape, x.dtype, ""))


@lru_cache(maxsize=4096)
def intent_on(call: str, shape: torch.Size, dtype: torch.dtype, how: str) -> Intent:
    """Return the Intent of a call on a tensor of this shape and dtype."""
    return Intent.of(f"{call} of {tuple(shape)} {str(dtype).removeprefix('torch.')}", how)


# The errors of a failed meeting: who calls what, who waits for whom, the rule and the fix


def made_alone(rank: int, mesh: str) -> TimeoutError:
    """Return the error for a mesh that only some ranks make."""
    return TimeoutError(
        f"Timed out: {mesh}: rank {rank} makes this mesh, and not all others do\n  rule: {MESHES}\n"
        f"  fix: make it outside of what some ranks run alone; ranks=... gives a mesh of some of them"
    )


def not_met(why: str, waits: Sequence[tuple[int, str | None, Sequence[int]]], timeout: float) -> Exception:
    """Return the error for a meeting that was not or will never be held.

    `waits` has for each rank involved its number, its call or None, and the ranks that it waits for.
    """
    lines = "".join(f"  {_waits(*each, why)}\n" for each in waits) + f"  rule: {SAME_LINES}"
    if why == LATE:
        return TimeoutError(
            f"Timed out: not all ranks have come within {timeout:g} s\n{lines}\n"
            f"  fix: find out what the other ranks are doing; if it may take so long, pass a longer timeout"
        )
    what = "the ranks wait for each other, each in another call" if why == CIRCLE else "a rank has ended"
    return (ShardingError if why == CIRCLE else RankEnded)(f"{what}\n{lines}")


def different(axes: Sequence[str], ranks: Sequence[int], messages: Sequence[str]) -> ShardingError:
    """Return the error for a meeting whose members make different calls."""
    return ShardingError(f"the ranks along {', '.join(axes)} do not make the same call\n{_by_call(ranks, messages)}")


def _waits(rank: int, call: str | None, missing: Sequence[int], why: str) -> str:
    if call is None:
        absent = "has ended" if why == ENDED else "has not come, and waits in no other call on this mesh"
        return f"rank {rank}: {absent}"
    who = f"ranks {[*missing]}" if len(missing) > 1 else f"rank {missing[0]}" if missing else "nobody any more"
    return f"rank {rank}: {_shown(call, False)}, waits for {who}"


def _shown(message: str, with_how: bool) -> str:
    how, _, text = message.partition("\n")
    return f"{text}, {how}" if how and with_how else text


def _by_call(ranks: Sequence[int], messages: Sequence[str]) -> str:
    """Return a text that says which ranks make which call, and how each is run if only that differs."""
    with_how, callers = len({_shown(each, False) for each in messages}) == 1, {}
    for rank, each in zip(ranks, messages, strict=True):
        callers.setdefault(_shown(each, with_how), []).append(rank)
    lines = ""
    for call, who in callers.items():
        lines += f"  {f'ranks {who}' if len(who) > 1 else f'rank {who[0]}'}: {call}\n"
    return f"{lines}  rule: {SAME_LINES}" + (", and differentiate it alike" if with_how else "")
