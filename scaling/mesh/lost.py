"""Say which rank is missing when a call fails because another rank, its host or the network to it is lost.

A transport's own words, such as gloo's "Timed out waiting 120000ms for recv operation to complete", name neither the
line nor the rank. So each process group is registered with its members' ranks and hosts, and whoever waits for a
message lets `raise_lost` say which line waited for which rank, and for how long.
"""

import contextlib
import re
import runpy
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, NoReturn
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from scaling.common.torch_private import process_group
from scaling.mesh.page import SharedPage
from scaling.spec import ShardingError

OURS = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))  # frames of these folders are not the user's
AROUND = contextlib.__file__, runpy.__file__, "<"
REAP = 0.5  # seconds until a process whose connections are closed is seen to have ended
# words of the transports for a closed connection:
CLOSED = ("closed by peer", "reset by peer", "Broken pipe", "error [", "remote process", "NCCL error")
ALL_TAKE_PART = "a collective ends when all ranks of its group have taken part in it"


class RankEnded(ShardingError):
    """A rank for which this one would have waited has ended."""


class Members(NamedTuple):
    """The members of a process group, in its order.

    `ranks` are their ranks in the run, `hosts` their hosts, and `checked` says whether they meet before each call.
    `places` are their rows in the `page` of shared memory, if they share one.
    """

    ranks: Sequence[int]
    hosts: Sequence[str]
    checked: bool = False
    places: Sequence[int] = ()
    page: SharedPage | None = None

    def ended(self) -> list[int]:
        """Return the members whose processes are known to have ended."""
        end = time.monotonic() + REAP
        while self.page is not None:
            found = [member for member, place in enumerate(self.places) if self.page.has_ended(place)]
            if found or time.monotonic() > end:
                return found
            time.sleep(0.02)
        return []

    def named(self, members: Sequence[int]) -> str:
        """Return the names of some members: "rank 1", or "ranks 2, 3 on node-b" if not all are on one host."""
        by_host: dict[str, list[str]] = {}
        for member in members:
            by_host.setdefault(self.hosts[member], []).append(str(self.ranks[member]))
        several = len({*self.hosts}) > 1
        return " and ".join(
            f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}" + (f" on {host}" if several else "")
            for host, ranks in by_host.items()
        )


_members: "WeakKeyDictionary[Any, Members]" = WeakKeyDictionary()  # by process group


def hold_members(pg, members: Members) -> None:
    """Register the members of a process group."""
    _members[pg] = members


def raise_lost(
    error: RuntimeError,
    call: object,
    pg: Any,
    began: float,
    late: Sequence[int] = (),
    closed: Sequence[int] = (),
    rule: str = ALL_TAKE_PART,
) -> NoReturn:
    """Raise, instead of a transport's error, one that names the call, the ranks it waited for, and for how long.

    Args:
        error: the error that is being handled; an error of any other kind is raised unchanged.
        call: the typed line, or the name of the call.
        pg: the process group, or its name.
        began: when the wait began, in seconds of time.monotonic().
        late: the members that had not answered, if that is known.
        closed: the members whose connection was closed, if that is known.
        rule: the rule that the ranks have broken.

    Raises:
        TimeoutError: no answer came in time.
        RankEnded: a connection was closed.
    """
    waited = time.monotonic() - began
    words = re.sub(r"^\[[^\]]*\] ", "", str(error)).partition(". This is typically")[0].strip().partition("\n")[0]
    in_time = not ("timed out" in words.lower() or "timeout" in words)
    if in_time and not any(each in words for each in CLOSED):
        raise error
    who, call = _who(pg, closed if in_time else late, words, in_time), f"{call}{_asked_at(error)}"
    if not in_time:
        fix = f"find out what {who} does instead, or whether its host is lost"
        raise TimeoutError(
            f"Timed out: {call}\n  no answer from {who} within {waited:.1f} s ({words})\n"
            f"  rule: {rule}\n  fix: {fix}; if it may take so long, pass a longer timeout"
        ) from None
    raise RankEnded(
        f"a rank has ended, or its host is lost: {call}\n  lost {who} after {waited:.1f} s ({words})\n"
        f"  rule: {rule}\n  fix: look at the output of {who} first, then at its host and the network"
    ) from None


@contextlib.contextmanager
def naming(call: object, pg: Any, waits_for: Sequence[int] = (), rule: str = ALL_TAKE_PART) -> Iterator[None]:
    """Let `raise_lost` explain any failure of a wait for other ranks in this context."""
    began = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        raise_lost(error, call, pg, began, waits_for, waits_for, rule)


def _who(pg: Any, known: Sequence[int], words: str, has_ended: bool) -> str:
    """Return the names of the members that are known to be missing, or of those among which one is missing.

    If the call was checked, all members have come to it, so the members on this host wait for another host just as this
    rank does. If a connection was closed, the transport's words hold the address.
    """
    try:
        pg = process_group(pg) if isinstance(pg, str) else pg
        me, ranks = dist.get_rank(pg), dist.get_process_group_ranks(pg)
    except (RuntimeError, ValueError, KeyError):  # the group no longer exists
        return "another rank"
    members = (pg is not None and _members.get(pg)) or Members(ranks, [""] * len(ranks))
    known = (members.ended() if has_ended else []) or known
    others = [member for member in range(len(ranks)) if member != me]
    this_host, address = members.hosts[me], re.search(r"\[([\w.:]+)\]:\d+", words)
    if has_ended and address:
        others = [member for member in others if f"({address[1]})" in members.hosts[member]] or others
    elif members.checked:
        others = [member for member in others if members.hosts[member] != this_host] or others
    return members.named(known or others) if known or len(others) == 1 else f"one of {members.named(others)}"


def own_frames(error: BaseException) -> list[tuple[Any, int]]:
    """Return the frames and lines of an error's traceback that are in the user's code, the innermost last."""
    return [place for place in traceback.walk_tb(error.__traceback__) if _is_own(place[0])]


def _is_own(frame: Any) -> bool:
    """Return whether a frame runs the user's code."""
    return not frame.f_code.co_filename.startswith((*OURS, *AROUND))


def with_own_frames(error: Exception) -> Exception:
    """Return the error with a traceback that shows only the user's lines."""
    shown = None
    for frame, line in reversed(own_frames(error)):
        shown = TracebackType(shown, frame, frame.f_lasti, line)
    return error.with_traceback(shown)


def _asked_at(error: BaseException) -> str:
    """Return the user's line that made the failing call, as ", at FILE:LINE"; "" if only the library is involved."""
    around = (place for place in traceback.walk_stack(None) if _is_own(place[0]))
    frame, line = next(iter(own_frames(error)[::-1]), None) or next(around, (None, 0))
    return "" if frame is None else f", at {frame.f_code.co_filename}:{line}"
