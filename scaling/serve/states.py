"""What the scheduler is made of: its options, requests, events, actions and state, as plain data. No torch."""

from dataclasses import dataclass, field
from typing import NamedTuple

from scaling.common.arguments import flag, whole
from scaling.serve.pages import Pool
from scaling.serve.policies import POLICIES, Policy


@dataclass(frozen=True)
class Options:
    """`pages` of `page` tokens a worker, `slots` requests at once, `budget` tokens a step (the policy "chunked").

    `decode_pages`: those of the worker that decodes, under "disaggregated"; None: as many. `proposals`: the tokens of a
    draft that a decode step checks for each request, at most; those of all count in the budget. `groups`: of ranks
    among which the requests are split, each with so many pages of its own, as a form of decoding splits rows over E or
    Z; they take their steps together.
    """

    pages: int
    page: int = 16
    slots: int = 8
    budget: int = 64
    policy: str = "chunked"
    prefix: bool = True
    decode_pages: int | None = None
    proposals: int = 0
    groups: int = 1

    def __post_init__(self):
        if self.policy not in POLICIES:
            raise ValueError(f"unknown policy {self.policy!r}\n  fix: choose one of {', '.join(POLICIES)}")
        whole(pages=self.pages, page=self.page, slots=self.slots, budget=self.budget, groups=self.groups)
        whole(0, proposals=self.proposals)
        whole(decode_pages=1 if self.decode_pages is None else self.decode_pages)
        flag(prefix=self.prefix)

    @property
    def length(self) -> int:
        """The longest prompt and completion together that fit."""
        return self.page * min(self.pages, self.decode_pages or self.pages)


class Request(NamedTuple):
    """`stop`: token ids that end the completion, whose last they are."""

    id: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    stop: frozenset[int] = frozenset()


class Arrive(NamedTuple):
    request: Request


class Cancel(NamedTuple):
    id: int


class Done(NamedTuple):
    """A worker's step is over: the tokens of those whose Work said `sample`, by id; 1 to 1 + `proposals` of each.
    `stopped`: whose last token ends them for what token ids cannot say, such as a text."""

    worker: str
    tokens: dict[int, tuple[int, ...]]
    stopped: frozenset[int] = frozenset()


class Moved(NamedTuple):
    id: int


SchedulerEvent = Arrive | Cancel | Done | Moved


class Work(NamedTuple):
    """Compute `tokens`, which stand at `start` and after, into `pages`; `sample`: give the token that follows.

    `proposals`: compute so many tokens of a draft after them, and give those that are right and the one that follows.
    A draft may want to see all the tokens: those `before` are given then. `group`: whose pages they are.
    """

    id: int
    start: int
    tokens: tuple[int, ...]
    pages: tuple[int, ...]
    sample: bool
    proposals: int = 0
    before: tuple[int, ...] = ()
    group: int = 0

    @property
    def width(self) -> int:
        """The tokens that are computed."""
        return len(self.tokens) + self.proposals


class Run(NamedTuple):
    worker: str
    works: tuple[Work, ...]


class Move(NamedTuple):
    """Copy the pages of `tokens` tokens of a group from the worker that prefills to the one that decodes."""

    id: int
    tokens: int
    source: tuple[int, ...]
    target: tuple[int, ...]
    group: int = 0


class Admit(NamedTuple):
    """A request enters a slot; `cached` of its tokens are there by a prefix hit."""

    id: int
    cached: int


class Preempt(NamedTuple):
    id: int


class Finish(NamedTuple):
    """`reason`: stop, length, cancelled, or refused: and why."""

    id: int
    tokens: tuple[int, ...]
    reason: str


Action = Run | Move | Admit | Preempt | Finish


@dataclass(frozen=True)
class Live:
    """A request that has come and is not finished. `pages` are its `group`'s of the worker `where`, None while it
    waits."""

    request: Request
    out: tuple[int, ...] = ()
    computed: int = 0
    pages: tuple[int, ...] = ()
    where: str | None = None
    group: int = 0
    target: tuple[int, ...] | None = None  # the pages that it is being moved to
    cancelled: bool = False

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.request.prompt + self.out

    @property
    def todo(self) -> int:
        return len(self.request.prompt) + len(self.out) - self.computed


@dataclass(frozen=True)
class State:
    """Everything that the next step depends on. `live` is in the order of arrival; a worker has a pool a group."""

    options: Options
    tick: int = 0
    live: dict[int, Live] = field(default_factory=dict)
    pools: dict[str, tuple[Pool, ...]] = field(default_factory=dict)
    busy: dict[str, tuple[Work, ...]] = field(default_factory=dict)

    @property
    def policy(self) -> Policy:
        return POLICIES[self.options.policy]
