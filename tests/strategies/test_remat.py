"""What a layer keeps for its backward, and what is computed again: the same gradients to the bit, FLOPs and bytes."""

from functools import partial

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from scaling import tree
from scaling.configs import Config, Latent
from scaling.cost import transformer as tm
from scaling.mesh import Mesh
from scaling.models import transformer as model
from scaling.strategies import transformer
from scaling.strategies.transformer.api import contexts_of
from scaling.strategies.transformer.ends import Terms
from scaling.strategies.transformer.step import AskedStep, Problem, TransformerLayers
from scaling.trace import trace
from scaling.trace.peak import peak_memory
from scaling.train.evaluate import local

SMALL = Config("small", 2, 32, 48, 4, 2, 8, 64)
RICH = SMALL.with_(name="rich", attention_bias=True, output_bias=True, qk_norm=True, tied=True, window=(None, 5))
LATENT = SMALL.with_(name="latent", K=4, latent=Latent(q_rank=16, kv_rank=8, nope=6, rope=4, value=8))
B, T = 4, 16


def given(mesh, config):
    """(params, tokens, targets), this rank's."""
    params = transformer.shard(model.init(config, 0), config, mesh)
    rows = torch.randint(0, config.V, (B, T + 1), generator=torch.Generator().manual_seed(1))
    return params, *(local(x, mesh) for x in (rows[:, :-1], rows[:, 1:]))


def gradients(mesh, config, remat, microbatches=1, keep_weights=False):
    arguments = *given(mesh, config), config, mesh
    with trace() as log:
        found = transformer.loss_and_grads(
            *arguments, remat=remat, microbatches=microbatches, keep_weights=keep_weights
        )
    return found, [event.op for event in log.collectives()]


def compared(mesh, config, microbatches=1):
    """For each policy whether loss and gradients are bitwise those of none, and how often each collective runs."""
    (loss, grads), plain = gradients(mesh, config, "none", microbatches)
    found = {"none": (True, {op: plain.count(op) for op in sorted(set(plain))})}
    for remat in tm.POLICIES[1:]:
        (other, again), ops = gradients(mesh, config, remat, microbatches)
        same = [torch.equal(a, b) for a, b in zip(tree.leaves(again), tree.leaves(grads), strict=True)]
        found[remat] = torch.equal(loss, other) and all(same), {op: ops.count(op) for op in sorted(set(ops))}
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "config", "microbatches"),
    [
        ({"X": 2, "Y": 2}, RICH, 2),
        ({"X": 2, "Y": 2}, LATENT, 2),
        ({"C": 2, "Y": 2}, SMALL, 1),
        ({"Z": 2, "X": 2}, SMALL, 2),
    ],
    ids=["X, Y", "latent", "C, Y", "Z, X"],
)
def test_gradients_are_the_same_to_the_bit(ranks, sizes, config, microbatches):
    for found in ranks(compared, sizes, config, microbatches):
        assert [remat for remat, (same, _) in found.items() if not same] == []


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.filterwarnings("ignore")  # of torch's own code
def test_compiled_as_one_graph():
    """A policy that computes layers again; `tests/sweeps/layouts.py --compile` has the others."""
    mesh, config = Mesh({"X": 1}), SMALL.with_(L=1, D=16, F=16, V=16)
    (loss, grads), _ = gradients(mesh, config, "block")
    step = partial(transformer.loss_and_grads, config=config, mesh=mesh, remat="block")
    compiled, again = torch.compile(step, fullgraph=True, backend="aot_eager")(*given(mesh, config))
    torch.testing.assert_close(compiled, loss)
    for mine, wanted in zip(tree.leaves(again), tree.leaves(grads), strict=True):
        torch.testing.assert_close(mine, wanted)


