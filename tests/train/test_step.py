"""A run's step on a mesh: gradients, losses and params are one device's, in every dtype; sums are float32, whatever the
params are; and bytes, collectives and FLOPs are those that the dry run says. What does not fit is refused by it. The
loss of held-out text, whatever is left for the last batch, and sample text are one device's too."""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from unittest import mock

import numpy
import pytest
import torch
import torch.nn.functional as F
from machine import on_ranks
from refused import read_table
from runs import ONE, TINY

from scaling import serve, tree
from scaling.book.arrays import largest
from scaling.collectives import all_gather
from scaling.configs import Latent, Linear, get
from scaling.cost.memory import ROOM
from scaling.launch import run
from scaling.mesh import AbstractMesh
from scaling.models import transformer as model
from scaling.strategies import expert, transformer
from scaling.strategies.transformer.ends import Terms, chunked_loss
from scaling.trace import trace
from scaling.trace.count import Between, counted_step
from scaling.trace.peak import peak_memory
from scaling.train import dry, evaluate, guards
from scaling.train.batches import Batches
from scaling.train.corpus import Corpus
from scaling.train.counting import count
from scaling.train.settings import DTYPES, Settings, optimizer_of
from scaling.train.step import (
    begin_state,
    check_compiled,
    drawn_params,
    gradients,
    local,
    make_step,
    split_frozen,
)

MODEL = get("tiny").with_(L=2, D=32, F=64, H=8, N=4, K=2)
EXPERTS = MODEL.with_(E=4, k=2, aux_coef=0.01)
STEPS = {"fp64": (1e-12, 1e-10), "fp16": (2e-3, 5e-3)}  # how far losses and params are from one device's
EACH = {"dtype": "fp64", "reduce": "each"}  # microbatch
SCALES = [(2.0**30, 2.0**29, 0), (2.0**16, 2.0**16, 1), (2.0**16, 2.0**16, 2)]  # that used, the next, the updates


def off(found, wanted) -> dict[str, float]:
    """{leaf: the norm of the difference over the wanted one's}"""
    return tree.named_leaves(tree.map(lambda g, w: ((g - w).norm() / w.norm()).item(), found, wanted))


def batch_of(settings, mesh):
    rows = torch.randint(0, 256, (settings.batch, settings.seq + 1), generator=torch.Generator().manual_seed(1))
    return [local(x, mesh) for x in (rows[:, :-1], rows[:, 1:], torch.zeros_like(rows[:, 1:]))]


def begun(settings, mesh):
    """(params, the optimizer's state, the step)."""
    params, optimizer = drawn_params(settings, mesh), optimizer_of(settings)
    return params, begin_state(settings, mesh, optimizer, params), make_step(settings, mesh, optimizer)


def summed(mesh, settings, dtype, scale=1024.0):
    """(the loss, whole gradients) under a scale, of which nothing else is seen, and {(op, name, dtype) of a line}. The
    norms are those of the whole gradients."""
    settings, types = replace(settings, dtype=dtype), transformer.specs(settings.model, mesh)
    params, batch = drawn_params(settings, mesh), batch_of(settings, mesh)
    with trace() as log:
        term, grads, _, norm, squares = gradients(settings, mesh)(params, batch, scale=scale)
    tree.check(grads, types, settings.model.sizes, mesh, torch.promote_types(DTYPES[dtype], torch.float32))
    norms, whole = guards.leaf_norms(squares, types, mesh), transformer.unshard(grads, settings.model, mesh)
    wanted = torch.stack([g.double().norm() for g in tree.leaves(whole)])
    torch.testing.assert_close((norms, norm.double()), (wanted, wanted.norm()), rtol=1e-5, atol=0)
    return term.item(), whole, {(event.op, str(event.after.name), event.dtype) for event in log.events}


