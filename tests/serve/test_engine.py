"""The scheduler: random traces with a model of whole numbers, planted mistakes, bugs that others published."""

import itertools
import math

import mock_model
import pytest

from scaling.mesh import AbstractMesh
from scaling.serve.engine import Engine
from scaling.serve.pages import ROOT, Pool
from scaling.serve.requests import Request
from scaling.serve.scheduler import initial, step
from scaling.serve.simulate import simulate
from scaling.serve.states import Admit, Arrive, Cancel, Done, Finish, Live, Options, Preempt, Run


def test_random_traces():
    """More by `engine_sweep.py`. Each thing must have happened: requests that are preempted and come again
    (nano-vllm#144, #211, #233), pages that several hold (sglang#35270), prefixes that are shared (vllm#5543, #7845)."""
    total = sum((mock_model.run(seed) for seed in range(300)), mock_model.Counter())
    happens = ["Preempt", "Move", "evictions", "hits", "full hits", "chunks", "cancelled", "stop", "refused"]
    for what in [*happens, "proposals kept", "proposals dropped"]:
        assert total[what] > 20, (what, total)


@pytest.mark.parametrize("groups", [2, 3])
def test_random_traces_over_groups_of_ranks(groups):
    """Each with a memory of its own."""
    total = sum((mock_model.run(seed, groups=groups) for seed in range(300)), mock_model.Counter())
    for what in ["Preempt", "Move", "evictions", "hits", "steps of several groups"]:
        assert total[what] > 9, (what, total)


def _stale(self, count):
    unheld = [page for page in self.edges if page not in self.refs][:count]
    for page in unheld:
        del self.edges[page], self.used[page]
        self.free.append(page)


def _whole(self, tokens):
    found, parent = [], ROOT
    for end in range(self.size, len(tokens) + 1, self.size):
        page = self.children.get((parent, tuple(tokens[end - self.size : end])))
        if page is None:
            break
        found.append(page)
        parent = page
    return found


def _flat(self, tokens):
    found = []
    for end in range(self.size, len(tokens), self.size):
        same = [p for (_, part), p in self.children.items() if part == tuple(tokens[end - self.size : end])]
        if not same:
            break
        found.append(same[0])
    return found


