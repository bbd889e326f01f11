"""The engine in real time: requests come while it runs, and each token goes out as soon as it is there.

`loop` is what every rank runs. Rank 0 has the `Desk`, where the threads that talk to clients leave requests; in each
turn it tells the other ranks what is new, so that all call the scheduler with the same events and take the same steps.
"""

import math
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaling.collectives import broadcast
from scaling.configs import Config
from scaling.serve import scheduler
from scaling.serve.engine import Engine, Given
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
    Run,
    SchedulerEvent,
    State,
)
from scaling.serve.text import TextStream
from scaling.serve.web.figures import Figures


class TokenNote(NamedTuple):
    """A token, its log-probability in nats and those of the likeliest, as [(id, logprob)]: before temperature."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class AnswerPiece(NamedTuple):
    """What has become certain of an answer; the last has the reason, the number of all tokens, and how many of the
    prompt's were there by a prefix hit."""

    text: str
    notes: tuple[TokenNote, ...] = ()
    reason: str | None = None
    tokens: int = 0
    cached: int = 0

    def then(self, more: "AnswerPiece") -> "AnswerPiece":
        """Both, the other one after this."""
        text, notes = self.text + more.text, self.notes + more.notes
        return AnswerPiece(text, notes, more.reason, self.tokens + more.tokens, self.cached + more.cached)


Sink = Callable[[AnswerPiece], Any]


class News(NamedTuple):
    """What all ranks are told in a turn. `cut`: how many of the last tokens of a request count, which then ends."""

    asks: tuple[Request, ...] = ()
    gone: tuple[int, ...] = ()
    cut: tuple[tuple[int, int], ...] = ()
    end: bool = False


class _Answer:
    """A request that is under way. `top`: the likeliest tokens that are wanted beside each; -1: no log-probability."""

    def __init__(self, request: Request, stream: TextStream, top: int, sink: Sink):
        self.request, self.stream, self.top, self.sink = request, stream, top, sink
        self.came, self.last, self.count, self.cached = time.monotonic(), math.nan, 0, 0


class Desk:
    """Where rank 0's other threads leave requests, and what sends their tokens out."""

    def __init__(self, options: Options, tokenizer: Any):
        self.tokenizer, self.figures = tokenizer, Figures()
        self.state: State = scheduler.initial(options)
        self.failed = ""
        self._mail: SimpleQueue = SimpleQueue()
        self._answers: dict[int, _Answer] = {}
        self._cut: dict[int, int] = {}

    # from any thread
    def ask(self, request: Request, top: int, sink: Sink) -> None:
        """Serve a request that `scheduler.refusal` lets pass, whose id is its own; `sink` is called with each piece."""
        self._mail.put(_Answer(request, TextStream(self.tokenizer, request.stops), top, sink))
        if self.failed:
            self.fail(self.failed)

    def cancel(self, id: int) -> None:
        """Nobody waits for this request any more: its pages are free at the next step."""
        self._mail.put(id)

    def close(self) -> None:
        """End the loop, whatever is under way."""
        self._mail.put(None)

    # from the thread of the loop
    def news(self, wait: bool) -> News:
        """All that has come since the last call; `wait` until something has."""
        asks, gone, end = [], [], False
        for mail in self._letters(wait):
            if mail is None:
                end = True
            elif isinstance(mail, int):
                if self._answers.pop(mail, None) is not None:
                    self.figures.ended("cancelled")
                gone.append(mail)
            else:
                self._answers[mail.request.id] = mail
                asks.append(mail.request)
        cut, self._cut = tuple(self._cut.items()), {}
        return News(tuple(asks), tuple(gone), cut, end)

    def _letters(self, wait: bool) -> Iterator[Any]:
        if wait:
            yield self._mail.get()
        while True:
            try:
                yield self._mail.get_nowait()
            except Empty:
                return

    def give(self, given: dict[int, Given]) -> None:
        """Send out what a step has given."""
        now = time.monotonic()
        for id, (tokens, logits) in given.items():
            if (answer := self._answers.get(id)) is None:
                continue
            for count, token in enumerate(answer.request.until_stop(tokens), 1):
                self._timed(answer, now)
                if token not in answer.request.stop:
                    text = answer.stream.push(token)
                    notes = (_note(token, logits[count - 1], answer.top),) if answer.top >= 0 else ()
                    if text or notes:
                        answer.sink(AnswerPiece(text, notes))
                if answer.stream.stopped:
                    self._cut[id] = count
                    break

    def _timed(self, answer: _Answer, now: float) -> None:
        answer.count += 1
        self.figures.token(now)
        if answer.count == 1:
            self.figures.ttft.observe(now - answer.came)
        else:
            self.figures.tpot.observe(now - answer.last)
        answer.last = now

    def see(self, state: State, actions: Sequence[Action]) -> None:
        """What the scheduler has decided."""
        self.state = state
        for action in actions:
            if not isinstance(action, Admit | Finish) or (answer := self._answers.get(action.id)) is None:
                continue
            if isinstance(action, Finish):
                self._end(answer, action.reason)
            else:
                answer.cached = max(answer.cached, action.cached)

    def _end(self, answer: _Answer, reason: str) -> None:
        del self._answers[answer.request.id]
        self.figures.ended(reason.partition(":")[0])
        answer.sink(AnswerPiece(answer.stream.rest(), (), reason, answer.count, answer.cached))

    def fail(self, why: str) -> None:
        """The engine has ended: so do all that wait, and who comes later is told the same."""
        self.failed = why
        self.news(wait=False)
        for answer in list(self._answers.values()):
            self._end(answer, f"failed: {why}")


