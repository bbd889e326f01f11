"""The scheduler's data: options, batching policies, events, actions and state. No torch.

A policy (Part 7, "Designing an Effective Inference Engine") picks what runs in the next step:

    static         a batch is admitted when the one before is done; prompts first, then all decode together
    interleaved    a new request is admitted when a slot is free, and its whole prompt runs as a separate step
    chunked        every step decodes all, and fills the rest of its token budget with chunks of prompts
    disaggregated  two workers, each with its own pages: prompts run on one, are moved, and decode on the other

It does not see pages: the scheduler checks whether there is room.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from scaling.common.arguments import flag, one_of, whole
from scaling.serve.pages import Pool
from scaling.serve.requests import Request

PREFILL, DECODE, ENGINE = "prefill", "decode", "engine"


@dataclass(frozen=True)
class Options:
    """The options of a scheduler.

    Attributes:
        pages: Pages of a worker.
        page: Tokens of a page.
        slots: Requests at once.
        budget: Tokens of a step under the policy "chunked".
        policy: The batching policy.
        prefix: Whether prompts share the pages of equal prefixes; not with linear layers, whose states are not kept.
        proposals: The most tokens of a draft that a decode step checks for each request; all count in the budget.
        longest: The longest prompt and completion together that the model is served with; None: as long as fits.
        window: The longest window of the model's layers, if layers with a window keep only the pages within it, which
            the policy "chunked" can do; None: all layers keep all pages.
        groups: Groups of ranks among which the requests are split, each with its own pages, as a form of decoding
            splits rows over E or Z. They take their steps together.
    """

    pages: int
    page: int = 16
    slots: int = 8
    budget: int = 64
    policy: str = "chunked"
    prefix: bool = True
    proposals: int = 0
    groups: int = 1
    longest: int | None = None
    window: int | None = None

    def __post_init__(self):
        one_of("policy", self.policy, POLICIES)
        whole(pages=self.pages, page=self.page, slots=self.slots, budget=self.budget, groups=self.groups)
        whole(0, proposals=self.proposals)
        flag(prefix=self.prefix)
        given = {"longest": self.longest, "window": self.window}
        whole(**{name: value for name, value in given.items() if value is not None})
        if self.window is not None and self.policy != "chunked":
            what = f"window={self.window}: the policy {self.policy!r} computes whole prompts, which no window holds"
            raise ValueError(f"{what}\n  fix: choose the policy 'chunked', or window=None")

    @property
    def window_pages(self) -> int:
        """The pages of layers with a window: always enough for all slots and for the tokens of a step."""
        reach = (self.window or 0) + self.proposals
        return min(self.pages, self.slots * (reach // self.page + 3) + self.budget // self.page)

    @property
    def length(self) -> int:
        """The longest prompt and completion together that fit."""
        return min(self.page * self.pages, self.longest or self.page * self.pages)


class Arrive(NamedTuple):
    """Event: a request arrives."""

    request: Request


class Cancel(NamedTuple):
    """Event: a request is cancelled."""

    id: int


class Done(NamedTuple):
    """Event: a worker's step is over.

    `tokens`: by id, the tokens of each Work with `sample`, 1 to 1 + `proposals` of each. `stopped`: requests that end
    with their last token for a reason that token ids cannot show, such as a stop text. `failed`: requests that end
    because their logits are not finite; they get no token.
    """

    worker: str
    tokens: dict[int, tuple[int, ...]]
    stopped: frozenset[int] = frozenset()
    failed: frozenset[int] = frozenset()


class Moved(NamedTuple):
    """Event: a request's cache has been moved."""

    id: int


SchedulerEvent = Arrive | Cancel | Done | Moved


class Work(NamedTuple):
    """Compute a request's `tokens`, which begin at position `start`, into `pages`; with `sample`, give the next token.

    `proposals`: let a draft propose this number of tokens after them, and return the accepted ones and the token that
    follows. A draft may need the whole text; then `before` has the tokens before `start`. `group`: the group that the
    pages belong to. `slot`: the request's slot on the worker, where the states of linear layers are. `window_pages`:
    the pages of layers with a window, if these have their own, with -1 for each page that has been given back.
    """

    request: Request
    start: int
    tokens: tuple[int, ...]
    pages: tuple[int, ...]
    sample: bool
    proposals: int = 0
    before: tuple[int, ...] = ()
    group: int = 0
    slot: int = 0
    window_pages: tuple[int, ...] = ()

    @property
    def id(self) -> int:
        """The request's id."""
        return self.request.id

    @property
    def width(self) -> int:
        """The number of tokens that are computed."""
        return len(self.tokens) + self.proposals


class Run(NamedTuple):
    """Action: a worker runs a step."""

    worker: str
    works: tuple[Work, ...]


class Move(NamedTuple):
    """Action: copy the pages of `tokens` tokens of a group from the worker that prefills to the one that decodes.

    `slots`: the request's slot on each of the two.
    """

    id: int
    tokens: int
    source: tuple[int, ...]
    target: tuple[int, ...]
    group: int = 0
    slots: tuple[int, int] = (0, 0)