def trained(mesh, settings):
    """Run two steps, in float16 after one with a scale that is too great. Return (bytes of params and of the state, the
    number of collectives, the most bytes at once, bytes sent, FLOPs), scales, losses and the whole params, or their
    masters."""
    (params, state, step), peaks = begun(settings, mesh), []
    held, scales, losses = (tree.nbytes(params), tree.nbytes(state)), [], []
    for number in range(3 if "scale" in state else 2):
        if "scale" in state:
            state |= {"scale": torch.tensor(2.0 ** (16 if number else 30))}
        between = Between()
        with peak_memory(between.saw) as memory:
            tree.map(torch.Tensor.detach, (params, state))
            params, state, metrics = step(params, state, batch_of(settings, mesh), donate=True)
        peaks.append(memory.peak)
        losses.append(metrics["loss"].item())
        if "scale" in state:
            scales.append((metrics["scale"], state["scale"].item(), int(state["step"])))
    most = min(peaks[-2:])  # a message's buffer may live a little longer while the machine is busy
    did = counted_step(memory.log.events, between)
    taken = *held, did.collectives, most, did.sent, did.flops
    layout = {"zero": settings.zero, "schedule": settings.pipeline_on(mesh.sizes)}
    whole = transformer.unshard(state.get("master", params), settings.model, mesh, **layout)
    return taken, scales, losses, whole


def by_graph(mesh, settings):
    """The losses and whole params after two steps, of which forward and backward are one graph if they are compiled."""
    torch._dynamo.utils.counters.clear()
    with mock.patch("torch.compile", partial(torch.compile, backend="aot_eager")):
        (params, state, step), losses = begun(settings, mesh), []
    for _ in range(2):
        with trace():
            params, state, metrics = step(params, state, batch_of(settings, mesh), donate=True)
        losses.append(metrics["loss"].item())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == settings.compile
    return losses, transformer.unshard(params, settings.model, mesh)


@pytest.mark.slow
@pytest.mark.compile
def test_a_compiled_step_is_one_graph_and_learns_the_same(ranks):
    settings = Settings(MODEL.with_(L=1, learned_positions=16), "", "", 4, 16, lr=3e-3, warmup=1, dtype="fp64")
    ((losses, wanted),) = ranks(by_graph, {"X": 1}, settings)
    for found, whole in ranks(by_graph, {"Y": 2}, replace(settings, compile=True)):
        assert found == pytest.approx(losses, rel=1e-12)
        assert largest(off(whole, wanted).values()) < 1e-10


@pytest.mark.sweep
@pytest.mark.compile
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize(("config", "options"), [
    (MODEL.with_(L=1), {"lora": 2, "lora_on": "W_Q,W_V,W_O,W_in"}),
    (MODEL.with_(L=1, K=4, latent=Latent(q_rank=12, kv_rank=10, nope=4, rope=4, value=8)), {}),
], ids=["adapters", "latents"])  # fmt: skip
def test_gradients_of_adapters_and_latents_are_one_graph(config, options):
    settings, (mesh,) = Settings(config, "", "", 2, 8, dtype="fp64", **options), run(lambda mesh: mesh, {"X": 1})
    frozen, own = split_frozen(settings, drawn_params(settings, mesh))
    f, batch = gradients(settings, mesh, frozen=frozen), batch_of(settings, mesh)
    _, wanted, *_ = f(own, batch)
    torch._dynamo.reset()
    _, found, *_ = torch.compile(f, fullgraph=True, dynamic=False, backend="aot_eager")(own, batch)
    assert largest((a - b).abs().max() for a, b in zip(*map(tree.leaves, (found, wanted)), strict=True)) < 1e-12


def test_what_is_no_graph_is_refused_by_name():
    told = {"experts": (EXPERTS, {}, {}), "mesh axis Z": (MODEL, {}, {"Z": 2}), "fp16": (MODEL, {"dtype": "fp16"}, {})}
    told |= {"dropout": (MODEL.with_(dropout=0.1), {}, {}), "--precision": (MODEL, {"precision": "fp8-row"}, {})}
    told |= {"linear layers": (MODEL.with_(linear=Linear(2, 4, 8, 8, 4, (0,))), {}, {})}
    for what, (config, options, sizes) in told.items():
        with pytest.raises(ValueError, match=f"--compile with .*{what}"):
            check_compiled(Settings(config, "", "", 4, 16, compile=True, **options), sizes)
    check_compiled(Settings(EXPERTS, "", "", 4, 16), {"Z": 2})


