"""The planner's ledger and its two witnesses: the closed forms of Part 5, and what an abstract mesh counts while the
strategies' own code runs, FLOPs and bytes exactly, memory within 3%."""

from dataclasses import replace

import pytest
import torch

from scaling import cost, tree
from scaling.configs import get
from scaling.hardware import chip
from scaling.mesh import AbstractMesh
from scaling.plan import Job, Layout, Stack, evaluate
from scaling.plan.network import book
from scaling.schedules import make
from scaling.spec import parse
from scaling.strategies import data_parallel, fsdp, fsdp_tp, pipeline, tensor_parallel, transformer, zero
from scaling.strategies.axes import present
from scaling.strategies.stage import mlp, of_strategy
from scaling.strategies.transformer import api
from scaling.trace.peak import peak_memory

V5P = chip("v5p")


def planned(job, **fields):
    layout = Layout(**fields)
    rings = {axis: 1 for axis, size in layout.sizes.items() if size > 1}
    return evaluate(job, book(V5P, layout.sizes, rings, layout.zero), layout)


LINKS = cost.Links(V5P.flops(), V5P.ici_bw, V5P.ici_bw, Z=V5P.link_bw, P=V5P.dcn_bw)
NAMES = {(False, False): "dp", (True, False): "fsdp", (False, True): "tp", (True, True): "fsdp_tp"}
LAYOUTS = [  # of the book's stack
    {},
    {"data": 64, "zero": 0},
    {"fsdp": 64},
    {"tensor": 4},
    {"fsdp": 256, "tensor": 8},
    {"fsdp": 32, "tensor": 4, "pipe": 4, "microbatches": 8},
    {"fsdp": 16, "pipe": 8, "pod": 2, "microbatches": 16},
    {"fsdp": 512, "tensor": 4, "pod": 4},
]


def closed_form(shape: cost.LayerShape, L: int, l: Layout) -> list[cost.Cost]:
    """Forward and backward of L layers on one chip: FSDP gathers its weights for each microbatch and reduces gradients
    once, stages send activations, and pods reduce each chip's share of the gradients."""
    P, Z, X, Y, M = l.pod, l.pipe, l.data * l.fsdp, l.tensor, l.microbatches
    name, one, found = NAMES[l.zero == 3, Y > 1], replace(shape, B=shape.B / P), []
    for way in ("forward", "backward"):
        layer = cost.layer(name, one, LINKS, X, Y, way).scaled(L / Z)
        times = dict(layer.axes)
        if "fsdp" in name:
            gathered = L / Z * cost.layer_bytes(name, one, X, Y, "forward")["X"] / LINKS.X
            times["X"] = gathered * (M + (way == "backward"))
        if Z > 1:
            times["Z"] = cost.pipeline_comms(one.B / (X * Y), one.D, LINKS.Z, Z, M)
        if P > 1 and way == "backward":
            times["P"] = 2 * 2 * one.params * L / (X * Y * Z) / LINKS.P
        found.append(cost.Cost(layer.math, tuple(times.items())))
    return found


@pytest.mark.parametrize("fields", LAYOUTS)
@pytest.mark.parametrize("batch", [2**20, 2**23])
def test_the_planner_equals_the_closed_form(fields, batch):
    fields = {"zero": 3 if "fsdp" in fields else 1, "reduce": "once"} | fields
    found = planned(Job(Stack(16, 8192, 32768), batch, seq=1), **fields)
    shape, M, Z = cost.LayerShape(batch, 8192, 32768), found.layout.microbatches, found.layout.pipe
    passes = closed_form(shape, 16, found.layout)
    flops = 3 * M * found.compute.linear
    assert flops == pytest.approx(16 * cost.layer_flops(shape) / found.chips, rel=1e-12)
    for ours, theirs in zip(found.cost.parts, passes, strict=True):
        assert ours.math == pytest.approx(theirs.math)
        assert sorted(t for _, t in ours.axes) == pytest.approx(sorted(t for _, t in theirs.axes))
    assert found.bubble == pytest.approx((Z - 1) / (M + Z - 1))
    both = passes[0] + passes[1]
    assert found.bound == pytest.approx(both.lower / (1 - found.bubble), rel=0.01)
    assert found.worst == pytest.approx(both.upper / (1 - found.bubble), rel=0.01)


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def counted(*trees):
    """Let the watch see tensors that no operation has used yet."""
    for one in trees:
        tree.map(torch.ops.aten.alias, one)


