"""The scheduler: random traces over tiny pools, by a model of whole numbers that reads and writes pages as the real one
does; and by hand what they do not look at: order and times.

The next token is a sum over all tokens before it, read back from the pages: `(7 + sum (i + 1) (t_i + 1)) mod V`. So a
page that was written by two, read after it was freed, or not moved shows as a wrong token, or at once: each place of a
page knows which prefix of tokens it belongs to, and a read that finds another prefix raises.
"""

import itertools
import math
import pickle
import random
from collections import Counter
from dataclasses import replace

import pytest

from scaling.serve.pages import Pool
from scaling.serve.requests import Request
from scaling.serve.scheduler import initial, refusal, step
from scaling.serve.simulate import drive, simulate
from scaling.serve.states import Admit, Arrive, Done, Move, Moved, Options, Preempt, Run

V = 5


def next_token(tokens) -> int:
    return (7 + sum((i + 1) * (t + 1) for i, t in enumerate(tokens))) % V


def alone(request: Request) -> tuple[int, ...]:
    """The completion of a request that has everything to itself."""
    out: list[int] = []
    while len(out) < request.max_new_tokens and not (out and out[-1] in request.stop):
        out.append(next_token([*request.prompt, *out]))
    return tuple(out)


class Memory:
    """One worker's pages: at each place the token there and a fingerprint of all the tokens up to it."""

    def __init__(self, page: int):
        self.page, self.at = page, {}

    def write(self, pages, start: int, tokens) -> None:
        before = self.read(pages, start)
        for i, token in enumerate(tokens, start):
            before = (*before, token)
            self.at[pages[i // self.page], i % self.page] = before

    def read(self, pages, count: int) -> tuple[int, ...]:
        """The first `count` tokens, whose fingerprints must be each other's prefixes."""
        found: tuple[int, ...] = ()
        for i in range(count):
            there = self.at[pages[i // self.page], i % self.page]
            assert there[:-1] == found, f"page {pages[i // self.page]} holds another request's tokens"
            found = there
        return found


class Audited:
    """execute and watch for `drive`: computes with the memories, and checks every state and every action."""

    def __init__(self, options: Options, chance: random.Random):
        self.options, self.chance = options, chance
        self.before = initial(options)
        self.frozen = pickle.dumps(self.before)
        self.memories = {worker: [Memory(options.page) for _ in each] for worker, each in self.before.pools.items()}
        self.windowed = [{} for _ in range(options.groups)]  # (page of layers with a window, place in it) -> the tokens
        self.counts: Counter[str] = Counter()

    def execute(self, action):
        seconds = self.chance.choice([0.0, 1.0, 1.0, 2.5])
        if isinstance(action, Move):
            source, target = (self.memories[worker][action.group] for worker in ("prefill", "decode"))
            target.write(action.target, 0, source.read(action.source, action.tokens))
            return seconds, Moved(action.id)
        memories, tokens, size = self.memories[action.worker], {}, self.options.page
        written = Counter((w.group, page) for w in action.works for page in set(w.pages[w.start // size :]))
        assert all(n == 1 for n in written.values()), "a page is written by two"
        for work in action.works:
            assert work.tokens
            memories[work.group].write(work.pages, work.start, (*work.tokens, *self.proposed(work)))
        for work in action.works if self.options.window else ():
            text, windowed = memories[work.group].read(work.pages, work.start + work.width), self.windowed[work.group]
            for i in range(max(0, work.start - self.options.window + 1), len(text)):
                at = work.window_pages[i // size], i % size
                assert i >= work.start or windowed[at] == text[: i + 1], "a page within the window was given back"
                windowed[at] = text[: i + 1]
        for work in action.works:
            if work.sample:
                found = memories[work.group].read(work.pages, work.start + work.width)
                tokens[work.id] = self.verified(found, work.proposals)
        return seconds, Done(action.worker, tokens)

    def proposed(self, work) -> list[int]:
        """A draft's tokens after those of the request, each right more often than not."""
        text = [*work.before, *work.tokens]
        for _ in range(work.proposals):
            text.append(next_token(text) if self.chance.random() < 0.7 else self.chance.randrange(V))
        return text[len(text) - work.proposals :]

    def verified(self, found: tuple[int, ...], proposals: int) -> tuple[int, ...]:
        """The proposals that are right, and the token after them; the others stay in the pages."""
        first = len(found) - proposals
        right = itertools.takewhile(lambda n: next_token(found[:n]) == found[n], range(first, len(found)))
        kept = len(list(right))
        self.counts["proposals kept"] += kept
        self.counts["proposals dropped"] += proposals - kept
        return (*found[first : first + kept], next_token(found[: first + kept]))

    def watch(self, state, actions):
        assert pickle.dumps(self.before) == self.frozen, "a step changes the state that it is given"
        for worker, group, pool in ((w, g, pool) for w, pools in state.pools.items() for g, pool in enumerate(pools)):
            mine = {id: live for id, live in state.live.items() if live.group == group}
            cached = pool.edges.keys() - pool.refs.keys()
            assert sorted([*pool.free, *pool.refs, *cached]) == [*range(pool.total)]
            assert pool.unheld.keys() == cached
            order = {parent: n for n, parent in enumerate(pool.unheld)}
            assert all(n < order.get(pool.edges[page][0], len(order)) for page, n in order.items()), (
                "a parent goes first"
            )
            assert (pool.held, pool.cached) == (len(pool.refs), len(cached))
            assert pool.total == self.options.pages
            busy = {work.id for work in state.busy.get(worker, ())}
            self._audit_near(pool, mine, [live for id, live in mine.items() if id not in busy])
            holders = Counter(p for live in mine.values() if live.where == worker for p in live.pages)
            holders += Counter(p for live in mine.values() if worker == "decode" for p in live.target or ())
            assert holders == Counter(pool.refs), "reference counts are not the holders"
            for id, live in mine.items():  # idle: no page for a guess that was dropped
                spare = live.where == worker and not any(id in [w.id for w in ws] for ws in state.busy.values())
                assert not spare or len(live.pages) <= pool.count(len(live.tokens))
            for page, (parent, tokens) in pool.edges.items():
                assert pool.children[parent, tokens] == page
                assert len(tokens) == pool.size
                assert parent == -1 or parent in pool.edges
                assert parent == -1 or page not in pool.refs or parent in pool.refs
            assert len(pool.children) == len(pool.edges)
            self.counts["evictions"] += len(self.before.pools[worker][group].edges.keys() - pool.edges.keys())
        for action in actions:
            self.counts[type(action).__name__] += 1
            if isinstance(action, Admit):
                self._count_hit(state, action)
                older = itertools.takewhile(lambda id, new=action.id: id != new, state.live)
                gone = {each.id for each in actions if isinstance(each, Preempt)}
                assert all(state.live[id].where or id in gone for id in older), "a younger request overtakes"
            if isinstance(action, Preempt) and len(state.pools) == 1:
                younger = itertools.islice(state.live.values(), [*state.live].index(action.id) + 1, None)
                group = state.live[action.id].group
                assert not any(each.where and each.group == group for each in younger), "an older one makes room"
            if isinstance(action, Run):
                self.counts["chunks"] += sum(not work.sample for work in action.works)
                self.counts["steps of several groups"] += len({work.group for work in action.works}) > 1
        self.before, self.frozen = state, pickle.dumps(state)

    def _audit_near(self, pool, mine, idle):
        if (windowed := pool.windowed) is None:
            return
        unused = windowed.edges.keys() - windowed.refs.keys()
        assert sorted([*windowed.free, *windowed.refs, *unused]) == [*range(windowed.total)]
        assert Counter(p for live in mine.values() for p in live.window_pages if p >= 0) == Counter(windowed.refs)
        assert {twin for twin, _ in windowed.edges.values()} <= pool.edges.keys()
        for live in idle:
            assert sum(p >= 0 for p in live.window_pages) <= pool.count(windowed.window) + 1
        self.counts["given back"] += sum(p < 0 for live in mine.values() for p in live.window_pages)

    def ended(self, served) -> Counter:
        """How often what happened, once all is over."""
        assert not self.before.live, "a request is starved"
        self.counts.update(times.reason.split(":")[0] for times in served.requests.values())
        return self.counts

    def _count_hit(self, state, action):
        """By brute force: the longest run of whole pages of these tokens, at most all but one, that the trie of the
        request's group spells."""
        live = state.live[action.id]
        pool, tokens = state.pools[state.policy.workers[0]][live.group], live.tokens

        def spelled(page: int) -> tuple[int, ...]:
            return () if page == -1 else (*spelled(pool.edges[page][0]), *pool.edges[page][1])

        page_of = {spelled(page): page for page in (-1, *pool.edges)}

        def hits(n: int) -> bool:
            first = pool.windowed.first(n) * pool.size if pool.windowed else n
            twins = [page_of.get(tokens[:m]) for m in range(first + pool.size, n + 1, pool.size)]
            return tokens[:n] in page_of and all((twin, ()) in pool.windowed.children for twin in twins)

        best = max(n for n in range(0, len(tokens), pool.size) if hits(n))
        self.counts["hits"] += action.cached > 0
        self.counts["full hits"] += best > 0 and best + pool.size >= len(tokens) and len(tokens) % pool.size == 0
        assert action.cached == best or not self.options.prefix


def trace(seed: int, groups: int = 1, drafted: bool | None = None):
    """A random trace: (options, [(time, request)], [(time, id)]). `drafted`: whether there are proposals, or any."""
    chance = random.Random(seed)
    page = chance.choice([1, 2, 3, 4])
    options = Options(
        pages=chance.randint(4, 12), page=page, slots=groups * chance.randint(1, 4), budget=chance.randint(1, 8),
        policy=chance.choice(["static", "interleaved", "chunked", "disaggregated"]),
        prefix=chance.random() < 0.8,
        proposals=chance.choice([0, 0, 1, 2, 5] if drafted is None else [1, 2, 5] if drafted else [0]), groups=groups,
    )  # fmt: skip
    stems = [tuple(chance.randrange(V) for _ in range(chance.choice([page, 2 * page]))) for _ in range(2)]
    arrivals, cancel = [], []
    for id in range(chance.randint(2, 9)):
        stem = chance.choice([*stems, ()])
        prompt = stem + tuple(chance.randrange(V) for _ in range(chance.choice([0, 0, 1, page, chance.randint(1, 5)])))
        stop = frozenset({chance.randrange(V)}) if chance.random() < 0.3 else frozenset()
        when = chance.choice([0.0, 0.0, 1.0, chance.uniform(0, 12)])
        arrivals.append((when, Request(id, prompt or (1,), chance.randint(1, 8), stop)))
        if chance.random() < 0.2:
            cancel.append((when + chance.choice([0.0, 1.0, chance.uniform(0, 9)]), id))
    return options, arrivals, cancel


def check(served, arrivals, cancel, options: Options, alone) -> None:
    """Each request is given what it is given alone, or the begin of it if it is cancelled; or it is refused."""
    for _, request in arrivals:
        times, wanted = served.requests[request.id], alone(request)
        if refusal(request, options):
            assert times.reason.startswith("refused"), times
        elif times.reason == "cancelled":
            assert request.id in {id for _, id in cancel}
            assert times.tokens == wanted[: len(times.tokens)]
        else:
            assert times.tokens == wanted, (request, times)
            assert times.reason == ("stop" if wanted[-1] in request.stop else "length")


@pytest.mark.parametrize("count", [160, pytest.param(5000, marks=pytest.mark.sweep)])
@pytest.mark.parametrize(("groups", "window"), [(1, False), (2, False), (3, False), (1, True), (2, True)])
def test_random_traces(groups, window, count):
    """Each thing must have happened: requests that are preempted and come again (nano-vllm#144, #211, #233), pages that
    several hold (sglang#35270, nano-vllm#217), prefixes that are shared (vllm#5543, #7845), also whole prompts
    (nano-vllm#144) and in pages that were another's before (#163); groups of ranks, each with pages of its own; layers
    with a window, which give back the pages that fell out of it."""
    total: Counter = Counter()
    for seed in range(count):
        options, arrivals, cancel = trace(seed, groups)
        if window:
            options = replace(options, policy="chunked", window=1 + seed % 7)
        audited = Audited(options, random.Random(seed + 1))
        served = drive(arrivals, options, audited.execute, cancel=cancel, watch=audited.watch)
        check(served, arrivals, cancel, options, alone)
        total += audited.ended(served)
    happens = [
        "Preempt",
        *(["given back"] if window else ["Move"]),
        "evictions",
        "hits",
        "full hits",
        "chunks",
        "cancelled",
        "stop",
        "refused",
    ]
    happens += ["proposals kept", "proposals dropped", *["steps of several groups"] * (groups > 1)]
    for what in happens:
        assert total[what] > 3, (what, total)


# (policy, times to the first tokens, time per token, all, longest gap of a decode)
POLICIES = [("static", [1, 1, 7], 1.0, 7, 1), ("interleaved", [1, 2, 3], 1.2, 8, 42), ("chunked", [1, 1, 2], 1.0, 6, 8)]


@pytest.mark.parametrize(("policy", "first", "tpot", "seconds", "gap"), POLICIES)
def test_policies_differ_in_when_they_admit(policy, first, tpot, seconds, gap):
    """Two short requests and a long one, two slots: when they have their first tokens, and when all is over.

    nano-vllm#73, PR#276, vllm#5042, who starves whom: chunked, no step is without those that decode; interleaved, a
    long prompt stops them for one step; static, it waits."""
    arrivals = [(0.0, Request(i, (1, 2), n)) for i, n in enumerate((1, 6, 1))]
    served = simulate(arrivals, Options(pages=16, page=2, slots=2, policy=policy), lambda action: 1.0)
    assert [times.ttft for times in served.requests.values()] == first
    assert [served.percentile("ttft", p) for p in (50, 95)] == first[1:]
    assert served.requests[1].tpot == served.percentile("tpot", 50) == tpot
    assert math.isnan(served.requests[2].tpot)  # of one token
    assert (served.seconds, served.throughput) == (seconds, 8 / seconds)
    arrivals = [(0.0, Request(0, (1,), 12)), (2.5, Request(1, tuple(range(40)), 2))]
    options = Options(pages=16, page=4, policy=policy, budget=8)
    served = simulate(arrivals, options, lambda action: float(sum(len(w.tokens) for w in action.works)))
    assert max(b - a for a, b in itertools.pairwise(served.requests[0].at)) == gap
    assert served.requests[1].ttft == served.requests[1].at[0] - 2.5


def test_least_lately_used_is_evicted_first():
    pool = Pool(3, 1)
    for token in (5, 6, 7):
        pool.release(pool.share(pool.take(1), (token,), 0))
    again = pool.match((5, 9))
    pool.hold(again)
    pool.release(again)
    pool.take(1)
    assert [bool(pool.match((token, 9))) for token in (5, 6, 7)] == [True, False, True]


def test_a_request_goes_to_the_group_that_has_its_prefix_else_where_the_fewest_are():
    start = initial(Options(pages=4, page=1, slots=6, groups=2))
    state, actions = step(start, [Arrive(Request(i, (i, i), 1)) for i in range(3)])
    assert [(work.id, work.group) for work in actions[-1].works] == [(0, 0), (1, 1), (2, 0)]
    state, _ = step(state, [Done("engine", dict.fromkeys(range(3), (9,)))])
    state, actions = step(state, [Arrive(Request(7, (1, 5), 1))])
    assert (state.live[7].group, actions[0]) == (1, Admit(7, 1))


def test_a_group_without_pages_preempts_its_own_youngest():
    """Not the one of the other group, though that is younger."""
    start = initial(Options(pages=2, page=2, slots=4, groups=2, prefix=False))
    state, _ = step(start, [Arrive(Request(i, prompt, 2)) for i, prompt in enumerate([(1, 1), (2,), (3,), (4,)])])
    _, actions = step(state, [Done("engine", dict.fromkeys(range(4), (9,)))])
    assert [action.id for action in actions if isinstance(action, Preempt)] == [2]
