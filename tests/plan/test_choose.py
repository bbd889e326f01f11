"""The mesh for a run: every mesh is tried, the fastest that fits is taken, and the command runs on it."""

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scaling.configs import get
from scaling.cost.counted import Calls, CountedStep, LineKind, weighted_sum
from scaling.hardware import Chip, Measured, chip
from scaling.measure import rates
from scaling.plan import __main__ as plan
from scaling.plan import choose
from scaling.plan.report import size
from scaling.plan.transformer_step import predict_transformer
from scaling.spec import ShardingError
from scaling.spec.sizes import parse_mesh
from scaling.strategies.transformer.layer import REMAT
from scaling.train import command, dry
from scaling.train.dry import StepOptions
from scaling.train.settings import Settings

SOME = Settings(get("tiny").with_(L=1, D=32, F=64, H=8, N=4, K=2), "", "", 4, 16)
OPS = ("AllGather", "ReduceScatter", "AllReduce", "AllToAll", "CollectivePermute")


def machine(latency=1e-4, bandwidth=1e9, memory=8e9):
    rows = tuple(Measured(op, 2, latency, bandwidth) for op in OPS)
    return Chip("ours", "cpu", "", (("fp32", 1e10),), hbm_bytes=memory, hbm_bw=1e10, measured=rows)


def test_every_mesh_is_tried():
    meshes = [*choose.meshes(SOME, 4)]
    assert len(meshes) == 5 + 10  # one axis of 4, or two of 2
    assert {"P": 2, "Y": 2} in meshes
    assert [*choose.meshes(SOME, 1)] == [{"X": 1}]
    assert len([*choose.meshes(replace(SOME, model=SOME.model.with_(E=4, k=2)), 4)]) == 6 + 15


@pytest.mark.slow
def test_the_fastest_is_taken_of_all_that_suit():
    """Where a call is dear the mesh has few collectives; with less memory fewer fit."""
    found, refused = choose.choices(SOME, 2, machine())
    assert [c.seconds for c in found] == sorted(c.seconds for c in found)
    assert {c.name for c in found} == {"P=2", "X=2", "C=2", "Y=2"}
    assert refused == ["Z=2: tiny: L=1 layers cannot fill 2 stages"]
    for one in found:
        assert one.seconds == predict_transformer(SOME, one.sizes, machine()).seconds
        assert one.memory == dry.fullest(SOME, one.sizes).memory
    few, refused = choose.choices(SOME, 2, machine(latency=1.0))
    calls = {c.name: dry.count(SOME, c.sizes).collectives for c in few}
    assert calls[few[0].name] == min(calls.values()) < calls["Y=2"]
    text = choose.table(few, refused)
    assert text.splitlines()[2].startswith(few[0].name)
    assert "it saves most in collectives" in text
    assert "4 meshes were compared, 1 do not suit, such as\n  Z=2: " in text
    held = sorted(c.memory for c in few)
    left, refused = choose.choices(SOME, 2, machine(memory=held[1] / dry.ROOM))
    assert sorted(c.memory for c in left) == held[:2]
    assert sum("a rank needs" in why for why in refused) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("tied", "on"), [(False, "Z=4"), (False, "Z=2,X=2"), (True, "Z=4"), (True, "Z=2,Y=2")])
def test_stages_that_fit_are_not_refused_by_formula(tied, on):
    """Layers that stages share unevenly, and ends that are stored over all stages and gathered at their own."""
    job = Settings(get("llama3-8b").with_(L=6, tied=tied), "", "", 8, 2048, microbatches=4, dtype="bf16", remat="block")
    one = next(one for one in choose.evaluated(job, chip("h100"), 4) if choose.mesh_of(one.layout) == parse_mesh(on))
    assert 0.75 < float(one.held.total) / dry.fullest(job, parse_mesh(on), "abstract").memory < 1.05


