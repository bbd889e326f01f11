"""Schedules, stages, axes and memory of the planner's ledger against what they are defined by."""

from dataclasses import fields
from fractions import Fraction

import numpy as np
import pytest

from scaling.configs import get
from scaling.cost.lanes import Lane
from scaling.hardware import chip
from scaling.plan import Job, Layout, Stack, evaluate, tree
from scaling.plan.job import CODED, row
from scaling.plan.ledger import heaviest
from scaling.plan.network import Network
from scaling.schedules import make
from scaling.schedules.simulator import Times, simulate

H100 = chip("h100")


def planned(job, **fields):
    layout = Layout(**fields)
    copies, groups = max(1, job.work.copies), job.work.groups
    return evaluate(job, tree(H100, layout.sizes, layout.zero, copies, groups, job.shards), layout)


@pytest.mark.parametrize(
    ("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zb-h1", 1), ("dualpipev", 2)]
)
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 8), (4, 8), (4, 16), (8, 16)])
def test_bubble_and_live_activations_are_the_simulators(schedule, chunks, stages, microbatches):
    """The stack's three times are equal: forward, and the two halves of its backward."""
    job = Job(Stack(32, 1024, 4096), 2**20, seq=1)
    found = planned(job, pipe=stages, microbatches=microbatches, schedule=schedule, chunks=chunks)
    timeline = simulate(make(schedule, stages, microbatches, chunks), Times(1, 1, 1))
    last = Fraction(timeline.idle(stages - 1), timeline.makespan)
    assert found.bubble == pytest.approx(float(last))
    assert found.compute.live == pytest.approx(float(max(timeline.live)))


def test_uneven_stages():
    assert heaviest(126, 0.66, 16) == 8  # the last stage holds six layers and the unembedding
    assert heaviest(80, 0.0, 4) == 20
    assert heaviest(61, 0.0, 16) == 4
    assert heaviest(4, 9.0, 2) == 9  # an unembedding larger than the layers has a stage to itself
    for L, unit, Z in ((126, 0.66, 16), (61, 2.3, 16), (7, 0.4, 3)):
        best = min(max([n] * (Z - 1) + [unit + max(0, L - (Z - 1) * n)]) for n in range(L + 1))
        assert heaviest(L, unit, Z) == pytest.approx(best)


def test_a_step_of_uneven_stages_takes_what_the_fullest_takes():
    job = Job(Stack(10, 8192, 32768), 2**17, seq=1)
    found = planned(job, pipe=4, microbatches=8)
    layer = planned(Job(Stack(1, 8192, 32768), 2**14, seq=1)).cost.math
    assert found.bound == pytest.approx((7 * 3 + 10) * layer, rel=1e-6)  # seven more of three layers, one of all ten


def test_remat_computes_again():
    job = Job(get("llama3-70b"), 2**22)
    base, matmuls, block = (planned(job, data=64, remat=remat) for remat in ("none", "matmuls", "block"))
    assert 1.25 < block.cost.math / base.cost.math < 4 / 3 + 1e-9
    assert 1 < matmuls.cost.math / base.cost.math < 1.03
    kept = [float(one.held.activations) for one in (base, matmuls, block)]
    assert kept == sorted(kept, reverse=True)
    for one in (base, matmuls, block):
        assert 64 * one.cost.math * H100.flops() == pytest.approx(job.flops(one.layout.remat))


def test_what_a_policy_computes_and_gathers_again():
    job = Job(get("llama3-70b"), 2**20)
    keeps, attended, matmuls = (
        planned(job, data=2, tensor=8, remat=remat) for remat in ("none", "attention", "matmuls")
    )
    assert attended.bytes["tensor"] == keeps.bytes["tensor"]
    assert matmuls.bytes["tensor"] == pytest.approx(keeps.bytes["tensor"] * 10 / 8)
    assert attended.compute.backward == matmuls.compute.backward > keeps.compute.backward
    assert matmuls.held.activations < attended.held.activations < keeps.held.activations


