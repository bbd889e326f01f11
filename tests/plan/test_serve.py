"""The planner of serving against brute force: every slice, form, mesh and batch, timed from the formulas by hand."""

import itertools
import math
import statistics
from dataclasses import asdict, replace

import pytest
import torch

from scaling import serve, tree
from scaling.book.arrays import largest
from scaling.configs import get
from scaling.cost.lanes import mesh_seconds
from scaling.hardware import chip
from scaling.mesh import AbstractMesh
from scaling.models import transformer as model
from scaling.plan.serve import Service, ServingPlan, plans, report
from scaling.plan.serve.candidates import meshes, stored_experts
from scaling.plan.serve.forecast import ERRORS, GPU, first_token, likely_token
from scaling.plan.serve.goals import deployments
from scaling.plan.serve.measured import fits, main, measured_rows
from scaling.plan.serve.traces import gantt, modelled, under_load
from scaling.serve.requests import Request
from scaling.serve.simulate import RequestTimes, Simulated, WorkSpan
from scaling.serve.states import POLICIES, Move, Run, Work
from scaling.spec.sizes import parse_mesh

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


@pytest.mark.parametrize(
    ("shape", "form", "Y", "Z"),
    [((2, 4), "heads", 8, 1), ((4, 4), "heads", 16, 1), ((2, 4), "heads_batch", 2, 4), ((4, 4), "heads_batch", 8, 2)],
)
def test_a_step_is_what_it_takes_by_hand(shape, form, Y, Z):
    service = Service(L70, 8192)
    for batch in (Z, 8 * Z, 40 * Z):
        one = ServingPlan(service, V5E, shape, form, (("Y", Y), ("Z", Z)) if Z > 1 else (("Y", Y),), batch)
        seconds, held = by_hand(shape, form, Y, Z, batch, 8192)
        assert one.step.seconds == pytest.approx(seconds)
        assert one.weight_bytes + one.kv_bytes == pytest.approx(held)
        assert one.fits == (held <= 0.9 * 16e9)


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


TRT, VLLM = (  # ms a token of LLaMA-3.1 70B in fp8 on H200, 1,024 in and out, batch 8 and 64 on TP 1, 2, 4, 8
    {(8, 1): 21.122, (8, 2): 12.425, (8, 4): 8.2368, (8, 8): 6.7158, (64, 1): 32.335, (64, 2): 18.992,
     (64, 4): 13.662, (64, 8): 13.506},
    {(8, 1): 22.557, (8, 2): 14.356, (8, 4): 10.136, (8, 8): 8.5192, (64, 1): 37.438, (64, 2): 22.707,
     (64, 4): 16.069, (64, 8): 12.734},
)  # fmt: skip


def test_the_forecast_explains_how_the_share_of_the_bound_falls_with_tp():
    """github.com/ai-dynamo/aiconfigurator, systems/silicon_sample.csv."""
    service = Service(L70, 2048, 1024, "fp8", "fp8", "fp8", over_time=True)
    shares = {}
    for key, measured in TRT.items():
        batch, ranks = key
        one = ServingPlan(service, chip("h200"), (ranks,), "heads", (("Y", ranks),), batch)
        likely = likely_token(one)
        assert one.step.kv + one.step.weights <= 1e-3 * min(measured, VLLM[key])
        assert likely.seconds == pytest.approx(sum(likely.parts.values()))
        assert likely.seconds == pytest.approx(1e-3 * (measured * VLLM[key]) ** 0.5, rel=0.3)
        shares[key] = (one.step.kv + one.step.weights) / likely.seconds
    # Between the shares measured in vLLM, .55 .48 .35 .22, and in TensorRT-LLM, .66 .57 .42 .25.
    assert [shares[8, ranks] for ranks in (1, 2, 4, 8)] == pytest.approx([0.60, 0.52, 0.38, 0.23], abs=0.08)


@pytest.mark.parametrize(
    ("engine", "model", "name", "rows"),
    [
        ("vllm", "llama3-70b", "h200", {
            (1024, 8, 1): 251, (1024, 8, 4): 106, (1024, 64, 4): 257, (8192, 8, 8): 395, (8192, 64, 2): 2964,
        }),
        ("trtllm", "llama3-70b", "h200", {
            (1024, 8, 1): 221, (1024, 8, 4): 104, (1024, 64, 4): 282, (8192, 8, 4): 567, (8192, 64, 4): 1695,
        }),
        ("sglang", "deepseek-v3", "b200", {(1024, 8, 8): 227, (1024, 32, 8): 528, (1024, 128, 8): 1413}),
    ],
)  # fmt: skip
def test_the_first_token_is_forecast_as_engines_reach_it(engine, model, name, rows):
    """Served in fp8, ms; github.com/ai-dynamo/aiconfigurator, systems/silicon_sample.csv.

    SGLang was set to look for requests at every 10th step for fewer than 16 requests, else at every 30th.
    """
    errors = []
    for (prompt, batch, ranks), measured in rows.items():
        wait = (10 if batch < 16 else 30) if engine == "sglang" else 0
        service = Service(
            get(model), prompt + 1024, 1024, "fp8", "fp8", "fp8", over_time=True, engine=engine, wait=wait
        )  # fmt: skip
        one = ServingPlan(service, chip(name), (ranks,), "heads", (("Y", ranks),), batch)
        errors.append(abs(math.log(1e3 * first_token(one) / measured)))
    assert statistics.median(errors) < math.log1p(2 * ERRORS[engine][0])
    assert largest(errors) < math.log(1.8)


