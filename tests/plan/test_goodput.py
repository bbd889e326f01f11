"""What failures cost: closed forms beside a simulation, brute force and what runs report."""

import math
from collections import Counter

import pytest

from scaling.plan import failures
from scaling.plan.failures import HOUR, daly, of_job, simulated, spare_hosts, young

CASES = [(16_384, 3.0, 600.0), (16_384, 60.0, 600.0), (1024, 120.0, 300.0), (100_000, 30.0, 300.0)]


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
