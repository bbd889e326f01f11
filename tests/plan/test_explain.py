from dataclasses import replace
from itertools import pairwise

import pytest

from scaling.configs import get
from scaling.hardware import chip
from scaling.plan import Job, Stack, explain, plans
from scaling.plan.job import Fixed, Question
from scaling.plan.one_layer import figure, layer_chart, layer_passes
from scaling.plan.report import Budget

JOBS = [
    (Job(get("llama3-70b"), 4 * 2**20), "v5p", 1024, Fixed()),
    (Job(get("llama3-70b"), 2**20), "h100", 64, Fixed((("fsdp", 8), ("tensor", 8)), remat="block")),
    (Job(get("llama3-8b"), 2**18), "h100", 32, Fixed((("fsdp", 32),), zero=3)),
    (Job(get("llama3-8b"), 2**17, 2**16), "h100", 16, Fixed((("context", 8), ("tensor", 2)), remat="matmuls")),
    (Job(get("mixtral-8x7b"), 256 * 4096), "h100", 64, Fixed((("expert", 8),))),
    (Job(get("deepseek-v3"), 2**23), "h800", 256, Fixed(schedule="dualpipev")),
    (Job(Stack(32, 8192, 32768), 2**21, seq=1), "h100", 64, Fixed()),
]


@pytest.mark.parametrize(("job", "name", "n", "fixed"), JOBS, ids=lambda x: x if isinstance(x, str) else None)
def test_the_layers_in_time_sum_to_the_forecast(job, name, n, fixed):
    found = plans(job, chip(name), n, fixed)[0]
    passes, parts = layer_passes(found), found.parts
    layers = found.layout.microbatches * float(found.compute.layers) * sum(part.seconds for part in passes)
    ends = found.layout.microbatches * 3 * float(found.compute.head) / (
        found.network.chip.flops(job.wide) * found.network.chip.efficiency.of_matmul(job.wide)
    )  # fmt: skip
    rest = float(parts.bubble + parts.once + parts.update)
    assert layers + ends == pytest.approx(found.forecast - rest, rel=0.04)
    for part in passes:
        computed = sorted((bar for bar in part.bars if bar.row == "compute"), key=lambda bar: bar.start)
        assert all(a.end <= b.start + 1e-12 for a, b in pairwise(computed))
        for lane in part.lanes:
            bars = sorted((bar for bar in part.bars if bar.row == lane), key=lambda bar: bar.start)
            assert all(0 <= bar.start < bar.end <= part.seconds * (1 + 1e-9) for bar in bars)
        assert set(part.lanes[1:]) <= {entry.axis for entry in found.entries}
        assert all(0 <= share <= 1 + 1e-9 for share in part.hidden.values())


def test_weights_run_behind_a_layer_and_bind_where_links_are_slow():
    job = Job(Stack(32, 8192, 32768), 2**21, seq=1)
    fixed = Fixed((("fsdp", 64),), zero=3, microbatches=1)
    fast = layer_passes(plans(job, chip("h100"), 64, fixed)[0])
    slow = layer_passes(plans(job, explain.links(chip("h100"), 1 / 64), 64, fixed)[0])
    assert fast[0].hidden == {"fsdp": pytest.approx(1)}
    assert slow[0].hidden["fsdp"] < 0.7
    assert slow[0].seconds > 1.4 * fast[0].seconds


def test_the_drawings():
    job = Job(get("llama3-70b"), 4 * 2**20)
    passes = layer_passes(plans(job, chip("v5p"), 1024, Fixed((("data", 256), ("tensor", 4))))[0])
    drawn = layer_chart(passes)
    assert max(len(line) for line in drawn.splitlines()) <= 100
    assert [line.split()[0] for line in drawn.splitlines()] == ["forward:", "compute", "tensor", "behind", "backward:",
                                                                 "compute", "tensor", "behind"]  # fmt: skip
    pytest.importorskip("matplotlib")
    for axes, part in zip(figure(passes, "a < b").axes, passes, strict=True):
        assert [text.get_text() for text in axes.get_yticklabels()] == part.lanes
        assert sum(box.get_width() for box in axes.patches) == pytest.approx(
            1e3 * sum(bar.seconds for bar in part.bars)
        )


def test_nothing_in_the_table_is_beaten():
    job, h100 = Job(get("llama3-8b"), 2**20), chip("h100")
    choices = explain.pareto_of_chips(Question(job, h100, 16), Budget(price=2.0))
    best = plans(job, h100, 16)[0]
    assert {one.found.chips for one in choices} == {8, 16, 32}
    assert any(one.found.forecast <= 1.03 * best.forecast for one in choices if one.found.chips == 16)
    for one in choices:
        assert one.dollars == pytest.approx(one.days * 24 * 2.0 * one.found.chips)
        assert not any(
            other.costs != one.costs and all(x <= y for x, y in zip(other.costs, one.costs, strict=True))
            for other in choices
        )
    assert len({one.costs[1] for one in choices}) > 1


def test_what_would_change_the_answer_is_planned_again():
    job, h100 = Job(get("llama3-8b"), 2**17), chip("h100")
    found = {change.what: change for change in explain.changes(Question(job, h100, 16))}
    less = plans(job, replace(h100, hbm_bytes=40e9), 16)[0]
    assert found["half the memory"].found.name == less.name
    assert found["half the memory"].found.forecast == pytest.approx(less.forecast)
    assert found["half the batch"].found.job.batch == 2**16
    assert found["matmuls in fp8"].per_chip > found["twice the batch"].per_chip
    found = {change.what: change for change in explain.changes(Question(job, h100, 16, Fixed((("tensor", 16),))))}
    assert found["links half as fast"].per_chip < 0.8 * found["links twice as fast"].per_chip
    fixed = {c.what: c for c in explain.changes(Question(job, h100, 16, Fixed((("data", 16),), remat="none")))}
    assert fixed["half the chips"].found is None
    assert "no mesh" in fixed["half the chips"].why


def test_break_evens_are_where_the_axis_takes_as_long_as_computing():
    job = Job(get("llama3-8b"), 2**20)
    found = plans(job, chip("h100"), 64, Fixed((("data", 64),), microbatches=1))[0]
    share = max(dict(part.axes)["data"] / part.math for part in found.cost.parts)
    [said] = explain.break_evens(found)
    assert f"{share:.0%} of computing" in said
    slower = plans(job, explain.links(chip("h100"), share), 64, Fixed((("data", 64),), microbatches=1))[0]
    assert max(dict(part.axes)["data"] / part.math for part in slower.cost.parts) == pytest.approx(1, rel=0.01)
    assert sum(share for _, share in explain.bottlenecks(found)) == pytest.approx(1, abs=0.005)
