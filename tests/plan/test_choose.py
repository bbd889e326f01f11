"""The mesh for a run: every mesh is tried, the fastest that fits is taken, and the command runs on it."""

import re
from dataclasses import replace

import pytest
from refused import named, read_table

from scaling.configs import get
from scaling.cost.counted import Calls
from scaling.cost.memory import ROOM
from scaling.hardware import Chip, Measured, chip
from scaling.measure.command import toml
from scaling.plan import __main__ as plan
from scaling.plan import choose, plans
from scaling.plan.job import Job, run_bytes
from scaling.plan.report import size
from scaling.plan.transformer_step import cost_table, predict_transformer
from scaling.spec.sizes import parse_mesh
from scaling.train import command, dry
from scaling.train.counting import count
from scaling.train.programs import step_by_symbols
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
    calls = {c.name: count(SOME, c.sizes).collectives for c in few}
    assert calls[few[0].name] == min(calls.values()) < calls["Y=2"]
    text = choose.table(few, refused)
    assert text.splitlines()[2].startswith(few[0].name)
    assert "it saves most in collectives" in text
    assert "4 meshes were compared, 1 do not suit, such as\n  Z=2: " in text
    held = sorted(c.memory for c in few)
    left, refused = choose.choices(SOME, 2, machine(memory=held[1] / ROOM))
    assert sorted(c.memory for c in left) == held[:2]
    assert sum("a rank needs" in why for why in refused) == 2


L8 = get("llama3-8b").with_(L=6, K=2)
EXPERTS = get("mixtral-8x7b").with_(L=6)
# what is held beside params and state: M microbatches
TABLE = """
what                                                 model                mesh     recomputed  M
layers that stages share unevenly                    L8                   Z=4      block       4
ends gathered at their own stage                     L8                   Z=2,X=2  block       4
a tied table on all stages                           L8.with_(tied=True)  Z=2,Y=2  block       4
fewer KV heads than ranks                            L8                   Y=4      block       4
whole gradients and tables of earlier microbatches   L8                   X=4      matmuls     4
no sums before the first backward                    L8                   Z=4      attention   4
gradients of a layer, whole and new                  L8                   X=4      block       1
a tied table that waits for both ends                L8.with_(tied=True)  X=4      block       1
weights and rows of experts, kept                    EXPERTS              X=2,E=2  none        1
rows of experts                                      EXPERTS              X=2,E=2  block       2
experts on stages                                    EXPERTS              Z=2,X=2  block       2
"""
HELD = {what: case for what, *case in read_table(TABLE, globals(), ("what", "recomputed"))}


@pytest.mark.slow
@pytest.mark.parametrize("held", HELD)
def test_memory_and_bytes_over_x_by_formula_are_the_step_s_own(held):
    model, on, remat, M = HELD[held]
    job = Settings(model, "", "", 4 * M, 2048, microbatches=M, dtype="bf16", remat=remat)
    one = next(one for one in choose.evaluated(job, chip("h100"), 4) if choose.mesh_of(one.layout) == on)
    step = dry.fullest(job, on, "abstract")
    assert 0.95 < float(one.held.total) / step.memory < 1.05
    if "X" in on and "Z" not in on:
        sent = [calls.amount for line, calls in step.lines.items() if "X" in line.axes and line.op != "AllReduce"]
        assert one.bytes["fsdp"] == pytest.approx(sum(sent), rel=1e-4)  # and a router's


@pytest.mark.slow
def test_on_a_chip_of_the_catalogue_what_is_fastest_by_formula_is_counted():
    """And not offered if the run's own step, all layers of it, does not fit."""
    some = Settings(get("llama3-8b").with_(L=4, V=32768), "", "", 16, 4096, microbatches=2, dtype="bf16", remat="block")
    (first,), refused = choose.choices(some, 8, chip("h100"), most=1)
    assert (first.sizes, refused) == ({"X": 8}, [])
    small = replace(chip("h100"), hbm_bytes=7.3e9)
    assert "X=8: a chip needs 9.17 GB" in choose.choices(some, 8, replace(small, hbm_bytes=1e9))[1]
    found, refused = choose.choices(some, 8, small, most=2)
    assert refused == ["X=4, Y=2: a rank needs 6.78 GB of 6.57"]
    assert [one.sizes for one in found] == [{"X": 2, "Y": 4}, {"Y": 8}]
    for one in found:
        assert one.memory == count(some, one.sizes).memory < ROOM * 7.3e9
    fourteen = replace(some, batch=14)
    assert [*choose.planned(fourteen, 7, chip("h100"), refused)] == [({"P": 7}, fourteen)]  # 7 divides no dim
    assert any(why.startswith("X=7: ") for why in refused)


