from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scaling import cost, measure
from scaling.cost import LayerShape, layer_bytes, layer_flops
from scaling.hardware import Chip, Measured, load_chip
from scaling.mesh import AbstractMesh
from scaling.plan.predict import Size, predict, shards, step, traced
from scaling.strategies import data_parallel, fsdp, fsdp_tp, tensor_parallel

OPS = ("AllGather", "ReduceScatter", "AllReduce", "AllToAll", "CollectivePermute")
CHIP = Chip(
    "ours", "cpu", "a test", (("fp32", 1e9), ("bf16", 4e9)), hbm_bytes=8e9, hbm_bw=1e10,
    measured=tuple(Measured(op, 2, 1e-4, 1e9) for op in OPS),
)  # fmt: skip


@settings(deadline=None, derandomize=True, max_examples=30)
@given(st.floats(1e-6, 1e-2), st.floats(1e7, 1e11))
def test_fit_finds_the_line(latency, bandwidth):
    got = measure.fit([(V, latency + V / bandwidth) for V in measure.VOLUMES])
    assert got[0] == pytest.approx(latency, rel=1e-3, abs=1e-9)
    if measure.VOLUMES[-1] / bandwidth > 1e-3 * latency:
        assert got[1] == pytest.approx(bandwidth, rel=1e-2)


def test_fit_never_gives_what_no_chip_file_takes():
    for points in ([(1e3, 1e-3), (1e6, 1e-4)], [(1e3, 1e-6), (1e6, 1.0)], [(1e6, 1e-3)]):
        latency, bandwidth = measure.fit(points)
        assert latency > 0
        assert 0 < bandwidth < float("inf")


def test_the_chip_file_is_read_back(tmp_path):
    path = tmp_path / "machine.toml"
    path.write_text(measure.toml(CHIP))
    assert load_chip(path) == CHIP
    assert cost.seconds("AllReduce", 1e6, load_chip(path), 2) == pytest.approx(1e-4 + 1e-3)


def test_the_slowest_rank_counts():
    times = {"AllReduce": [(V, 1e-3 + V / 1e9) for V in measure.VOLUMES]}
    slow = {"AllReduce": [(V, 2e-3 + V / 5e8) for V in measure.VOLUMES]}
    chip = measure.combine(
        [measure.RankMeasured({"fp32": 2e9}, 4e9, times), measure.RankMeasured({"fp32": 1e9}, 5e9, slow)], "m"
    )
    assert (chip.flops("fp32"), chip.hbm_bw) == (1e9, 4e9)
    (row,) = chip.measured
    assert (row.op, row.ranks) == ("AllReduce", 2)
    assert row.latency == pytest.approx(2e-3, rel=1e-3)
    assert row.bandwidth == pytest.approx(5e8, rel=1e-3)


@pytest.mark.parametrize(
    ("module", "mesh", "name", "calls"),
    [
        (data_parallel, {"X": 2}, "dp", 2),
        (fsdp, {"X": 2}, "fsdp", 6),
        (tensor_parallel, {"Y": 2}, "tp", 4),
        (fsdp_tp, {"X": 2, "Y": 1}, "fsdp", 6),
        (fsdp_tp, {"X": 1, "Y": 2}, "tp", 4),
    ],
)
def test_a_prediction_is_the_price_of_the_trace(module, mesh, name, calls):
    size = Size(3, 16, 8, 32)
    got = predict(module, size, mesh, CHIP)
    assert got.math == pytest.approx(layer_flops(LayerShape(16, 8, 32), 2) * 3 / 1e9)
    moved = 2 * sum(layer_bytes(name, LayerShape(16, 8, 32), mesh.get("X", 1), mesh.get("Y", 1)).values())  # fp32
    latencies = 3 * calls * 1e-4
    if name == "dp":
        moved /= 2  # an AllReduce's own time was measured, not that of two gathers
    ((_, comms),) = got.comms
    assert comms == pytest.approx(latencies + 3 * moved / 1e9)
    weights = 3 * 2 * 8 * 32 / (1 if name == "dp" else 2)
    assert got.between == pytest.approx(4 * (5 * 3 * 16 * 32 / 2 + 3 * weights) / 1e10)
    assert got.total == pytest.approx(got.math + got.between + comms)
    assert got.overlapped <= got.total
    rows = (*CHIP.measured, Measured("Activation", 2, 1e-5, 1e8), Measured("Update", 2, 1e-6, 1e9))
    timed = predict(module, size, mesh, replace(CHIP, measured=rows))
    act = 3 * (1e-5 + 4 * 16 * 32 / 2 / 1e8)
    assert timed.between == pytest.approx(act + 2 * 1e-6 + 4 * weights / 1e9)


def run_step(mesh, name):
    module, size = {"fsdp": fsdp, "tp": tensor_parallel}[name], Size(2, 8, 8, 16)
    params, In = shards(module, size, mesh, torch.ones)
    before = params["W_in"].clone()
    step(module, params, In, mesh, rate=1e-3)
    return bool((params["W_in"] != before).all())


@pytest.mark.parametrize(("name", "mesh"), [("fsdp", {"X": 2}), ("tp", {"Y": 2})])
def test_the_step_updates_the_params(ranks, name, mesh):
    assert all(ranks(run_step, mesh, name))


def test_the_abstract_step_has_the_bytes_of_the_strategy():
    log = traced(fsdp, Size(2, 8, 8, 16), {"X": 4})
    assert log.book_bytes == 2 * 2 * layer_bytes("fsdp", LayerShape(8, 8, 16), 4)["X"]
    assert log.flops == 2 * layer_flops(LayerShape(8, 8, 16), 4)
    assert AbstractMesh({"X": 4}).size() == 4


def measured(mesh):
    return measure.measure_rank(mesh, ("fp32",), 1)


@pytest.mark.slow
def test_two_ranks_measure(ranks, monkeypatch):
    chip = measure.combine(ranks(measured, {"X": 2}), "here")
    assert {row.op for row in chip.measured} == {*OPS, "Activation", "Update"}
    assert chip.flops("fp32") > 1e6
    assert "AllToAll" in measure.chip_table(chip)
    monkeypatch.setattr(measure.launch, "run", lambda fn, mesh, **_: ranks(seconds, mesh, mesh))
    checks = measure.check(chip, 2, (Size(1, 8, 8, 16),), 1)
    assert [c.name for c in checks] == ["DP", "FSDP", "TP", "FSDP+TP", "FSDP+TP"]
    assert all(c.seconds > 0 < c.prediction.total for c in checks)
    assert "predicted ms" in measure.checks_table(checks)
    assert measure.median_error(checks) >= 0


def seconds(mesh, sizes):
    module = next(m for _, m, axes in measure.MESHES if {a: n or 2 for a, n in axes.items()} == sizes)
    return [measure.step_seconds(mesh, module, Size(1, 8, 8, 16), 1)]


def test_command_refuses_nonsense(capsys):
    assert measure.main(["--dtypes", "int4"]) == 2
    assert "unknown dtype int4" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        measure.main(["--ranks", "1"])
    assert "'1' is no int from 2" in capsys.readouterr().err