def kept(mesh, config, microbatches):
    """Whether kept weights change no bit, and the AllGathers over X without and with them."""
    (_, grads), once = gradients(mesh, config, "none", microbatches)
    (_, again), ops = gradients(mesh, config, "none", microbatches, keep_weights=True)
    same = [torch.equal(a, b) for a, b in zip(tree.leaves(again), tree.leaves(grads), strict=True)]
    return all(same), once.count("AllGather"), ops.count("AllGather")


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "microbatches"), [({"X": 4}, 1), ({"X": 2}, 2), ({"Z": 2, "X": 2}, 2)])
def test_kept_weights_are_gathered_once_a_step(ranks, sizes, microbatches):
    """Else a layer's, which travel together, are gathered in both passes of each microbatch."""
    layers = SMALL.L // sizes.get("Z", 1)
    for same, thrown_away, once in ranks(kept, sizes, SMALL, microbatches):
        assert same
        assert thrown_away - once == layers * (2 * microbatches - 1)


def test_no_collective_is_repeated_whose_result_nobody_reads(ranks):
    """Of a layer with X and Y the two streams y over Y; not the ReduceScatters."""
    counts = {remat: ops for remat, (_, ops) in ranks(compared, {"X": 2, "Y": 2}, SMALL)[0].items()}
    none, streams = counts["none"], 2 * SMALL.L
    more = {remat: ops["AllGather"] - none["AllGather"] for remat, ops in counts.items()}
    assert more == {"none": 0, "attention": 0, "matmuls": streams, "block": streams}
    attention = {remat: ops["ReduceScatter"] - none["ReduceScatter"] for remat, ops in counts.items()}
    assert attention == {"none": 0, "attention": 0, "matmuls": 0, "block": SMALL.L}  # attention's, for the MLP


def attention_flops(Q, K, V, *_, **__):
    """Of torch's kernel on the CPU, which its counter does not know: from the shapes [B, N, T, H]."""
    batch, heads, queries, width = Q
    return 4 * batch * heads * queries * K[2] * width


def flops(config, remat):
    kernel = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flops}
    with FlopCounterMode(display=False, custom_mapping=kernel) as counter:
        gradients(Mesh({"X": 1}), config, remat)
    return counter.get_total_flops()


@pytest.mark.slow
@pytest.mark.parametrize("config", [SMALL, SMALL.with_(gated=False, K=4)], ids=["gated", "plain"])
def test_what_is_computed_again_is_the_formula(config):
    once = flops(config, "none")
    for remat in tm.POLICIES:
        assert flops(config, remat) - once == tm.remat_flops(config, B, T, remat, last=False), remat


def kept_bytes(config, remat):
    """What the layers keep between forward and backward."""
    mesh, params = Mesh({"X": 1}), model.init(config, 0)
    types = transformer.specs(config, mesh)
    asked = AskedStep(config, remat)
    contexts = contexts_of(asked, mesh, (B, 64), None, torch.float32, None)
    problem = Problem(asked, mesh, types, Terms(config.V, 0.0, 0.0), torch.float32, contexts)
    layers = TransformerLayers(problem, params)
    with peak_memory() as memory:
        tree.map(torch.sum, (params, contexts[0].rope))  # so that they count already
        before, x = memory.now, torch.zeros(B, 64, config.D)
        x, _, kept = layers.run(x, contexts[0])
        return memory.now - before - x.nbytes, len(kept)


@pytest.mark.parametrize("remat", tm.POLICIES)
def test_what_is_kept_is_the_formula(remat):
    config = SMALL.with_(D=128, F=256, H=32)
    nbytes, layers = kept_bytes(config, remat)
    assert layers == config.L
    assert nbytes == pytest.approx(tm.saved_bytes(config, B * 64, remat, "fp32"), rel=0.03)


def test_experts_are_run_again_whole_or_not_at_all():
    with pytest.raises(ValueError, match="cannot be used with experts"):
        gradients(Mesh({"X": 1}), SMALL.with_(E=4, k=2), "matmuls")
