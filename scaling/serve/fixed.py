"""Steps of fixed shapes over one cache: one packed upload, and no value that is read on the host.

A step of the engine or of `generate` gives each row some tokens, which follow the tokens in its cache. Ids, counts,
starts and pages go to the device as one array of whole numbers. From it `step.logits_of` computes there where keys and
values belong. If steps are compiled by torch.compile or captured as CUDA graphs (`capture`), their shapes are few:
rows, tokens and pages are rounded up to powers of two, and attention reads a bucket of places under a mask. Each shape
is compiled or captured when it is first needed. A prompt, with more than FEW tokens a row, keeps its exact shape.
"""

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from scaling.configs import Config
from scaling.models.rope import table_kinds
from scaling.serve.cache import capacity, share_of, writable
from scaling.serve.capture import Captured, why_eager, why_not
from scaling.serve.requests import check_served_text
from scaling.serve.slots import Extent
from scaling.serve.step import check_room, logits_of, warn_beyond
from scaling.serve.types import ONE
from scaling.serve.weights import plain_leaf

FEW = 8  # tokens of a row up to which a step has a fixed shape
LEAST = 16  # places of the smallest bucket


class Steps:
    """The steps of a model over one cache, to which they write. The params must have been checked.

    Attributes:
        cache: The cache. Each step brings its own lengths and, in pages, its own table.
        why: Why no step is captured, or None.
        fixed: Whether steps of few tokens are compiled or captured, so that their shapes are rounded up.
    """

    def __init__(
        self,
        params: dict,
        config: Config,
        cache: dict,
        mesh=None,
        form: str = "heads",
        *,
        compile: Any = None,
        capture: bool = True,
    ):
        """Hold the model and the cache, which is donated.

        Args:
            params: This rank's params, typed as in `serve.specs`.
            config: The model.
            cache: A cache of `init_cache`.
            mesh: The mesh, or None for one device.
            form: How params and cache are sharded, one of `serve.types.FORMS`.
            compile: A backend of torch.compile, such as "inductor"; None compiles nothing.
            capture: Whether to capture steps as CUDA graphs where that is possible.
        """
        self.params, self.config, self.mesh, self.form = params, config, ONE if mesh is None else mesh, form
        self.device, self.cache = plain_leaf(params).device, writable(cache, plain_leaf(params), donate=True)
        self.page = cache["KV"].shape[3] if "pages" in cache else 0
        self.room = capacity(cache, share_of(self.mesh, form).shards)
        self.why = why_not(config, self.mesh, self.device) if capture else "it was not asked for"
        self.compile = None if why_eager(config) else compile
        self.fixed = self.compile is not None or self.why is None
        self.pool = None if self.why else torch.cuda.graph_pool_handle()
        self.mesh.without("C")  # this view of the mesh is kept: a compiler could not make it
        self.made: dict[tuple, Callable[[Tensor], Tensor]] = {}
        self.places: dict[int, dict] = {}  # the tables of cos and sin of each bucket

    def rounded(self, n: int) -> int:
        """Return to how many rows, tokens or pages n are padded: the next power of two if shapes are fixed."""
        return 1 << max(0, n - 1).bit_length() if n and self.fixed else n

    @torch.no_grad()
    def __call__(
        self,
        rows: Sequence[Sequence[int]],
        starts: Sequence[int],
        pages: Sequence[Sequence[int]] = (),
        every: bool = False,
    ) -> Tensor:
        """Return the logits[B, V] after each row's last token, or of `every` token, [B, T, V].

        Row b's ids follow the first starts[b] tokens that the cache has of it, in pages[b] if it is in pages. A row may
        have no ids; its logits then mean nothing.

        Raises:
            ValueError: A row has no room in the cache.
        """
        counts = [*map(len, rows)]
        T, longest = max(counts), max(start + count for start, count in zip(starts, counts, strict=True))
        check_served_text(self.config, longest)
        if self.mesh.rank == 0:
            warn_beyond(self.config, longest)
        if self.page:
            for b, held in enumerate(pages):
                check_room(starts[b : b + 1], counts[b : b + 1], T, len(held) * self.page, 0)
        else:
            check_room(starts, counts, T, self.room, 0)
        fixed = self.fixed and T <= FEW and (T == 1 or self.mesh.sizes.get("C", 1) == 1)
        M = -(-longest // self.page) if self.page else 0
        T, M = (self.rounded(T), self.rounded(M)) if fixed else (T, M)
        asked = [
            [*row, *[0] * (T - len(row)), len(row), starts[b], *held[:M], *[0] * (M - len(held))]
            for b, (row, held) in enumerate(zip(rows, pages or [()] * len(rows), strict=True))
        ]
        asked, extent = torch.tensor(asked, device=self.device), Extent.of(starts, counts, T)
        if not fixed:
            return self._compute(self.params, self.cache, asked, T, extent, every)
        most = M * self.page if self.page else min(self.room, max(LEAST, 1 << (longest - 1).bit_length()))
        key = len(rows), T, most, every, extent.full
        if key not in self.made:
            self.made[key] = self._make(asked, T, Extent(0, most, most, extent.full, fixed=True), every)
        return self.made[key](asked)

    def _compute(self, params, held, asked, T: int, extent: Extent, every: bool, places: dict | None = None) -> Tensor:
        tokens, counts, starts, pages = asked.tensor_split([T, T + 1, T + 2], 1)
        cache = held | {"lengths": starts[:, 0]} | ({"pages": pages} if self.page else {})
        return logits_of(
            params, tokens, cache, counts[:, 0], extent, self.config, self.mesh,
            form=self.form, last=not every, places=places,
        )  # fmt: skip

    def _make(self, asked: Tensor, T: int, extent: Extent, every: bool) -> Callable[[Tensor], Tensor]:
        """Return the function of `asked` that computes the logits of steps of this shape, compiled or captured."""
        if extent.most not in self.places:
            positions, dtype = torch.arange(extent.most, device=self.device), plain_leaf(self.params).dtype
            self.places[extent.most] = table_kinds(self.config, positions, dtype)
        places = self.places[extent.most]
        # Each layer's keys and values are an input of the graph: of a view of the whole cache a compiler makes a copy.
        held = {name: [x.unbind() for x in self.cache[name].unbind()] for name in ("KV", "scale") if name in self.cache}

        def step(params, held, asked, places):
            return self._compute(params, held, asked, T, extent, every, places)

        if self.compile is not None:  # a separate code object, because torch counts recompilations, at most 8, for each
            own = FunctionType(step.__code__.replace(), step.__globals__, closure=step.__closure__)
            step = torch.compile(own, fullgraph=True, dynamic=False, backend=self.compile)

        def run(asked: Tensor) -> Tensor:
            return step(self.params, held, asked, places)

        return run if self.why else Captured(run, asked, self.pool)
