import json
import math
from dataclasses import replace

import pytest
import torch

from scaling import cost
from scaling.configs import get
from scaling.hardware import chip
from scaling.plan import Job, evaluate, fits, guide, plans
from scaling.plan.__main__ import count, main
from scaling.plan.layer import layer, strategy
from scaling.plan.network import Network, slice_shape
from scaling.spec import parse
from scaling.trace import trace

V5P = chip("v5p")
NAMES = {(False, False): "dp", (True, False): "fsdp", (False, True): "tp", (True, True): "fsdp_tp"}
MESHES = [(1, 1), (4, 1), (1, 4), (4, 2), (2, 8)]


# --- A layer's bytes and FLOPs: the code's, the closed form's, the planner's


@pytest.mark.parametrize(("X", "Y"), MESHES)
@pytest.mark.parametrize(("B", "D", "F"), [(64, 32, 48), (128, 64, 16)])
def test_a_layer_equals_the_closed_form(X, Y, B, D, F):
    got = layer(B, D, F, X, Y)
    shape = cost.LayerShape(B, D, F)
    assert got.flops == cost.layer_flops(shape, X * Y)
    for direction, backward in (("forward", False), ("backward", True)):
        closed = cost.layer_bytes(NAMES[X > 1, Y > 1], shape, X, Y, direction)
        for axis in "XY":
            moved = sum(m.nbytes for m in got.moves if m.axis == axis and m.backward is backward)
            assert moved == closed[axis], (direction, axis)
    assert got.weights == 2 * 2 * D * F / (X * Y)


def run_for_real(mesh, B, D, F):
    module = strategy(mesh.sizes["X"], mesh.sizes["Y"])
    sizes = {"B": B, "D": D, "F": F}

    def local(name, stacked):
        spec = parse(module.SPECS[name])
        shape = spec.local_shape({dim: sizes[dim] for dim in spec.dim_names}, mesh)
        return torch.randn((1, *shape) if stacked else shape, dtype=torch.bfloat16)

    params = {"W_in": local("W_in", True), "W_out": local("W_out", True)}
    with trace() as log:
        Out, saved = module.forward(params, local("In", False), mesh)
        module.backward(torch.ones_like(Out), saved, params, mesh)
    return log.flops, [(e.op, "".join(e.axes), e.nbytes) for e in log.collectives() if mesh.size(e.axes) > 1]


@pytest.mark.parametrize("sizes", [{"X": 2, "Y": 1}, {"X": 1, "Y": 2}, {"X": 2, "Y": 2}])
def test_a_layer_equals_the_trace_of_the_same_code_run_for_real(ranks, sizes):
    want = layer(8, 16, 32, sizes["X"], sizes["Y"])
    for flops, moves in ranks(run_for_real, sizes, 8, 16, 32):
        assert flops == want.flops
        assert sorted(moves) == sorted((m.op, m.axis, m.nbytes) for m in want.moves)


def test_sizes_that_do_not_divide_are_counted_in_proportion():
    padded, even = layer(96, 30, 44, 4, 8), layer(96, 32, 48, 4, 8)
    for a, b in zip(padded.moves, even.moves, strict=True):
        share = 30 * 44 / (32 * 48) if a.axis == "X" else 30 / 32
        assert a.nbytes == pytest.approx(b.nbytes * share)
    assert padded.flops == pytest.approx(even.flops * 30 * 44 / (32 * 48))


# --- A step


def network(torus=None, **sizes):
    every = {"pod": 1, "pipe": 1, "data": 1, "fsdp": 1, "tensor": 1} | sizes
    return Network(V5P, every, torus or dict.fromkeys(sizes, 1))


def test_a_step_equals_the_closed_form():
    job = Job(get("llama3-70b"), 4 * 2**20)
    c = job.config
    plan = evaluate(job, network({"fsdp": 2, "tensor": 1}, fsdp=2048, tensor=4), "none", 1)
    matrices = job.weights[0] / (c.L * c.D * c.F)
    shape = cost.LayerShape(job.batch, c.D, c.F, matrices, blocks=2)
    links = cost.Links(V5P.flops(), *(V5P.bandwidth("ici", axes=m) for m in (2, 1)))
    closed = cost.step("fsdp_tp", c.L, shape, links, {"X": 2048, "Y": 4})
    times = dict(plan.cost.axes)
    assert times["fsdp"] == pytest.approx(dict(closed.cost.axes)["X"])
    assert times["tensor"] == pytest.approx(dict(closed.cost.axes)["Y"])
    dots = job.flops() - 6 * job.weights[1] * job.batch
    assert plan.cost.math == pytest.approx(closed.cost.math + dots / (8192 * V5P.flops()))