# jobs of a run: a model, its chips, sequences
NAMED = named(
    """
what                     model, chips, sequences
more chunks than layers  (get("llama3-405b"), 1024, 512)
61 layers                (get("deepseek-v3"), 256, 1024)
linear layers            (get("qwen3.5-397b"), 512, 1024)
dense layers between     (get("mixtral-8x7b").with_(dense_layers=tuple(range(1, 32, 2)), F_dense=14336), 16, 64)
""",
    globals(),
)


@pytest.mark.parametrize(("model", "chips", "sequences"), NAMED.values(), ids=NAMED)
def test_layouts_that_are_named_for_a_run_are_those_that_it_runs(model, chips, sequences):
    job = Job(model, sequences * 8192, 8192, "bf16", *run_bytes("bf16"), shards=("fsdp",))
    for found in plans(job, chip("h100"), chips)[:8]:
        own = found.layout
        given = {"microbatches": own.microbatches, "remat": own.remat, "zero": own.zero, "pipeline": own.pipeline}
        some = Settings(model, "", "", sequences, 8192, dtype="bf16", reduce=own.reduce, **given)
        assert not choose.uneven(some, choose.mesh_of(own)), own
    if model.linear or isinstance(model.dense_layers, tuple):  # no stage stores them, in whatever run
        asked = replace(job, shards=Job(model, 8192, 8192).shards)
        assert {found.layout.pipe for found in plans(asked, chip("h100"), chips)[:8]} == {1}


DENSE, MIXTRAL, WIDE = (get(name).with_(V=8192) for name in ("llama3-8b", "mixtral-8x7b", "llama3-405b"))
TIED = DENSE.with_(D=1024, F=4096, N=16, K=4, H=64, tied=True)
LATENT = get("deepseek-v3").with_(D=512, F=256, N=8, K=8, E=8, k=2, V=8200, dense_layers=1, F_dense=512)
WINDOWS = DENSE.with_(L=7, window=(512, None, 512, None, 512, None, 512))
# z: the rank's stage; M: microbatches, of so many sequences
TABLE = """
model                L   mesh              z  M   sequences  remat      ZeRO  pipeline
DENSE                5   X=4,C=2           0  5   40         matmuls    3     1f1b
WINDOWS              7   P=2,Y=4           0  1   2          attention  1     1f1b
MIXTRAL              5   P=2,E=2,Y=2       0  1   4          block      3     1f1b
# of a schedule the lines alone are mixed
TIED                 8   Z=2,C=2           1  4   4          none       0     zb-h1
TIED                 2   Z=2               0  21  42         none       3     1f1b
TIED                 4   Z=4               2  21  42         none       3     1f1b
TIED                 29  Z=6               0  21  42         block      1     1f1b
TIED                 29  Z=8,Y=2           7  21  42         none       3     1f1b
TIED.with_(V=9216)   24  Z=12              0  12  12         none       3     1f1b
TIED                 27  Z=4               0  24  24         block      3     interleaved:2
TIED                 20  Z=5,X=4           0  40  160        block      1     interleaved:2
LATENT               11  Z=5,E=2           0  20  40         block      3     1f1b
# few layers hold most activations, many gradients
WIDE                 20  P=4,Z=2,X=4,Y=16  0  2   256        block      3     1f1b
"""
COUNTED = read_table(TABLE, globals(), ("remat", "pipeline"))


@pytest.mark.slow
@pytest.mark.parametrize(("model", "L", "mesh", "z", "M", "sequences", "remat", "zero", "pipeline"), COUNTED)
def test_a_few_layers_and_microbatches_say_what_all_take(model, L, mesh, z, M, sequences, remat, zero, pipeline):
    some = Settings(model.with_(L=L), "", "", sequences, 1024, microbatches=M, dtype="bf16", remat=remat, zero=zero)
    given = replace(some, pipeline=pipeline), mesh, {"Z": z} if z else None, "gloo"
    few, whole = step_by_symbols(*given), count(*given)
    assert replace(few, peaks={}, plain=whole.plain, curved=whole.curved) == replace(whole, peaks={})
    assert (*few.plain, *few.curved) == pytest.approx(
        (*whole.plain, *whole.curved), rel=1e-3
    )  # targets are picked from those of all microbatches
    assert few.memory == pytest.approx(whole.memory, rel=1e-5)
    assert step_by_symbols(*given, memory=False).lines == whole.lines
    for axes, calls in whole.by_axes().items():
        of_axes = [each for line, each in whole.lines.items() if "".join(line.axes) == axes]
        assert calls == Calls(*map(sum, zip(*of_axes, strict=True)))


