"""The planner's memory beside what an abstract mesh counts while the strategies' own code runs, within 3%."""

import pytest
import torch
from test_ledger import L8, planned

from scaling import tree
from scaling.mesh import AbstractMesh
from scaling.plan import Job
from scaling.spec import parse, present
from scaling.spec.sizes import parse_mesh
from scaling.strategies import transformer
from scaling.strategies.transformer import api
from scaling.trace.peak import peak_memory


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
