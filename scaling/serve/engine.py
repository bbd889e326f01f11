"""The engine: a model that carries out the scheduler's actions (Part 7, "Designing an Effective Inference Engine").

`simulate.drive` asks an `Engine` for times and tokens. For each Run it computes on the pages that the scheduler chose,
and measures the time. The clock of a trace advances by the measured time, so arrivals need not be waited for, and two
workers overlap in that clock although they share this machine.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from scaling.configs import Config
from scaling.serve.cache import share_of
from scaling.serve.draft import Draft, NgramIndex, by_model, by_ngrams, check_draft
from scaling.serve.fixed import PagedModel, copy_to_device
from scaling.serve.requests import Request, check_known_ids
from scaling.serve.sampling import sample
from scaling.serve.simulate import Simulated, drive
from scaling.serve.states import DECODE, PREFILL, Action, Done, Finish, Move, Moved, Options, Run, Work
from scaling.serve.text import TextStream
from scaling.serve.types import ONE
from scaling.train.guards import gather_over_ranks


class StepResult(NamedTuple):
    """The tokens and logits that a request gets in a step.

    Attributes:
        tokens: Its new tokens, up to one that ends it.
        logits: The logits[n, V] that the tokens were drawn from.
        texts: If it has stop texts, the text that each token makes certain.
        stopped: Whether a stop text has ended it.
        failed: Whether the logits are not finite, so that the request gets no token and ends.
        read: For a prompt that is scored, the place of the first token of this step, and the logits[n, V] after each of
            its tokens.
        spoiled: The position from which the cache has keys and values that are not finite, of a request that has failed
            or of proposals that were not accepted; None if all are finite.
    """

    tokens: tuple[int, ...]
    logits: Tensor
    texts: tuple[str, ...] = ()
    stopped: bool = False
    failed: bool = False
    read: tuple[int, Tensor] | None = None
    spoiled: int | None = None


class StartedStep(NamedTuple):
    """A worker's decode step that was started before the tokens of the step before were read.

    Attributes:
        works: Its works, whose tokens only the device knows.
        logits: The logits[B, V] after them, which the device may still be computing; None without works.
    """

    works: list[Work]
    logits: Tensor | None


def advance(model: PagedModel, draft: Draft | None, worker: str, works: Sequence[Work]) -> dict[int, StepResult]:
    """Compute the works, and return the result of each request that samples or whose prompt is scored.

    A request that samples gets the proposals that were accepted, and the token after them.
    """
    proposed = draft(worker, works) if draft else {}
    scored = [w.request.scored and w.start < len(w.request.prompt) for w in works]
    every = any(scored) or any(w.proposals for w in works)
    longer = [w._replace(tokens=(*w.tokens, *proposed.get(w.id, ()))) for w in works] if every else works
    logits = model.logits(worker, longer, every)
    results = _drawn(works, proposed, logits, every)
    # A masked proposal whose values are not finite makes the logits before it NaN, so these are computed without it.
    if again := [w._replace(proposals=0) for w in works if w.proposals and results[w.id].failed]:
        for work in again:
            model.clear(worker, work, work.start)
        results |= advance(model, None, worker, again)
    for b, work in enumerate(works):
        result = results.get(work.id, StepResult((), logits[b, :0]))
        if scored[b] and not result.failed:
            results[work.id] = result._replace(read=(work.start, logits[b, : len(work.tokens)]))
    return results


def _drawn(works: Sequence[Work], proposed: dict[int, list[int]], logits: Tensor, every: bool) -> dict[int, StepResult]:
    """Draw tokens for the works, from logits[B, T, V] of every token, or [B, V] of each work's last.

    A work that does not sample is in the result only if it has failed, as the token of a chunk shows that nobody gets.
    """
    at = [(b, w, n) for b, w in enumerate(works) for n in range(1 + w.proposals)]
    if every:
        logits = logits[[b for b, _, _ in at], [len(w.tokens) - 1 + n for _, w, n in at]]
    places = [w.start + len(w.tokens) + n for _, w, n in at]
    drawn, results, first = sample(logits, [w.request.draw for _, w, _ in at], places).read(), {}, 0
    for work in works:
        rows = slice(first, first + 1 + work.proposals)
        result = _accept(work, proposed.get(work.id, ()), drawn[rows], logits[rows])
        if work.sample or result.failed:
            results[work.id] = result
        first += 1 + work.proposals
    return results


def _accept(work: Work, proposed: Sequence[int], drawn: Sequence[int | None], logits: Tensor) -> StepResult:
    """Return a step's tokens: those drawn, up to and including the first that differs from its proposal.

    They end before the first that cannot be drawn; a work without any has failed.
    """
    tokens: tuple[int, ...] = ()
    for proposal, token in itertools.zip_longest(proposed, drawn):
        if token is None:
            break
        tokens += (token,)
        if token != proposal:
            break
    cached = work.start + len(work.tokens) + len(tokens) - 1 if tokens else work.start
    return StepResult(tokens, logits[: len(tokens)], failed=not tokens, spoiled=cached if None in drawn else None)


class Engine:
    """execute(Run or Move) -> (seconds, Done or Moved), with the params and each worker's pages.

    Args:
        params: This rank's params, typed as in `serve.specs`.
        config: The model.
        options: The scheduler's options.
        mesh: The mesh, or None for one device.
        draft: (config, params), in either order, of a smaller model with the same vocabulary, or "ngram". It makes the
            proposals that `options` asks for. Tokens depend on it only by rounding.
        form: The form of decoding, one of `serve.types.FORMS` that has pages, or any if not `paged`. If it splits rows,
            over E or Z, `options.groups` is the number of groups.
        tokenizer: The tokenizer, needed for requests that end before a stop text.
        clock: A function that returns seconds, of the wall or of the processor.
        **model: As in `fixed.PagedModel`: the dtype of the cache, whether it is paged, compile and capture.
    """

    def __init__(
        self,
        params: dict,
        config: Config,
        options: Options,
        *,
        mesh=None,
        draft: Any = None,
        form: str = "heads",
        tokenizer: Any = None,
        clock: Callable[[], float] = time.perf_counter,
        **model,
    ):
        if (groups := share_of(ONE if mesh is None else mesh, form).groups) != options.groups:
            raise ValueError(
                f'{mesh}: the form "{form}" splits requests among {groups} groups of ranks, options.groups is '
                f"{options.groups}\n  fix: Options(..., groups={groups}), with so many pages in each"
            )
        if (draft is None) != (options.proposals == 0):
            raise ValueError(
                f"proposals={options.proposals} and draft={draft!r:.20}: one makes what the other asks for\n"
                "  fix: give both, or neither"
            )
        if draft is not None and any(getattr(each, "linear", None) for each in (config, *draft)):
            raise ValueError(
                f"{config.name}: proposals with linear layers\n  rule: a state takes no rejected proposal back\n"
                "  fix: leave the draft out"
            )
        if config.linear and options.prefix:
            raise ValueError(
                f"{config.name}: shared prefixes with linear layers\n  rule: a page holds keys and values, and not the "
                "state after its last token\n  fix: Options(..., prefix=False)"
            )
        self.mesh, self.clock, self.tokenizer = mesh, clock, tokenizer
        self.streams: dict[int, TextStream] = {}
        make_model = partial(PagedModel, options=options, mesh=mesh, form=form, **model)
        self.texts: dict[int, NgramIndex] = {}
        self.model, self.draft = (
            make_model(params, config),
            partial(by_ngrams, self.texts) if draft == "ngram" else None,
        )
        self.models = [self.model]
        if draft not in (None, "ngram"):
            self.models.append(_small(draft, config, make_model))
            self.draft = partial(by_model, self.models[-1])
        # A GPU starts a step before the last one's tokens are read. A linear layer's state can take back no token.
        self.ahead = self.model.device.type == "cuda" and not draft and not config.linear
        self.started: dict[str, StartedStep] = {}  # each worker's next step

    def __call__(self, action: Run | Move) -> tuple[float, Done | Moved]:
        """Carry out one action, and return its seconds, the same on all ranks, and the event of its end."""
        start = self.clock()
        _, (event,) = self.carry_out([action])
        if self.model.device.type == "cuda" and not self.started:
            torch.cuda.synchronize(self.model.device)
        return self._agreed(self.clock() - start), event

    def _agreed(self, seconds: float) -> float:
        """Return the mean over the mesh, so that all ranks have the same clock and therefore the same steps."""
        if self.mesh is None:
            return seconds
        return float(gather_over_ranks(torch.tensor([seconds], dtype=torch.float64), self.mesh).mean())

    def carry_out(self, actions: Sequence[Action]) -> tuple[dict[int, StepResult], list[Done | Moved]]:
        """Carry out the scheduler's actions, and return each request's tokens and the events at their ends."""
        results: dict[int, StepResult] = {}
        done: list[Done | Moved] = []
        for action in actions:
            if isinstance(action, Move):
                self._clear_started(DECODE, lambda work, pages=action.target: {*self._place(work)[-1]} <= {*pages})
                for model in self.models:
                    model.move(action)
                done.append(Moved(action.id))
            elif isinstance(action, Run):
                results |= (of_action := self._run(action))
                stopped = frozenset(id for id, result in of_action.items() if result.stopped)
                failed = frozenset(id for id, result in of_action.items() if result.failed)
                for model, work in itertools.product(self.models, action.works):
                    if work.id in of_action and (start := of_action[work.id].spoiled) is not None:
                        model.clear(action.worker, work, start)
                done.append(Done(action.worker, {id: each.tokens for id, each in of_action.items()}, stopped, failed))
            elif isinstance(action, Finish):
                self.streams.pop(action.id, None)
                self.texts.pop(action.id, None)
        return results, done

    def _run(self, action: Run) -> dict[int, StepResult]:
        """Return the tokens that each request gets in this step, by its id, in the order of the works."""
        results: dict[int, StepResult] = {}
        kept = {self._place(work) for work in action.works}
        self._clear_started(action.worker, lambda work: self._place(work) not in kept)
        started = self.started.pop(action.worker, StartedStep([], None))
        for one in (True, False):  # works of one token run separately, so none is padded to a prompt's length
            if works := [w for w in action.works if (len(w.tokens) == 1) == one]:
                ahead = one and self.ahead and all(w.sample and not w.request.scored for w in works)
                ahead = ahead and action.worker != PREFILL  # whose requests leave it with their first token
                if ahead:
                    results |= self._decoded(action.worker, works, started)
                else:
                    results |= advance(self.model, self.draft, action.worker, works)
        return {work.id: self._counted(work.request, results[work.id]) for work in action.works if work.id in results}

    def _place(self, work: Work) -> tuple:
        """Return a request, with the position and the page of a decode step's token."""
        page = work.start // self.model.page
        return id(work.request), work.start, work.pages[page : page + 1]

    def _clear_started(self, worker: str, left: Callable[[Work], bool]) -> None:
        """Clear the places that the started step wrote for works that have left them, before others write there."""
        if (started := self.started.get(worker)) is None:
            return
        for work in filter(left, started.works):
            self.model.clear(worker, work, work.start)
        works = [work._replace(pages=()) if left(work) else work for work in started.works]
        self.started[worker] = started._replace(works=works)

    def _decoded(self, worker: str, works: list[Work], started: StartedStep) -> dict[int, StepResult]:
        """Start the next step, and then return a token of each work, so that the device computes while the host reads.

        `started` is the step that the last call has started. Works that it does not have are computed now. A row that
        ends with this token computes one token too many in the next step. Nobody reads that token, and its keys and
        values are cleared before another row gets the page.
        """
        computed, logits = started
        known = {self._place(w) for w in computed}
        if new := [w for w in works if self._place(w) not in known]:
            of_new = self.model.logits(worker, new)
            computed, logits = [*computed, *new], of_new if logits is None else torch.cat([logits, of_new])
        rows = {self._place(w): row for row, w in enumerate(computed)}
        found = [rows[self._place(w)] for w in works]
        logits = cast(Tensor, logits)[copy_to_device(found, self.model.device)]
        drawn = sample(logits, [w.request.draw for w in works], [w.start + 1 for w in works])
        if all(not w.request.stops and w.start + 1 < len(w.pages) * self.model.page for w in works):
            after = [w._replace(start=w.start + 1, tokens=(0,)) for w in works]
            self.started[worker] = StartedStep(after, self.model.logits(worker, after, ids=drawn.ids))
        each = zip(works, drawn.read(), logits.split(1), strict=True)
        return {w.id: _accept(w, (), [token], row) for w, token, row in each}

    def _counted(self, request: Request, result: StepResult) -> StepResult:
        """Return a request's tokens up to the one that ends it, and if it has stop texts their text."""
        tokens, stopped, texts = request.until_stop(result.tokens), False, []
        for token in tokens if request.stops else ():
            texts.append("" if token in request.stop else self.stream_of(request).push(token))
            if stopped := self.stream_of(request).stopped:
                tokens = tokens[: len(texts)]
                break
        return result._replace(tokens=tokens, logits=result.logits[: len(tokens)], texts=tuple(texts), stopped=stopped)

    def stream_of(self, request: Request) -> TextStream:
        """Return the stream of a request's text, one object until its end; the engine pushes if it has stop texts."""
        if request.id not in self.streams:
            self.streams[request.id] = TextStream(self.tokenizer, request.stops, request.prompt)
        return self.streams[request.id]


