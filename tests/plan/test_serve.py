"""The planner of serving against brute force: every slice, form, mesh and batch, timed from the formulas by hand."""

import math

import pytest
import torch

from scaling import serve, tree
from scaling.configs import get
from scaling.cost import serving
from scaling.hardware import chip
from scaling.mesh import AbstractMesh
from scaling.models import transformer as model
from scaling.plan.serve import Service, ServingPlan, plans, report
from scaling.plan.serve.candidates import meshes

V5E, L70 = chip("v5e"), get("llama3-70b")
SMALL = get("llama3-8b").with_(L=8, V=32000)
HBM, LINK, HOP = 8.2e11, 4.5e10, 1e-6


def by_hand(shape, form, Y, Z, batch, context):
    """(seconds, bytes a chip) of a step of LLaMA-3 70B on v5e in int8, bf16 FLOPs and activations; "heads" or batch."""
    L, D, F, N, K, H, V, chips = 80, 8192, 28672, 64, 8, 128, 128256, Y * Z
    extra = (chips / min(K, Y) - 1) * 2 * L * D * K * H  # copies of W_K and W_V
    stored = L * (3 * D * F + 2 * D * (N + K) * H + 2 * D) + D + 2 * V * D + extra
    cached = max(1, Y / K) * batch * context * 2 * L * K * H
    lines = [side for side in shape if side > 1]
    hops, ports = sum(side - 1 for side in lines), len(lines)

    def gather(nbytes):
        return max(hops * HOP, nbytes * (1 - 1 / chips) / (ports * LINK))

    comms = (2 * L + 1) * 2 * gather(2 * batch * D) + gather(2 * batch * V)
    if form == "heads_batch":  # Z along one line, the last axis: V Z / (4 Z W) twice over, as a line has half the links
        comms += 2 * L * max((Z - 1) * HOP, 2 * batch * N * H / Y / (4 * LINK))
    math_ = 2 * batch * (stored - extra - V * D) / (chips * 1.97e14)
    return cached / (chips * HBM) + max((stored - V * D) / (chips * HBM), math_, comms), (stored + cached) / chips


@pytest.mark.parametrize(("latency", "context"), [(None, 8192), (0.010, 8192), (0.016, 2048)])
def test_the_best_of_all(latency, context):
    """Of 2x4 and 4x4 by heads and by heads x batch: all batches tried."""
    tried = {}
    for shape, form, Y, Z in (
        ((2, 4), "heads", 8, 1), ((4, 4), "heads", 16, 1), ((2, 4), "heads_batch", 4, 2), ((2, 4), "heads_batch", 2, 4),
        ((4, 4), "heads_batch", 8, 2), ((4, 4), "heads_batch", 4, 4),
    ):  # fmt: skip
        for batch in range(Z, 700, Z):
            seconds, held = by_hand(shape, form, Y, Z, batch, context)
            if held <= 0.9 * 16e9 and (latency is None or seconds <= latency):
                tried[shape, form, Y, Z, batch] = (round(batch / seconds / (Y * Z), 6), -seconds)
    shape, form, Y, Z, batch = max(tried, key=tried.__getitem__)
    service = Service(L70, context, latency=latency)
    found = [f for f in plans(service, V5E, most=16) if f.form in ("heads", "heads_batch")]
    best = found[0]
    assert (best.shape, best.form, best.batch) == (shape, form, batch)
    assert {"Z": 1} | dict(best.sizes) == {"Y": Y, "Z": Z}
    seconds, held = by_hand(shape, form, Y, Z, batch, context)
    assert best.step.seconds == pytest.approx(seconds)
    assert best.weight_bytes + best.kv_bytes == pytest.approx(held)


@pytest.mark.parametrize("objective", ["throughput", "latency"])
@pytest.mark.parametrize("latency", [None, 5e-4])
def test_every_form_and_batch(objective, latency):
    """All that `meshes` names on up to 8 chips, every batch up to far beyond what is taken."""
    service = Service(SMALL, 4096, 256, latency=latency, headroom=0.05)
    every = []
    for shape in ((1, 1), (2, 2), (2, 4)):
        for form, sizes in meshes(math.prod(shape)):
            step = {"heads_batch": dict(sizes).get("Z"), "2d": dict(sizes).get("X")}.get(form, 1)
            for batch in range(step, 80, step) if objective == "throughput" else [step]:
                one = ServingPlan(service, V5E, shape, form, sizes, batch)
                if one.fits and one.in_time:
                    every.append(one)
    found = plans(service, V5E, most=8, objective=objective)
    if objective == "latency":
        assert found[0].step.seconds == pytest.approx(min(one.step.seconds for one in every))
    else:
        assert found[0].per_chip == pytest.approx(max(one.per_chip for one in every), rel=2e-6)
        assert max(one.batch for one in found) < 80
    assert all(one.fits and one.in_time for one in found)
    assert {(one.shape, one.form) for one in found} == {(one.shape, one.form) for one in every}


