"""Ways to train in less memory, beside peft's and bitsandbytes' counts; what failures cost, beside a simulation."""

import math
from collections import Counter

import pytest

from scaling.configs import get
from scaling.hardware import chip
from scaling.plan import Job, failures, plans
from scaling.plan.failures import HOUR, daly, of_job, simulated, spare_hosts, young
from scaling.plan.fitting import adapter_params, frugal_ways
from scaling.plan.job import Fixed

L8 = get("llama3-8b")
CASES = [(16_384, 3.0, 600.0), (16_384, 60.0, 600.0), (1024, 120.0, 300.0), (100_000, 30.0, 300.0)]


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


@pytest.mark.parametrize(("chips", "save", "restart"), CASES)
def test_goodput_is_what_a_simulation_of_many_days_finds(chips, save, restart):
    job = of_job(chips, save, restart=restart)
    spent: Counter = Counter()
    for what, start, end in simulated(job, 20_000 * job.mtbf):
        spent[what] += end - start
    assert spent["work"] / sum(spent.values()) == pytest.approx(job.goodput, rel=0.01)
    assert sum(job.costs.values()) == pytest.approx(1 - job.goodput, abs=0.2 * (1 - job.goodput))


@pytest.mark.parametrize(("chips", "save", "restart"), CASES)
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