def test_the_lines_that_a_plan_explains_are_those_of_the_dry_run():
    some, sizes = replace(SOME, dtype="bf16"), {"X": 2, "Y": 2}
    part = predict_transformer(some, sizes, chip("h100")).fullest
    lines = count(some, sizes, backend="abstract").lines
    assert {line.kind: line.calls for line in part.lines} == lines
    head, _, *rows = cost_table(part).splitlines()
    assert [*head.split()[:2], head.split()[-1]] == ["line", "over", "ms"]
    assert sorted(row.split()[0] for row in rows) == sorted(["products", "between", *(kind.op for kind in lines)])
    assert sum(row.endswith("waited for") for row in rows) == sum(not kind.ahead for kind in lines)


def joined(text: str) -> str:
    """The text with its folded commands on one line each."""
    return re.sub(r" \\\n +", " ", text)


@pytest.mark.slow
def test_a_plan_is_the_dry_run_of_the_command_that_it_prints(tmp_path, capsys):
    """To the byte: memory, and what is sent."""
    model, on = tmp_path / "small.toml", tmp_path / "machine.toml"
    model.write_text("L = 1\nD = 32\nF = 64\nH = 8\nN = 4\nK = 2\nV = 256\n")
    on.write_text(toml(machine()))
    given = ["--model", str(model), "--batch", "4", "--seq", "16", "--device", "cuda", "--dry-run"]
    assert command.main([*given, "--plan", "2", "--chip", str(on)]) == 0
    said = capsys.readouterr().out
    assert "meshes were compared" in said
    run = (
        next(line for line in joined(said).splitlines() if line.startswith("run: ")).split("scaling.train ")[1].split()
    )
    assert command.main([*run, "--dry-run"]) == 0
    again = capsys.readouterr().out
    assert said.endswith(again)
    counted = count(SOME, parse_mesh(run[run.index("--mesh") + 1]), backend="abstract")
    assert f"{counted.sent:,} bytes" in again
    assert f"{counted.memory:,} bytes" in again
    assert command.main([*given, "--mesh", "X=5", "--plan", "--chip", str(on)]) == 1
    assert "no mesh suits\n  " in capsys.readouterr().err
    assert command.main([*given, "--plan", "2"]) == 1
    assert "scaling.measure --ranks 2 --out machine.toml" in " ".join(capsys.readouterr().err.split())


def bytes_of_a_dry_run(command_line: str, capsys) -> str:
    """Of the printed command, as the planner says them."""
    assert command.main([*command_line.split("scaling.train ")[1].split(), "--dry-run"]) == 0
    together = re.search(r"together +([\d,]+) bytes", capsys.readouterr().out)[1]
    return f", {size(int(together.replace(',', '')))} a rank"


@pytest.mark.slow
def test_the_planner_too_prints_the_command_that_runs_its_plan(capsys):
    asked = "--model tiny --chip h100 --chips 2 --batch 8192 --run --seq"
    assert plan.main([*asked.split(), "1024"]) == 0
    said = capsys.readouterr().out
    command_line, counted = joined(said).splitlines()[-2:]
    assert f"{bytes_of_a_dry_run(command_line, capsys)}; sent in a step over X " in counted
    assert "DP 2\n  data parallel over 2, optimizer state sharded over 2 (ZeRO-1)\n" in said
    assert command_line.endswith("--zero 1 --mesh X=2")
    assert plan.main([*asked.split(), "1023"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("This code runs no such step: whole sequences")
    sharded = "1024 --mesh fsdp=2 --microbatches 2 --remat none"
    assert plan.main([*asked.split(), *sharded.split(), "--reduce", "each"]) == 0
    each, counted = joined(capsys.readouterr().out).splitlines()[-2:]
    assert each.endswith("--microbatches 2 --reduce each --mesh X=2")
    assert bytes_of_a_dry_run(each, capsys) in counted
    staged = *asked.split(), "1024", "--mesh", "pipe=2", "--microbatches", "4", "--schedule"
    seconds = []
    for schedule in ("1f1b", "zb-h1", "interleaved"):
        assert plan.main([*staged, schedule]) == 0
        command_line, counted = joined(capsys.readouterr().out).splitlines()[-2:]
        seconds.append(float(re.search(r"\(--dry-run\): (\S+) s a step", counted)[1]))
    assert seconds[1] < seconds[0]  # zb-h1 fills idle time with gradients of weights
    assert command_line.endswith("--microbatches 4 --pipeline interleaved:2 --mesh Z=2")
    assert bytes_of_a_dry_run(command_line, capsys) in counted