def _small(draft: Any, target: Config, make: Callable[..., PagedModel]) -> PagedModel:
    """Return a draft's model. Raise ValueError if it is not a model, or does not fit its target."""
    if not isinstance(draft, tuple) or {type(part) for part in draft} != {Config, dict}:
        raise ValueError(f'draft={draft!r:.40} is neither (config, params) nor "ngram"\n  fix: give one of these')
    config, params = draft if isinstance(draft[0], Config) else draft[::-1]
    check_draft(config, target)
    try:
        return make(params, config)
    except ValueError as error:
        what, _, fix = str(error).partition("\n  fix: ")
        raise type(error)(f"the draft {config.name}: {what}\n  fix: {fix}") from None


def serve(
    params: dict,
    config: Config,
    arrivals: Iterable[tuple[float, Request]],
    options: Options,
    *,
    cancel: Iterable[tuple[float, int]] = (),
    **engine,
) -> Simulated:
    """Serve [(seconds, request)] by this model, and return the tokens and times of each.

    Each request gets the tokens that it gets alone, but for rounding (`sampling`). The other arguments are as in
    `simulate.drive` and `Engine`.

    Raises:
        ValueError: A prompt with ids outside the vocabulary, or a stop text without a tokenizer.
    """
    arrivals = list(arrivals)
    for _, request in arrivals:
        check_known_ids(f"request {request.id}", request.prompt, config.V)
        if request.stops and engine.get("tokenizer") is None:
            raise ValueError(f"request {request.id}: a stop text needs a tokenizer\n  fix: serve(..., tokenizer=...)")
    execute = Engine(params, config, options, **engine)
    return drive(arrivals, options, execute, cancel=list(cancel))
