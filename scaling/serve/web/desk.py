"""The engine in real time: requests arrive while it runs, and each token goes out right after it is computed.

Every rank runs `Turns`. Rank 0 has the `Desk`, where the code that talks to clients leaves requests. In each turn it
sends the new ones to the other ranks, so that all call the scheduler with the same events and take the same steps. A
turn runs in a separate thread; everything at the desk belongs to the thread of asyncio's loop. `Figures` has the
measurements, for Prometheus and for the page.
"""

import asyncio
import math
import pickle
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from torch import Tensor

from scaling.collectives import broadcast
from scaling.configs import Config
from scaling.serve import scheduler
from scaling.serve.engine import Engine, StepResult
from scaling.serve.requests import Request
from scaling.serve.states import Action, Admit, Arrive, Cancel, Finish, Options, State
from scaling.serve.text import TextStream
from scaling.serve.web.words import AnswerPiece, TokenNote

WINDOW = 2.0  # seconds over which tokens a second are counted
FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)  # bounds of the histograms, seconds
LATER = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Figures:
    """The measurements of one server, in its private registry."""

    def __init__(self):
        self.registry = CollectorRegistry()
        own = {"registry": self.registry, "namespace": "scaling"}
        self.asked = Counter("prompt_tokens", "tokens of the prompts that were accepted", **own)
        self.tokens = Counter("generated_tokens", "tokens that were generated", **own)
        self.requests = Counter("requests", "requests that have ended, by reason", ["reason"], **own)
        self.refusals = Counter("refusals", "calls that were refused, by status", ["status"], **own)
        self.ttft = Histogram("time_to_first_token_seconds", "from arrival to first token", buckets=FIRST, **own)
        self.tpot = Histogram("time_per_output_token_seconds", "from one token to the next", buckets=LATER, **own)
        self.gauges = {name: Gauge(name, text, **own) for name, text in GAUGES.items()}
        self._lately: deque[float] = deque()

    def token(self, now: float) -> None:
        """Count a generated token."""
        self.tokens.inc()
        self._lately.append(now)
        while self._lately[0] < now - WINDOW:
            self._lately.popleft()

    def ended(self, reason: str) -> None:
        """Count a request that has ended."""
        self.requests.labels(reason).inc()

    def now(self, state: State) -> dict[str, float]:
        """Return the present value of each gauge, by its name in GAUGES."""
        since = time.monotonic() - WINDOW
        live, full = list(state.live.values()), [pool for pools in state.pools.values() for pool in pools]
        pools = [pool for each in full for pool in (each, each.windowed) if pool]
        return {
            "batch": sum(len(works) for works in state.busy.values()),
            "running": sum(one.where is not None for one in live),
            "waiting": sum(one.where is None for one in live),
            "pages": sum(pool.total for pool in pools),
            "pages_held": sum(pool.held for pool in pools),
            "pages_cached": sum(pool.cached for pool in pools),
            "tokens_per_second": sum(at >= since for at in list(self._lately)) / WINDOW,
        }

    def text(self, state: State) -> bytes:
        """Return all measurements in Prometheus' format."""
        for name, value in self.now(state).items():
            self.gauges[name].set(value)
        return generate_latest(self.registry)


GAUGES = {
    "batch": "requests in the step that runs",
    "running": "requests in a slot",
    "waiting": "requests that wait for a slot or for pages",
    "pages": "pages of the cache, of layers with a window and of the others",
    "pages_held": "pages that requests hold",
    "pages_cached": "pages that nobody holds, kept for prompts that begin alike",
    "tokens_per_second": f"generated tokens a second, over the last {WINDOW:.0f} seconds",
}


Sink = Callable[[AnswerPiece], Any]


class News(NamedTuple):
    """The news of a turn, which all ranks get: new requests, cancelled ones, and whether this is the end."""

    asks: tuple[Request, ...] = ()
    gone: tuple[int, ...] = ()
    end: bool = False


class Turns:
    """The engine turn by turn, equal on every rank; `Engine` takes the same params and options."""

    def __init__(self, params: dict, config: Config, options: Options, mesh=None, **engine):
        self.engine, self.mesh = Engine(params, config, options, mesh=mesh, **engine), mesh
        self.state, self.done = scheduler.initial(options), []

    def __call__(self, news: News) -> tuple[list[Action], dict[int, StepResult]] | None:
        """Take a turn with rank 0's news; return (the scheduler's actions, what requests get), or None at the end."""
        news = _broadcast_news(news, self.mesh)
        if news.end:
            return None
        events = [*self.done, *map(Arrive, news.asks), *map(Cancel, news.gone)]
        self.state, actions = scheduler.step(self.state, events)
        given, self.done = self.engine.carry_out(actions)
        return actions, given


class Ask(NamedTuple):
    """The form in which a request's answer is wanted.

    Attributes:
        top: How many of the likeliest tokens are wanted with each token; -1 for no log-probabilities.
        echo: The text of the prompt, if the answer begins with it.
        silent: Whether only the prompt is wanted: the one token that is computed after it is left out.
    """

    top: int = -1
    echo: str | None = None
    silent: bool = False


