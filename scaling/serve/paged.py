"""A model with its pages, one pool a worker: the model that serves, and a draft beside it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from scaling.configs import Config
from scaling.serve import scheduler
from scaling.serve.cache import init_cache, untouched
from scaling.serve.states import Move, Options, Work
from scaling.serve.step import run_rows


class PagedModel:
    """Holds the params, this rank's, and the pages."""

    def __init__(self, params: dict, config: Config, options: Options, mesh=None, dtype=None):
        self.params, self.config, self.page, self.mesh = params, config, options.page, mesh
        self.device = params["norm"].device
        self.pools = {
            worker: init_cache(config, 1, pool.total * pool.size, mesh=mesh, dtype=dtype, page=pool.size)
            for worker, pool in scheduler.initial(options).pools.items()
        }

    def logits(self, worker: str, works: Sequence[Work], every: bool = False) -> Tensor:
        """As `drafts.CachedModel`: all tokens are written to their pages."""
        M, starts = max(len(w.pages) for w in works), [w.start for w in works]
        pages = torch.tensor([[*w.pages, *[0] * (M - len(w.pages))] for w in works], device=self.device)
        cache, rows = self.pools[worker] | {"pages": pages}, [w.tokens for w in works]
        logits, cache = run_rows(self.params, rows, starts, cache, self.config, self.mesh, every=every)
        self.pools[worker] = self.pools[worker] | {name: cache[name] for name in ("KV", "scale") if name in cache}
        return logits

    def move(self, move: Move) -> None:
        """The pages of a prompt, from the pool of the worker that prefills to the other's."""
        count = -(-move.tokens // self.page)
        source, target = (torch.tensor(pages[:count], device=self.device) for pages in (move.source, move.target))
        there, here = self.pools["prefill"], self.pools["decode"]
        if untouched(here):
            here["KV"] = torch.zeros(here["KV"].shape, dtype=there["KV"].dtype, device=self.device)
        for name in ("KV", "scale"):
            if name in there:
                here[name][:, :, target] = there[name][:, :, source]