def test_rates_are_found_again_from_rows_that_they_forecast(tmp_path, capsys):
    """Half of the rows is enough to forecast the other half, in the columns of silicon_sample.csv."""
    columns = "model_path,system,backend,precision,isl,osl,batch_size,tp_size,attention_dp_size,moe_tp_size,moe_ep_size"
    lines = [f"# comment\n{columns},silicon_ttft_ms,silicon_tpot_ms"]
    models = {"meta-llama/Llama-3.1-70B": "llama3-70b", "nvidia/DeepSeek-R1-NVFP4": "deepseek-v3"}
    for (path, name), ranks, on, batch, prompt in itertools.product(
        models.items(), (2, 4, 8), ("h200", "b200"), (4, 16, 64), (512, 4096)
    ):
        service = Service(get(name), prompt + 512, 512, "fp8", "fp8", "fp8", over_time=True)
        one = ServingPlan(service, chip(on), (ranks,), "heads", (("Y", ranks),), batch)
        times = f"{1e3 * first_token(one)},{1e3 * likely_token(one).seconds}"
        lines.append(f"{path},{on}_sxm,vllm,fp8,{prompt},512,{batch},{ranks},1,{ranks},1,{times}")
    (tmp_path / "rows.csv").write_text("\n".join(lines))
    rows = list(measured_rows(tmp_path / "rows.csv"))
    token, first = fits(rows)
    assert {(row.plan.service.config.name, row.plan.chips) for row in rows} == {
        ("llama3-70b", 2), ("llama3-70b", 4), ("llama3-70b", 8), ("deepseek-v3", 8), ("deepseek-v3", 4)
    }  # fmt: skip
    assert len(token.groups) == len(first.groups) == len(rows)
    assert token.error < 0.01
    assert token.rates == asdict(GPU)  # it begins there
    assert first.error < 0.05
    assert main([str(tmp_path / "rows.csv")]) == 0
    assert f"vllm = [{first.error:.2f}" in capsys.readouterr().out


@pytest.mark.parametrize(("ttft", "tpot"), [(0.5, 0.03), (1.0, 0.02), (None, 0.015), (0.3, None)])
def test_of_prompts_together_and_apart_the_better_keeps_both_limits(ttft, tpot):
    service = Service(L70, 2500, 500, "fp8", "fp8", "fp8", over_time=True, ttft=ttft, tpot=tpot)
    h100 = chip("h100")
    found = plans(service, h100, chips=32, replicas=None)
    goals = deployments(service, h100, found, 32, 256)
    assert {one.prompts is None for one in goals} == {True, False}
    for one in goals:
        assert one.chips <= 32
        assert one.ttft <= (ttft or math.inf)
        assert one.tpot <= (tpot or math.inf)
        assert one.per_chip == pytest.approx(one.requests * 500 / one.chips)
    assert goals[0].per_chip >= goals[1].per_chip
    together = next(one for one in goals if not one.prompts)
    assert together.requests == pytest.approx(max(one.requests for one in found), rel=1e-6)
    apart = next(one for one in goals if one.prompts)
    assert apart.requests <= apart.instances / apart.prompts.taken(apart.prompts.chips)  # prompts are not outrun
    assert likely_token(apart.decode).seconds < likely_token(replace(apart.decode, apart=False)).seconds


def test_experts_over_any_number_of_chips_and_int8_caches_with_scales():
    """On 72 chips 256 experts become 288, four on each chip (arXiv:2412.19437, 3.4, has redundant experts, too)."""
    service = Service(get("deepseek-v3"), 8192, weights="fp8", kv="fp8", compute="fp8")
    found = [one for one in plans(service, chip("gb200"), chips=72) if dict(one.sizes).get("E") == 72]
    assert {(one.service.config.E, one.service.copied) for one in found} == {(288, 32)}
    expert = 3 * 7168 * 2048 * 58
    assert found[0].load.experts == 288 * expert
    assert stored_experts(256, 144) == 288
    assert stored_experts(8, 7) == 0
    whole, bare = (Service(L70, 8192, over_time=over).load for over in (True, False))
    assert whole.kv(1) == pytest.approx(bare.kv(1) * (1 + 4 / 128))