def test_data_axis_equals_the_trace_of_data_parallelism():
    job = Job(get("llama3-8b"), 2**20)
    c, one = job.config, layer(2**20, 4096, 14336)
    plan = evaluate(job, network(data=64), "none", 1)
    from scaling.mesh import AbstractMesh
    from scaling.strategies import data_parallel

    params = {"W_in": torch.empty(1, c.D, c.F, dtype=torch.bfloat16, device="meta")}
    params["W_out"] = params["W_in"].mT.contiguous()
    mesh = AbstractMesh({"X": 64})
    In = torch.empty(2**14, c.D, dtype=torch.bfloat16, device="meta")
    with trace() as log:
        Out, saved = data_parallel.forward(params, In, mesh)
        data_parallel.backward(Out, saved, params, mesh)
    assert one.weights * 2 == log.book_bytes
    assert dict(plan.bytes)["data"] == pytest.approx(log.book_bytes * job.weights[0] / (2 * c.D * c.F))


def test_pods_pipeline_and_checkpointing():
    job = Job(get("llama3-70b"), 4 * 2**20)
    base = evaluate(job, network(fsdp=1024), "none", 1)
    pods = evaluate(job, network({"fsdp": 1}, pod=4, fsdp=1024), "none", 1)
    assert dict(pods.cost.axes)["pod"] == pytest.approx(2 * 2 * job.weights[0] / 1024 / 6.25e9)
    assert pods.cost.math == pytest.approx(base.cost.math / 4)
    piped = evaluate(job, network({"fsdp": 1, "pipe": 1}, pipe=8, fsdp=128), "none", 16)
    assert piped.bubble == pytest.approx(7 / 23)
    assert piped.cost.math == pytest.approx(base.cost.math)
    assert dict(piped.cost.axes)["fsdp"] == pytest.approx(16 / 8 * dict(base.cost.axes)["fsdp"])  # gathered 16 times
    block = evaluate(job, network(fsdp=1024), "block", 1)
    matmuls = evaluate(job, network(fsdp=1024), "matmuls", 1)
    assert base.memory.activations > matmuls.memory.activations > block.memory.activations
    assert 1.25 < block.cost.math / base.cost.math < 4 / 3 + 1e-9
    assert 1 < matmuls.cost.math / base.cost.math < 1.03
    assert block.mfu < base.mfu


def test_memory_of_part_6():
    """Params and Adam's state of 70B on 8,960 chips: Part 6 counts 10 bytes a parameter, without gradients."""
    job = Job(get("llama3-70b"), 4 * 2**20, grad_bytes=0)
    plan = evaluate(job, network({"fsdp": 3}, fsdp=8960), "block", 1)
    assert plan.memory.params + plan.memory.optimizer == pytest.approx(10 * 70.55e9 / 8960, rel=1e-3)
    assert plan.memory.activations == pytest.approx(2 * 8192 * 4 * 2**20 * 80 / 8960)


# --- The search


def test_part_6_llama3_70b_on_a_pod():
    job = Job(get("llama3-70b"), 4 * 2**20)
    found = plans(job, V5P, 8960)
    best = found[0]
    assert best.size("fsdp") > 1 < best.size("tensor")
    assert best.cost.bound == "compute"
    assert 1000 <= best.size("fsdp") <= 2240  # X_opt = 1618
    alone = next(p for p in found if p.size("fsdp") == 8960)
    assert alone.cost.bound == "fsdp"  # the book: FSDP alone is communication-bound on 8,960 chips
    assert all(p.chips == 8960 for p in found)
    seconds = [round(p.seconds, 6) for p in found if fits(p, V5P)]
    assert seconds == sorted(seconds)


def test_part_5_question_3_llama2_13b():
    best = plans(Job(get("llama2-13b"), 3 * 2**20), V5P, 4096)[0]
    assert (best.size("fsdp"), best.size("tensor"), best.cost.bound) == (1024, 4, "compute")
    assert not fits(next(p for p in plans(Job(get("llama2-13b"), 2**13), V5P, 1)), V5P)  # 130 GB on 96


