import math
import time
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machine import counted_once, ended, on_ranks
from refused import read_table

from scaling import cost
from scaling.configs import get
from scaling.cost.counted import Calls, CountedStep, LineKind, pipelined, price
from scaling.hardware import Chip, Efficiency, Measured, load_chip
from scaling.measure import command, network, rates
from scaling.measure.command import Check, check_steps, median_error, table, tau
from scaling.plan.choose import choices
from scaling.plan.transformer_step import predict_transformer
from scaling.train.counting import count
from scaling.train.settings import Settings

approx = pytest.approx
OPS = ("AllGather", "ReduceScatter", "AllReduce", "AllToAll", "CollectivePermute")
CHIP = Chip(
    "ours", "cpu", "a test", (("fp32", 1e9), ("bf16", 4e9)), hbm_bytes=8e9, hbm_bw=1e10,
    measured=tuple(Measured(op, 2, 1e-4, 1e9) for op in OPS), efficiency=Efficiency(attention=0.25),
)  # fmt: skip
TINY = Settings(get("tiny").with_(L=2, D=64, F=128, H=16, N=4, K=2), "", "", 8, 64)


@pytest.fixture(autouse=True, scope="module")
def steps_are_counted_once():
    with counted_once():
        yield


@settings(deadline=None, derandomize=True, max_examples=15)
@given(st.floats(1e-6, 1e-2), st.floats(1e7, 1e11), st.lists(st.floats(1e-9, 1e-3), min_size=3, max_size=3))
def test_fits_find_the_line_and_the_prices_of_three_things(latency, bandwidth, prices):
    got = rates.fit([(V, latency + V / bandwidth) for V in rates.VOLUMES])
    assert got[0] == approx(latency, rel=1e-3, abs=1e-9)
    if rates.VOLUMES[-1] / bandwidth > 1e-3 * latency:
        assert got[1] == approx(bandwidth, rel=1e-2)
    for points in ([(1e3, 1e-3), (1e6, 1e-4)], [(1e3, 1e-6), (1e6, 1.0)], [(1e6, 1e-3)]):  # and what a chip file takes
        assert all(0 < found < math.inf for found in rates.fit(points))
    rows = [(1.0, float(n), float(n * m)) for n in (1, 5, 90) for m in (1, 7, 300)]
    seconds = [sum(p * x for p, x in zip(prices, row, strict=True)) for row in rows]
    assert rates.fit_prices(rows, seconds) == approx(prices, rel=1e-4)


def test_the_slowest_rank_counts_and_the_chip_file_is_read_back(tmp_path):
    quick, slow = (
        {("AllReduce", 2): [(float(V), latency + V / bandwidth) for V in rates.VOLUMES]}
        for latency, bandwidth in ((1e-3, 1e9), (2e-3, 5e8))
    )
    one = rates.RankMeasured({"fp32": 2e9}, 3e9, 1e9, 4e9, 1e-6, quick)
    two = rates.RankMeasured({"fp32": 1e9}, 0, 5e8, 5e9, 1e-6, slow)
    chip = rates.combine_ranks([one, two], "m")
    assert (chip.flops("fp32"), chip.hbm_bw, chip.efficiency.attention) == (1e9, 4e9, 0.5)
    rows = [(row.op, row.ranks, row.bandwidth) for row in chip.measured]
    assert rows == [("AllReduce", 2, approx(5e8, rel=1e-3)), ("Matmul", 2, 1e9), ("Matmul", 1, 3e9)]
    assert chip.measured[0].latency == approx(2e-3, rel=1e-3)
    path = tmp_path / "machine.toml"
    both = replace(CHIP, measured=(*CHIP.measured, Measured("AllReduce", 2, 1e-5, 2e9, alone=True)))
    path.write_text(command.toml(both))
    assert load_chip(path) == both
    assert [cost.seconds("AllReduce", 1e6, load_chip(path), n) for n in (1, 2)] == [0, approx(1e-4 + 1e-3)]