TABLE = """
config                                           mesh     options
MODEL                                            X=1      dtype="bf16", remat="matmuls"
MODEL.with_(L=3, tied=True)                      X=1      dtype="fp32", remat="block", microbatches=2
MODEL                                            C=2      dtype="fp32", remat="attention"
EXPERTS.with_(shared=1, shared_gate=True)        Z=2,E=2  dtype="fp64", optimizer="muon"
MODEL                                            Z=2      dtype="fp16", remat="block", microbatches=2
MODEL.with_(L=5, F=256)                          Z=2      dtype="fp64", microbatches=2, pipeline="interleaved:2"
MODEL.with_(L=4, F=256)                          Z=2,X=2  EACH, microbatches=4, pipeline="interleaved:2"
MODEL.with_(K=1, L=6, sinks=True, score_cap=2.)  X=2,Y=2  dtype="fp64", optimizer="muon"
MODEL.with_(tied=True)                           X=2,Y=2  EACH, zero=1, optimizer="muon", microbatches=2
EXPERTS.with_(L=3, dense_layers=1, F_dense=64)   Z=2,X=2  dtype="fp64", zero=2, remat="block"
"""
CASES = read_table(TABLE, globals())


@pytest.mark.parametrize(("config", "sizes", "options"), CASES, ids=[f"{case[1]} {case[2]}" for case in CASES])
def test_the_dry_run_is_the_run_and_the_run_is_one_device_s(ranks, config, sizes, options):
    settings = Settings(config, "", "", 8, 32, lr=3e-3, warmup=1, **options)
    peaks, said, computed, found = [], [], [], ranks(trained, sizes, settings)
    for rank, ((*held, most, sent, flops), *_) in enumerate(found):
        wanted = count(settings, sizes, AbstractMesh(sizes).coord_of(rank))
        assert held == [wanted.params, wanted.state, wanted.collectives]
        computed.append((flops, wanted.flops))
        if not config.moe:  # with experts a rank's rows follow the routing
            assert (sent, flops) == (wanted.sent, wanted.flops)
            assert most == pytest.approx(wanted.memory, rel=0.03)
        peaks.append(most)
        said.append(wanted.memory)
    assert sum(flops for flops, _ in computed) == sum(flops for _, flops in computed)  # rows have experts
    assert sum(peaks) == pytest.approx(sum(said), rel=0.03)
    assert dry.fullest(settings, sizes).memory == pytest.approx(max(peaks), rel=0.05 if config.moe else 0.03)
    if settings.dtype in STEPS:
        _, scales, wanted_losses, wanted_params = trained(ONE, settings)
        skipped = settings.dtype == "fp16"  # the first step
        assert scales == SCALES * skipped
        assert (wanted_losses[0] == wanted_losses[1]) == skipped
        assert wanted_losses[-2] > wanted_losses[-1]
        limit, far = STEPS[settings.dtype]
        for _, *scales_and_losses, params in found:
            assert scales_and_losses == [scales, pytest.approx(wanted_losses, rel=limit)]
            assert largest(off(params, wanted_params).values()) < far


@pytest.mark.slow
def test_too_large_a_batch_is_refused_with_the_largest_that_fits():
    of_batch = partial(Settings, MODEL.with_(L=1), "", "", seq=64)
    settings, sizes = of_batch(batch=40), {"P": 2, "X": 2}  # half of 20 does not divide over both axes
    limit = count(of_batch(batch=12), sizes).memory / ROOM
    with pytest.raises(ValueError, match=r"a rank needs 0.0\d GB.*\n  fix: --batch 8;"):
        dry.refuse_too_large(settings, sizes, limit)
    dry.refuse_too_large(of_batch(batch=8), sizes, limit)
    with pytest.raises(ValueError, match="no batch fits"):
        dry.refuse_too_large(settings, sizes, 1000)


@pytest.mark.slow
def test_a_step_of_8b_holds_neither_all_logits_nor_its_tables_to_the_end():
    """Beside the state: 4,096 tokens of llama3-8b on a rank of X=32 would have 2.1 GB of float32 logits alone, and each
    table of the vocabulary, its gradient and the buffers of gloo's ReduceScatter take 1.05 GB each, and the sum of the
    chunks' gradients, in float32, 2.1 GB while the loss is made. Four layers add 0.14 GB, and the last one's weights,
    which stay gathered for its backward, 0.44 GB."""
    settings = Settings(get("llama3-8b").with_(L=4), "", "", batch=32, seq=4096, dtype="bf16", remat="block")
    assert count(settings, {"X": 32}, backend="abstract").step < 5.1e9
    assert count(settings, {"X": 32}, backend="gloo").step < 8.4e9