def _unshared(self, pages, tokens, first, tick):
    for i in range(first, len(tokens) // self.size):
        key = pages[i - 1] if i else ROOT, tuple(tokens[i * self.size : (i + 1) * self.size])
        if self.children.setdefault(key, pages[i]) == pages[i]:
            self.edges[pages[i]], self.used[pages[i]] = (*key, i), tick
    return pages


def _forgotten(self, pages, tick):
    for page in pages:
        self.refs.pop(page, None)
        if page not in self.edges:
            self.free.append(page)


MISTAKES = {
    "nano-vllm#163: a page that is taken again is still found under its old tokens": (Pool, "_evict", _stale),
    "nano-vllm#144: a prompt that is cached whole has nothing left to compute": (Pool, "match", _whole),
    "a page is found by its own tokens, whatever stands before": (Pool, "match", _flat),
    "sglang#35270: pages of the trie whose parents nobody holds": (Pool, "share", _unshared),
    "nano-vllm#217: what one releases is free, though others hold it": (Pool, "release", _forgotten),
    "a draft's tokens after a stop token": (Request, "until_stop", lambda self, tokens: tuple(tokens)),
    "more proposals than the request may still give": (
        Live, "proposals", lambda self, most: most * bool(self.out),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_planted_mistakes_are_found(name, monkeypatch):
    """Bugs of other engines, put into this one: the traces must fail."""
    monkeypatch.setattr(*MISTAKES[name])
    with pytest.raises((AssertionError, KeyError, IndexError, ValueError)):
        sum((mock_model.run(seed) for seed in range(300)), mock_model.Counter())


def drained(state, events=()):
    """(state, actions) of all steps until nothing runs, each worker done at once, giving token 9."""
    log, todo = [], list(events)
    while True:
        state, actions = step(state, todo)
        log += actions
        todo = [Done(a.worker, {w.id: (9,) for w in a.works if w.sample}) for a in actions if isinstance(a, Run)]
        if not todo:
            return state, log


@pytest.mark.parametrize("policy", ["static", "interleaved", "chunked", "disaggregated"])
def test_nano_vllm_144_a_prompt_that_is_cached_whole(policy):
    """Its length a multiple of the page: the last page is computed again, no step has zero tokens, no page is shared
    and written."""
    options = Options(pages=6, page=4, policy=policy)
    prompt = (1, 2, 3, 4, 5, 6, 7, 8)
    arrivals = [(0.0, Request(0, prompt, 1)), (10.0, Request(1, prompt, 1))]
    served = simulate(arrivals, options, lambda action: 1.0)
    assert served.requests[1].cached == 4
    first, second = (run.works[0] for run in served.steps)
    assert second.start == 4 and second.tokens == (5, 6, 7, 8) and second.pages[0] == first.pages[0]  # noqa: PT018
    assert second.pages[1] != first.pages[1]


def test_nano_vllm_73_decode_goes_on_beside_prompts():
    """nano-vllm#73, PR#276, vllm#5042, who starves whom: chunked, no step is without those that decode; interleaved, a
    long prompt stops them for one step."""
    arrivals = [(0.0, Request(0, (1,), 12)), (2.5, Request(1, tuple(range(40)), 2))]

    def gaps(policy):
        options = Options(pages=16, page=4, policy=policy, budget=8)
        served = simulate(arrivals, options, lambda action: float(sum(len(w.tokens) for w in action.works)))
        at = served.requests[0].at
        return max(b - a for a, b in itertools.pairwise(at))

    assert gaps("chunked") == 8
    assert gaps("interleaved") == 42  # the prompt, and then both


def test_step_changes_nothing_that_it_is_given():
    state, _ = step(initial(Options(pages=8, page=2)), [Arrive(Request(0, (1, 2, 3), 3))])
    again = [step(state, [Done("engine", {0: (5,)}), Arrive(Request(1, (1, 2, 9), 2))]) for _ in range(2)]
    assert again[0][1] == again[1][1]
    assert again[0][0].live == again[1][0].live
    assert state.live[0].out == () and list(state.busy) == ["engine"]  # noqa: PT018


def test_refused_cancelled_unknown():
    options = Options(pages=2, page=4)
    bad = [Request(0, (), 3), Request(1, (1,), 8), Request(2, (1,), 0)]
    state, actions = step(initial(options), [Arrive(request) for request in bad])
    assert [type(a) for a in actions] == [Finish] * 3 and not state.live  # noqa: PT018
    assert ["empty" in actions[0].reason, "8 fit" in actions[1].reason, "at least 1" in actions[2].reason] == [True] * 3
    state, _ = step(state, [Arrive(Request(3, (1,), 4))])
    with pytest.raises(ValueError, match="request 3 has been given already"):
        step(state, [Arrive(Request(3, (1,), 4))])
    state, actions = step(state, [Cancel(3), Cancel(77)])
    assert not actions  # it is in a step
    state, actions = step(state, [Done("engine", {3: (1,)})])
    assert actions == [Finish(3, (), "cancelled")]
    with pytest.raises(ValueError, match="engine is idle"):
        step(state, [Done("engine", {})])
    with pytest.raises(ValueError, match=r"(?s)unknown policy 'best'.*fix: choose one of static"):
        Options(pages=1, policy="best")


def test_each_worker_has_its_pages():
    def totals(**options):
        pools = initial(Options(8, 2, **options)).pools
        return {worker: [pool.total for pool in own] for worker, own in pools.items()}

    assert totals(decode_pages=5) == {"engine": [8]}
    assert totals(policy="disaggregated") == {"prefill": [8], "decode": [8]}
    assert totals(policy="disaggregated", decode_pages=5, groups=2) == {"prefill": [8, 8], "decode": [5, 5]}


def test_policies_differ_in_when_they_admit():
    """Two short and one long request, two slots: who is admitted in which step of the batch."""

    def admitted(policy):
        arrivals = [(0.0, Request(i, (1, 2), n)) for i, n in enumerate((1, 6, 1))]
        served = simulate(arrivals, Options(pages=16, page=2, slots=2, policy=policy), lambda action: 1.0)
        return served.requests[2].ttft, served.seconds

    assert admitted("static") == (7.0, 7.0)
    assert admitted("interleaved")[0] == 3.0  # when the first is done, after the second's prompt
    assert admitted("chunked")[0] == 2.0


def test_times_of_a_trace_by_hand():
    """Prefill 2 s, decode 1 s a step: the clock, the percentiles and the throughput."""
    arrivals = [(0.0, Request(0, (1, 2), 3)), (1.0, Request(1, (3, 4), 2))]
    cost = lambda action: 2.0 if len(action.works[0].tokens) > 1 else 1.0  # noqa: E731
    served = simulate(arrivals, Options(pages=8, page=2, policy="interleaved"), cost)
    assert served.requests[0].at == [2.0, 5.0, 6.0]
    assert served.requests[1].at == [4.0, 5.0]
    assert (served.requests[0].ttft, served.requests[0].tpot, served.requests[1].tpot) == (2.0, 2.0, 1.0)
    assert (served.seconds, served.throughput) == (6.0, 5 / 6)
    assert (served.percentile("ttft", 50), served.percentile("ttft", 95)) == (2.0, 3.0)
    assert math.isnan(served.requests[0].__class__(0.0).tpot)


def test_least_lately_used_is_evicted_first():
    pool = Pool(3, 1)
    for tick, token in enumerate((5, 6, 7)):
        pages = pool.share(pool.take(1), (token,), 0, tick)
        pool.release(pages, tick)
    again = pool.match((5, 9))
    pool.hold(again, 3)
    pool.release(again, 3)
    pool.take(1)
    assert [bool(pool.match((token, 9))) for token in (5, 6, 7)] == [True, False, True]


def test_admission_is_in_the_order_of_arrival():
    """A small request does not overtake a large one that waits for pages."""
    options = Options(pages=4, page=1, slots=4, policy="chunked", prefix=False)
    state, actions = step(initial(options), [Arrive(Request(0, (1, 1), 2)), Arrive(Request(1, (1, 1, 1), 1)),
                                             Arrive(Request(2, (1,), 1))])  # fmt: skip
    assert [a.id for a in actions if isinstance(a, Admit)] == [0]
    _, log = drained(state, [Done("engine", {0: (9,)})])
    assert [a.id for a in log if isinstance(a, Finish)] == [0, 1, 2]
    assert not [a for a in log if isinstance(a, Preempt)]


@pytest.mark.parametrize("axis", ["Z", "E"])
def test_each_group_of_ranks_has_pages_of_its_own(axis):
    with pytest.raises(ValueError, match=r"among 2 groups of ranks, options.groups is 1\n  fix: .*groups=2"):
        Engine({}, None, Options(4, 1, 1), mesh=AbstractMesh({axis: 2}))


def test_a_request_goes_to_the_group_that_has_its_prefix_and_else_where_the_fewest_are():
    options = Options(pages=4, page=1, slots=6, groups=2)
    state, actions = step(initial(options), [Arrive(Request(i, (i, i), 1)) for i in range(3)])
    assert [live.group for live in state.live.values()] == [0, 1, 0]
    (run,) = [action for action in actions if isinstance(action, Run)]
    assert [(work.id, work.group) for work in run.works] == [(0, 0), (1, 1), (2, 0)]
    state, _ = drained(state, [Done("engine", dict.fromkeys(range(3), (9,)))])
    state, actions = step(state, [Arrive(Request(7, (1, 5), 1))])
    assert state.live[7].group == 1
    assert [action.cached for action in actions if isinstance(action, Admit)] == [1]


def test_a_group_without_pages_preempts_its_own_youngest():
    """Not the one of the other group, though that is younger."""
    options = Options(pages=2, page=2, slots=4, groups=2, prefix=False)
    prompts = {0: (1, 1), 1: (2,), 2: (3,), 3: (4,)}
    state, _ = step(initial(options), [Arrive(Request(id, prompt, 2)) for id, prompt in prompts.items()])
    assert [live.group for live in state.live.values()] == [0, 1, 0, 1]
    state, actions = step(state, [Done("engine", dict.fromkeys(prompts, (9,)))])
    assert [action.id for action in actions if isinstance(action, Preempt)] == [2]
    _, log = drained(state, [Done("engine", dict.fromkeys((0, 1, 3), (9,)))])
    assert [action.id for action in log if isinstance(action, Finish)] == [0, 1, 3, 2]
