"""The planner's ledger beside what an abstract mesh counts while the strategies' own code runs: FLOPs and bytes
exactly, memory within 3%."""

import pytest
import torch
from test_ledger import L8, planned, stack

from scaling import tree
from scaling.mesh import AbstractMesh
from scaling.plan import Job
from scaling.schedules import make
from scaling.spec import parse, present
from scaling.spec.sizes import parse_mesh
from scaling.strategies import data_parallel, fsdp, fsdp_tp, pipeline, tensor_parallel, transformer, zero
from scaling.strategies.stage import mlp, of_strategy
from scaling.strategies.transformer import api
from scaling.trace.peak import peak_memory


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def counted(*trees):
    """Let the watch see tensors that no operation has used yet."""
    for one in trees:
        tree.map(torch.ops.aten.alias, one)


def adam(params, ways=1):
    """m and v in fp32, or one of so many shards of them."""
    return [tree.map(lambda p: empty(p.numel() // ways, dtype=torch.float32), params) for _ in range(2)]


STACKS = [
    (data_parallel, "X=8", "data=8 zero=0"),
    (zero, "X=8", "data=8 zero=1"),
    (fsdp, "X=8", "fsdp=8 zero=3"),
    (tensor_parallel, "Y=8", "tensor=8"),
    (fsdp_tp, "X=4,Y=4", "fsdp=4 tensor=4 zero=3"),
    (fsdp_tp, "X=2,Y=8", "fsdp=2 tensor=8 zero=3"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "L", "M"), [(8 * 1024, 6, 2), (8 * 4096, 8, 1), (64 * 4096, 4, 2)])
@pytest.mark.parametrize(("module", "mesh", "text"), STACKS)
def test_a_stack_of_layers(module, mesh, text, tokens, L, M):
    """A step of the strategy, its gradients summed over microbatches."""
    abstract, dims = AbstractMesh(parse_mesh(mesh)), {"B": tokens // M, "D": 4096, "F": 4 * 4096}

    def local(name, *front):
        return empty(*front, *parse(module.SPECS[name]).local_shape(dims, abstract))

    params, partial = {name: local(name, L) for name in ("W_in", "W_out")}, None
    states = adam(params, 8 if module is zero else 1)
    with peak_memory() as memory:
        counted(params, *states)
        for i in range(M):
            Out, saved = module.forward(params, local("In"), abstract, activation="gelu")
            dOut = torch.ones_like(Out)
            del Out
            given = {"partial": partial, "reduce": i == M - 1} | ({"stage": 1} if module is zero else {})
            _, partial = module.backward(dOut, saved, params, abstract, donate=True, **given)
            del saved, dOut
    ours = planned(stack(L, tokens, 4096), f"{text} microbatches={M} reduce=once")
    assert float(ours.held.total) == pytest.approx(memory.peak, rel=0.03)
    assert 3 * M * ours.compute.linear == memory.log.flops
    for axis in abstract.sizes:
        moved = sum(e.nbytes * (2 if e.op == "AllReduce" else 1) for e in memory.log.collectives() if axis in e.axes)
        after = moved if module is zero else 0  # its params are gathered once they are updated
        planned_axes = {"X": ("data", "fsdp"), "Y": ("tensor",)}[axis]
        assert sum(ours.bytes.get(name, 0) for name in planned_axes) == moved + after


@pytest.mark.parametrize("Y", [1, 4])
@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("zb-h1", 1), ("interleaved", 2), ("dualpipev", 2)])
def test_microbatches_in_flight(name, chunks, Y):
    L, width, Z, M, tokens = 16, 4096, 4, 8, 32768
    mesh = AbstractMesh({"Z": Z, "Y": Y} if Y > 1 else {"Z": Z})
    stage = of_strategy(tensor_parallel.STRATEGY, "gelu") if Y > 1 else mlp("gelu")
    params = {"W_in": empty(L // Z, width, 4 * width // Y), "W_out": empty(L // Z, 4 * width // Y, width)}
    In, states = empty(tokens, width // Y), adam(params)
    with peak_memory() as memory:
        counted(params, In, *states)
        pipeline.value_and_grad(params, In, In, mesh, make(name, Z, M), lambda Out, _: Out.sum(), stage)
    ours = planned(stack(L, tokens, width), f"pipe={Z} tensor={Y} microbatches={M} schedule={name} chunks={chunks}")
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


SHORT = L8.with_(L=8, V=32000)
LOSS = SHORT.with_(L=1, V=128256, F=64, N=8, K=8, H=16)  # the loss is the fullest moment
WHOLE = {
    "X=8": "data=8", "Y=8": "tensor=8", "C=4": "context=4", "P=2,C=2,Y=2": "pod=2 context=2 tensor=2",
    "X=2,Y=4": "data=2 tensor=4 remat=block",
}  # fmt: skip
TRANSFORMERS = [
    *((SHORT, mesh, f"{text} microbatches={M}", 32 * M, 0.02) for mesh, text in WHOLE.items() for M in (1, 2)),
    (LOSS, "X=8", "data=8 remat=block", 8, 0.001),
    (LOSS, "X=8", "data=8 remat=block", 24, 0.001),
    (LOSS, "X=4,Y=2", "data=4 tensor=2 remat=block", 8, 0.001),
]


@pytest.mark.slow
@pytest.mark.parametrize(("config", "mesh", "text", "sequences", "rel"), TRANSFORMERS)
def test_a_transformer(config, mesh, text, sequences, rel, monkeypatch):
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