def test_caches_over_time_are_a_bound_that_published_figures_keep():
    """TensorRT-LLM's LLaMA-3.1 8B in fp8 on an H100, 128 in and 4,096 out: 14,325 tokens/s."""
    service = Service(get("llama3-8b"), 128 + 4096, 4096, "fp8", "fp8", "fp8", over_time=True)
    best = plans(service, chip("h100"), chips=1)[0]
    assert 0.65 < 14_325 / best.tokens_per_second < 0.75
    assert best.kv_bytes == pytest.approx(best.batch * best.load.kv(128 + 2048))
    assert plans(replace(service, over_time=False), chip("h100"), chips=1)[0].tokens_per_second < 14_325


@pytest.mark.parametrize(
    ("name", "on", "chips"), [("deepseek-v3", "h200", 16), ("llama3-8b", "b200", 64), ("llama3-8b", "v5e", 16)]
)
def test_no_forecast_of_a_token_is_below_its_bound(name, on, chips):
    found = plans(Service(get(name), 4100, 4000, "int8", over_time=True), chip(on), chips=chips, apart=True)
    assert found
    assert all(one.tpot >= one.step.seconds for one in found)


@pytest.mark.parametrize("chips", [9, 12, 15])
def test_experts_on_part_of_a_second_node_send_over_the_network(chips):
    inside, across = (mesh_seconds("AllToAll", 1e9, "E", {"E": n}, chip("h200")) for n in (8, chips))
    assert across > 2.5 * inside


def test_replicas_share_the_chips_where_that_makes_more():
    service = Service(L70, 8192, over_time=True)
    one, best = (plans(service, V5E, chips=256, replicas=replicas)[0] for replicas in (1, None))
    assert (one.replicas, one.shape) == (1, (16, 16))
    assert (best.replicas, best.shape) == (16, (4, 4))
    assert best.per_chip > 3 * one.per_chip
    assert plans(service, V5E, chips=256, replicas=3) == []
    fewer = [found.shape for found in plans(service, chip("gb200"), chips=72, replicas=None, form="heads")]
    assert {math.prod(shape) for shape in fewer} <= {n for n in range(1, 73) if 72 % n == 0}


def test_prefill_servers_by_hand():
    """7,680 tokens at 40% of 16 x 1.97e14 FLOPs/s against 92 sequences that take 512 steps."""
    best = plans(Service(L70, 8192), V5E, chips=16)[0]
    flops = 2 * 7680 * (80 * (3 * 8192 * 28672 + 2 * 8192 * 72 * 128)) + 2 * 80 * 7680 * 7681 * 8192 + 2 * 8192 * 128256
    assert best.prefill == pytest.approx(flops / (16 * 1.97e14 * 0.4))
    assert best.prefill_servers == pytest.approx(best.batch * best.prefill / (512 * best.step.seconds))


def test_experts_over_chips_beat_tensor_parallelism_on_many():
    """DeepSeek-V3 on 64 H800s: with attention by data more a chip than without, and more than what is published of 144
    of them."""
    service = Service(get("deepseek-v3"), 4096, weights="fp8", kv="bf16", compute="fp8")
    found = plans(service, chip("h800"), chips=64)
    best = {}
    for one in found:
        best.setdefault((one.form, "E" in dict(one.sizes)), one)
    assert {one.form for one in found} >= {"heads", "heads_batch", "experts"}
    assert best["heads", True].per_chip > 1850 > best["heads", False].per_chip
    assert best["experts", True].per_chip > 1850 > best["heads_batch", False].per_chip
    assert all(one.batch % dict(one.sizes).get("E", 1) == 0 for one in found)


@pytest.mark.parametrize(
    ("form", "on", "kept"),
    [
        ("heads", "Y=8,E=2", "KV[B_E, S, M]"),
        ("experts", "Y=4,E=4", "KV[B_E, S, M]"),
        ("sequence", "Y=4,Z=2", "KV[B, S_Z, M]"),
    ],
)
def test_what_a_latent_s_ranks_hold_is_what_they_are_given(form, on, kept):
    c = get("deepseek-v3").with_(L=3, dense_layers=1, k=1, E=16, expert_groups=1, top_groups=1)
    sizes = parse_mesh(on)
    service, mesh = Service(c, 1024, weights="bf16", kv="bf16"), AbstractMesh(sizes)
    one = ServingPlan(service, chip("h100"), (mesh.size(sizes),), form, tuple(sizes.items()), 16)
    given = serve.specs(c, mesh, form=form)
    params = tree.nbytes(model.init(c, dtype=torch.bfloat16, mesh=mesh, specs=given))
    cache = serve.init_cache(c, 16, 1024, mesh=mesh, form=form, dtype=torch.bfloat16)["KV"].nbytes
    assert one.weight_bytes == pytest.approx(params, rel=1e-3)  # norms and routers are whole on every rank
    assert one.kv_bytes == cache
    assert one.type == kept


