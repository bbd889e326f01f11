"""A model with its pages, one pool for each worker: the model that serves, or a draft that proposes its tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor

from scaling.configs import Config
from scaling.serve import scheduler
from scaling.serve.cache import init_cache, share_of
from scaling.serve.fixed import Steps
from scaling.serve.requests import Request
from scaling.serve.states import Move, Options, Work
from scaling.serve.step import check_served
from scaling.serve.types import ONE
from scaling.serve.weights import plain_leaf

NO_WORK = Work(Request(-1, (), 0), 0, (), (), False)


class PagedModel:
    """A model that holds this rank's params and its group's pages. If it is not `paged`, a page is a row of a cache."""

    def __init__(
        self,
        params: dict,
        config: Config,
        options: Options,
        mesh=None,
        dtype=None,
        form="heads",
        paged: bool = True,
        **steps,
    ):
        check_served(params, config, ONE if mesh is None else mesh, form)
        self.device, self.page, self.groups, self.paged = plain_leaf(params).device, options.page, options.groups, paged
        self.group = share_of(ONE if mesh is None else mesh, form).group
        self.pools: dict[str, Steps] = {}
        for worker, (pool, *_) in scheduler.initial(options).pools.items():
            rows, length, page = (1, pool.total * pool.size, pool.size) if paged else (pool.total, pool.size, None)
            cache = init_cache(config, self.groups * rows, length, mesh=mesh, dtype=dtype, page=page, form=form)
            self.pools[worker] = Steps(params, config, cache, mesh, form, **steps)

    def logits(self, worker: str, works: Sequence[Work], every: bool = False) -> Tensor:
        """Write all tokens to the cache; return Logits[B, V] after each work's last, or [B, T, V] after `every` one."""
        pool = self.pools[worker]
        height = max(sum(work.group == group for work in works) for group in range(self.groups))
        height = pool.rounded(height) if self.paged else len(pool.cache["lengths"]) // self.groups
        rows = [NO_WORK] * (height * self.groups)  # padding gives every group the same number of rows
        free, places = [group * height for group in range(self.groups)], []
        for work in works:
            places.append(free[work.group] if self.paged else free[work.group] + work.pages[0])
            rows[places[-1]] = work
            free[work.group] += self.paged
        pages = [w.pages for w in rows] if self.paged else ()
        logits = pool([w.tokens for w in rows], [w.start for w in rows], pages, every)
        return logits[: len(works)] if places == [*range(len(works))] else logits[places]

    def move(self, move: Move) -> None:
        """Copy a prompt's pages from the pool of the worker that prefills to the decoder's, on its group's ranks."""
        if move.group != self.group:
            return
        count = -(-move.tokens // self.page)
        source, target = (torch.tensor(pages[:count], device=self.device) for pages in (move.source, move.target))
        there, here = (self.pools[worker].cache for worker in ("prefill", "decode"))
        for name in ("KV", "scale"):
            if name in there:
                here[name][:, :, target] = there[name][:, :, source]