def test_a_step_s_price_is_what_its_calls_take():
    """Products by their FLOPs, other work by its bytes, collectives as measured, and calls where they were."""
    gather, reduce, send = (
        LineKind(op, (axis,), "float32", ahead)
        for op, axis, ahead in (("AllGather", "X", True), ("AllReduce", "Y", False), ("Send", "X", True))
    )
    step = CountedStep(
        products=Calls(18, 6e6), reads=Calls(18, 3e6), attention=Calls(4, 1e6), plain=Calls(9, 2e6),
        curved=Calls(6, 1e6), lines={gather: Calls(6, 3e6), reduce: Calls(2, 1e6), send: Calls(5, 1e6)},
    )  # fmt: skip
    got = price(step, {"X": 2, "Y": 2}, CHIP)
    assert got.math == approx(6e6 / 1e9 + 1e6 / 0.25e9)
    assert got.between == approx((2e6 + 1e6) / 1e10)
    assert dict(got.comms) == {"X": approx(6e-4 + 3e-3), "Y": approx(2e-4 + 1e-3)}
    assert got.total == approx(got.math + got.between + 3.6e-3 + 1.2e-3)
    assert got.overlapped == approx(got.total - 3.6e-3)
    assert price(step, {"X": 2, "Y": 2}, CHIP, "bf16").math == approx(got.math / 4)
    rows = (*CHIP.measured, Measured("Activation", 4, 1e-5, 1e8), Measured("Product", 4, 1e-6, 1e9))
    timed = price(step, {"X": 2, "Y": 2}, replace(CHIP, measured=rows))
    assert timed.between - got.between == approx(6 * 1e-5 + 1e6 * (1 / 1e8 - 1 / 1e10))
    assert timed.math - got.math == approx(18 * 1e-6 + 3e6 / 1e9 + 4 * 1e-6)


def test_a_transformer_is_counted_whole():
    did, on = (count(TINY, sizes, documents=False) for sizes in ({"X": 1}, {"Y": 2}))
    config, tokens = TINY.model, 8 * 64
    heads = 2 * config.D * config.N * config.H + 2 * config.D * config.K * config.H
    matmuls = config.L * (heads + 3 * config.D * config.F) + config.D * config.V
    gains = (2 * config.L + 1) * 2 * tokens * config.D  # the product in each dgain; of shards, in each row's mean, too
    assert did.products.amount == 6 * tokens * matmuls + gains
    assert 2 * on.products.amount == 6 * tokens * matmuls + 2 * gains
    assert did.attention[:2] == (2 * config.L, config.L * 7 * tokens * config.N * config.H * 64)


@pytest.mark.slow
def test_each_stage_is_priced_and_collectives_are_faster_while_others_idle():
    rows = (*CHIP.measured, Measured("Matmul", 2, 1e-9, 1e9), Measured("Matmul", 1, 1e-9, 2e9))
    idle = tuple(Measured(op, 2, 1e-5, 1e9, alone=True) for op in OPS)
    shared, quick = replace(CHIP, measured=rows), replace(CHIP, measured=(*CHIP.measured, *idle))
    some = replace(TINY, microbatches=4)
    apart, beside, alone = (predict_transformer(some, {"Z": 2}, on) for on in (CHIP, shared, quick))
    first, last = apart.stages
    assert first.math < last.math  # it has the unembedding
    assert apart.fullest is last
    more = predict_transformer(replace(some, batch=10, microbatches=5), {"Z": 2}, CHIP).stages
    (one, first), (each, last) = ((b.total - a.total, a.total) for a, b in zip(apart.stages, more, strict=True))
    once = [first - 4 * one, last - 4 * each]  # of a step, whatever its microbatches: both stages at the same time
    assert 0 < min(once) < max(once) < 0.2 * apart.seconds
    assert apart.seconds == approx(one + 4 * each + max(once))
    least = (first + last) / 2  # cores that one leaves the other takes
    assert least <= beside.seconds < 0.8 * apart.seconds
    assert alone.stages == apart.stages
    assert 0 < alone.seconds < apart.seconds
    assert predict_transformer(some, {"Y": 2}, quick) == predict_transformer(some, {"Y": 2}, CHIP)


def test_a_pipeline_is_the_sum_of_its_slots_and_order_is_counted_in_pairs():
    for stages, microbatches, alone, seconds in (
        ([2] * 4, 4, (), 2 * (1 + 3 / 4)),
        ([2], 1, [0.5], 2),  # there is no other stage that could stand still
        ([2, 1], 1, (), 2 + 1),  # one microbatch: each in its turn
        ([2, 1], 4, (), (2 + 3 * 2 + 1) / 4),  # the first, three of both, the last
        ([2] * 2, 1, [1, 1], 2),  # as fast as both at once
        ([2, 1], 1000, [1, 0.5], 1.5),  # cores are shared
        ([2] * 4, 2, [1] * 4, 5 / 2),  # two at a time, each on one of two processors
        ([2] * 3, 2, [1] * 3, (1 + 4 / 3 + 4 / 3 + 1) / 2),  # of one and a half
    ):
        assert pipelined(stages, microbatches, alone) == approx(seconds, rel=1e-3)
    for found, order, error in (((2, 3, 4), 1, 1 / 3), ((4, 3, 2), -1, 1 / 2), ((2, 4, 3), 1 / 3, 1 / 2)):
        checks = [Check({"X": 2}, said, seconds) for said, seconds in zip((1, 2, 3), found, strict=True)]
        assert (tau(checks), median_error(checks)) == approx((order, error))