class Admit(NamedTuple):
    """Action: a request enters a slot; `cached` of its tokens are in the cache by a prefix hit."""

    id: int
    cached: int


class Preempt(NamedTuple):
    """Action: a request leaves its slot, and waits again."""

    id: int


class Finish(NamedTuple):
    """Action: a request ends; `reason` is stop, length, cancelled, or refused or failed with the cause."""

    id: int
    tokens: tuple[int, ...]
    reason: str


Action = Run | Move | Admit | Preempt | Finish


class Live(NamedTuple):
    """A request that has arrived and is not finished.

    `pages` are pages of its `group` on the worker `where`, which is None while the request waits, and `slot` is one of
    the worker's slots. `target` and `next_slot` are the pages and the slot that it is being moved to. `window_pages` is
    as in `Work`.
    """

    request: Request
    out: tuple[int, ...] = ()
    computed: int = 0
    pages: tuple[int, ...] = ()
    where: str | None = None
    group: int = 0
    slot: int = 0
    window_pages: tuple[int, ...] = ()
    target: tuple[int, ...] | None = None
    next_slot: int = 0
    cancelled: bool = False

    @property
    def tokens(self) -> tuple[int, ...]:
        """The prompt and the output so far."""
        return self.request.prompt + self.out

    def text(self, start: int, end: int) -> tuple[int, ...]:
        """Return the tokens from `start` to `end`, without a copy of the whole text."""
        past = len(self.request.prompt)
        return self.request.prompt[start:end] + self.out[max(0, start - past) : max(0, end - past)]

    @property
    def length(self) -> int:
        """The number of its tokens."""
        return len(self.request.prompt) + len(self.out)

    @property
    def id(self) -> int:
        """The request's id."""
        return self.request.id

    @property
    def todo(self) -> int:
        """The number of its tokens that are not in the cache."""
        return self.length - self.computed

    @property
    def decoding(self) -> bool:
        """Whether its next step decodes one token."""
        return bool(self.out) and self.todo == 1

    def proposals(self, most: int) -> int:
        """Return how many tokens of a draft its next step can use: none before it decodes, none beyond the last."""
        return min(most, self.request.max_new_tokens - len(self.out) - 1) if self.decoding else 0


@dataclass(frozen=True)
class State:
    """Everything that the next step depends on; `live` is in order of arrival, and a worker has a pool per group."""

    options: Options
    live: dict[int, Live] = field(default_factory=dict)
    pools: dict[str, tuple[Pool, ...]] = field(default_factory=dict)
    busy: dict[str, tuple[Work, ...]] = field(default_factory=dict)

    @property
    def policy(self) -> "Policy":
        """The batching policy."""
        return POLICIES[self.options.policy]

    def pool(self, live: Live) -> Pool:
        """Return the pool of a request's pages on its worker."""
        return self.pools[live.where or ""][live.group]


class Policy(NamedTuple):
    """A batching policy.

    `admit(running, slots)` returns how many more requests may enter; `pick(worker, running, options)` the [(id,
    tokens)] of a step.
    """

    workers: tuple[str, ...]
    admit: Callable[[int, int], int]
    pick: Callable[[str, Sequence[Live], Options], list[tuple[int, int]]]


def _when_empty(running: int, slots: int) -> int:
    return 0 if running else slots


def _when_free(running: int, slots: int) -> int:
    return slots - running


def _all_prompts_first(worker: str, running: Sequence[Live], options: Options) -> list[tuple[int, int]]:
    prompts = [(r.id, r.todo) for r in running if not r.decoding]
    return prompts or [(r.id, 1) for r in running]


def _one_prompt_first(worker: str, running: Sequence[Live], options: Options) -> list[tuple[int, int]]:
    return _all_prompts_first(worker, [r for r in running if not r.decoding][:1] or running, options)


def _decodes_and_chunks(worker: str, running: Sequence[Live], options: Options) -> list[tuple[int, int]]:
    decoding = [r for r in running if r.decoding]
    picked = [(r.id, 1) for r in decoding]
    left = options.budget - sum(1 + r.proposals(options.proposals) for r in decoding)
    left = max(left, 1)  # a prompt goes on however many decode
    for r in running:
        if not r.decoding and left:
            picked.append((r.id, min(r.todo, left)))
            left -= picked[-1][1]
    return picked


def _by_worker(worker: str, running: Sequence[Live], options: Options) -> list[tuple[int, int]]:
    some = running[:1] if worker == PREFILL else running
    return [(r.id, r.todo) for r in some]


POLICIES = {
    "static": Policy((ENGINE,), _when_empty, _all_prompts_first),
    "interleaved": Policy((ENGINE,), _when_free, _one_prompt_first),
    "chunked": Policy((ENGINE,), _when_free, _decodes_and_chunks),
    "disaggregated": Policy((PREFILL, DECODE), _when_free, _by_worker),
}
