"""The loss in chunks of tokens is torch's of all logits, with its gradients, for any split of V. A pipeline's ends."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from machine import on_ranks
from problems import BLOCKS, close, drawn, on_one_device, squares, stack, summed, whole
from torch.func import grad_and_value

from scaling import tree
from scaling.configs import Config
from scaling.mesh import AbstractMesh, Mesh
from scaling.models import transformer as model
from scaling.schedules import make
from scaling.strategies import pipeline, transformer
from scaling.strategies.stage import mlp
from scaling.strategies.transformer.ends import Terms, chunked_loss
from scaling.trace import trace
from scaling.trace.peak import peak_memory

B, T, D = 2, 6, 5


def problem(V):
    """x and U; targets, some ignored; weights."""
    x, U, w = drawn((B, T, D), (D, V), (B, T), seed=V)
    targets = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(V))
    targets[0, 1], targets[1, 4] = -100, V - 1
    return x, U, targets, w.square()


def by_torch(x, U, targets, w, smoothing=0.0, z=0.0):
    logits = (x @ U).flatten(0, 1)
    ce = F.cross_entropy(logits, targets.flatten(), reduction="none", ignore_index=-100, label_smoothing=smoothing)
    w = torch.where(targets == -100, 0, w).flatten()
    return (w * (ce + z * logits.logsumexp(-1).square())).sum() / w.sum()


CASES = [(V, chunk, tied, 0.1, 0.01) for V in (8, 9, 5) for chunk in (150, 1 << 20) for tied in (False, True)]
CASES += [(8, chunk, tied, 0.0, 0.0) for chunk in (1, 150) for tied in (False, True)]


@on_ranks({"Y": 1}, {"Y": 2}, {"Y": 4})
def test_chunks_of_tokens_and_parts_of_the_vocabulary_are_the_whole(mesh):
    """V = 9 and 5 over Y = 4: a rank has padding alone."""
    one = torch.tensor(1.0, dtype=torch.float64)
    for V, chunk, tied, smoothing, z in CASES:
        x, U, targets, w = problem(V)
        wanted = on_one_device(partial(by_torch, targets=targets, w=w, smoothing=smoothing, z=z), (x, U), one)
        beyond = (0, -V % mesh.sizes["Y"])
        U, wanted_dU = F.pad(U, beyond, value=50.0), F.pad(wanted[1][1], beyond)  # what is padding is in no sum
        w = torch.where(targets == -100, 0, w)
        U = tree.shard(U, "U[D, V_Y]", mesh)
        given = targets, w / w.sum(), Terms(V, smoothing, z), mesh.optional, chunk
        table = {"embed": U.T} if tied else {"unembed": U}
        value, dx, (dU,) = (
            part.values() if isinstance(part, dict) else part for part in chunked_loss(x, table, *given, gradients=True)
        )
        types = "Loss[] {U_Y}", "dx[B, T, D] {U_Y}", "dU[D, V_Y]"
        close(tree.unshard((value, dx, dU.T if tied else dU), types, mesh), (wanted[0], wanted[1][0], wanted_dU))
        assert torch.equal(chunked_loss(x, table, *given, gradients=False)[0], value)


def test_memory_and_messages_by_the_size_of_a_chunk():
    """Of 1,024 x 1,024 logits no more than a chunk is there; each chunk sends four numbers a token."""
    peaks, mesh = [], AbstractMesh({"Y": 4}).optional
    for chunk_bytes, wanted in ((1 << 22, [4 * 1024, 3 * 4 * 1024]), (1 << 19, [512, 3 * 512] * 8)):
        x, U, w = (torch.empty(shape, device="meta") for shape in ((4, 256, 8), (8, 1024), (4, 256)))
        targets = torch.empty(4, 256, dtype=torch.int64, device="meta")
        with peak_memory() as memory, trace() as log:
            chunked_loss(x, {"unembed": U}, targets, w, Terms(4096, 0.0, 0.0), mesh, chunk_bytes, gradients=True)
        peaks.append(memory.peak)
        assert [e.nbytes for e in log.collectives()] == wanted
        assert log.flops == 3 * 2 * 1024 * 8 * 1024  # no logit twice
    assert peaks[0] > 1 << 20 > peaks[1]


SMALL = Config("small", 1, 16, 24, 2, 2, 8, 32)
TABLES = {"two tables": SMALL, "one table": SMALL.with_(tied=True), "positions": SMALL.with_(learned_positions=512)}


@pytest.mark.parametrize("config", TABLES.values(), ids=TABLES)
def test_gradients_in_bfloat16_are_near_those_in_float32(config):
    """Half of all tokens are one token, whose row of the embedding's gradient is a sum of thousands."""
    mesh, weights = Mesh({"X": 1}), torch.tensor([31.0] + [1.0] * 31)
    tokens, targets = torch.multinomial(weights, 2 * 8192, True, generator=torch.Generator()).view(2, 16, 512)
    params, found = model.init(config, 0, torch.bfloat16), []
    for dtype in (torch.bfloat16, torch.float32):
        own = transformer.shard(tree.map(lambda x, to=dtype: x.to(to), params), config, mesh)
        found.append(transformer.loss_and_grads(own, tokens, targets, config, mesh, sums=torch.float32)[1])
    ours, wanted = map(tree.named_leaves, found)
    for name, grad in wanted.items():
        assert (ours[name] - grad).norm() < 0.01 * grad.norm(), name


PARAMS, ((IN, TARGET), *_) = whole(L=8)
HEAD = {"E": torch.eye(IN.shape[1], dtype=torch.float64)}


@on_ranks({"Z": 2})
def test_ends_of_a_pipeline(mesh):
    """Loss, gradients of the input, of layers and of a head, the head's by the derivative of its loss."""

    def of_head(head, Out, Target):
        return squares(Out @ head["E"], Target)

    def f(In, params, head):
        return of_head(head, stack(params, In), TARGET)

    stage, schedule = mlp(*BLOCKS[0]), make("dualpipev", 2, 8)
    types = {name: stage.specs[name] for name in PARAMS}
    params = tree.shard(pipeline.arrange(PARAMS, schedule), types, mesh)
    Loss, grads = pipeline.with_ends(params, HEAD, IN, TARGET, mesh, schedule, of_head, stage)
    dIn, dE = summed([grads.dIn, grads.head["E"]], ["dIn[B, D]", "dE[D, E]"], mesh)
    found = dIn, pipeline.restore(tree.unshard(grads.params, types, mesh), schedule), {"E": dE}
    close((found, Loss), grad_and_value(f, argnums=(0, 1, 2))(IN, PARAMS, HEAD))
