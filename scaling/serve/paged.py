"""A model with its pages, one pool a worker: the model that serves, and a draft beside it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from scaling.configs import Config
from scaling.serve import scheduler
from scaling.serve.cache import cache_layout, init_cache, untouched
from scaling.serve.states import Move, Options, Work
from scaling.serve.step import run_rows
from scaling.serve.types import ONE


class PagedModel:
    """Holds the params, this rank's, and the pages of its group."""

    def __init__(self, params: dict, config: Config, options: Options, mesh=None, dtype=None, form: str = "heads"):
        self.params, self.config, self.page, self.mesh, self.form = params, config, options.page, mesh, form
        self.device, self.groups = params["norm"].device, options.groups
        self.group = cache_layout(config, ONE if mesh is None else mesh, form, True).group
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