def _note(token: int, logits: Tensor, top: int) -> TokenNote:
    logprobs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    values, ids = logprobs.topk(min(top, len(logprobs)))
    return TokenNote(token, float(logprobs[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))


def loop(params: dict, config: Config, options: Options, mesh=None, desk: Desk | None = None, **engine) -> None:
    """Serve what comes to the desk of rank 0 until that is closed. Params as `Engine` has them, which
    takes the rest too. A refusal of the engine ends it, after all that wait have been told."""
    execute, state, done = Engine(params, config, options, mesh=mesh, **engine), scheduler.initial(options), []
    while not (news := _told(desk.news(wait=not done) if desk else News(), mesh)).end:
        state, actions = scheduler.step(state, _events(news, done))
        if desk:
            desk.see(state, actions)
        done = []
        for action in actions:
            if isinstance(action, Run | Move):
                given = execute.given(action)
                if desk:
                    desk.give(given)
                tokens = {id: own.tokens for id, own in given.items()}
                done.append(Done(action.worker, tokens) if isinstance(action, Run) else Moved(action.id))


def _events(news: News, done: list[Done | Moved]) -> list[SchedulerEvent]:
    """What the scheduler is told: the steps that are over, of whose tokens a stop text may have cut some, first."""
    cut = dict(news.cut)
    events: list[SchedulerEvent] = []
    for event in done:
        if isinstance(event, Done):
            given = {id: some[: cut.get(id)] for id, some in event.tokens.items()}
            event = Done(event.worker, given, frozenset(cut))
        events.append(event)
    return [*events, *map(Arrive, news.asks), *map(Cancel, news.gone)]


def _told(news: News, mesh) -> News:
    """Rank 0's news, on every rank."""
    if mesh is None or mesh.size() == 1:
        return news
    axes = "".join(axis for axis, size in mesh.sizes.items() if size > 1)
    said = b"" if mesh.rank or news == News() else pickle.dumps(news)
    size = broadcast(f"size[I] {{U_{axes}}} -> size[I]", torch.tensor([len(said)], device=mesh.device), mesh)
    if not int(size):
        return News()
    text = torch.frombuffer(bytearray(said or int(size)), dtype=torch.uint8).to(mesh.device)
    return pickle.loads(bytes(broadcast(f"news[N] {{U_{axes}}} -> news[N]", text, mesh).tolist()))