def test_zero():
    job = Job(get("llama3-8b"), 2**20)
    params = job.work.params
    ddp, one, three = (planned(job, zero=z, **f) for z, f in ((0, {"data": 8}), (1, {"data": 8}), (3, {"fsdp": 8})))
    assert ddp.held.optimizer == pytest.approx(8 * params, rel=1e-4)
    assert one.held.optimizer == pytest.approx(params, rel=1e-4)
    assert (one.held.params, one.held.grads) == (ddp.held.params, ddp.held.grads)
    assert three.held.params == pytest.approx(2 * params / 8, rel=1e-4)
    assert ddp.bytes["data"] == pytest.approx(one.bytes["data"])  # an AllReduce is a ReduceScatter and an AllGather
    assert three.bytes["fsdp"] == pytest.approx(1.5 * one.bytes["data"])


def test_weights_that_zero_shards_over_fsdp_alone():
    """As a run does. What the ranks along context then hold alike they reduce as replicas do."""
    every = Job(get("llama3-8b"), 2**20)
    shared, alone = (
        planned(job, fsdp=4, context=2, zero=3) for job in (every, Job(every.config, every.batch, shards=("fsdp",)))
    )
    params = every.work.params
    assert shared.held.params == pytest.approx(2 * params / 8, rel=1e-4)
    assert alone.held.params == pytest.approx(2 * params / 4, rel=1e-4)
    assert (shared.network.lanes["weights"].ranks, alone.network.lanes["weights"].ranks) == (8, 4)
    assert "data" not in shared.bytes
    assert alone.bytes["data"] == pytest.approx(2 * 2 * params / 4, rel=1e-4)
    assert alone.bytes["fsdp"] == pytest.approx(shared.bytes["fsdp"])


def test_memory_of_part_6():
    """Params and Adam's state of 70B on 8,960 chips: Part 6 counts 10 bytes a parameter, without gradients."""
    job = Job(get("llama3-70b"), 4 * 2**20, grad_bytes=0)
    found = planned(job, fsdp=1024, zero=3, remat="block")
    assert found.held.params + found.held.optimizer == pytest.approx(10 * 70.55e9 / 1024, rel=1e-3)
    assert found.held.activations == pytest.approx(2 * 8192 * 4096 * 80)


def test_gradients_of_microbatches_are_scattered_once_or_each_time():
    job = Job(get("llama3-8b"), 2**20)
    each, once = (planned(job, fsdp=8, zero=3, microbatches=4, reduce=reduce) for reduce in ("each", "once"))
    assert each.bytes["fsdp"] / once.bytes["fsdp"] == pytest.approx(12 / 9)
    assert once.held.grads == pytest.approx(8 * each.held.grads)


def test_keys_and_values_cross_the_context_axis():
    config = get("llama3-70b")
    job = Job(config, 2**22, 2**17)
    found = planned(job, data=4, context=8, tensor=8)
    V = 2 * 2**17 * 2 * config.K * config.H / 8 * (2**22 / 2**17 / 4)  # bf16, both, a sequence, one of eight heads
    assert found.bytes["context"] == pytest.approx(3 * config.L * V)
    narrow = planned(job, data=4, context=8, tensor=16)
    assert narrow.bytes["context"] == pytest.approx(found.bytes["context"])  # 16 ranks, 8 heads: one each, copied


def test_kv_heads_below_tensor_are_copied():
    job = Job(get("llama3-70b"), 2**22)
    flat, copied = (planned(job, data=2, tensor=Y).compute for Y in (8, 16))
    w = job.work
    assert flat.linear * 8 == pytest.approx(2 * flat.tokens * w.L * w.dense)
    assert copied.linear * 16 == pytest.approx(2 * copied.tokens * w.L * (w.dense + w.kv))


def test_experts():
    config = get("mixtral-8x7b")
    job = Job(config, 2**20)
    dense, split = planned(job, data=8), planned(job, expert=8)
    assert split.compute.linear == pytest.approx(dense.compute.linear)
    assert split.bytes["expert"] == pytest.approx(4 * config.L * 2 * 2**20 / 8 * config.D)
    within = planned(job, data=4, tensor=2)  # attention's and the experts' gather and scatter, forward and backward
    assert within.bytes["tensor"] == pytest.approx(8 * config.L * 2 * 2**20 / 4 * config.D)
    experts = config.L * config.E * 3 * config.D * config.F
    assert float(dense.held.params - split.held.params) == pytest.approx(2 * experts * 7 / 8)
    assert split.bytes["data"] == pytest.approx(2 * 2 * (job.work.params - experts), rel=0.001)  # only what is dense