@pytest.mark.parametrize(("config", "sizes", "microbatches"), [
    (MODEL, {"X": 2, "Y": 2}, 2), (MODEL, {"Z": 2, "X": 2}, 2), (EXPERTS, {"Z": 2, "E": 2}, 1), (EXPERTS, {"E": 2}, 1),
    (MODEL, {"C": 2}, 1),
])  # fmt: skip
def test_gradients_are_one_device_s_summed_in_float32(ranks, config, sizes, microbatches):
    """Products, weights and activations on their way are in bfloat16; gradients, the loss and norms are sums."""
    settings = Settings(config, "", "", 8, 32, microbatches=microbatches)
    wanted_value, wanted, _ = summed(ONE, settings, "fp64", 1.0)
    for value, grads, lines in ranks(summed, sizes, settings, "bf16"):
        assert value == pytest.approx(wanted_value, rel=0.05)
        assert largest(by for leaf, by in off(grads, wanted).items() if "router" not in leaf) < 0.05
        assert not torch.equal(grads["norm"], grads["norm"].bfloat16().float())  # sums that it cannot hold
        assert sizes != {"X": 2, "Y": 2} or [line for line in lines if line[2] != dtype_of(*line[:2])] == []


def dtype_of(op: str, name: str) -> torch.dtype:
    """Of a line in a step whose params are bfloat16."""
    moved = op == "ReduceScatter" and name in ("x", "y", "dy", "dx", "Attn", "Out")
    added = op in ("AllReduce", "ReduceScatter") or name in ("total", "k")  # of the loss: its tokens and its slope
    return torch.float32 if added and not moved else torch.bfloat16


def test_what_the_chunks_of_a_loss_add_up_to():
    """Of half a million tokens a few weigh a thousand times as much as the others: it is as good as float64's. In
    bfloat16 the gradient of the unembedding, of 256 chunks, is rounded once, as that of one chunk is."""
    x, U, w = torch.randn(4, 1 << 17, 2), torch.randn(2, 4), torch.rand(4, 1 << 17)
    w[0, :200] = 1000
    targets = torch.randint(4, w.shape)
    ce = F.cross_entropy((x.double() @ U.double()).flatten(0, 1), targets.flatten(), reduction="none")
    true = ((w.double().flatten() * ce).sum() / w.double().sum()).item()
    given = targets, w / w.sum(), Terms(4, 0.0, 0.0), ONE.optional, 1 << 13
    assert chunked_loss(x, {"unembed": U}, *given, gradients=False)[0].item() == pytest.approx(true, rel=3e-7)
    for table, shape in ("unembed", (4, 8)), ("embed", (8, 4)):
        x, U = (1 + torch.randn(1, 1 << 14, 4)).bfloat16(), torch.randn(shape).bfloat16()
        given = torch.randint(8, x.shape[:2]), torch.full(x.shape[:2], 2.0**-14), Terms(8, 0.0, 0.0), ONE.optional
        one, many = (chunked_loss(x, {table: U}, *given, size, gradients=True)[2][table] for size in (1 << 30, 1 << 11))
        assert many.dtype == torch.bfloat16
        assert (many.float() - one.float()).abs().max() <= 2**-7 * one.abs().max()


SAMPLED = MODEL.with_(L=5)
SETTINGS = Settings(SAMPLED, "", "", sample="Once upon ä", seed=3, pipeline="interleaved:2")
IDS, STARTS = numpy.random.default_rng(0).integers(0, 256, 32 * 11 + 1), (0, 100, 128, 131, 150)


