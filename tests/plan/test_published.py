"""What the planner says beside what others measured or count: published runs and steps of serving, peft's and
bitsandbytes' counts of ways to train in less memory; what failures cost, beside a simulation."""

import math
import statistics
from collections import Counter
from dataclasses import replace

import pytest

from scaling.book.arrays import largest
from scaling.configs import get
from scaling.hardware import chip
from scaling.plan import Job, failures, plans, published
from scaling.plan.classes import error_line, is_unusual, runs_table, usual_error
from scaling.plan.failures import HOUR, daly, of_job, simulated, spare_hosts, young
from scaling.plan.fitting import adapter_params, frugal_ways
from scaling.plan.job import Fixed
from scaling.plan.serve.published import data, measured_steps

L8 = get("llama3-8b")
SMALL, LLAMA = 128, 16_384  # chips of the runs beside which the planner finds its own layout here; the command: all


@pytest.fixture(scope="module")
def rows():
    """Each run beside the planner; of large ones only the run's own mesh."""
    found = []
    for run in published.published_runs():
        if run.chips <= SMALL or run.chips == LLAMA:
            found.append(published.beside_planner(run))
        else:
            own = published.own_mesh(run)
            found.append(published.Beside(run, own, own))
    return found


@pytest.mark.slow
def test_forecasts_of_the_published_meshes_are_near_what_was_measured_and_what_is_off_is_explained(rows):
    errors, printed = [abs(math.log1p(row.error)) for row in rows], published.table(rows)
    assert statistics.median(errors) < math.log(1.08)
    assert largest(errors) < math.log(1.6)
    assert len(rows) > 65
    for row in rows:
        assert {axis: n for axis, n in row.own.layout.sizes.items() if n > 1} == dict(row.run.mesh)
        assert row.own.chips == row.run.chips
        assert row.own.bound * row.run.measured * row.run.chips <= row.run.job.batch, "beats its bound"
        unusual = is_unusual(row.run.job, row.run.chip, row.own.layout)
        assert row.best is row.own or row.best.forecast < row.own.forecast or unusual
        assert row.run.gave or row.gain <= published.BETTER, row.run.where
        assert row.run.wanting or abs(row.error) <= published.BETTER or not row.run.compared, row.run.where
        assert row.run.source in " ".join(printed.split())
        assert row.run.where in " ".join(printed.split())
    assert max(map(len, printed.splitlines())) <= 100


@pytest.mark.slow
def test_what_a_forecast_says_of_its_class_is_what_halves_of_the_runs_say_of_each_other(rows):
    stored = {name: tuple(found) for name, found in runs_table()["errors"].items()}
    found = published.class_errors(rows)
    assert {name: (round(error, 2), count) for name, (error, count) in found.items()} == stored
    assert all(error < 0.205 for error, _ in found.values())
    for what, most in (("publication", 0.1), ("class", 0.15)):
        assert published.median(published.errors_without(rows, what)) < most


def test_a_forecast_says_how_far_its_class_is_off():
    job = Job(L8, 2**20)
    assert error_line(job, chip("h100")).startswith("39 published runs of this class (dense models on GPUs) are off by")
    assert "no published run" in error_line(replace(job, config=get("mixtral-8x7b"), seq=2**15), chip("v5p"))
    assert "rtx3090" in error_line(job, chip("rtx3090"))
    assert usual_error(job, chip("rtx3090")) is None


def test_runs_are_of_models_that_a_user_can_name_and_tokens_follow_from_tflops():
    """LLaMA-3 405B: 400 TFLOPs/s a GPU of 6 x 405e9 FLOPs a token and attention are 41% of 989."""
    runs = published.published_runs()
    assert [get(run.job.config.name) for run in runs] == [run.job.config for run in runs]
    run = next(run for run in runs if run.chips == LLAMA and run.job.seq == 8192)
    assert run.measured * published.token_flops(run.job, "causal") == pytest.approx(400e12)
    assert 6 * 405e9 < published.token_flops(run.job, "causal") < 6.5 * 405e9


