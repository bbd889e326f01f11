"""The planner's ledger beside what it must be: the closed forms of Part 5, the simulator of schedules, what each recipe
computes, moves and holds by hand, and the memory that an abstract mesh counts while the strategies' own code runs. What
the run's own step does is in test_choose."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from refused import evaluated, read_table, refused

from scaling import cost, tree
from scaling.configs import get
from scaling.cost.transformer import train_flops
from scaling.hardware import chip
from scaling.mesh import AbstractMesh
from scaling.plan import Job, Layout, evaluate, network, plans, search  # noqa: F401 - REFUSED names plans
from scaling.plan.job import AXES, Fixed
from scaling.plan.ledger import heaviest
from scaling.schedules import make
from scaling.schedules.simulator import Times, simulate
from scaling.spec import parse, present
from scaling.spec.sizes import parse_mesh
from scaling.strategies import transformer
from scaling.strategies.transformer import api
from scaling.trace.peak import peak_memory

H100, V5P = chip("h100"), chip("v5p")
L8, L70, MIXTRAL = get("llama3-8b"), get("llama3-70b"), get("mixtral-8x7b")
BATCH = 2**20  # tokens


def layout_of(text):
    """Of "fsdp=4 zero=3 remat=block"."""
    words = dict(word.split("=") for word in text.split())
    return Layout(**{name: int(value) if value.isdigit() else value for name, value in words.items()})


def planned(job, text=""):
    """A layout on H100s; of a plain job, or of pods, on a torus as Part 5 assumes it: a ring for each axis."""
    layout = layout_of(text)
    if job.seq == SHORT or layout.pod > 1:
        rings = {axis: 1 for axis, size in layout.sizes.items() if size > 1}
        return evaluate(job, network.book(V5P, layout.sizes, rings, layout.zero), layout)
    copies, groups = max(1, job.work.copies), job.work.groups
    return evaluate(job, network.tree(H100, layout.sizes, layout.zero, copies, groups, job.shards), layout)


def plain(L, tokens):
    """Layers whose attention, norms and vocabulary hardly count beside their products."""
    return Job(L70.with_(L=L, V=16), tokens, SHORT)


# --- The closed forms of Part 5

SHORT = 16  # tokens of a sequence
LINKS = cost.Links(V5P.flops(), V5P.ici_bw, V5P.ici_bw, Z=V5P.link_bw, P=V5P.dcn_bw)
NAMES = {(False, False): "dp", (True, False): "fsdp", (False, True): "tp", (True, True): "fsdp_tp"}


def closed_form(shape: cost.LayerShape, L: int, l: Layout) -> list[cost.Cost]:
    """Forward and backward of L layers on one chip: FSDP gathers its weights for each microbatch, without stages the
    last layer's in the forward alone, and reduces gradients once, stages send activations, and pods reduce each chip's
    share of the gradients."""
    P, Z, X, Y, M = l.pod, l.pipe, l.data * l.fsdp, l.tensor, l.microbatches
    name, one, found = NAMES[l.zero == 3, Y > 1], replace(shape, B=shape.B / P), []
    for way in ("forward", "backward"):
        layer = cost.layer(name, one, LINKS, X, Y, way)
        times = {axis: L / Z * seconds for axis, seconds in layer.axes}
        if "fsdp" in name:
            layers = (L / Z - (Z == 1)) * M + L / Z if way == "backward" else L / Z * M
            times["X"] = layers * cost.layer_bytes(name, one, X, Y, "forward")["X"] / LINKS.X
        if Z > 1:
            times["Z"] = cost.pipeline_comms(one.B / (X * Y), one.D, LINKS.Z, Z, M)
        if P > 1 and way == "backward":
            times["P"] = 2 * 2 * one.params * L / (X * Y * Z) / LINKS.P
        found.append(cost.Cost(L / Z * layer.math, tuple(times.items())))
    return found


LAYOUTS = (
    "", "data=64 zero=0", "fsdp=64 zero=3", "tensor=4", "fsdp=256 tensor=8 zero=3",
    "fsdp=32 tensor=4 pipe=4 microbatches=8 zero=3", "fsdp=16 pipe=8 pod=2 microbatches=16 zero=3",
    "fsdp=512 tensor=4 pod=4 zero=3",
)  # fmt: skip


@pytest.mark.parametrize("text", LAYOUTS)
@pytest.mark.parametrize("batch", [2**20, 2**23])
def test_the_planner_equals_the_closed_form(text, batch):
    found = planned(plain(16, batch), f"{text} reduce=once")
    shape = cost.LayerShape(batch, L70.D, L70.F, found.job.work.dense / (L70.D * L70.F), blocks=2)
    M, Z = found.layout.microbatches, found.layout.pipe
    passes = closed_form(shape, 16, found.layout)
    flops = 3 * M * found.compute.linear
    assert flops == pytest.approx(16 * cost.layer_flops(shape) / found.chips, rel=1e-4)
    for ours, theirs in zip(found.cost.parts, passes, strict=True):
        assert ours.math == pytest.approx(theirs.math, rel=1e-3)
        assert sorted(t for _, t in ours.axes) == pytest.approx(sorted(t for _, t in theirs.axes), rel=0.01)
    assert found.bubble == pytest.approx((Z - 1) / (M + Z - 1), rel=1e-3)
    both = passes[0] + passes[1]
    assert found.bound == pytest.approx(both.lower / (1 - found.bubble), rel=0.01)
    assert found.worst == pytest.approx(both.upper / (1 - found.bubble), rel=0.01)


# --- By hand: schedules, stages, axes, and what each recipe computes, moves and holds


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved 2", "interleaved 4", "zb-h1", "dualpipev 2"])
def test_bubble_and_live_activations_are_the_simulators(schedule):
    """The three times of plain layers are equal: forward, and the two halves of the backward."""
    name, chunks = f"{schedule} 1".split()[:2]
    for Z, M in ((2, 8), (4, 8), (8, 16)):
        found = planned(plain(32, BATCH), f"pipe={Z} microbatches={M} schedule={name} chunks={chunks}")
        timeline = simulate(make(name, Z, M, int(chunks)), Times(1, 1, 1))
        assert found.bubble == pytest.approx(float(Fraction(timeline.idle(Z - 1), timeline.makespan)), rel=2e-3)
        assert found.compute.live == pytest.approx(float(max(timeline.live)))


def test_uneven_stages_and_few_tokens():
    """The last stage holds six layers and the unembedding; one that is larger than all layers has a stage to itself.
    A step takes what the fullest takes."""
    for L, unit, Z in ((126, 0.66, 16), (80, 0.0, 4), (61, 0.0, 16), (4, 9.0, 2), (61, 2.3, 16), (7, 0.4, 3)):
        best = min(max([n] * (Z - 1) + [unit + max(0, L - (Z - 1) * n)]) for n in range(L + 1))
        assert heaviest(L, unit, Z) == pytest.approx(best)
    few = planned(plain(4, 64))  # few tokens are bound by reading weights
    assert few.cost.parts[0].math == pytest.approx(2 * 4 * few.job.work.dense / V5P.hbm_bw)
    layer = planned(plain(1, 2**14)).cost.math
    found = planned(plain(10, 2**17), "pipe=4 microbatches=8")
    assert found.bound == pytest.approx((7 * 3 + 10) * layer, rel=1e-3)  # seven more of three layers, one of all ten


def test_remat():
    """What a policy keeps, computes again, and gathers again."""
    job = Job(L70, BATCH)
    policies = {"none": 8, "attention": 8, "matmuls": 10, "block": 12}  # gathers and scatters of a layer
    each = {name: planned(job, f"data=2 tensor=8 remat={name}") for name in policies}
    none, attention, matmuls, block = (one.cost.math for one in each.values())
    assert 1.25 < block / none < 4 / 3 + 1e-9
    assert none < attention == matmuls < 1.03 * none
    kept = [float(one.held.activations) for one in each.values()]
    assert kept == sorted({*kept}, reverse=True)
    for name, one in each.items():
        flops = train_flops(L70, job.sequences, job.seq, causal=True, remat=name)
        assert 16 * one.cost.math * H100.flops() == pytest.approx(sum(flops.values()))
        assert one.bytes["tensor"] == pytest.approx(policies[name] * L70.L * BATCH * L70.D)


def test_zero():
    """Where weights are sharded over fsdp alone, as a run does, what the ranks along context hold alike they reduce as
    replicas do."""
    job = Job(L8, BATCH)
    one, three = planned(job, "data=8"), planned(job, "fsdp=8 zero=3")
    ends, layer = 2 * sum(job.work.ends), 2 * job.work.dense  # gathered once; the last layer once for both passes
    assert three.bytes["fsdp"] == pytest.approx(1.5 * one.bytes["data"] - ends - layer)
    assert one.held.optimizer == pytest.approx(job.work.params, rel=1e-4)
    each, once = (planned(job, f"fsdp=8 zero=3 microbatches=4 reduce={way}") for way in ("each", "once"))
    layers = layer * L8.L
    assert each.bytes["fsdp"] == pytest.approx(12 * layers - 4 * layer + 5 * ends)
    assert once.bytes["fsdp"] == pytest.approx(9 * layers - 4 * layer + 2 * ends)
    assert once.held.grads == pytest.approx(8 * each.held.grads)
    params, text = job.work.params, "fsdp=4 context=2 zero=3"
    shared, alone = planned(job, text), planned(replace(job, shards=("fsdp",)), text)
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
        found = planned(job, f"data=4 context=8 tensor={Y}")
        assert found.bytes["context"] == pytest.approx(3 * L70.L * whole)
        w, c, copies = job.work, found.compute, max(1, Y / L70.K)
        assert c.linear * Y == pytest.approx(2 * c.tokens * w.L * (w.dense + (copies - 1) * w.kv))


def test_experts():
    job, sent = Job(MIXTRAL, BATCH), 2 * BATCH * MIXTRAL.L * MIXTRAL.D
    experts = MIXTRAL.L * MIXTRAL.E * 3 * MIXTRAL.D * MIXTRAL.F
    dense, split, within = (planned(job, text) for text in ("data=8", "expert=8", "data=4 tensor=2"))
    assert split.compute.linear == pytest.approx(dense.compute.linear)
    assert split.bytes["expert"] == pytest.approx(4 * sent / 8)
    assert within.bytes["tensor"] == pytest.approx(8 * sent / 4)  # attention's and the experts' gather and scatter
    assert float(dense.held.params - split.held.params) == pytest.approx(2 * experts * 7 / 8)
    assert split.bytes["data"] == pytest.approx(2 * 2 * (job.work.params - experts), rel=0.001)  # only what is dense
    moe, toy = (planned(Job(get(name), 2**22, 64), "fsdp=64 zero=3") for name in ("part7-moe", "part7-toy"))
    assert moe.bytes["fsdp"] / toy.bytes["fsdp"] == pytest.approx(211.5 / 18.25, rel=0.01)  # all are gathered,
    assert moe.compute.linear / toy.compute.linear == pytest.approx(31.1 / 18.25, rel=0.03)  # some compute


def test_fp8_computes_faster_and_sends_as_much():
    wide, narrow = (planned(Job(L8, BATCH, dtype=dtype), "fsdp=8 zero=3") for dtype in ("bf16", "fp8"))
    assert narrow.bytes == wide.bytes
    assert 0.5 < narrow.cost.math / wide.cost.math < 0.7  # dot products and unembedding stay bf16
    assert [Job(L8, BATCH, dtype=dtype).wide for dtype in ("fp8", "fp16", "fp32")] == ["bf16", "fp16", "fp32"]
    deep = get("deepseek-v3")
    half, whole = (planned(Job(deep, 2**22, dtype=dtype), "expert=64").bytes["expert"] for dtype in ("fp8", "bf16"))
    assert half == pytest.approx(0.75 * whole)


def job(**other):
    return Job(**{"config": L8, "batch": BATCH} | other)


# what is asked: what is said
REFUSED = r"""
call                              words of its error
layout_of('pipe=0')               pipe = 0
Layout(data=2.0)                  data = 2.0
layout_of('remat=some')           remat = 'some'
layout_of('zero=2')               zero = 2
layout_of('fsdp=8')               fsdp = 8 shards the params\n  fix: give zero=3
layout_of('schedule=gpipe')       schedule = 'gpipe'
job(batch=4e6)                    whole number
job(batch=1024)                   longer than the batch
job(dtype='int4')                 dtype is 'int4'
job(overlap='half')               overlap is 'half'
job(headroom=1.5)                 headroom is 1.5
job(grad_bytes=-1)                grad_bytes is -1
Fixed((('seq', 2),))              mesh axis = 'seq'
Fixed(remat='some')               remat = 'some': one of None
Fixed(zero=2)                     zero = 2: one of None
Fixed(reduce='late')              reduce = 'late'
Fixed((('tensor', 0),))           tensor = 0
plans(Job(L8, 2**22), V5P, 8951)  are not a slice
plans(Job(L70, 2**20), H100, 0)   at least 1
"""
test_refused = refused(evaluated(REFUSED, globals()))


# --- What frameworks hold

# GiB; github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, with full checkpointing
TITAN = read_table(
    """