def losses_by_document(params) -> tuple[float, int]:
    """Return the sum of the losses of IDS, cut into 11 sequences, and their number: each piece of a document in a
    sequence is run alone, and none is asked for the next document's first token."""
    total, count = 0.0, 0
    cuts = sorted({*STARTS, *range(0, len(IDS), 32)})
    for first, last in pairwise(cuts):
        targets = torch.from_numpy(IDS[first + 1 : last + (last not in STARTS)])
        logits = model.forward(params, torch.from_numpy(IDS[first:last])[None], config=SAMPLED)[0, : len(targets)]
        total, count = total + F.cross_entropy(logits, targets, reduction="sum").item(), count + len(targets)
    return total, count


@on_ranks({"X": 2, "Y": 2}, {"Z": 2, "C": 2})
def test_held_out_and_training_losses_are_the_mean_over_documents_on_any_mesh(mesh):
    corpus = Corpus((IDS[:200], IDS[200:]), numpy.array(STARTS))
    params = model.init(SAMPLED, 0, torch.float64)
    total, count = losses_by_document(params)
    assert count == 32 * 11 - 4
    for on, batch, microbatches in (ONE, 11, 1), (ONE, 8, 2), (mesh, 4, 1):  # one batch; of 4, 4 and 3 sequences
        settings = replace(SETTINGS, batch=batch, seq=32, microbatches=microbatches, eval_batches=0)
        held = Batches(corpus, batch, 32, 0, 0, len(IDS))
        mine = transformer.shard(params, SAMPLED, on, schedule=settings.pipeline_on(on.sizes))
        found = evaluate.evaluate(mine, [held], settings, on, lambda: torch.zeros(1))
        assert found == pytest.approx(total / count, rel=1e-12)
        rows = held.rows([*range(11), 0])  # 12 rows, which meshes divide: the first one, again, ...
        rows[1][11] = -100  # ... does not count
        settings = replace(settings, batch=12, microbatches=2 if "Z" in on.sizes else 3)
        loss, *_ = gradients(settings, on)(mine, [local(x, on) for x in rows])
        assert loss.item() == pytest.approx(total / count, rel=1e-12)


@on_ranks({"Z": 2, "Y": 2})
def test_the_same_text_on_every_mesh_and_cold_what_serving_gives(mesh):
    params = model.init(SAMPLED, 5, torch.float64)
    with mock.patch.object(evaluate, "LENGTH", 16):
        held = transformer.shard(params, SAMPLED, mesh, schedule=SETTINGS.pipeline_on(mesh.sizes))
        found = evaluate.continuation(held, SETTINGS, mesh)
        assert found == ("" if mesh.rank else evaluate.continuation(params, SETTINGS, ONE))
        if mesh.rank == 0:
            wanted = serve.generate(params, [list(SETTINGS.sample.encode())], SAMPLED, 16)
            with mock.patch.object(evaluate, "TEMPERATURE", 1e-9):
                assert evaluate.continuation(params, SETTINGS, ONE) == bytes(wanted[0]).decode(errors="replace")


def test_a_sample_that_cannot_be_taken_is_refused_before_the_run():
    with pytest.raises(ValueError, match=r"--sample gathers the whole params .*\n  fix: leave it out"):
        evaluate.check_sample(SETTINGS, 2, 50_000, 1e5)
    evaluate.check_sample(SETTINGS, 1, 50_000, 1e5)  # which has them already
    with pytest.raises(ValueError, match=r"do not lie in 0\.\.99"):
        evaluate.check_sample(Settings(SAMPLED.with_(V=100), "", "", sample="prompt"), 1, 0, 1e9)


def test_a_sample_ends_with_the_learned_positions():
    settings = Settings(MODEL.with_(learned_positions=8), "", "", sample="begin", seed=3)
    assert len(evaluate.continuation(drawn_params(settings, ONE), settings, ONE)) <= 3
    with pytest.raises(ValueError, match="there are 8"):
        evaluate.check_sample(replace(settings, sample="beginning"), 1, 0, 1e9)


