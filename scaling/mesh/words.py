"""What ranks are told whose meeting failed: who calls what, who waits for whom, the rule and the fix."""

from collections.abc import Sequence

from scaling.spec import ShardingError

CIRCLE, ENDED, LATE = "wait for each other", "has ended", "has not come in time"
RULE = "all ranks of a group run the same lines in the same order, on shards of one shape and dtype"
MESHES = "a mesh is made by all ranks alike"


def made_alone(rank: int, mesh: str) -> TimeoutError:
    return TimeoutError(
        f"Timed out: {mesh}: rank {rank} makes this mesh, and not all others do\n  rule: {MESHES}\n"
        f"  fix: make it outside of what some ranks run alone; ranks=... gives a mesh of some of them"
    )


def not_met(why: str, waits: Sequence[tuple[int, str | None, Sequence[int]]], timeout: float) -> Exception:
    """Why a meeting was not held, or never will be; of each rank that has to do with it its number, its call or None,
    and the ranks that it waits for."""
    lines = "".join(f"  {_waits(*each, why)}\n" for each in waits) + f"  rule: {RULE}"
    if why == LATE:
        return TimeoutError(
            f"Timed out: not all ranks have come within {timeout:g} s\n{lines}\n"
            f"  fix: find out what the other ranks are doing; if it may take so long, pass a longer timeout"
        )
    what = "the ranks wait for each other, each in another call" if why == CIRCLE else "a rank has ended"
    return ShardingError(f"{what}\n{lines}")


def different(axes: Sequence[str], ranks: Sequence[int], said: Sequence[str]) -> ShardingError:
    return ShardingError(f"the ranks along {', '.join(axes)} do not make the same call\n{_by_call(ranks, said)}")


def _waits(rank: int, call: str | None, missing: Sequence[int], why: str) -> str:
    if call is None:
        absent = "has ended" if why == ENDED else "has not come, and waits in no other call on this mesh"
        return f"rank {rank}: {absent}"
    who = f"ranks {[*missing]}" if len(missing) > 1 else f"rank {missing[0]}" if missing else "nobody any more"
    return f"rank {rank}: {_shown(call, False)}, waits for {who}"


def _shown(said: str, with_how: bool) -> str:
    how, _, text = said.partition("\n")
    return f"{text}, {how}" if how and with_how else text


def _by_call(ranks: Sequence[int], said: Sequence[str]) -> str:
    """Who makes which call; and how, where that is what they differ in."""
    with_how, callers = len({_shown(each, False) for each in said}) == 1, {}
    for rank, each in zip(ranks, said, strict=True):
        callers.setdefault(_shown(each, with_how), []).append(rank)
    lines = ""
    for call, who in callers.items():
        lines += f"  {f'ranks {who}' if len(who) > 1 else f'rank {who[0]}'}: {call}\n"
    return f"{lines}  rule: {RULE}" + (", and differentiate it alike" if with_how else "")