@pytest.mark.slow
def test_a_chip_of_the_catalogue_is_planned_by_formula():
    job = Settings(get("llama3-8b").with_(V=8192), "", "", batch=64, seq=4096, dtype="bf16", remat="block")
    found, refused = choose.choices(job, 8, chip("h100"), most=3)
    assert found[0].sizes == {"X": 8}
    assert len(found) == 3
    assert all(c.memory < dry.ROOM * 80e9 for c in found)
    assert refused == []  # what comes first by formula fits by count
    found, refused = choose.choices(replace(job, batch=63), 7, chip("h100"))
    assert {tuple(c.sizes) for c in found} == {("P",)} or not found  # 7 divides no dim
    assert any(why.startswith("X=7: ") for why in refused)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("L", "ranks", "batch", "remat", "memory", "least"),
    [pytest.param(8, 32, 64, "none", 20e9, 0, marks=pytest.mark.sweep), (4, 16, 32, "block", 5.75e9, 1)],
)
def test_no_mesh_is_offered_on_which_the_run_does_not_fit(L, ranks, batch, remat, memory, least):
    """By the count of the run's own step, all layers of it; at `least` so many fit by formula alone."""
    model = get("llama3-8b").with_(L=L, V=32768)
    some = Settings(model, "", "", batch, 4096, dtype="bf16", microbatches=2, remat=remat)
    small = replace(chip("h100"), hbm_bytes=memory)
    found, refused = choose.choices(some, ranks, small)
    assert 0 < len(found) <= choose.OFFERED
    assert sum("a rank needs" in why for why in refused) >= least
    for one in found:
        counted = dry.count(some, one.sizes).memory
        assert one.memory >= counted * 0.98  # that of the fullest rank
        assert counted <= dry.ROOM * small.need("hbm_bytes")


# --- A step that is counted with a few layers and microbatches is the whole step: bytes by axis and FLOPs exactly,
# memory within 2%. Drawn: dense models and experts, meshes of up to thousands of ranks, every policy, schedules, ZeRO.


DENSE, TIED = get("llama3-8b").with_(V=8192), get("llama3-8b").with_(V=8192, D=1024, F=4096, N=16, K=4, H=64, tied=True)
MODELS = [DENSE, TIED, get("mixtral-8x7b").with_(V=8192), DENSE.with_(window=(512, None) * 4, L=8)]


@st.composite
def steps(draw) -> tuple[Settings, dict[str, int], StepOptions]:
    config = draw(st.sampled_from(MODELS))
    axes = draw(st.lists(st.sampled_from("PXCYZ" + "E" * config.moe), unique=True, min_size=1, max_size=3))
    most = {"Z": 2, "Y": config.K, "E": config.E, "C": 4, "X": 64, "P": 16}
    sizes = {a: draw(st.sampled_from([2**i for i in range(1, 7) if 2**i <= most[a]])) for a in "PZXCYE" if a in axes}
    Z = sizes.get("Z", 1)
    M = draw(st.sampled_from([1, 2, 5] if Z == 1 else [2 * Z, 2 * Z + 2]))
    few = 5 if Z == 1 else 4 * Z  # the least of which fewer say what all take
    layers = config.L if isinstance(config.window, tuple) else few + draw(st.integers(0, Z))
    options = StepOptions(draw(st.sampled_from((0, 1, 3))), draw(st.sampled_from((None, "zb-h1"))) if Z > 1 else None)
    remat = draw(st.sampled_from(("none", "block") if config.moe else tuple(REMAT)))
    batch = M * sizes.get("P", 1) * sizes.get("X", 1) * sizes.get("E", 1) * draw(st.sampled_from((1, 2)))
    some = Settings(config.with_(L=layers), "", "", batch, 1024, microbatches=M, dtype="bf16", remat=remat)
    return some, sizes, options


@pytest.mark.slow
@settings(deadline=None, derandomize=True, max_examples=4)
@given(steps(), st.sampled_from((0, 1)))
def test_a_few_layers_and_microbatches_say_what_all_take(drawn, last):
    some, sizes, options = drawn
    coord = {"Z": sizes["Z"] - 1} if last and "Z" in sizes else None
    try:
        whole = dry.count(some, sizes, coord, options=options)
    except (ShardingError, ValueError):
        return  # a mesh, or a policy, that the run refuses
    few = dry.counted(some, sizes, coord, options=options)
    assert (few.lines, few.flops, few.attention) == (whole.lines, whole.flops, whole.attention)
    assert (few.params, few.state) == (whole.params, whole.state)
    assert few.memory == pytest.approx(whole.memory, rel=0.02)
    assert dry.counted(some, sizes, coord, options=options, memory=False).lines == whole.lines