@pytest.mark.parametrize("how", [{}, {"betas": "0.8,0.9", "label_smoothing": 0.2, "z_loss": 0.01}])
def test_steps_are_those_of_a_plain_loop_of_torch_s(how):
    """Clipped, and by AdamW, in which only matrices decay."""
    settings = Settings(MODEL, "", "", 8, 32, lr=3e-3, warmup=1, clip=0.1, dtype="fp64", schedule="constant", **how)
    (params, state, step), batch = begun(settings, ONE), batch_of(settings, ONE)
    theirs = tree.map(lambda W: W.clone().requires_grad_(), params)
    leaves = tree.named_leaves(theirs)
    decays = {name: 0.1 if "W_" in name or "unembed" in name else 0.0 for name in leaves}
    groups = [{"params": [leaves[name]], "weight_decay": decay} for name, decay in decays.items()]
    plain = torch.optim.AdamW(groups, lr=3e-3, betas=(0.8, 0.9) if how else (0.9, 0.95))
    for _ in range(3):
        params, state, metrics = step(params, state, batch)
        plain.zero_grad()
        logits = model.forward(theirs, batch[0], config=MODEL).flatten(0, 1)
        ce = F.cross_entropy(logits, batch[1].flatten(), label_smoothing=settings.label_smoothing)
        (ce + settings.z_loss * logits.logsumexp(-1).square().mean()).backward()
        norm = torch.nn.utils.clip_grad_norm_(leaves.values(), 0.1)
        plain.step()
        assert metrics["grad_norm"].item() == pytest.approx(norm.item(), rel=1e-12)
    assert largest(off(params, theirs).values()) < 1e-12


BALANCED = TINY.with_(L=3, E=4, k=2, routing="sigmoid", dense_layers=1, F_dense=16, aux_coef=0.01)


def biases(mesh, settings):
    """The whole biases of experts after three steps, and the largest of their moments."""
    params, state, step = begun(settings, mesh)
    for _ in range(3):
        params, state, _ = step(params, state, batch_of(settings, mesh), donate=True)
    state = state.get("rest", state)
    moments = [state[name]["layers"]["bias"].abs().max().item() for name in ("m", "v")]
    bias = state.get("master", params)["layers"]["bias"]
    assert torch.equal(params["layers"]["bias"], bias.to(params["layers"]["bias"].dtype))
    return all_gather("bias[L_Z, E] -> bias[L, E]", bias, mesh) if "Z" in mesh.sizes else bias, max(moments)


@pytest.mark.slow
def test_biases_of_experts_move_toward_an_even_load(ranks, monkeypatch):
    """By the rate and the sign alone, as a loop over the choices of all layers and microbatches says; on every mesh."""
    settings = Settings(BALANCED, "", "", 4, 16, microbatches=2, dtype="fp64")
    choices, real = [], expert.route_tokens

    def seen(*given, **how):
        choices.append(real(*given, **how).experts.numpy().copy())
        return real(*given, **how)

    with monkeypatch.context() as patch:
        patch.setattr(expert, "route_tokens", seen)
        found, moments = biases(ONE, settings)
    bias = numpy.zeros((2, 4))
    for step in range(3):
        for layer in range(2):  # two microbatches, of two layers with experts each
            both = [*choices[4 * step + layer].flat, *choices[4 * step + layer + 2].flat]
            load = [both.count(e) for e in range(4)]
            for e in range(4):
                bias[layer, e] += 0.001 * numpy.sign(sum(load) / 4 - load[e])
    numpy.testing.assert_allclose(found.numpy(), bias, rtol=1e-12)
    assert abs(bias).max() == pytest.approx(0.003)
    assert moments == 0
    for mesh in {"X": 2}, {"E": 2}, {"Y": 2}, {"Z": 2}:
        assert torch.equal(ranks(biases, mesh, settings)[0][0], found), mesh
    low, _ = biases(ONE, replace(settings, dtype="bf16", optimizer="muon"))
    assert low.dtype == torch.float32
    assert low.abs().max() == pytest.approx(0.003)
    step, (params, batch) = gradients(settings, ONE), (drawn_params(settings, ONE), batch_of(settings, ONE))
    loads, same = (step(params, batch, 0, scale)[2]["layers"] for scale in (1.0, 1024.0))
    assert torch.equal(same, loads)  # the loss's scale is none of the tokens'
    assert not biases(ONE, replace(settings, bias_rate=0.0))[0].any()
    assert not replace(settings, weights="DIR").balancing
    with pytest.raises(ValueError, match=r"--bias-rate 0.1: tiny has none"):
        _ = replace(settings, model=TINY, bias_rate=0.1).balancing
