"""Plans under load: lone requests timed by hand, pictures drawn from spans that are known."""

import math

import pytest

from scaling.configs import get
from scaling.hardware import chip
from scaling.plan.serve import Service, plans
from scaling.plan.serve.traces import gantt, histogram, modelled, under_load
from scaling.serve.requests import Request
from scaling.serve.simulate import RequestTimes, Simulated, WorkSpan
from scaling.serve.states import POLICIES, Move, Run, Work

V5E = chip("v5e")
SMALL = get("llama3-8b").with_(L=4, V=32000)
PLAN = plans(Service(SMALL, 256, 16), V5E, chips=1)[0]


def test_a_lone_request_by_hand():
    """240 tokens of prompt at 40% MFU, and 15 steps of one token, each reading all weights and its own cache."""
    D, F, heads = 4096, 14336, 32 * 128 + 2 * 8 * 128
    params = 4 * (3 * D * F + D * heads + 32 * 128 * D + 2 * D) + D + D * 32000
    served = under_load(PLAN, rate=1e-3, count=3)
    for times in served.requests.values():
        pairs = 240 * 241 / 2 * 4 * 32 * 128 * 4  # FLOPs of causal attention: 4 NH a pair and layer
        read = 240 * 2 * 4 * 8 * 128  # int8
        first = max(pairs / 1.97e14, read / 8.2e11) + max(2 * 240 * params / (0.4 * 1.97e14), params / 8.2e11)
        assert times.ttft == pytest.approx(first)
        steps = [(241 + i) * 2 * 4 * 8 * 128 / 8.2e11 + params / 8.2e11 for i in range(15)]
        assert times.tpot == pytest.approx(sum(steps) / 15)


@pytest.mark.parametrize("policy", POLICIES)
def test_all_are_served_under_load(policy):
    served = under_load(PLAN, rate=500.0, policy=policy, count=30, seed=1)
    assert [len(times.at) for times in served.requests.values()] == [16] * 30
    assert served.throughput == pytest.approx(30 * 16 / served.seconds)
    again = under_load(PLAN, rate=500.0, policy=policy, count=30, seed=1)
    assert again.steps == served.steps


def test_a_move_goes_over_the_datacenter():
    assert modelled(PLAN)(Move(0, 100, (0,), (1,))) == pytest.approx(100 * 2 * 4 * 8 * 128 / 3.125e9)


def work(id, tokens):
    return Work(Request(id, (0,), 1), 0, (0,) * tokens, (0,), True)


def test_slots_as_drawn():
    """Two requests beside each other, the third where the first was; the second's cache is moved."""
    spans = (
        WorkSpan(0.0, 2.0, Run("engine", (work(0, 5),))), WorkSpan(2.0, 4.0, Run("engine", (work(0, 1), work(1, 3)))),
        WorkSpan(4.0, 5.0, Move(1, 3, (0,), (1,))), WorkSpan(6.0, 7.0, Run("engine", (work(1, 1), work(2, 2)))),
        WorkSpan(7.0, 10.0, Run("engine", (work(2, 1),))),
    )  # fmt: skip
    served = Simulated(spans, {id: RequestTimes(0.0) for id in range(3)})
    assert gantt(served, 10) == "  0 |PPdd  Pddd|\n  1 |  PP>.d   |"
    assert gantt(served, 10, rows=1).endswith("and 1 more slots")


def test_histograms_count_everything():
    values = [0.001, 0.0011, 0.5, 1.0, math.nan]
    lines = histogram(values).splitlines()
    assert sum(int(line.split()[2]) for line in lines) == 4
    assert [int(line.split()[2]) for line in lines][0::7] == [2, 2]
    assert histogram([math.nan]) == "  (none)"


def test_ranks_wait_for_the_group_that_has_most_to_do():
    """Attention by data: the requests are split, and the experts are everybody's."""
    offered = plans(Service(get("mixtral-8x7b"), 1024, 16), chip("h100"), chips=4, form="experts", batch=8)
    plan = next(plan for plan in offered if plan.groups == 2)
    groups = 2

    def seconds(*of):
        request = Request(0, (0,), 1)
        return modelled(plan)(Run("engine", tuple(Work(request, 900, (0,), (), True, group=g) for g in of)))

    assert seconds(0) == seconds(*range(groups)) < seconds(0, 0) == seconds(*range(groups), 1)
    served = under_load(plan, rate=20.0, count=12)
    assert [len(times.at) for times in served.requests.values()] == [16] * 12
    assert {work.group for run in served.steps for work in run.works} == set(range(groups))
