"""Schedules, stages, axes and memory of the planner's ledger against what they are defined by."""

from dataclasses import fields
from fractions import Fraction

import numpy as np
import pytest

from scaling.configs import get
from scaling.cost.lanes import Lane
from scaling.hardware import chip
from scaling.plan import Job, Layout, Stack, evaluate, tree
from scaling.plan.job import CODED, Fixed, row
from scaling.plan.ledger import heaviest
from scaling.plan.network import Network
from scaling.schedules import make
from scaling.schedules.simulator import Times, simulate

H100, L8, L70, MIXTRAL = chip("h100"), get("llama3-8b"), get("llama3-70b"), get("mixtral-8x7b")


def planned(job, **fields):
    layout = Layout(**fields)
    copies, groups = max(1, job.work.copies), job.work.groups
    return evaluate(job, tree(H100, layout.sizes, layout.zero, copies, groups, job.shards), layout)


def test_bubble_and_live_activations_are_the_simulators():
    """The stack's three times are equal: forward, and the two halves of its backward."""
    for schedule, chunks in (("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zb-h1", 1), ("dualpipev", 2)):
        for stages, microbatches in ((2, 8), (4, 8), (8, 16)):
            job = Job(Stack(32, 1024, 4096), 2**20, seq=1)
            found = planned(job, pipe=stages, microbatches=microbatches, schedule=schedule, chunks=chunks)
            timeline = simulate(make(schedule, stages, microbatches, chunks), Times(1, 1, 1))
            last = Fraction(timeline.idle(stages - 1), timeline.makespan)
            assert found.bubble == pytest.approx(float(last))
            assert found.compute.live == pytest.approx(float(max(timeline.live)))


def test_uneven_stages():
    """The last stage holds six layers and the unembedding; one that is larger than all layers has a stage to itself.
    A step takes what the fullest takes."""
    for L, unit, Z in ((126, 0.66, 16), (80, 0.0, 4), (61, 0.0, 16), (4, 9.0, 2), (61, 2.3, 16), (7, 0.4, 3)):
        best = min(max([n] * (Z - 1) + [unit + max(0, L - (Z - 1) * n)]) for n in range(L + 1))
        assert heaviest(L, unit, Z) == pytest.approx(best)
    found = planned(Job(Stack(10, 8192, 32768), 2**17, seq=1), pipe=4, microbatches=8)
    layer = planned(Job(Stack(1, 8192, 32768), 2**14, seq=1)).cost.math
    assert found.bound == pytest.approx((7 * 3 + 10) * layer, rel=1e-6)  # seven more of three layers, one of all ten


def test_remat():
    """What a policy keeps, computes again, and gathers again."""
    job = Job(L70, 2**20)
    none, attention, matmuls, block = (
        planned(job, data=2, tensor=8, remat=remat) for remat in ("none", "attention", "matmuls", "block")
    )
    assert 1.25 < block.cost.math / none.cost.math < 4 / 3 + 1e-9
    assert none.cost.math < attention.cost.math == matmuls.cost.math < 1.03 * none.cost.math
    kept = [float(one.held.activations) for one in (none, attention, matmuls, block)]
    assert kept == sorted({*kept}, reverse=True)
    for one, gathers in ((none, 8), (attention, 8), (matmuls, 10), (block, 12)):
        assert 16 * one.cost.math * H100.flops() == pytest.approx(job.flops(one.layout.remat))
        assert one.bytes["tensor"] == pytest.approx(gathers * L70.L * 2 * 2**20 / 2 * L70.D)


def test_zero():
    """What ZeRO holds and moves of a stack stands in test_witnesses; here with embedding and unembedding."""
    one, three = (planned(Job(L8, 2**20), zero=zero, **{axis: 8}) for zero, axis in ((1, "data"), (3, "fsdp")))
    assert three.bytes["fsdp"] == pytest.approx(1.5 * one.bytes["data"])
    assert one.held.optimizer == pytest.approx(one.job.work.params, rel=1e-4)
    each, once = (planned(Job(L8, 2**20), fsdp=8, zero=3, microbatches=4, reduce=way) for way in ("each", "once"))
    assert each.bytes["fsdp"] / once.bytes["fsdp"] == pytest.approx(12 / 9)
    assert once.held.grads == pytest.approx(8 * each.held.grads)


def test_weights_that_zero_shards_over_fsdp_alone():
    """As a run does. What the ranks along context then hold alike they reduce as replicas do."""
    every = Job(L8, 2**20)
    shared, alone = (
        planned(job, fsdp=4, context=2, zero=3) for job in (every, Job(every.config, every.batch, shards=("fsdp",)))
    )
    params = every.work.params
    for found, ways in ((shared, 8), (alone, 4)):
        assert found.held.params == pytest.approx(2 * params / ways, rel=1e-4)
        assert found.network.lanes["weights"].ranks == ways
    assert "data" not in shared.bytes
    assert alone.bytes["data"] == pytest.approx(2 * 2 * params / 4, rel=1e-4)
    assert alone.bytes["fsdp"] == pytest.approx(shared.bytes["fsdp"])


def test_keys_and_values():
    """They cross the context axis, bf16, both, of one of eight heads; of 16 ranks two have the same."""
    job, whole = Job(L70, 2**22, 2**17), 2 * 2**17 * 2 * L70.K * L70.H / 8 * (2**22 / 2**17 / 4)
    for Y in (8, 16):
        found = planned(job, data=4, context=8, tensor=Y)
        assert found.bytes["context"] == pytest.approx(3 * L70.L * whole)
        w, c = job.work, found.compute
        copies = max(1, Y / L70.K)
        assert c.linear * Y == pytest.approx(2 * c.tokens * w.L * (w.dense + (copies - 1) * w.kv))