def test_bounds_of_serving_are_those_by_hand_and_none_is_beaten():
    """70.55e9 params in int8 less the embedding, 163,840 bytes a token; LLaMA-2 7B in bf16, 524,288 bytes a token."""
    steps = [one for group in data()["group"] for one in measured_steps(group)]
    assert len(steps) > 40
    for one in steps:
        assert one.bound <= one.seconds, (one.group, one.config.name, one.batch)
        assert one.bound + one.slower + one.step.comms + one.rest == pytest.approx(one.seconds)
        assert one.slower > 0
    of = {(one.group[:13], one.config.name, one.chips, one.batch, one.context): one for one in steps}
    read = 70_553_706_496 - 128256 * 8192
    two = of["LLaMA-3.1 70B", "llama3-70b", 8, 128, 2048]  # 64 sequences each
    assert two.bound == pytest.approx((64 * 2048 * 163_840 + read) / (8 * 8.2e11))
    compute = of["LLaMA-3.1 70B", "llama3-70b", 16, 128, 2048]
    assert compute.bound == pytest.approx(128 * 2048 * 163_840 / (16 * 8.2e11) + 2 * 128 * read / (16 * 1.97e14))
    small = of["gpt-fast, bf1", "llama2-7b", 2, 1, 205]
    assert small.bound == pytest.approx((2 * (6_738_415_616 - 32000 * 4096) + 205 * 524_288) / (2 * 2.0e12))
    assert small.step.comms == pytest.approx((2 * 32 + 2) * 2e-5)  # launches


# Less memory, and failures

FAILING = pytest.mark.parametrize(("chips", "save", "restart"), [
    (16_384, 3.0, 600.0), (16_384, 60.0, 600.0), (1024, 120.0, 300.0), (100_000, 30.0, 300.0),
])  # fmt: skip


def test_adapters_and_frozen_weights_are_those_of_llama3_8b():
    """peft prints 41,943,040 trainable params for rank 16 on all linear layers; its NF4 weights are about 5.7 GB."""
    assert adapter_params(L8) == 41_943_040
    ways = {way.name: way for way in frugal_ways(Job(L8, 2**16, 2048))}
    assert list(ways) == ["8-bit Adam", "Adam on the host", "activations on the host", "LoRA", "QLoRA"]
    assert ways["QLoRA"].job.param_bytes * 8.03e9 == pytest.approx(5.7e9, rel=0.02)
    assert ways["8-bit Adam"].job.optimizer_bytes == 2
    assert ways["LoRA"].job.optimizer_bytes * 8.03e9 == pytest.approx(16 * 41_943_040, rel=0.001)
    assert next(frugal_ways(Job(L8, 2**16, 2048, optimizer_bytes=2))).name == "Adam on the host"


@pytest.mark.parametrize("remat", ["block", "matmuls"])
def test_of_layers_inputs_two_remain_where_the_others_wait_on_the_host(remat):
    here, there = (
        plans(Job(L8, 2**20, 2048, offload=offload), chip("h100"), 8, Fixed((("fsdp", 8),), remat, 1))[0].held
        for offload in (False, True)
    )
    layers = L8.L if remat == "block" else 2
    assert there.activations == pytest.approx(here.activations * 2 / layers)
    assert (there.total < here.total) == (remat == "block")


@FAILING
def test_goodput_is_what_a_simulation_of_many_days_finds(chips, save, restart):
    job = of_job(chips, save, restart=restart)
    spent: Counter = Counter()
    for what, start, end in simulated(job, 20_000 * job.mtbf):
        spent[what] += end - start
    assert spent["work"] / sum(spent.values()) == pytest.approx(job.goodput, rel=0.01)
    assert sum(job.costs.values()) == pytest.approx(1 - job.goodput, abs=0.2 * (1 - job.goodput))


@FAILING
def test_no_other_interval_is_better_than_daly_s(chips, save, restart):
    best = of_job(chips, save, restart=restart)
    others = [of_job(chips, save, restart=restart, interval=best.interval * 2 ** (i / 8)) for i in range(-24, 25)]
    assert max(other.goodput for other in others) <= best.goodput * (1 + 1e-4)
    assert best.interval <= young(save, best.mtbf) <= 1.3 * best.interval or save > best.mtbf / 10
    assert daly(3 * best.mtbf, best.mtbf) == best.mtbf


def test_llama_3_had_a_failure_every_three_hours_and_more_than_nine_tenths_of_its_time():
    job = of_job(16_384, failures.save_seconds(14 * 405e9 / 16_384))
    assert job.mtbf / HOUR == pytest.approx(54 * 24 / 419)
    assert 0.9 < job.goodput < 0.95


def test_spares_are_enough_but_for_a_hundredth_of_the_time():
    for away in (0.0, 0.3, 2.0, 30.0, 99.0):
        count = spare_hosts(away)
        shares = [math.exp(n * math.log(away or 1e-300) - away - math.lgamma(n + 1)) for n in range(count + 1)]
        assert sum(shares) >= 0.99 > sum(shares[:-1])
    assert spare_hosts(101.0) == pytest.approx(spare_hosts(100.0), abs=3)