def test_a_latent_cache_is_told_apart_from_few_heads():
    """Of a latent each chip along Y has the whole; of heads only where there are fewer than chips."""
    for name, times in (("deepseek-v3", "16 times: a latent is of all"), ("llama3-70b", "2 times: K = 8 KV heads are")):
        service = Service(get(name), 4096, weights="fp8", kv="bf16")
        served = ServingPlan(service, chip("h100"), (16,), "heads", (("Y", 16),), 16)
        assert any(f"the cache is stored {times}" in note for note in report.notes(served))


# --- Plans under load: lone requests timed by hand, pictures drawn from spans that are known

PLAN = plans(Service(SMALL.with_(L=4), 256, 16), V5E, chips=1)[0]


def test_a_lone_request_and_a_move_by_hand():
    """240 tokens of prompt at 40% MFU, and 15 steps of one token, each reading all weights and its own cache at 95% of
    the peak; a move goes over the datacenter."""
    D, F, heads, V = 4096, 14336, 32 * 128 + 2 * 8 * 128, 32000
    matrices = 4 * (3 * D * F + D * heads + 32 * 128 * D)
    read = matrices + 4 * 2 * D + D + D * V
    served = under_load(PLAN, rate=1e-3, count=3)
    for times in served.requests.values():
        pairs = 240 * 241 / 2 * 4 * 32 * 128 * 4  # FLOPs of causal attention: 4 NH a pair and layer
        assert times.ttft == pytest.approx((pairs + 2 * 240 * matrices + 2 * D * V) / (0.4 * 1.97e14))
        steps = [1.05 * ((241 + i) * 2 * 4 * 8 * 128 + read) / 8.2e11 for i in range(15)]
        assert times.tpot == pytest.approx(sum(steps) / 15)
    assert modelled(PLAN)(Move(0, 100, (0,), (1,))) == pytest.approx(100 * 2 * 4 * 8 * 128 / 3.125e9)


@pytest.mark.parametrize("policy", POLICIES)
def test_all_are_served_under_load(policy):
    served = under_load(PLAN, rate=500.0, policy=policy, count=30, seed=1)
    assert [len(times.at) for times in served.requests.values()] == [16] * 30
    assert served.throughput == pytest.approx(30 * 16 / served.seconds)
    again = under_load(PLAN, rate=500.0, policy=policy, count=30, seed=1)
    assert again.steps == served.steps


def work(id, tokens):
    return Work(Request(id, (0,), 1), 0, (0,) * tokens, (0,), True)


def test_requests_as_drawn():
    """The first two run beside each other, the third waits for a slot; the second's cache is moved."""
    spans = (
        WorkSpan(0.0, 2.0, Run("engine", (work(0, 5),))), WorkSpan(2.0, 4.0, Run("engine", (work(0, 1), work(1, 3)))),
        WorkSpan(4.0, 5.0, Move(1, 3, (0,), (1,))), WorkSpan(6.0, 7.0, Run("engine", (work(1, 1), work(2, 2)))),
        WorkSpan(7.0, 10.0, Run("engine", (work(2, 1),))),
    )  # fmt: skip
    served = Simulated(spans, {id: RequestTimes(2.0 * id, end=end) for id, end in enumerate((4.0, 7.0, 10.0))})
    assert gantt(served, 10) == "0 |PPdd      |\n1 |  PP>.d   |\n2 |    ..Pddd|"
    assert gantt(served, 10, most=1) == "0 |PPdd      |"


def test_ranks_wait_for_the_group_that_has_most_to_do():
    """Attention by data: the requests are split, and the experts are everybody's."""
    offered = plans(Service(get("mixtral-8x7b"), 1024, 16), chip("h100"), chips=4, form="experts", batch=8)
    plan = next(plan for plan in offered if plan.groups == 2)

    def seconds(*of):
        request = Request(0, (0,), 1)
        return modelled(plan)(Run("engine", tuple(Work(request, 900, (0,), (), True, group=g) for g in of)))

    assert seconds(0) == seconds(*range(2)) < seconds(0, 0) == seconds(*range(2), 1)
    chunks = [Work(Request(0, (0,), 1), 0, (0,) * 100, (0,), True, group=g) for g in range(2)]
    one, both = (modelled(plan)(Run("engine", tuple(some))) for some in (chunks[:1], chunks))
    assert both == pytest.approx(2 * one)  # experts are on all chips, so a prompt of one group takes all of them
    served = under_load(plan, rate=20.0, count=12)
    assert [len(times.at) for times in served.requests.values()] == [16] * 12
    assert {work.group for run in served.steps for work in run.works} == set(range(2))
