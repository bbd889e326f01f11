"""Run a trace of requests through the scheduler in time, by discrete events. No torch.

`drive` is the loop of both the engine and the simulator. It takes events in the order of time, calls `scheduler.step`,
and hands its actions to `execute`, which returns each action's duration and result. The engine computes and
measures; the simulator asks a cost model. So their steps are the same, and only the times differ.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, NamedTuple

from scaling.serve import scheduler
from scaling.serve.requests import Request
from scaling.serve.states import (
    Action,
    Admit,
    Arrive,
    Cancel,
    Done,
    Finish,
    Move,
    Moved,
    Options,
    Preempt,
    Run,
    SchedulerEvent,
    State,
    Work,
)


class WorkSpan(NamedTuple):
    """A Run or a Move, and when it ran, in seconds."""

    start: float
    end: float
    action: Run | Move


@dataclass
class RequestTimes:
    """The times of a request: of its arrival, and of each of its tokens."""

    arrival: float
    tokens: tuple[int, ...] = ()
    at: list[float] = field(default_factory=list)
    reason: str = ""
    end: float = math.nan
    cached: int = 0
    preempted: int = 0

    @property
    def ttft(self) -> float:
        """Time to first token, seconds."""
        return self.at[0] - self.arrival if self.at else math.nan

    @property
    def tpot(self) -> float:
        """Mean time per output token after the first, seconds; nan with fewer than two."""
        return (self.at[-1] - self.at[0]) / (len(self.at) - 1) if len(self.at) > 1 else math.nan


@dataclass(frozen=True)
class Simulated:
    """The actions that ran, in the order of their start, and each request's times."""

    spans: tuple[WorkSpan, ...]
    requests: Mapping[int, RequestTimes]

    @property
    def steps(self) -> list[Run | Move]:
        """The actions without their times."""
        return [span.action for span in self.spans]

    @property
    def seconds(self) -> float:
        """Seconds from the beginning to the end of the last action."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def throughput(self) -> float:
        """Output tokens per second, of all requests."""
        return sum(len(times.at) for times in self.requests.values()) / self.seconds if self.spans else 0.0

    def percentile(self, what: str, percent: float) -> float:
        """Return a percentile of "ttft" or "tpot": the least value that `percent` of the requests do not exceed."""
        values = sorted(v for v in (getattr(t, what) for t in self.requests.values()) if not math.isnan(v))
        return values[max(0, math.ceil(len(values) * percent / 100) - 1)] if values else math.nan


Execute = Callable[[Run | Move], tuple[float, Done | Moved]]
TimedRequest = tuple[float, Request]


def drive(
    arrivals: Iterable[TimedRequest],
    options: Options,
    execute: Execute,
    *,
    cancel: Sequence[tuple[float, int]] = (),
    watch: Callable[[State, list[Action]], Any] | None = None,
) -> Simulated:
    """Serve [(seconds, request)] until all are finished.

    Events at the same time belong to one step.

    Args:
        arrivals: The requests with their times.
        options: The scheduler's options.
        execute: The function from a Run or Move to (seconds, the event of its end).
        cancel: Pairs (seconds, id) of requests to cancel.
        watch: A function that is called with every state and its actions.

    Raises:
        ValueError: A time that is not finite, or an id of two requests.
    """
    for t, *_ in [*(arrivals := list(arrivals)), *cancel]:
        _finite("a time", t)
    times: dict[int, RequestTimes] = {}
    for t, request in arrivals:
        if request.id in times:
            raise ValueError(f"request {request.id} has been given already\n  fix: give each request an id of its own")
        times[request.id] = RequestTimes(t)
    number = itertools.count()
    queue: list[tuple[float, int, SchedulerEvent]] = [(t, next(number), Arrive(r)) for t, r in arrivals]
    queue += [(t, next(number), Cancel(id)) for t, id in cancel]
    heapq.heapify(queue)

    state, spans = scheduler.initial(options), []
    while queue:
        now, events = queue[0][0], []
        while queue and queue[0][0] == now:
            events.append(heapq.heappop(queue)[2])
        for id, tokens in (each for event in events if isinstance(event, Done) for each in event.tokens.items()):
            if not state.live[id].cancelled:
                times[id].at += [now] * len(state.live[id].request.until_stop(tokens))
        state, actions = scheduler.step(state, events)
        if watch is not None:
            watch(state, actions)
        for action in actions:
            if isinstance(action, Run | Move):
                seconds, event = execute(action)
                _finite("seconds of a step", seconds)
                spans.append(WorkSpan(now, now + seconds, action))
                heapq.heappush(queue, (now + seconds, next(number), event))
            elif isinstance(action, Admit):
                times[action.id].cached = max(times[action.id].cached, action.cached)
            elif isinstance(action, Preempt):
                times[action.id].preempted += 1
            elif isinstance(action, Finish):
                done = times[action.id]
                done.tokens, done.end, done.reason = action.tokens, now, action.reason
    return Simulated(tuple(spans), times)


def _finite(what: str, seconds: Any) -> None:
    """Raise a ValueError unless it is a finite time; after NaN the events would never end."""
    if not isinstance(seconds, Real) or not math.isfinite(seconds):
        raise ValueError(f"{what} is {seconds!r}: must be a finite number\n  fix: give seconds")


ActionTime = Callable[[Run | Move], float]


def simulate(
    arrivals: Iterable[TimedRequest],
    options: Options,
    cost: ActionTime,
    *,
    cancel: Sequence[tuple[float, int]] = (),
    token: Callable[[int, int], int] | None = None,
    kept: Callable[[int, int], bool] | None = None,
) -> Simulated:
    """Return the same steps as the engine's, with cost(action) seconds for each; nothing is computed.

    token(id, position) is the token that a request gives at a position, where that matters: for stop tokens, and for
    prefix hits on completions. By default it is a number that no prompt has. kept(id, position) says whether a draft's
    proposal for that position is accepted; by default it never is.
    """
    give = token or (lambda id, position: -1 - id)

    def given(work: Work) -> tuple[int, ...]:
        first = work.start + len(work.tokens)
        places = range(first, first + work.proposals)
        count = next((n for n, place in enumerate(places) if kept is None or not kept(work.id, place)), len(places))
        return tuple(give(work.id, first + n) for n in range(count + 1))

    def execute(action: Run | Move) -> tuple[float, Done | Moved]:
        if isinstance(action, Move):
            return cost(action), Moved(action.id)
        return cost(action), Done(action.worker, {work.id: given(work) for work in action.works if work.sample})

    return drive(arrivals, options, execute, cancel=cancel)
