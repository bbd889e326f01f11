"""The engine: the scheduler's actions carried out by a model (Part 7, "Designing an Effective Inference Engine").

`PagedModel` is a model with its pages, one pool a worker: the one that serves, or a draft beside it. `Engine` is what
`simulate.drive` asks for times and tokens: it computes a Run on the pages that the scheduler says, and measures it. The
clock of a trace advances by what was measured, so that arrivals in between are met without waiting for
them, and two workers run beside each other in that clock though they share this machine.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from scaling.collectives import unshard
from scaling.configs import Config
from scaling.serve import scheduler
from scaling.serve.cache import init_cache, part_of, untouched
from scaling.serve.drafts import advance, drafting
from scaling.serve.requests import check_known_ids
from scaling.serve.sampling import Draw
from scaling.serve.simulate import Simulated, drive
from scaling.serve.states import Move, Options, Request, Run, Work
from scaling.serve.step import run_rows
from scaling.serve.types import ONE, row_groups
from scaling.spec import Spec


class PagedModel:
    """Holds the params, this rank's, and the pages of its group."""

    def __init__(self, params: dict, config: Config, options: Options, mesh=None, dtype=None, form: str = "heads"):
        self.params, self.config, self.page, self.mesh, self.form = params, config, options.page, mesh, form
        self.device, self.groups = params["norm"].device, options.groups
        self.group = part_of(ONE if mesh is None else mesh, form).group
        self.pools = {
            worker: init_cache(
                config, self.groups, pool.total * pool.size, mesh=mesh, dtype=dtype, page=pool.size, form=form
            )
            for worker, (pool, *_) in scheduler.initial(options).pools.items()
        }

    def logits(self, worker: str, works: Sequence[Work], every: bool = False) -> Tensor:
        """As `drafts.CachedModel`: all tokens are written to their pages."""
        rows, places = self._rows(works)
        M = max(len(w.pages) for w in works)
        pages = torch.tensor([[*w.pages, *[0] * (M - len(w.pages))] for w in rows], device=self.device)
        tokens, starts = [w.tokens for w in rows], [w.start for w in rows]
        logits, cache = run_rows(
            self.params, tokens, starts, self.pools[worker] | {"pages": pages}, self.config, self.mesh,
            every=every, form=self.form,
        )  # fmt: skip
        self.pools[worker] = self.pools[worker] | {name: cache[name] for name in ("KV", "scale") if name in cache}
        return logits if self.groups == 1 else logits[places]

    def _rows(self, works: Sequence[Work]) -> tuple[list[Work], list[int]]:
        """(the rows of a batch, group after group, each filled up to as many rows by works of no tokens; which of them
        each work is)."""
        of = [[i for i, work in enumerate(works) if work.group == group] for group in range(self.groups)]
        height = max(map(len, of))
        rows, places = [Work(-1, 0, (), (), False)] * (height * self.groups), [0] * len(works)
        for group, some in enumerate(of):
            for n, i in enumerate(some, group * height):
                rows[n], places[i] = works[i], n
        return rows, places

    def move(self, move: Move) -> None:
        """The pages of a prompt, from the pool of the worker that prefills to the other's; on its group's ranks."""
        if move.group != self.group:
            return
        count = -(-move.tokens // self.page)
        source, target = (torch.tensor(pages[:count], device=self.device) for pages in (move.source, move.target))
        there, here = self.pools["prefill"], self.pools["decode"]
        if untouched(here):
            here["KV"] = torch.zeros(here["KV"].shape, dtype=there["KV"].dtype, device=self.device)
        for name in ("KV", "scale"):
            if name in there:
                here[name][:, :, target] = there[name][:, :, source]


class Engine:
    """execute(Run or Move) -> (seconds, {id: tokens}): holds the params and each worker's pages.

    `draws`: of the requests that are not greedy, by id. `draft`: (config, params) of a smaller model with the same
    vocabulary, or "ngram": what makes the proposals that `options` asks for; no token depends on it (`drafts`).
    `form`: of decoding, one that has pages; where it splits rows, over E or Z, `options.groups` says in how many.
    `logits(id, logits[V])` is called for each token that is given. `clock`: seconds, of the wall or of the
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
        form: str = "heads",
        clock: Callable[[], float] = time.perf_counter,
        logits: Callable[[int, Tensor], object] | None = None,
    ):
        if (groups := row_groups(form, ONE if mesh is None else mesh)) != options.groups:
            raise ValueError(
                f'{mesh}: the form "{form}" splits requests among {groups} groups of ranks, options.groups is '
                f"{options.groups}\n  fix: Options(..., groups={groups}), with so many pages in each"
            )
        if (draft is None) != (options.proposals == 0):
            raise ValueError(
                f"proposals={options.proposals} and draft={draft!r:.20}: one makes what the other asks for\n"
                "  fix: give both, or neither"
            )
        self.mesh, self.logits, self.clock = mesh, logits, clock
        self.draws = {} if draws is None else draws
        self.models: list[PagedModel] = []  # and of a draft that is a model, its own

        def hold(params: dict, config: Config) -> PagedModel:
            self.models.append(PagedModel(params, config, options, mesh, dtype, form))
            return self.models[-1]

        self.model, self.draft = hold(params, config), drafting(draft, config, hold)

    def __call__(self, action: Run | Move) -> tuple[float, dict[int, tuple[int, ...]]]:
        start = self.clock()
        tokens = self._run(action) if isinstance(action, Run) else {}
        if isinstance(action, Move):
            for model in self.models:
                model.move(action)
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

    def _run(self, run: Run) -> dict[int, tuple[int, ...]]:
        given: dict[int, tuple[int, ...]] = {}
        for one in (True, False):  # those of one token apart, so that they are not padded to a prompt's length
            if not (works := [w for w in run.works if (len(w.tokens) == 1) == one]):
                continue
            for id, tokens, logits in advance(self.model, self.draft, run.worker, works, self.draws):
                given[id] = tokens
                if self.logits is not None:
                    for its in logits:
                        self.logits(id, its)
        return given


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
        check_known_ids(f"request {request.id}", request.prompt, config.V)
    execute = Engine(params, config, options, draws, **engine)
    return drive(arrivals, options, execute, cancel=list(cancel), on_token=on_token)