def adam(params, ways=1):
    """m and v in fp32, or one of so many shards of them."""
    return [tree.map(lambda p: empty(p.numel() // ways, dtype=torch.float32), params) for _ in range(2)]


def traced(module, sizes, B, D, F, L, microbatches=1):
    """Of a step of the strategy, its gradients summed over microbatches."""
    mesh, dims = AbstractMesh(sizes), {"B": B // microbatches, "D": D, "F": F}

    def local(name, *front):
        return empty(*front, *parse(module.SPECS[name]).local_shape(dims, mesh))

    params, partial = {name: local(name, L) for name in ("W_in", "W_out")}, None
    states = adam(params, 8 if module is zero else 1)
    with peak_memory() as memory:
        counted(params, *states)
        for i in range(microbatches):
            Out, saved = module.forward(params, local("In"), mesh, activation="gelu")
            dOut, last = torch.ones_like(Out), i == microbatches - 1
            del Out
            given = {"partial": partial, "reduce": last} | ({"stage": 1} if module is zero else {})
            _, partial = module.backward(dOut, saved, params, mesh, donate=True, **given)
            del saved, dOut
    return memory


AXES = {"X": ("data", "fsdp"), "Y": ("tensor",)}
STACKS = [
    (data_parallel, {"X": 8}, {"data": 8, "zero": 0}),
    (zero, {"X": 8}, {"data": 8, "zero": 1}),
    (fsdp, {"X": 8}, {"fsdp": 8, "zero": 3}),
    (tensor_parallel, {"Y": 8}, {"tensor": 8}),
    (fsdp_tp, {"X": 4, "Y": 4}, {"fsdp": 4, "tensor": 4, "zero": 3}),
    (fsdp_tp, {"X": 2, "Y": 8}, {"fsdp": 2, "tensor": 8, "zero": 3}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("B", "L", "microbatches"), [(8 * 1024, 16, 4), (8 * 4096, 8, 1), (64 * 4096, 8, 4)])
@pytest.mark.parametrize(
    ("module", "mesh", "fields"), STACKS, ids=lambda x: x.__name__[19:] if hasattr(x, "SPECS") else ""
)
def test_a_stack_of_layers(module, mesh, fields, B, L, microbatches):
    D, F = 4096, 16384
    ours = planned(Job(Stack(L, D, F), B, seq=1), **fields, microbatches=microbatches, reduce="once")
    memory = traced(module, mesh, B, D, F, L, microbatches)
    assert float(ours.held.total) == pytest.approx(memory.peak, rel=0.03)
    assert 3 * microbatches * ours.compute.linear == memory.log.flops
    for axis in mesh:
        moved = sum(e.nbytes * (2 if e.op == "AllReduce" else 1) for e in memory.log.collectives() if axis in e.axes)
        after = moved if module is zero else 0  # its params are gathered once they are updated
        assert sum(ours.bytes.get(name, 0) for name in AXES[axis]) == moved + after


@pytest.mark.parametrize("Y", [1, 4])
@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("zb-h1", 1), ("interleaved", 2), ("dualpipev", 2)])
def test_microbatches_in_flight(name, chunks, Y):
    L, D, F, Z, M, B = 16, 4096, 16384, 4, 8, 32768
    mesh = AbstractMesh({"Z": Z, "Y": Y} if Y > 1 else {"Z": Z})
    stage = of_strategy(tensor_parallel.STRATEGY, "gelu") if Y > 1 else mlp("gelu")
    params = {"W_in": empty(L // Z, D, F // Y), "W_out": empty(L // Z, F // Y, D)}
    In, states = empty(B, D // Y), adam(params)
    with peak_memory() as memory:
        counted(params, In, *states)
        pipeline.value_and_grad(params, In, In, mesh, make(name, Z, M), lambda Out, _: Out.sum(), stage)
    ours = planned(Job(Stack(L, D, F), B, seq=1), pipe=Z, tensor=Y, microbatches=M, schedule=name, chunks=chunks)
    assert float(ours.held.total) == pytest.approx(memory.peak - 2 * In.numel(), rel=0.03)  # less the whole batch's In


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


SHORT = get("llama3-8b").with_(L=8, V=32000)
LOSS = SHORT.with_(L=1, V=128256, F=64, N=8, K=8, H=16)  # the loss is the fullest moment
TRANSFORMERS = [  # config, mesh, sequences, microbatches, layout, tolerance
    *(
        (SHORT, mesh, 32 * M, M, fields, 0.02)
        for mesh, fields in (
            ({"X": 8}, {"data": 8}),
            ({"Y": 8}, {"tensor": 8}),
            ({"C": 4}, {"context": 4}),
            ({"P": 2, "C": 2, "Y": 2}, {"pod": 2, "context": 2, "tensor": 2}),
            ({"X": 2, "Y": 4}, {"data": 2, "tensor": 4, "remat": "block"}),
        )
        for M in (1, 2)
    ),
    *(
        (LOSS, {"X": X, "Y": Y}, sequences, 1, {"data": X, "tensor": Y, "remat": "block"}, 0.001)
        for X, Y, sequences in ((8, 1, 8), (8, 1, 24), (4, 2, 8))
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("config", "mesh", "sequences", "M", "fields", "rel"), TRANSFORMERS)
def test_a_transformer(config, mesh, sequences, M, fields, rel, monkeypatch):
    """Whose params are whole. Of a large vocabulary not whole logits, but a chunk's, and the unembedding's gradient by
    a chunk and by all."""
    monkeypatch.setattr(api, "fused", lambda Q, K, V, window=None, segments=None: Kernel.apply(Q, K, V))
    abstract, T = AbstractMesh(mesh), 4096
    types = transformer.specs(config, abstract, zero=1)
    params = tree.map(lambda text: empty(*parse(text).local_shape(config.sizes, abstract)), types)
    rows = parse(str(present("t[B_PX, T_C]", abstract))).local_shape({"B": sequences, "T": T}, abstract)
    tokens = empty(*rows, dtype=torch.int64)
    states = adam(params)
    with peak_memory() as memory:
        counted(params, *states)
        transformer.loss_and_grads(
            params, tokens, tokens, config, abstract, zero=1, microbatches=M, remat=fields.get("remat", "none")
        )
    ours = planned(Job(config, sequences * T, T), zero=0, **fields, microbatches=M)
    assert float(ours.held.total) == pytest.approx(memory.peak, rel=rel)