def test_experts_that_are_gathered_move_all_and_compute_some():
    moe, toy = (planned(Job(get(name), 2**22, 64), fsdp=64, zero=3) for name in ("part7-moe", "part7-toy"))
    assert moe.bytes["fsdp"] / toy.bytes["fsdp"] == pytest.approx(211.5 / 18.25, rel=0.01)
    assert moe.compute.linear / toy.compute.linear == pytest.approx(31.1 / 18.25, rel=0.03)


def test_fp8_computes_faster_and_sends_as_much():
    wide, narrow = (planned(Job(get("llama3-8b"), 2**20, dtype=dtype), fsdp=8, zero=3) for dtype in ("bf16", "fp8"))
    assert narrow.bytes == wide.bytes
    assert 0.5 < narrow.cost.math / wide.cost.math < 0.7  # dot products and unembedding stay bf16
    deep = get("deepseek-v3")
    half, whole = (planned(Job(deep, 2**22, dtype=dtype), expert=64).bytes["expert"] for dtype in ("fp8", "bf16"))
    assert half == pytest.approx(0.75 * whole)


def test_few_tokens_are_bound_by_reading_weights():
    found = planned(Job(Stack(4, 8192, 32768), 64, seq=1))
    assert found.cost.parts[0].math == pytest.approx(2 * 2 * 4 * 8192 * 32768 / H100.hbm_bw)


def test_a_forecast_is_never_below_the_bound():
    job = Job(get("llama3-70b"), 2**21)
    for given in (
        {"data": 8}, {"fsdp": 64, "zero": 3}, {"fsdp": 8, "tensor": 8, "zero": 3},
        {"pipe": 4, "data": 2, "tensor": 8, "microbatches": 8}, {"data": 4, "context": 8, "tensor": 2},
        {"fsdp": 64, "zero": 3, "microbatches": 4, "reduce": "once"},
    ):  # fmt: skip
        found = planned(job, **given)
        assert found.bound <= found.forecast
        assert found.bound <= found.worst


def test_columns_are_the_rows():
    job = Job(get("mixtral-8x7b"), 2**20)
    layouts = [
        Layout(pipe=2, data=2, expert=4, microbatches=4, remat="block"),
        Layout(fsdp=4, context=2, tensor=2, zero=3, microbatches=2, reduce="once"),
        Layout(pipe=4, expert=2, tensor=2, microbatches=8, schedule="interleaved", chunks=2, remat="matmuls"),
        Layout(pipe=2, data=8, microbatches=8, schedule="dualpipev", chunks=2),
    ]
    networks = [tree(H100, layout.sizes, layout.zero, 2, 8) for layout in layouts]
    rows: dict = {field.name: [getattr(layout, field.name) for layout in layouts] for field in fields(Layout)}
    rows |= {name: [words.index(word) for word in rows[name]] for name, words in CODED.items()}
    many = Layout(**{name: np.array(values) for name, values in rows.items()})
    lanes = {name: Lane.columns([network.lanes[name] for network in networks]) for name in networks[0].lanes}
    assert [row(many, i) for i in range(4)] == layouts
    together = evaluate(job, Network(H100, {}, 0, lanes), many)
    singles = [evaluate(job, network, layout) for network, layout in zip(networks, layouts, strict=True)]
    for found in (lambda one: one.forecast, lambda one: one.held.total, lambda one: one.bound, lambda one: one.worst):
        np.testing.assert_allclose(found(together), [float(found(one)) for one in singles], rtol=1e-12)


def test_layouts_and_jobs_are_checked():
    for given, message in (
        ({"pipe": 0}, "pipe = 0"), ({"data": 2.0}, "data = 2.0"), ({"remat": "some"}, "remat = 'some'"),
        ({"zero": 2}, "zero = 2"), ({"fsdp": 8}, "fsdp = 8 shards the params\n  fix: give zero=3"),
        ({"schedule": "gpipe"}, "schedule = 'gpipe'"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            Layout(**given)
    for given, message in (
        ({"batch": 4e6}, "whole number"), ({"batch": 1024}, "longer than the batch"), ({"dtype": "int4"}, "dtype = 'i"),
        ({"overlap": "half"}, "overlap = 'half'"), ({"headroom": 1.5}, "headroom = 1.5"), ({"grad_bytes": -1}, "grad"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            Job(get("llama3-8b"), **({"batch": 2**20} | given))