def test_part_6_question_2_llama3_405b():
    best = plans(Job(get("llama3-405b"), 16 * 2**20), V5P, 8 * 8960)[0]
    assert (best.size("pod"), best.cost.bound) == (8, "compute")
    assert best.size("tensor") in (8, 16)


def test_plans_obey_the_model_and_the_network():
    for plan in plans(Job(get("llama3-70b"), 2**20), chip("h100"), 64):
        assert plan.chips == 64
        assert 80 % plan.size("pipe") == 0
        assert 64 % plan.size("tensor") == 0
        assert plan.seconds >= plan.cost.math
        assert plan.worst >= plan.seconds
    with pytest.raises(ValueError, match="at least 1"):
        plans(Job(get("llama3-8b"), 2**20), V5P, 0)
    with pytest.raises(ValueError, match="unknown remat"):
        plans(Job(get("llama3-8b"), 2**20), V5P, 64, remat="some")
    with pytest.raises(ValueError, match="longer than the batch"):
        Job(get("llama3-8b"), 1024)
    with pytest.raises(ValueError, match="whole number"):
        Job(get("llama3-8b"), 4e6)


def test_overlap_models():
    job = Job(get("llama3-70b"), 4 * 2**20)
    step = {
        o: evaluate(replace(job, overlap=o), network(fsdp=1024, tensor=8), "none", 1) for o in ("max", "sum", "none")
    }
    times = [seconds for _, seconds in step["max"].cost.axes]
    assert step["max"].seconds == max(step["max"].cost.math, *times)
    assert step["sum"].seconds == max(step["max"].cost.math, sum(times))
    assert step["none"].seconds == pytest.approx(step["max"].cost.math + sum(times))
    with pytest.raises(ValueError, match="overlap = 'half'"):
        replace(job, overlap="half")


def test_a_mixture_of_experts_moves_all_and_computes_some():
    dense, moe = get("part7-toy"), get("part7-moe")
    plans = [evaluate(Job(c, 2**22, 64), network(fsdp=256), "none", 1) for c in (dense, moe)]
    assert dict(plans[1].bytes)["fsdp"] / dict(plans[0].bytes)["fsdp"] == pytest.approx(211.5 / 18.25, rel=0.01)
    assert plans[1].cost.math / plans[0].cost.math == pytest.approx(31.1 / 18.25, rel=0.03)


@pytest.mark.parametrize("chips", [1, 2, 4, 8, 32])
def test_small_slices_have_plans_on_fewer_torus_axes(chips):
    job = Job(get("llama3-8b").with_(L=2, V=1000), 2**20)
    for plan in plans(job, V5P, chips):
        for axis, spanned in plan.torus:
            assert 2**spanned <= plan.size(axis)
        assert sum(spanned for _, spanned in plan.torus) <= 3
    assert {p.size("fsdp") for p in plans(job, V5P, chips)} >= {1, chips}


def test_seconds_of_a_collective():
    sizes = {"pod": 2, "pipe": 4, "fsdp": 64, "tensor": 8}
    torus = Network(V5P, sizes, {"pipe": 1, "fsdp": 1, "tensor": 1})
    assert torus.seconds("AllGather", 1e9, "fsdp") == pytest.approx(cost.all_gather(1e9, V5P, 16))
    assert torus.seconds("AllReduce", 1e9, "tensor") == pytest.approx(2 * 1e9 / 1.8e11)
    assert torus.seconds("AllGather", 1.0, "fsdp") == pytest.approx(32e-6)  # hops of a ring of 64
    assert torus.seconds("AllReduce", 1e9, "pod") == pytest.approx(2 * 1e9 / 6.25e9)
    assert torus.seconds("CollectivePermute", 9e10, "pipe") == pytest.approx(1, rel=1e-5)
    assert torus.seconds("AllGather", 1e9, "data") == 0
    line = replace(torus, rings=False)
    assert line.seconds("AllGather", 1e9, "fsdp") == pytest.approx(2 * torus.seconds("AllGather", 1e9, "fsdp"))
    h100 = chip("h100")
    tree = Network(h100, {"pipe": 2, "fsdp": 4, "tensor": 8})
    assert tree.seconds("AllGather", 1e9, "tensor") == pytest.approx(1e9 * 7 / 8 / 450e9)
    assert tree.seconds("ReduceScatter", 1e9, "fsdp") == pytest.approx(8e9 * 3 / 4 / 400e9)  # 8 groups share a node
    assert tree.seconds("CollectivePermute", 1e9, "pipe") == pytest.approx(1e9 / 50e9)