@pytest.mark.slow
@pytest.mark.parametrize(("Z", "z"), [(2, 0), (4, 2)])
def test_a_few_of_many_microbatches_say_what_a_pipeline_takes(Z, z):
    """The first stage holds more of them than the last, which has the logits."""
    some = Settings(TIED.with_(L=Z), "", "", 42, 256, microbatches=21, dtype="bf16", remat="none")
    few, whole = (f(some, {"Z": Z}, {"Z": z}, "abstract") for f in (dry.counted, dry.count))
    assert few.memory == pytest.approx(whole.memory, rel=1e-3)
    assert (few.lines, few.flops) == (whole.lines, whole.flops)


@pytest.mark.slow
def test_a_few_layers_say_where_a_deep_model_is_fullest():
    """With few layers the activations are the most, with many the gradients: a tenth was missing."""
    model, sizes = get("llama3-405b").with_(L=40, V=32768), {"P": 32, "Z": 4, "X": 4, "Y": 16}
    some = Settings(model, "", "", 2048, 4096, microbatches=4, dtype="bf16", remat="block")
    few, whole = (f(some, sizes, None, "gloo") for f in (dry.counted, dry.count))
    assert few.memory == pytest.approx(whole.memory, rel=1e-6)


def test_steps_are_mixed_by_their_numbers():
    line = LineKind("AllGather", ("X",), "bfloat16", True)
    three = CountedStep(
        products=Calls(30, 300), lines={line: Calls(3, 90, 60)}, flops=300, params=7, peaks={"a": 40, "b": 30}
    )
    four = CountedStep(
        products=Calls(40, 400), lines={line: Calls(4, 120, 80)}, flops=400, params=8, peaks={"a": 50, "b": 49}
    )
    ten = weighted_sum([(-6, three), (7, four)])
    assert (ten.products, ten.flops, ten.params) == (Calls(100, 1000), 1000, 14)
    assert (ten.peaks, ten.step, ten.memory) == ({"a": 110, "b": 163}, 163, 177)  # another place is the fullest
    assert ten.by_axes() == {"X": Calls(10, 300, 200)}


@pytest.mark.slow
def test_a_plan_is_the_dry_run_of_the_command_that_it_prints(tmp_path, capsys):
    """To the byte: memory, and what is sent."""
    model, on = tmp_path / "small.toml", tmp_path / "machine.toml"
    model.write_text("L = 1\nD = 32\nF = 64\nH = 8\nN = 4\nK = 2\nV = 256\n")
    on.write_text(rates.toml(machine()))
    given = ["--model", str(model), "--batch", "4", "--seq", "16", "--device", "cuda", "--dry-run"]
    assert command.main([*given, "--plan", "2", "--chip", str(on)]) == 0
    said = capsys.readouterr().out
    assert "meshes were compared" in said
    run = next(line for line in said.splitlines() if line.startswith("run: ")).split("scaling.train ")[1].split()
    assert command.main([*run, "--dry-run"]) == 0
    again = capsys.readouterr().out
    assert said.endswith(again)
    counted = dry.count(SOME, parse_mesh(run[run.index("--mesh") + 1]), backend="abstract")
    assert f"{counted.sent:,} bytes" in again
    assert f"{counted.memory:,} bytes" in again
    assert command.main([*given, "--mesh", "X=5", "--plan", "--chip", str(on)]) == 1
    assert "no mesh suits\n  " in capsys.readouterr().err
    assert command.main([*given, "--plan", "2"]) == 1
    assert "scaling.measure --ranks 2 --out machine.toml" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_the_planner_prints_the_command_that_runs_its_plan(capsys):
    asked = "--model tiny --chip h100 --chips 2 --batch 8192 --run --seq"
    assert plan.main([*asked.split(), "1024"]) == 0
    command_line, counted = capsys.readouterr().out.splitlines()[-2:]
    assert command.main([*command_line.split("scaling.train ")[1].split(), "--dry-run"]) == 0
    dry_run = capsys.readouterr().out
    together = int(re.search(r"together +([\d,]+) bytes", dry_run)[1].replace(",", ""))
    assert f": {size(together)} a rank; sent in a step over P " in counted
    assert plan.main([*asked.split(), "1023"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("This code runs no such step: whole sequences")