def test_experts():
    job = Job(MIXTRAL, 2**20)
    sent, experts = 2 * 2**20 * MIXTRAL.L * MIXTRAL.D, MIXTRAL.L * MIXTRAL.E * 3 * MIXTRAL.D * MIXTRAL.F
    dense, split, within = (planned(job, **each) for each in ({"data": 8}, {"expert": 8}, {"data": 4, "tensor": 2}))
    assert split.compute.linear == pytest.approx(dense.compute.linear)
    assert split.bytes["expert"] == pytest.approx(4 * sent / 8)
    assert within.bytes["tensor"] == pytest.approx(8 * sent / 4)  # attention's and the experts' gather and scatter
    assert float(dense.held.params - split.held.params) == pytest.approx(2 * experts * 7 / 8)
    assert split.bytes["data"] == pytest.approx(2 * 2 * (job.work.params - experts), rel=0.001)  # only what is dense
    moe, toy = (planned(Job(get(name), 2**22, 64), fsdp=64, zero=3) for name in ("part7-moe", "part7-toy"))
    assert moe.bytes["fsdp"] / toy.bytes["fsdp"] == pytest.approx(211.5 / 18.25, rel=0.01)  # all are gathered,
    assert moe.compute.linear / toy.compute.linear == pytest.approx(31.1 / 18.25, rel=0.03)  # some compute


def test_fp8_computes_faster_and_sends_as_much():
    wide, narrow = (planned(Job(L8, 2**20, dtype=dtype), fsdp=8, zero=3) for dtype in ("bf16", "fp8"))
    assert narrow.bytes == wide.bytes
    assert 0.5 < narrow.cost.math / wide.cost.math < 0.7  # dot products and unembedding stay bf16
    assert [Job(L8, 2**20, dtype=dtype).wide for dtype in ("fp8", "fp16", "fp32")] == ["bf16", "fp16", "fp32"]
    deep = get("deepseek-v3")
    half, whole = (planned(Job(deep, 2**22, dtype=dtype), expert=64).bytes["expert"] for dtype in ("fp8", "bf16"))
    assert half == pytest.approx(0.75 * whole)


def test_few_tokens_are_bound_by_reading_weights():
    found = planned(Job(Stack(4, 8192, 32768), 64, seq=1))
    assert found.cost.parts[0].math == pytest.approx(2 * 2 * 4 * 8192 * 32768 / H100.hbm_bw)


LAYOUTS = [
    Layout(pipe=2, data=2, expert=4, microbatches=4, remat="block"),
    Layout(fsdp=4, context=2, tensor=2, zero=3, microbatches=2, reduce="once"),
    Layout(pipe=4, expert=2, tensor=2, microbatches=8, schedule="interleaved", chunks=2, remat="matmuls"),
    Layout(pipe=2, data=8, microbatches=8, schedule="dualpipev", chunks=2),
    Layout(fsdp=8, tensor=2, zero=3),
]


def test_columns_are_the_rows():
    """And no forecast is below its bound."""
    job = Job(MIXTRAL, 2**20)
    networks = [tree(H100, layout.sizes, layout.zero, 2, 8) for layout in LAYOUTS]
    rows: dict = {field.name: [getattr(layout, field.name) for layout in LAYOUTS] for field in fields(Layout)}
    rows |= {name: [words.index(word) for word in rows[name]] for name, words in CODED.items()}
    many = Layout(**{name: np.array(values) for name, values in rows.items()})
    lanes = {name: Lane.columns([network.lanes[name] for network in networks]) for name in networks[0].lanes}
    assert [row(many, i) for i in range(len(LAYOUTS))] == LAYOUTS
    together = evaluate(job, Network(H100, {}, 0, lanes), many)
    singles = [evaluate(job, network, layout) for network, layout in zip(networks, LAYOUTS, strict=True)]
    for found in (lambda one: one.forecast, lambda one: one.held.total, lambda one: one.bound, lambda one: one.worst):
        np.testing.assert_allclose(found(together), [float(found(one)) for one in singles], rtol=1e-12)
    assert all(one.bound <= one.forecast and one.bound <= one.worst for one in singles)


REFUSED = {
    Layout: [
        ({"pipe": 0}, "pipe = 0"), ({"data": 2.0}, "data = 2.0"), ({"remat": "some"}, "remat = 'some'"),
        ({"zero": 2}, "zero = 2"), ({"fsdp": 8}, "fsdp = 8 shards the params\n  fix: give zero=3"),
        ({"schedule": "gpipe"}, "schedule = 'gpipe'"),
    ],
    Job: [
        ({"batch": 4e6}, "whole number"), ({"batch": 1024}, "longer than the batch"), ({"dtype": "int4"}, "dtype = 'i"),
        ({"overlap": "half"}, "overlap = 'half'"), ({"headroom": 1.5}, "headroom = 1.5"), ({"grad_bytes": -1}, "grad"),
    ],
    Fixed: [
        ({"axes": (("seq", 2),)}, "unknown mesh axis 'seq'"), ({"remat": "some"}, "unknown remat 'some'"),
        ({"zero": 2}, "unknown zero 2"), ({"reduce": "late"}, "unknown reduce 'late'"),
        ({"axes": (("tensor", 0),)}, "tensor = 0"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_asked_is_checked(kind):
    for given, message in REFUSED[kind]:
        with pytest.raises(ValueError, match=message):
            kind(**({"config": L8, "batch": 2**20} if kind is Job else {}) | given)
