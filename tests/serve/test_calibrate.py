"""Prices that were put in are found again, and a trace is then simulated to the times that it had."""

import random

import calibrate
import pytest

from scaling.serve.requests import Request
from scaling.serve.simulate import simulate
from scaling.serve.states import Options


def trace(seed: int, count: int = 30):
    chance = random.Random(seed)
    return [
        (chance.uniform(0, 2), Request(i, tuple(range(chance.randint(1, 40))), chance.randint(1, 20)))
        for i in range(count)
    ]


def test_prices_are_found_again():
    options = Options(pages=90, page=4, slots=6, budget=24, policy="disaggregated")
    truth = dict(zip(calibrate.PRICED, (1e-3, 1e-5, 1e-7, 5e-3, 2e-3, 0.0, 5e-5), strict=True))
    real = calibrate.cost(truth, 4)
    served = simulate(trace(1), options, real)
    found = calibrate.fit(served.spans, 4)
    assert found == pytest.approx(truth, rel=1e-6, abs=1e-12)
    other = trace(2)
    times = [simulate(other, options, cost).requests[7].at for cost in (real, calibrate.cost(found, 4))]
    assert times[0] == pytest.approx(times[1])


def test_without_measurements():
    with pytest.raises(ValueError, match="there are no measured steps to calibrate on"):
        calibrate.fit([], 4)
