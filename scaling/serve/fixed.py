"""Steps of fixed shapes over a cache: one packed upload, no value read on the host; and a model with its pages.

A step of the engine or of `generate` gives each row some tokens, which follow the tokens in its cache. Ids, counts,
starts and pages go to the device as one array of whole numbers, from which `step.logits_of` computes where keys and
values belong. If steps are compiled by torch.compile or captured as CUDA graphs (`capture`), their shapes are few:
rows, tokens and pages are rounded up to powers of two, and attention reads a bucket of places under a mask. Each shape
is compiled or captured when it is first needed. A prompt, with more than FEW tokens a row, keeps its exact shape,
and so does a step of more than EVERY tokens through experts, because in a fixed step each expert computes all tokens.

A replay of a graph reads and writes the memory that its capture saw, so params, cache and the static input stay in
place. A step also runs to warm up, so it must give the same result however often it runs: the values that it writes to
the cache may depend on its input alone.
"""

from collections.abc import Callable, Sequence
from math import inf
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from scaling import tree
from scaling.configs import Config
from scaling.models.rope import table_kinds
from scaling.serve import scheduler
from scaling.serve.cache import capacity, init_cache, share_of, writable
from scaling.serve.requests import Request, check_served_text
from scaling.serve.slots import Extent
from scaling.serve.states import Move, Options, Work
from scaling.serve.step import check_room, check_served, logits_of, warn_beyond
from scaling.serve.types import ONE, lay_out_by_output, plain_leaf

WARM_UPS = 2  # runs before the capture, in which libraries allocate their workspaces


def why_eager(config: Config) -> str | None:
    """Return why no step of this model can be compiled or captured, or None."""
    what = f"{config.name} has linear layers, whose states a step changes each time that it runs"
    return what if config.linear else None


def why_not(config: Config, mesh: Any, device: torch.device) -> str | None:
    """Return why no step of this model can be captured here, or None if it can."""
    if device.type != "cuda":
        return f"there are no CUDA graphs on {device.type}"
    if getattr(mesh, "checked", False) and mesh.size() > 1:
        return "the ranks of a checked mesh compare their calls on the host"
    return why_eager(config)


def capture_graph(step: Callable[[Tensor], Tensor], x: Tensor, pool: Any) -> Callable[[Tensor], Tensor]:
    """Return step(x) -> y, captured as a CUDA graph for inputs of x's shape. Each call returns new memory.

    Args:
        step: The function to capture.
        x: An input of the shape.
        pool: A handle of torch.cuda.graph_pool_handle. Graphs may share it if only one runs at a time.
    """
    static, side, graph = x.clone(), torch.cuda.Stream(x.device), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            step(static)
    torch.cuda.current_stream(x.device).wait_stream(side)
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        y = step(static)

    def replay(x: Tensor) -> Tensor:
        static.copy_(x)
        graph.replay()
        return y.clone()

    return replay