class _Answer:
    """The answer of a running request."""

    def __init__(self, request: Request, ask: Ask, stream: TextStream, sink: Sink):
        self.request, self.ask, self.stream, self.sink = request, ask, stream, sink
        self.came, self.last, self.count, self.cached = time.monotonic(), math.nan, 0, 0
        self.prompt = [TokenNote(request.prompt[0])]  # the part that has been scored

    def noted(self, given: StepResult) -> tuple[TokenNote, ...]:
        """Keep the notes of the prompt's tokens that this step has scored; return the new tokens' notes."""
        if given.read is not None and self.ask.top >= 0:
            start, logits = given.read
            known = len(self.prompt) - 1 - start  # above 0 if a preempted request is computed again
            tokens = self.request.prompt[start + 1 + known : start + 1 + len(logits)]
            self.prompt += map(self._note, tokens, logits[known:])
        return tuple(map(self._note, given.tokens, given.logits)) if self.ask.top >= 0 else ()

    def _note(self, token: int, logits: Tensor) -> TokenNote:
        logprobs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        values, ids = logprobs.topk(min(self.ask.top, len(logprobs)))
        return TokenNote(token, float(logprobs[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))


class Desk:
    """The place on rank 0 that takes requests and sends their tokens out."""

    def __init__(self, turns: Turns):
        self.turns, self.figures, self.failed = turns, Figures(), ""
        self.answers: dict[int, _Answer] = {}
        self._asks: list[Request] = []
        self._gone: list[int] = []
        self._ended, self._woken = False, asyncio.Event()

    def ask(self, request: Request, ask: Ask, sink: Sink) -> None:
        """Serve a request that `scheduler.refusal` accepts; `sink` is called with each piece."""
        self.answers[request.id] = _Answer(request, ask, self.turns.engine.stream_of(request), sink)
        self._asks.append(request)
        self._woken.set()

    def cancel(self, id: int) -> None:
        """Cancel a request that nobody waits for; if it is running, its pages are free at the next step."""
        if self.answers.pop(id, None) is not None:
            self.figures.ended("cancelled")
            self._gone.append(id)
            self._woken.set()

    def close(self) -> None:
        """End the loop, even if requests are running."""
        self._ended = True
        self._woken.set()

    async def serve(self) -> None:
        """Take turns until the desk is closed; if the engine ends, end all answers, and refuse later calls."""
        loop = asyncio.get_running_loop()
        try:
            with ThreadPoolExecutor(1) as thread:
                while (turn := await loop.run_in_executor(thread, self._turn, await self._news())) is not None:
                    self._see(*turn)
        except BaseException as error:
            self.failed = f"{type(error).__name__}: {error}"
            for answer in list(self.answers.values()):
                self._end(answer, f"failed: {self.failed}")
            raise

    async def _news(self) -> News:
        """Return everything that has come since the last call; if no request is running, wait for something."""
        if not self.turns.done:
            await self._woken.wait()
        self._woken.clear()
        news = News(tuple(self._asks), tuple(self._gone), self._ended)
        self._asks, self._gone = [], []
        return news

    def _turn(self, news: News) -> tuple[list[Action], dict[int, tuple[StepResult, tuple[TokenNote, ...]]]] | None:
        """Take a turn, in the engine's thread, and compute the log-probabilities that are wanted."""
        if (turn := self.turns(news)) is None:
            return None
        actions, given = turn
        answers = {id: self.answers.get(id) for id in given}
        return actions, {id: (given[id], answer.noted(given[id])) for id, answer in answers.items() if answer}

    def _see(self, actions: Sequence[Action], given: dict[int, tuple[StepResult, tuple[TokenNote, ...]]]) -> None:
        """Send out the results of a turn."""
        for action in actions:
            if not isinstance(action, Admit | Finish) or (answer := self.answers.get(action.id)) is None:
                continue
            if isinstance(action, Finish):
                self._end(answer, action.reason)
            else:
                answer.cached = max(answer.cached, action.cached)
        now = time.monotonic()
        for id, (own, notes) in given.items():
            if (answer := self.answers.get(id)) is None or not own.tokens:
                continue
            if answer.ask.echo is not None and not answer.count:
                answer.sink(AnswerPiece(answer.ask.echo, tuple(answer.prompt) if answer.ask.top >= 0 else ()))
            for i, token in enumerate(own.tokens):
                self._timed(answer, now)
                if token not in answer.request.stop and not answer.ask.silent:
                    text = own.texts[i] if own.texts else answer.stream.push(token)
                    if text or notes:
                        answer.sink(AnswerPiece(text, notes[i : i + 1]))

    def _timed(self, answer: _Answer, now: float) -> None:
        answer.count += 1
        self.figures.token(now)
        if answer.count == 1:
            self.figures.ttft.observe(now - answer.came)
        else:
            self.figures.tpot.observe(now - answer.last)
        answer.last = now

    def _end(self, answer: _Answer, reason: str) -> None:
        del self.answers[answer.request.id]
        self.figures.ended(reason.partition(":")[0])
        count = answer.count
        if answer.ask.silent and reason in ("stop", "length"):
            reason, count = "length", 0
        text = "" if answer.ask.silent else answer.stream.rest()
        answer.sink(AnswerPiece(text, (), reason, count, answer.cached))


def _broadcast_news(news: News, mesh) -> News:
    """Return rank 0's news, on every rank."""
    if mesh is None or mesh.size() == 1:
        return news
    axes = "".join(axis for axis, size in mesh.sizes.items() if size > 1)
    said = b"" if mesh.rank or news == News() else pickle.dumps(news)
    size = broadcast(f"size[I] {{U_{axes}}} -> size[I]", torch.tensor([len(said)], device=mesh.device), mesh)
    if not int(size):
        return News()
    text = torch.frombuffer(bytearray(said or int(size)), dtype=torch.uint8).to(mesh.device)
    return pickle.loads(bytes(broadcast(f"news[N] {{U_{axes}}} -> news[N]", text, mesh).tolist()))