model          sequences  seq     layout                                             microbatches  peak
"llama3-8b"    8          32768   {"fsdp": 8}                                        1             83.9
"llama3-8b"    4          65536   {"fsdp": 4, "context": 2}                          1             84.2
"llama3-8b"    2          131072  {"fsdp": 2, "context": 4}                          1             84.0
"llama3-70b"   512        8192    {"fsdp": 32, "tensor": 8}                          1             67.6
"llama3-405b"  64         32768   {"fsdp": 8, "tensor": 8, "pipe": 8}                8             75.3
"llama3-405b"  32         65536   {"fsdp": 4, "context": 2, "tensor": 8, "pipe": 8}  8             75.9
""",
    globals(),
)


@pytest.mark.parametrize(("model", "sequences", "seq", "mesh", "microbatches", "peak"), TITAN)
def test_torchtitan_s_peaks_are_those_that_it_publishes(model, sequences, seq, mesh, microbatches, peak):
    fixed = Fixed(tuple((dict.fromkeys(AXES, 1) | mesh).items()), "block", microbatches, "1f1b")
    own, titan = (
        search(Job(get(model), sequences * seq, seq, "fp8", 4, 4, 8, framework=name), chip("h100:hbm2e"),
               math.prod(mesh.values()), fixed).found[0].held.total / 2**30
        for name in ("this", "torchtitan")
    )  # fmt: skip
    assert titan == pytest.approx(peak, rel=0.2)
    assert own < 0.8 * peak


def test_megatron_s_activations_are_those_of_its_paper():
    """arXiv:2205.05198, Table 2: 34 bytes a token and D, over tensor; 4 of them are dropout's masks, which are not
    held here."""
    config = get("gpt-22b")
    job = Job(config, 4 * 2048, 2048, framework="megatron")
    fixed = Fixed(tuple((dict.fromkeys(AXES, 1) | {"tensor": 8}).items()), "attention", 1)
    found = search(job, chip("a100"), 8, fixed).found[0]
    assert found.held.activations == pytest.approx(30 / 8 * 4 * 2048 * config.D * config.L, rel=0.01)
    assert found.held.reserved > 0


# --- What the strategies' own code holds


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def counted(*trees):
    """Let the watch see tensors that no operation has used yet."""
    for one in trees:
        tree.map(torch.ops.aten.alias, one)


def adam(params):
    """m and v in fp32."""
    return [tree.map(lambda p: empty(p.numel(), dtype=torch.float32), params) for _ in range(2)]


class Kernel(torch.autograd.Function):
    """An attention kernel by its memory: it keeps Q, K, V, O and one statistic a head."""

    @staticmethod
    def forward(ctx, Q, K, V):
        O = torch.empty_like(Q)
        ctx.save_for_backward(Q, K, V, O, empty(*Q.shape[:3], dtype=torch.float32))
        return O

    @staticmethod
    def backward(ctx, dO):
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])


SHORTER = L8.with_(L=8, V=32000)
LOSS = SHORTER.with_(L=1, V=128256, F=64, N=8, K=8, H=16)  # the loss is the fullest moment
WHOLE = {
    "X=8": "data=8", "Y=8": "tensor=8", "C=4": "context=4", "P=2,C=2,Y=2": "pod=2 context=2 tensor=2",
    "X=2,Y=4": "data=2 tensor=4 remat=block",
}  # fmt: skip
TRANSFORMERS = [
    *((SHORTER, mesh, f"{text} microbatches={M}", 32 * M, 0.02) for mesh, text in WHOLE.items() for M in (1, 2)),
    (LOSS, "X=8", "data=8 remat=block", 8, 0.001),
    (LOSS, "X=8", "data=8 remat=block", 24, 0.001),
    (LOSS, "X=4,Y=2", "data=4 tensor=2 remat=block", 8, 0.001),
]


@pytest.mark.slow
@pytest.mark.parametrize(("config", "mesh", "text", "sequences", "rel"), TRANSFORMERS)
def test_memory_of_a_transformer_is_what_its_step_holds(config, mesh, text, sequences, rel, monkeypatch):
    """Whose params are whole. Of a large vocabulary not whole logits, but a chunk's, and the unembedding's gradient by
    a chunk and by all."""
    monkeypatch.setattr(api, "fused", lambda Q, K, V, mask=None: Kernel.apply(Q, K, V))
    abstract, T = AbstractMesh(parse_mesh(mesh)), 4096
    ours = planned(Job(config, sequences * T, T), f"{text} zero=0")
    layout = ours.layout
    types = transformer.specs(config, abstract, zero=0)
    params = tree.map(lambda text: empty(*parse(text).local_shape(config.sizes, abstract)), types)
    rows = parse(str(present("t[B_PX, T_C]", abstract))).local_shape({"B": sequences, "T": T}, abstract)
    tokens, states = empty(*rows, dtype=torch.int64), adam(params)
    with peak_memory() as memory:
        counted(params, *states)
        transformer.loss_and_grads(
            params, tokens, tokens, config, abstract, zero=0, microbatches=layout.microbatches, remat=layout.remat
        )
    assert float(ours.held.total) == pytest.approx(memory.peak, rel=rel)