@on_ranks({"X": 2})
def test_a_time_lasts_until_the_last_rank_is_done(mesh):
    seconds = rates.timed(lambda: time.sleep(0.03 * mesh.rank), mesh, 2, times=2)
    assert seconds >= 0.029  # of 0.03, by another clock


def measured(mesh):
    rates.BUSY, rates.POOL = (16, 32, 32), 2**21  # here and on these ranks alone: nothing is measured in earnest
    return rates.measure_rank(mesh, ("fp32",), 1, (2**15, 2**18), ((8, 16, 16), (16, 32, 64)))


def on_these(ranks, fn, sizes, *given, checked, device=None):
    """What is asked of `launch.run`, by ranks that are there."""
    assert not checked  # it would be in the times
    return ranks(fn, sizes, *given)


@pytest.mark.slow
def test_two_ranks_measure_and_run_what_is_planned(ranks, monkeypatch):
    chip = rates.combine_ranks(ranks(measured, {"X": 2}), "here")
    assert {row.op for row in chip.measured} == {*OPS, "Product", "Pointwise", "Activation", "Matmul"}
    assert chip.flops("fp32") > 1e6
    assert "AllToAll" in command.chip_table(chip)
    some = replace(TINY, microbatches=2)
    planned, _ = choices(some, 2, chip)
    assert {choice.name for choice in planned} == {"P=2", "Z=2", "X=2", "C=2", "Y=2"}
    monkeypatch.setattr(command.launch, "run", partial(on_these, ranks))
    checks = check_steps(some, chip, 2, 1, 3)
    assert [(c.sizes, c.predicted) for c in checks] == [(choice.sizes, choice.seconds) for choice in planned[::2]]
    assert all(c.seconds > 0 < c.predicted for c in checks)
    assert "predicted ms" in table(checks)
    monkeypatch.setattr(command.launch, "run", lambda *asked, **how: [[1.0], [2.0]])
    assert check_steps(some, chip, 2, 1, 1) == [Check(planned[0].sizes, planned[0].seconds, 2.0)]  # of the slower rank
    with pytest.raises(ValueError, match="no mesh of 3 ranks suits"):
        check_steps(TINY, chip, 3, 1)


NONSENSE = read_table(
    """
arguments                                       exit code  words
"--dtypes int4"                                 2          "unknown dtype int4"
"--ranks 1"                                     2          "'1' is not a whole number from 2"
"network --repeats 1 --mesh X=x"                1          "Error"
"network --repeats 1 --folder /nowhere/at/all"  2          "/nowhere/at/all"
"network --mesh X=1"                            1          "has no network"
""",
    globals(),
)


@pytest.mark.parametrize(("arguments", "code", "said"), NONSENSE)
def test_command_refuses_nonsense(capsys, arguments, code, said):
    assert ended(command.main, arguments.split()) == code
    assert said in capsys.readouterr().err


# --- Bus bandwidth by axis, collective and size; ranks that are slow on their own are named


def test_bus_bandwidth_and_slow_ranks():
    seconds = {("X", op, 800): 1e-6 for op in ("AllGather", "AllReduce", "AllToAll")}
    rows = network._report([(seconds, (1e9, 1e9))] * 4, {"X": 4}, None).splitlines()[2:5]
    assert [float(row.split()[-1]) for row in rows] == [0.6, 1.2, 0.15]  # GB/s of 600, 1,200 and 150 bytes
    assert network.slow([4e9, 1e9, 2e9], "disk") == []
    assert network.slow([4e9, 1e9, 4e9], "disk") == ["rank 1: disk 1.00 GB/s, the median is 4.00"]


def test_each_axis_is_measured(ranks, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(network, "SIZES", (4096,))
    monkeypatch.setattr(network.launch, "run", partial(on_these, ranks))
    options = f"--mesh X=2,Y=1 --repeats 1 --link 10 --folder {tmp_path}"
    assert command.main(["network", *options.split()]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert " ".join(lines[0].split()) == "axis collective V bytes us bus GB/s of the link"
    assert [line.split()[:3] for line in lines[2:6]] == [["X", op, "4,096"] for op in network.LINES]
    assert list(tmp_path.iterdir()) == []