def test_slices():
    assert slice_shape(V5P, 8960) == (16, 20, 28)
    assert slice_shape(V5P, 4096) == (16, 16, 16)
    assert math.prod(slice_shape(chip("v5e"), 64)) == 64
    with pytest.raises(ValueError, match="are no slice"):
        slice_shape(V5P, 8950)


# --- The command


def command(capsys, *arguments):
    code = main(list(arguments))
    return code, capsys.readouterr()


def test_command(capsys):
    code, out = command(capsys, "--model", "llama3-70b", "--chip", "v5p", "--chips", "8960", "--batch", "4M", "--json")
    got = json.loads(out.out)
    assert code == 0
    assert got["fits"]
    assert got["closed_form"]["X_opt"] == pytest.approx(1618, rel=1e-3)
    assert got["closed_form"]["compute_bound"] == "FSDP+TP"
    assert got["closed_form"]["mixed_threshold"] == pytest.approx(113, abs=1)
    assert got["at_mfu"]["days"] == pytest.approx(44, abs=1)
    assert got["at_mfu"]["dollars"] == pytest.approx(got["at_mfu"]["days"] * 24 * 8960 * 4.2)
    code, out = command(capsys, "--model", "llama3-70b", "--chip", "v5p", "--chips", "8960", "--batch", "4M")
    assert "bound by compute" in out.out
    assert "X_opt = 1,619 (FSDP), 5.5 (TP)" in out.out
    assert "at 40% MFU: 44.7 days" in out.out


def test_command_when_nothing_fits(capsys):
    code, out = command(capsys, "--model", "llama3-70b", "--chip", "h100", "--chips", "8", "--batch", "512k")
    assert code == 1
    assert "Nothing fits" in out.out
    assert "16 chips: " in out.out
    assert "8-bit optimizer states" in out.out
    arguments = ["--model", "llama3-70b", "--chip", "h100", "--chips", "8", "--batch", "512k", "--json"]
    code, out = command(capsys, *arguments)
    need = json.loads(out.out)["help"]
    assert code == 1
    assert need["missing"] == pytest.approx(need["held"] - 80e9)


def test_command_errors(capsys):
    for arguments, message in (
        (["--model", "llama9", "--chip", "v5p"], "unknown model"),
        (["--model", "llama3-8b", "--chip", "v9"], "unknown chip"),
        (["--model", "llama3-8b", "--chip", "v5e", "--dtype", "int4"], "dtype"),
    ):
        code, out = command(capsys, *arguments, "--chips", "16", "--batch", "1M")
        assert code == 2
        assert message in out.err
    assert count("4M") == 4 * 2**20


# --- The guide


def test_the_ladder_is_climbed_as_the_model_grows():
    h100 = chip("h100")
    taken = []
    for L in (2, 20, 32, 60):
        job = Job(get("llama3-8b").with_(L=L, V=32000), 32 * 2048, 2048)
        taken.append(guide.choose(guide.climb(job, h100, 8)).rung.name)
    assert taken == ["DDP", "DDP", "FSDP", "FSDP"]
    job = Job(get("llama3-70b"), 32 * 8192, 8192)
    names = [step.rung.name for step in guide.climb(job, h100, 16) if step.fits]
    assert names[0] == "FSDP + checkpointing + TP 2"
    one = Job(get("llama3-8b").with_(L=2, V=32000), 32 * 2048, 2048)
    assert guide.choose(guide.climb(one, h100, 1)).rung.name == "one GPU"


def test_ddp_keeps_the_whole_optimizer():
    job = Job(get("llama3-8b"), 32 * 2048, 2048)
    ddp, sharded = (evaluate(replace(job, zero1=z), network(data=8), "none", 1) for z in (False, True))
    assert ddp.memory.optimizer == 8 * sharded.memory.optimizer


def test_guide_command(capsys):
    code, out = command(capsys, "guide", "--model", "llama3-8b", "--gpu", "h100", "--gpus", "8")
    assert code == 0
    assert "Take: FSDP" in out.out
    code, out = command(capsys, "guide", "--model", "llama3-8b", "--memory", "24GB", "--gpus", "2")
    assert code == 1
    assert "Nothing fits" in out.out
    assert "8-bit Adam" in out.out
    code, out = command(capsys, "guide", "--model", "llama3-8b", "--gpu", "v5p")
    assert code == 2
    assert "is a tpu" in out.err
