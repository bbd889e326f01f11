"""The scheduler: random traces with a model of whole numbers, and by hand what they do not look at: order and times."""

import itertools
import math

import mock_model
import pytest

from scaling.serve.pages import Pool
from scaling.serve.requests import Request
from scaling.serve.scheduler import initial, step
from scaling.serve.simulate import simulate
from scaling.serve.states import Admit, Arrive, Done, Options, Preempt, Run


@pytest.mark.parametrize("count", [120, pytest.param(5000, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_random_traces(groups, count):
    """Each thing must have happened: requests that are preempted and come again (nano-vllm#144, #211, #233), pages that
    several hold (sglang#35270, nano-vllm#217), prefixes that are shared (vllm#5543, #7845), also whole prompts
    (nano-vllm#144) and in pages that were another's before (#163); groups of ranks, each with pages of its own."""
    total = sum((mock_model.run(seed, groups) for seed in range(count)), mock_model.Counter())
    happens = ["Preempt", "Move", "evictions", "hits", "full hits", "chunks", "cancelled", "stop", "refused"]
    happens += ["proposals kept", "proposals dropped", *["steps of several groups"] * (groups > 1)]
    for what in happens:
        assert total[what] > 3, (what, total)


def drained(state, events=()):
    """(state, actions) of all steps until nothing runs, each worker done at once, giving token 9."""
    log, todo = [], list(events)
    while True:
        state, actions = step(state, todo)
        log += actions
        todo = [Done(a.worker, {w.id: (9,) for w in a.works if w.sample}) for a in actions if isinstance(a, Run)]
        if not todo:
            return state, log


def arrived(options: Options, *requests: tuple):
    """After the first step of requests (prompt, new tokens), whose ids are 0, 1, ..."""
    return step(initial(options), [Arrive(Request(i, *request)) for i, request in enumerate(requests)])


def test_step_changes_nothing_that_it_is_given():
    state, _ = arrived(Options(pages=8, page=2), ((1, 2, 3), 3))
    again = [step(state, [Done("engine", {0: (5,)}), Arrive(Request(1, (1, 2, 9), 2))]) for _ in range(2)]
    assert again[0][1] == again[1][1]
    assert again[0][0].live == again[1][0].live
    assert (state.live[0].out, list(state.busy)) == ((), ["engine"])


def test_each_worker_has_its_pages():
    pools = initial(Options(8, 2, policy="disaggregated", decode_pages=5, groups=2)).pools
    assert {worker: [pool.total for pool in own] for worker, own in pools.items()} == {
        "prefill": [8, 8],
        "decode": [5, 5],
    }


POLICIES = [("static", 7, 7, 1), ("interleaved", 3, 8, 42), ("chunked", 2, 6, 8)]


@pytest.mark.parametrize(("policy", "first", "seconds", "gap"), POLICIES)
def test_policies_differ_in_when_they_admit(policy, first, seconds, gap):
    """Two short requests and a long one, two slots: when the third has its first token, and when all is over.

    nano-vllm#73, PR#276, vllm#5042, who starves whom: chunked, no step is without those that decode; interleaved, a
    long prompt stops them for one step; static, it waits."""
    arrivals = [(0.0, Request(i, (1, 2), n)) for i, n in enumerate((1, 6, 1))]
    served = simulate(arrivals, Options(pages=16, page=2, slots=2, policy=policy), lambda action: 1.0)
    assert (served.requests[2].ttft, served.seconds) == (first, seconds)
    assert math.isnan(served.requests[2].tpot)  # of one token
    arrivals = [(0.0, Request(0, (1,), 12)), (2.5, Request(1, tuple(range(40)), 2))]
    options = Options(pages=16, page=4, policy=policy, budget=8)
    served = simulate(arrivals, options, lambda action: float(sum(len(w.tokens) for w in action.works)))
    assert max(b - a for a, b in itertools.pairwise(served.requests[0].at)) == gap


def test_times_of_a_trace_by_hand():
    """Prefill 2 s, decode 1 s a step: the clock, the percentiles and the throughput."""
    arrivals = [(0.0, Request(0, (1, 2), 3)), (1.0, Request(1, (3, 4), 2))]
    options = Options(pages=8, page=2, policy="interleaved")
    served = simulate(arrivals, options, lambda action: float(len(action.works[0].tokens)))
    assert [times.at for times in served.requests.values()] == [[2.0, 5.0, 6.0], [4.0, 5.0]]
    assert [(times.ttft, times.tpot) for times in served.requests.values()] == [(2.0, 2.0), (3.0, 1.0)]
    assert (served.seconds, served.throughput) == (6.0, 5 / 6)
    assert [served.percentile("ttft", p) for p in (50, 95)] == [2.0, 3.0]


def test_least_lately_used_is_evicted_first():
    pool = Pool(3, 1)
    for tick, token in enumerate((5, 6, 7)):
        pool.release(pool.share(pool.take(1), (token,), 0, tick), tick)
    again = pool.match((5, 9))
    pool.hold(again, 3)
    pool.release(again, 3)
    pool.take(1)
    assert [bool(pool.match((token, 9))) for token in (5, 6, 7)] == [True, False, True]


def test_a_request_goes_to_the_group_that_has_its_prefix_and_else_where_the_fewest_are():
    state, actions = arrived(Options(pages=4, page=1, slots=6, groups=2), *(((i, i), 1) for i in range(3)))
    assert [(work.id, work.group) for work in actions[-1].works] == [(0, 0), (1, 1), (2, 0)]
    state, _ = drained(state, [Done("engine", dict.fromkeys(range(3), (9,)))])
    state, actions = step(state, [Arrive(Request(7, (1, 5), 1))])
    assert (state.live[7].group, actions[0]) == (1, Admit(7, 1))


def test_a_group_without_pages_preempts_its_own_youngest():
    """Not the one of the other group, though that is younger."""
    options = Options(pages=2, page=2, slots=4, groups=2, prefix=False)
    state, _ = arrived(options, ((1, 1), 2), ((2,), 2), ((3,), 2), ((4,), 2))
    _, actions = step(state, [Done("engine", dict.fromkeys(range(4), (9,)))])
    assert [action.id for action in actions if isinstance(action, Preempt)] == [2]
