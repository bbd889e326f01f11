"""The engine: the scheduler's actions carried out by a model (Part 7, "Designing an Effective Inference Engine").

`Engine` is what `simulate.drive` asks for times and tokens: it computes a Run on the pages that the scheduler says, and
measures it. The clock of a trace advances by what was measured, so that arrivals in between are met without waiting for
them, and two workers run beside each other in that clock though they share this machine.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaling.collectives import unshard
from scaling.configs import Config
from scaling.serve.drafts import Draft, NGrams, SmallModel
from scaling.serve.generation import check_draft, draft_model
from scaling.serve.paged import PagedModel
from scaling.serve.sampling import Sampling, sample
from scaling.serve.simulate import Simulated, drive
from scaling.serve.speculative import as_proposed
from scaling.serve.states import Move, Options, Request, Run, Work
from scaling.spec import Spec


class Draw(NamedTuple):
    """How a request's tokens are drawn."""

    how: Sampling = Sampling()
    seed: int = 0


class Engine:
    """execute(Run or Move) -> (seconds, {id: tokens}): holds the params and each worker's pages.

    `draws`: of the requests that are not greedy, by id. `draft`: (config, params) of a smaller model with the same
    vocabulary, or "ngram": what makes the proposals that `options` asks for; no token depends on it (`drafts`).
    `logits(id, place, logits[V])` is called for each token that is given. `clock`: seconds, of the wall or of the
    processor.
    """

    def __init__(
        self,
        params: dict,
        config: Config,
        options: Options,
        draws: Mapping[int, Draw] | None = None,
        *,
        mesh=None,
        dtype: torch.dtype | None = None,
        draft: Any = None,
        clock: Callable[[], float] = time.perf_counter,
        logits: Callable[[int, int, Tensor], object] | None = None,
    ):
        if mesh is not None and mesh.sizes.get("Z", 1) > 1:
            raise ValueError(
                "all pages of an engine belong to one batch, so that Z cannot split them\n"
                "  fix: run one engine for each replica, on a mesh without Z"
            )
        if (draft is None) != (options.proposals == 0):
            raise ValueError(
                f"proposals={options.proposals} and draft={draft!r:.20}: one makes what the other asks for\n"
                "  fix: give both, or neither"
            )
        self.mesh, self.logits, self.clock = mesh, logits, clock
        self.draws = {} if draws is None else draws
        self.model = PagedModel(params, config, options, mesh, dtype)
        self.draft: Draft | None = None if draft is None else NGrams()
        if draft not in (None, "ngram"):
            small, theirs = draft_model(draft)
            check_draft(small, config)
            self.draft = SmallModel(PagedModel(theirs, small, options, mesh, dtype))

    def __call__(self, action: Run | Move) -> tuple[float, dict[int, tuple[int, ...]]]:
        start = self.clock()
        tokens = self._move(action) if isinstance(action, Move) else self._run(action)
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        return self._agreed(self.clock() - start), tokens

    def _agreed(self, seconds: float) -> float:
        """The mean over the mesh: all ranks have the same clock, and so the same steps."""
        if self.mesh is None or self.mesh.size() == 1:
            return seconds
        spec = Spec("t", (), tuple(sorted(self.mesh.sizes)))
        total = unshard(str(spec), torch.tensor(seconds, dtype=torch.float64, device=self.model.device), self.mesh)
        return float(total) / self.mesh.size()

    def _move(self, move: Move) -> dict[int, tuple[int, ...]]:
        for model in (self.model, self.draft):
            if model is not None:
                model.move(move)
        return {}

    def _run(self, run: Run) -> dict[int, tuple[int, ...]]:
        given: dict[int, tuple[int, ...]] = {}
        for one in (True, False):  # those of one token apart, so that they are not padded to a prompt's length
            if works := [w for w in run.works if (len(w.tokens) == 1) == one]:
                given |= self._give(run.worker, works)
        return given

    def _give(self, worker: str, works: list[Work]) -> dict[int, tuple[int, ...]]:
        """The tokens of each work that samples: those of its proposals that are right, and the one after them."""
        proposed = self.draft.propose(worker, works, self._draw) if self.draft else {}
        longer = [w._replace(tokens=(*w.tokens, *proposed.get(w.id, ()))) for w in works]
        every = any(w.proposals for w in works)
        logits = self.model.logits(worker, longer, every)
        logits = logits if every else logits[:, None]
        rows = [(b, n) for b, w in enumerate(works) if w.sample for n in range(1 + w.proposals)]
        if not rows:
            return {}
        chosen = logits[[b for b, _ in rows], [len(works[b].tokens) - 1 + n if every else 0 for b, n in rows]]
        places = [(works[b], works[b].start + len(works[b].tokens) + n) for b, n in rows]
        drawn = iter(zip(self._draw(places, chosen), places, chosen, strict=True))
        given: dict[int, tuple[int, ...]] = {}
        for work in [work for work in works if work.sample]:
            own = [next(drawn) for _ in range(1 + work.proposals)]
            given[work.id] = tuple(as_proposed(proposed.get(work.id, ()), [id for id, _, _ in own]))
            if self.logits is not None:
                for _, (_, place), its in own[: len(given[work.id])]:
                    self.logits(work.id, place, its)
        return given

    def _draw(self, places: Sequence[tuple[Work, int]], logits: Tensor) -> list[int]:
        """A token for each place of a request, from logits[n, V]."""
        groups: dict[Sampling, list[tuple[int, int, int]]] = {}
        for i, (work, place) in enumerate(places):
            how, seed = self.draws.get(work.id, Draw())
            groups.setdefault(how, []).append((i, seed, place))
        drawn = [0] * len(places)
        for how, some in groups.items():
            rows, seeds, at = (list(column) for column in zip(*some, strict=True))
            for i, id in zip(rows, sample(logits[rows], how, seeds, at).tolist(), strict=True):
                drawn[i] = id
        return drawn


def serve(
    params: dict,
    config: Config,
    arrivals: Iterable[tuple[float, Request]],
    options: Options,
    draws: Mapping[int, Draw] | None = None,
    *,
    cancel: Iterable[tuple[float, int]] = (),
    on_token: Callable[[int, int], bool] | None = None,
    **engine,
) -> Simulated:
    """Serve [(seconds, request)] by this model: tokens and times of each. Request i gives what it would give alone.

    The rest as in `simulate.drive` and `Engine`. ValueError for a prompt with ids outside the vocabulary.
    """
    arrivals = list(arrivals)
    for _, request in arrivals:
        if wrong := [t for t in request.prompt if not 0 <= t < config.V]:
            raise ValueError(
                f"request {request.id}: token {wrong[0]} lies outside the vocabulary, 0..{config.V - 1}"
                "\n  fix: encode the prompt by this model's tokenizer"
            )
    execute = Engine(params, config, options, draws, **engine)
    return drive(arrivals, options, execute, cancel=list(cancel), on_token=on_token)