FEW = 8  # tokens of a row up to which a step has a fixed shape
LEAST = 16  # places of the smallest bucket
EVERY = 256  # tokens of a step up to which a GPU reads an expert's weights for longer than it computes all tokens


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
        window_cache: dict | None = None,
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
            window_cache: A cache of the layers with a window, if `cache` has only those without.
            compile: A backend of torch.compile, such as "inductor"; None compiles nothing. On a CPU compiled steps have
                their own copy of the params, in another order in memory.
            capture: Whether to capture steps as CUDA graphs where that is possible.
        """
        self.params, self.config, self.mesh, self.form = params, config, ONE if mesh is None else mesh, form
        self.device, self.cache = plain_leaf(params).device, writable(cache, plain_leaf(params), donate=True)
        self.page = cache["KV"].shape[3] if "pages" in cache else 0
        self.tables = 1 + (window_cache is not None)
        if window_cache is not None:
            window_cache = writable(window_cache, plain_leaf(params), donate=True)
            held = [name for name in ("KV", "scale") if name in window_cache]
            self.cache |= {name: by_layer(self.cache[name], window_cache[name], config) for name in held}
        self.room = capacity(cache, share_of(self.mesh, form).shards)
        self.why = why_not(config, self.mesh, self.device) if capture else "it was not asked for"
        self.compile = None if why_eager(config) else compile
        self.fixed = self.compile is not None or self.why is None
        if self.compile is not None and self.device.type == "cpu":
            self.params = lay_out_by_output(params, config)  # inductor's loop reads each matrix from start to end
        self.pool = None if self.why else torch.cuda.graph_pool_handle()
        self.mesh.without("C")  # this view of the mesh is kept: a compiler could not make it
        self.made: dict[tuple, Callable[[Tensor], Tensor]] = {}
        self.places: dict[int, dict] = {}  # the tables of cos and sin of each bucket

    def rounded(self, n: int) -> int:
        """Return the number to which n rows, tokens or pages are padded: the next power of two if shapes are fixed."""
        return 1 << max(0, n - 1).bit_length() if n and self.fixed else n

    @torch.no_grad()
    def __call__(
        self,
        rows: Sequence[Sequence[int]],
        starts: Sequence[int],
        pages: Sequence[Sequence[int]] = (),
        every: bool = False,
        ids: tuple[Tensor, Tensor] | None = None,
        states: Sequence[int] = (),
        window_pages: Sequence[Sequence[int]] = (),
    ) -> Tensor:
        """Return logits[B, V] after each row's last token; with `every`, logits[B, T, V] after all tokens.

        Row b's ids follow the first starts[b] tokens that the cache has of it, in pages[b] if it is in pages. A row may
        have no ids; its logits then mean nothing. `ids`: (which rows, the first id of each), if they are on the device.
        `states`: each row's slot among the states of linear layers, if it is not b. `window_pages`: each row's pages of
        the layers with a window, if these have their own.

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
        fixed = fixed and (not self.config.moe or len(rows) * self.rounded(T) <= EVERY)
        M = -(-longest // self.page) if self.page else 0
        T, M = (self.rounded(T), self.rounded(M)) if fixed else (T, M)
        # A masked place is read, and a NaN there makes its row NaN, so a row's table is filled with its own last page.
        tables = [
            [[*held[:M], *[held[-1] if held else 0] * (M - len(held))] for held in table]
            for table in (pages, window_pages)
            if table
        ]
        # A linear layer multiplies padded tokens by zero, so they repeat the row's last one, which is as finite as it.
        padded = [[*row, *[*row[-1:], 0][:1] * (T - len(row))] for row in rows]
        asked = [
            [*padded[b], len(row), starts[b], *(page for table in tables for page in table[b])]
            for b, row in enumerate(rows)
        ]
        asked, extent = copy_to_device(asked, self.device), Extent.of(starts, counts, T)
        if ids is not None:
            asked[:, 0].index_copy_(0, *ids)
        if not fixed:
            held = self.cache | ({"states": copy_to_device(states, self.device)} if states else {})
            return self._compute(self.params, held, asked, T, extent, every)
        most = M * self.page if self.page else min(self.room, max(LEAST, 1 << (longest - 1).bit_length()))
        key = len(rows), T, most, every, extent.full
        if key not in self.made:
            self.made[key] = self._make(asked, T, Extent(0, most, most, extent.full, fixed=True), every)
        return self.made[key](asked)

    def _compute(self, params, held, asked, T: int, extent: Extent, every: bool, places: dict | None = None) -> Tensor:
        tokens, counts, starts, pages = asked.tensor_split([T, T + 1, T + 2], 1)
        tables = dict(zip(("pages", "window_pages"), pages.chunk(self.tables, 1), strict=False)) if self.page else {}
        cache = held | {"lengths": starts[:, 0]} | tables
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
        held = {name: [[*x] for x in self.cache[name]] for name in ("KV", "scale") if name in self.cache}

        def step(params, held, asked, places):
            return self._compute(params, held, asked, T, extent, every, places)

        if self.compile is not None:  # a separate code object, because torch counts recompilations, at most 8, for each
            own = FunctionType(step.__code__.replace(), step.__globals__, closure=step.__closure__)
            step = torch.compile(own, fullgraph=True, dynamic=False, backend=self.compile)

        def run(asked: Tensor) -> Tensor:
            return step(self.params, held, asked, places)

        return run if self.why else capture_graph(run, asked, self.pool)


def by_layer(full: Tensor, windowed: Tensor, config: Config) -> list[list[Tensor]]:
    """Return KV[i][l] of all layers, from the stacked KV of the layers without a window and of those with one."""
    pairs = [(iter(a), iter(b)) for a, b in zip(full, windowed, strict=True)]
    return [[next(a if window is None else b) for window in config.windows] for a, b in pairs]


def copy_to_device(numbers: Sequence, device: torch.device) -> Tensor:
    """Return whole numbers as a tensor on the device. The host does not wait for the copy."""
    return torch.tensor(numbers).to(device, non_blocking=True)


def by_length(lengths: Sequence[int], again: float) -> list[list[int]]:
    """Split rows into groups of similar lengths, as lists of the rows' numbers; a step computes one group at a time.

    Attention reads as many places for every row of a group as its longest row has. For each further group a step reads
    the weights once more, which have as many bytes as `again` places. Rows are split only if that halves the bytes.
    """

    def split(rows: list[int]) -> list[list[int]]:
        sizes = [lengths[row] for row in rows]
        costs = [i * sizes[i - 1] + (len(rows) - i) * sizes[-1] for i in range(1, len(rows))]
        if not costs or 2 * (min(costs) + 2 * again) > len(rows) * sizes[-1] + again:
            return [rows]
        cut = costs.index(min(costs)) + 1
        return split(rows[:cut]) + split(rows[cut:])

    return split(sorted(range(len(lengths)), key=lengths.__getitem__))


NO_WORK = Work(Request(-1, (), 0), 0, (), (), False, slot=-1)


class PagedModel:
    """A model that holds this rank's params and its group's pages. If it is not `paged`, a page is a row of a cache.

    A linear layer has no pages, but a state for each slot, and a last one for rows without a request.
    """

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
        self.config = config
        self.group = share_of(ONE if mesh is None else mesh, form).group
        self.pools, self.states = dict[str, Steps](), paged and config.linear is not None
        self.again: dict[str, float] = {}  # for each worker as in `by_length`
        self.windowed = paged and options.window is not None and any(config.windows)
        if self.windowed and (wider := [w for w in config.windows if w is not None and w > (options.window or 0)]):
            what = f"{config.name}: a window of {max(wider)} tokens, where layers keep the pages of {options.window}"
            raise ValueError(f"{what}\n  fix: Options(..., window={max(wider)}), or window=None to keep all")
        for worker, (pool, *_) in scheduler.initial(options).pools.items():
            rows, length, page = (1, pool.total * pool.size, pool.size) if paged else (pool.total, pool.size, None)
            own, window_cache = {"mesh": mesh, "dtype": dtype, "page": page, "form": form}, None
            layers = config.windows.count(None) if self.windowed else None
            cache = init_cache(config, self.groups * rows, length, layers=layers, **own)
            if layers is not None:
                room = options.window_pages * pool.size
                window_cache = init_cache(config, self.groups, room, layers=config.L - layers, **own)
            if self.states:
                slots = init_cache(config, self.groups * (options.slots + 1), 1, mesh=mesh, dtype=dtype, form=form)
                cache |= {name: slots[name] for name in ("S", "tail")}
            self.pools[worker] = Steps(params, config, cache, mesh, form, window_cache=window_cache, **steps)
            places = [layer for kind in self.pools[worker].cache["KV"] for layer in kind]  # [pages, page, ...]
            place = sum([layer.nbytes / (layer.shape[0] * layer.shape[1]) for layer in places])
            self.again[worker] = sum([x.nbytes for x in tree.leaves(params)]) / place if places else inf
            params = self.pools[worker].params  # both workers' steps share the params that were laid out anew

    def logits(self, worker: str, works: Sequence[Work], every: bool = False, ids: Tensor | None = None) -> Tensor:
        """Write the works' tokens to the cache; return Logits[B, V] after each work's last token, B works.

        With `every`, return Logits[B, T, V] after all tokens. `ids`[B] on the device replace the works' first tokens.
        Works whose rows have very different lengths are computed in several steps (`by_length`).
        """
        pool, lengths = self.pools[worker], [work.start + len(work.tokens) for work in works]
        if self.paged and len(groups := by_length(lengths, self.again[worker])) > 1:
            T, parts = max(len(work.tokens) for work in works), []
            for group in groups:
                at = copy_to_device(group, self.device)
                part = self.logits(worker, [works[i] for i in group], every, None if ids is None else ids[at])
                parts.append(F.pad(part, (0, 0, 0, T - part.shape[1])) if every else part)
            order = sorted(range(len(works)), key=[i for group in groups for i in group].__getitem__)
            return torch.cat(parts)[copy_to_device(order, self.device)]
        height = max(sum(work.group == group for work in works) for group in range(self.groups))
        height = pool.rounded(height) if self.paged else len(pool.cache["lengths"]) // self.groups
        rows = [NO_WORK] * (height * self.groups)  # padding gives every group the same number of rows
        free, places = [group * height for group in range(self.groups)], []
        for work in works:
            places.append(free[work.group] if self.paged else free[work.group] + work.pages[0])
            rows[places[-1]] = work
            free[work.group] += self.paged
        pages = [w.pages for w in rows] if self.paged else ()
        in_order = places == [*range(len(works))]
        at = None if in_order and ids is None else copy_to_device(places, self.device)
        given = None if ids is None or at is None else (at, ids)
        states = [w.slot for w in rows] if self.states else ()
        near = [w.window_pages for w in rows] if self.windowed else ()
        window_pages = [[held[-1] if page < 0 else page for page in held] for held in near]
        logits = pool([w.tokens for w in rows], [w.start for w in rows], pages, every, given, states, window_pages)
        return logits[: len(works)] if in_order else logits[at]

    def clear(self, worker: str, work: Work, start: int) -> None:
        """Write zeros over the keys and values of a work's row from position `start` on, on its group's ranks.

        They are not finite, or may not be. Whoever gets the pages reads them before they are full. The numbers that it
        has not written are masked, and a NaN times zero would be NaN.
        """
        if work.group != self.group:
            return
        (first, offset), cache = divmod(start, self.page), self.pools[worker].cache
        for held in (cache[name] for name in ("KV", "scale") if name in cache):
            found = [(held.movedim((2, 3), (0, 1)), work.pages)] if isinstance(held, torch.Tensor) else []
            for kind in held if not found else ():
                tables = (work.pages if window is None else work.window_pages for window in self.config.windows)
                found += zip(kind, tables, strict=True)
            for x, pages in found:  # [pages, page, ...]
                for n, page in enumerate(pages[first:]):
                    x[page, 0 if n else offset :] = 0
        if self.states:
            for name in ("S", "tail"):
                cache[name][:, work.slot] = 0

    def move(self, move: Move) -> None:
        """Copy a prompt's pages and state from the worker that prefills to the decoder, on its group's ranks."""
        if move.group != self.group:
            return
        count = -(-move.tokens // self.page)
        source, target = (torch.tensor(pages[:count], device=self.device) for pages in (move.source, move.target))
        there, here = (self.pools[worker].cache for worker in ("prefill", "decode"))
        for name in ("KV", "scale"):
            if name in there:
                here[name][:, :, target] = there[name][:, :, source]
        for name in ("S", "tail") if self.states else ():
            here[name][:, move.slots[1]] = there[name][:, move.slots[0]]