def test_meshes_fill_the_chips():
    for chips in (1, 2, 8, 12):
        assert all(math.prod(n for _, n in sizes) == chips for _, sizes in meshes(chips))
    assert [form for form, _ in meshes(1)] == ["heads"]


def test_prefill_servers_by_hand():
    """7,680 tokens at 40% of 16 x 1.97e14 FLOPs/s against 92 sequences that take 512 steps."""
    best = plans(Service(L70, 8192), V5E, chips=16)[0]
    flops = 2 * 7680 * (80 * (3 * 8192 * 28672 + 2 * 8192 * 72 * 128)) + 2 * 80 * 7680 * 7681 * 8192 + 2 * 8192 * 128256
    assert best.prefill == pytest.approx(flops / (16 * 1.97e14 * 0.4))
    assert best.prefill_servers == pytest.approx(best.batch * best.prefill / (512 * best.step.seconds))


def test_experts_over_chips_beat_tensor_parallelism_on_many():
    """DeepSeek-V3 on 64 H800s: with attention by data more a chip than without, and more than what is published of 144
    of them. What a chip holds, by hand: of all but the routed experts as many copies as there are parts of the batch,
    of W_DQ and W_DKV one a chip, and with whole experts over all, the shared one on each chip."""
    c = get("deepseek-v3")
    service, load = Service(c, 4096, weights="fp8", kv="bf16", compute="fp8"), serving.load(c, "fp8", "bf16")
    found = plans(service, chip("h800"), chips=64)
    best = {}
    for one in found:
        best.setdefault((one.form, "E" in dict(one.sizes)), one)
    assert {one.form for one in found} >= {"heads", "heads_batch", "experts"}
    assert best["heads", True].per_chip > 1850 > best["heads", False].per_chip
    assert best["experts", True].per_chip > 1850 > best["heads_batch", False].per_chip
    shared, down = 3 * c.D * c.shared * c.F * (c.L - c.dense_layers), c.L * c.D * (1536 + 576)
    for form, more in (("heads", 0), ("experts", 1)):
        one = best[form, True]
        sizes = dict(one.sizes)
        assert one.batch % sizes["E"] == 0
        dense = load.weights - load.experts + (sizes["Y"] - 1) * (down + more * shared)
        assert one.weight_bytes == pytest.approx((sizes["E"] * dense + load.experts) / 64)


@pytest.mark.parametrize(
    ("form", "sizes"), [("heads", {"Y": 8, "E": 2}), ("experts", {"Y": 4, "E": 4}), ("sequence", {"Y": 4, "Z": 2})]
)
def test_what_a_latent_s_ranks_hold_is_what_they_are_given(form, sizes):
    c = get("deepseek-v3").with_(L=2, dense_layers=0, F_dense=0, k=1, E=16, expert_groups=1, top_groups=1)
    service, mesh = Service(c, 1024, weights="bf16", kv="bf16"), AbstractMesh(sizes)
    one = ServingPlan(service, chip("h100"), (mesh.size(sizes),), form, tuple(sizes.items()), 16)
    given = serve.specs(c, mesh, form=form)
    params = tree.nbytes(model.init(c, dtype=torch.bfloat16, mesh=mesh, specs=given))
    cache = serve.init_cache(c, 16, 1024, mesh=mesh, form=form, dtype=torch.bfloat16)["KV"].nbytes
    assert one.weight_bytes == pytest.approx(params, rel=1e-3)  # norms and routers are whole on every rank
    assert one.kv_bytes == cache
    assert one.type == {"heads": "KV[B_E, S, M]", "experts": "KV[B_E, S, M]", "sequence": "KV[B, S_Z, M]"}[form]


def test_a_latent_cache_is_told_apart_from_few_heads():
    """Of a latent each chip along Y has the whole; of heads only where there are fewer than chips."""
    for name, why in (("deepseek-v3", "a latent is of all heads"), ("llama3-70b", "K = 8 KV heads are fewer than Y")):
        service = Service(get(name), 4096, weights="fp8", kv="bf16")
        sizes, chips = (("Y", 16),), 16
        served = ServingPlan(service, chip("h100"), (chips,), "heads", sizes, 16)
        assert f"the cache is stored {16 / (1 if service.config.latent else 8):g} times: {why}" in report.notes(served)
