"""The engine: the scheduler's actions carried out by a model (Part 7, "Designing an Effective Inference Engine").

`Engine` is what `simulate.drive` asks for times and tokens: it computes a Run on the pages that the scheduler says, and
measures it. The clock of a trace advances by what was measured, so that arrivals in between are met without waiting for
them, and two workers run beside each other in that clock though they share this machine.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from scaling.collectives import unshard
from scaling.configs import Config
from scaling.serve import invariant, scheduler
from scaling.serve.cache import init_cache
from scaling.serve.sampling import Sampling, sample
from scaling.serve.simulate import Simulated, drive
from scaling.serve.states import Move, Options, Request, Run, Work
from scaling.serve.step import decode, prefill
from scaling.spec import Spec


class Draw(NamedTuple):
    """How a request's tokens are drawn."""

    how: Sampling = Sampling()
    seed: int = 0


class Engine:
    """execute(Run or Move) -> (seconds, {id: token}): holds the params and each worker's pages.

    `draws`: of the requests that are not greedy, by id. `batch_invariant`: a request's logits are the same bits
    whatever runs beside it (`invariant`). `logits(id, place, logits[V])` is called for each token that is drawn.
    `clock`: seconds, of the wall or of the processor.
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
        batch_invariant: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        logits: Callable[[int, int, Tensor], object] | None = None,
    ):
        if mesh is not None and mesh.sizes.get("Z", 1) > 1:
            raise ValueError("an engine's pages are of one batch\n  fix: an engine for each replica, without Z")
        if batch_invariant and mesh is not None:
            raise ValueError("the batch-invariant mode is of one device\n  fix: mesh=None")
        self.params, self.config, self.options, self.mesh = params, config, options, mesh
        self.draws, self.logits, self.clock = draws or {}, logits, clock
        self.sizes = invariant.agreeing(params) if batch_invariant else None
        self.device = params["norm"].device
        self.pools = {
            worker: init_cache(config, 1, pool.total * pool.size, mesh=mesh, dtype=dtype, page=pool.size)
            for worker, pool in scheduler.initial(options).pools.items()
        }

    def __call__(self, action: Run | Move) -> tuple[float, dict[int, int]]:
        start = self.clock()
        tokens = self._move(action) if isinstance(action, Move) else self._run(action)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self._agreed(self.clock() - start), tokens

    def _agreed(self, seconds: float) -> float:
        """The mean over the mesh: all ranks have the same clock, and so the same steps."""
        if self.mesh is None or self.mesh.size() == 1:
            return seconds
        spec = Spec("t", (), tuple(sorted(self.mesh.sizes)))
        total = unshard(str(spec), torch.tensor(seconds, dtype=torch.float64, device=self.device), self.mesh)
        return float(total) / self.mesh.size()

    def _move(self, move: Move) -> dict[int, int]:
        """The pages of a prompt, from the pool of the worker that prefills to the other's."""
        count = -(-move.tokens // self.options.page)
        source, target = (torch.tensor(pages[:count], device=self.device) for pages in (move.source, move.target))
        there, here = self.pools["prefill"], self.pools["decode"]
        if 0 in here["KV"].stride():  # untouched so far: without memory and dtype
            here["KV"] = torch.zeros(here["KV"].shape, dtype=there["KV"].dtype, device=self.device)
        for name in ("KV", "scale"):
            if name in there:
                here[name][:, :, target] = there[name][:, :, source]
        return {}

    def _run(self, run: Run) -> dict[int, int]:
        if self.sizes is not None:
            groups = [run.works]
        else:  # those of one token apart, so that they are not padded to a prompt's length
            groups = [[w for w in run.works if (len(w.tokens) == 1) == one] for one in (True, False)]
        drawn: dict[int, int] = {}
        for works in groups:
            if works:
                drawn |= self._draw(works, self._logits(run.worker, works))
        return drawn

    def _logits(self, worker: str, works: Iterable[Work]) -> Tensor:
        """Logits[B, V] after each work's last token; its keys and values are written to its pages."""
        works = list(works)
        lengths = torch.tensor([len(w.tokens) for w in works], device=self.device)
        T, M = int(lengths.max()), max(len(w.pages) for w in works)
        tokens = torch.tensor([[*w.tokens, *[0] * (T - len(w.tokens))] for w in works], device=self.device)
        cache = self.pools[worker] | {
            "pages": torch.tensor([[*w.pages, *[0] * (M - len(w.pages))] for w in works], device=self.device),
            "lengths": torch.tensor([w.start for w in works], device=self.device),
        }
        given = {"lengths": lengths, "donate": True}
        if self.sizes is not None:
            logits, cache = invariant.prefill(self.params, tokens, cache, self.config, sizes=self.sizes, **given)
        elif T > 1:
            logits, cache = prefill(self.params, tokens, cache, self.config, self.mesh, **given)
        else:
            logits, cache = decode(self.params, tokens[:, 0], cache, self.config, self.mesh, donate=True)
        self.pools[worker] = self.pools[worker] | {name: cache[name] for name in ("KV", "scale") if name in cache}
        return logits

    def _draw(self, works: Iterable[Work], logits: Tensor) -> dict[int, int]:
        groups: dict[Sampling, list[tuple[int, Work, int]]] = {}
        for row, work in enumerate(works):
            if work.sample:
                how, seed = self.draws.get(work.id, Draw())
                groups.setdefault(how, []).append((row, work, seed))
        drawn = {}
        for how, some in groups.items():
            places = [work.start + len(work.tokens) for _, work, _ in some]
            chosen = logits[[row for row, _, _ in some]]
            ids = sample(chosen, how, [seed for _, _, seed in some], places).tolist()
            for (_, work, _), place, own, id in zip(some, places, chosen, ids, strict=True):
                drawn[work.id] = id
                if self.logits is not None:
                    self.logits(work.id, place, own)
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
            raise ValueError(f"request {request.id}: token {wrong[0]} lies outside the vocabulary, 0..{config.V - 1}")
    execute = Engine(params, config, options, draws, **engine)
    return drive(arrivals, options, execute, cancel=list(cancel), on_token=on_token)
