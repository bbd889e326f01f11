"""What a step of the Transformer sends, computes and holds, beside the closed forms of Part 5, on abstract meshes."""

import itertools
from collections import Counter

import pytest
import torch
from problems import counts, rows_on
from refused import read_table
from test_transformer_mesh import EXPERTS, LATENT, PLAIN, B, T
from torch.utils.flop_counter import FlopCounterMode

from scaling import tree
from scaling.book.arrays import largest
from scaling.configs import Config
from scaling.cost import transformer as tm
from scaling.mesh import AbstractMesh, Mesh
from scaling.models import transformer as model
from scaling.strategies import transformer
from scaling.trace import trace
from scaling.trace.peak import peak_memory


def abstract(config, sizes, zero=3, **_):
    """(a mesh, params that it holds)."""
    mesh = AbstractMesh(sizes)
    return mesh, model.init(config, mesh=mesh, specs=transformer.specs(config, mesh, zero=zero))


def traced(config, sizes, step=transformer.loss_and_grads, **options):
    mesh, params = abstract(config, sizes, **options)
    (tokens,) = rows_on(mesh, torch.empty(B, T, dtype=torch.int64, device="meta"))
    with trace() as log:
        step(params, tokens, tokens, config, mesh, **options)
    return log


def test_gathers_and_reductions_are_under_way_while_a_layer_computes():
    """So no more than two layers' whole gradients are held. Over X all of a layer travels at once. The unembedding is
    gathered while the last layer computes, also where that layer is of another kind than the one before."""
    L = 4
    events = traced(PLAIN.with_(L=L), {"X": 2}).events
    assert all(event.async_op for event in events if event.op in ("AllGather", "ReduceScatter"))
    ops = [event.op for event in events]
    starts = [i for i, op in enumerate(ops) if op == "ReduceScatter"]  # a layer's, all in one, and those of the ends
    assert len(starts) == L + 2
    assert all(ops[a:b].count("Einsum") >= 14 for a, b in itertools.pairwise(starts[:L]))
    assert products_behind(events, "ReduceScatter")[0] == 14  # the unembedding's gradient, behind the last layer's
    for config in (PLAIN.with_(L=L), EXPERTS.with_(L=L, dense_layers=(1,), F_dense=40)):
        hidden = products_behind(traced(config, {"X": 2}).events, "AllGather")
        assert hidden[:2] == [0, 0]  # the embedding and the first layer
        assert min(hidden[2:]) >= 7
        assert len(hidden) == 2 * L - 1 + 2


XY, TWO, EACH, STREAMS = {"X": 2, "Y": 2}, {"microbatches": 2}, {"reduce": "each"}, {("AllGather", "Y"): 2 * PLAIN.L}


@pytest.mark.parametrize(
    ("options", "gathers", "scatters"),
    [
        ({}, 2 * PLAIN.L - 1, 1),
        ({"keep_weights": True}, PLAIN.L, 1),
        (TWO, 2 * (2 * PLAIN.L - 1), 1),
        (TWO | EACH, 2 * (2 * PLAIN.L - 1), 2),
    ],
)
def test_bytes_are_part_5_s(options, gathers, scatters):
    """Over X a layer's weights are gathered in both passes, those of the last layer in the forward alone, all once if
    they are kept, and those of the ends once. Each gradient is scattered once, or after each microbatch. Over Y the
    residual stream goes four times a layer.

    Every other collective moves one number a token, or a gain.
    """
    X, Y, c = 2, 2, PLAIN
    moved = Counter()
    for event in traced(c, {"X": X, "Y": Y}, **options).collectives():
        moved[event.op, "".join(event.axes)] += event.nbytes
    layer = (2 * c.N * c.H + 2 * c.K * c.H + 3 * c.F) * c.D
    weights, tokens = (c.L * layer + 2 * c.V * c.D) // Y * 4, B // X * T * 4
    stream = (4 * c.L + 2) * tokens * c.D  # and once each for embedding and head, forward and backward together
    gains = (2 * c.L + 1) * c.D * 4
    assert moved == {
        ("ReduceScatter", "X"): scatters * weights,
        ("AllGather", "X"): weights + (gathers - c.L) * layer // Y * 4,
        ("AllGather", "Y"): stream,
        ("ReduceScatter", "Y"): stream,
        ("AllReduce", "Y"): 4 * tokens,  # the largest logit of each token, and three sums over V
        ("AllReduce", "XY"): gains + 4,  # and the loss
        ("AllReduce", "X"): 4,  # the sum of the weights
    }


def test_a_layer_of_latents_sends_and_multiplies_by_the_closed_form():
    """Over Y the latents R + M of each token travel instead of the stream D, in both passes; C_Q and C_KV each way."""
    c, X, Y = LATENT, 2, 4
    deep, once = (traced(c.with_(L=L), {"X": X, "Y": Y}) for L in (3, 2))
    assert deep.flops - once.flops == 3 * 2 * B * T * (tm.attention_params(c) + 3 * c.D * c.F) // (X * Y)
    moves = [[e.nbytes for e in log.collectives() if e.op != "AllReduce" and e.axes == ("Y",)] for log in (deep, once)]
    assert len(moves[0]) - len(moves[1]) == 2 * 5
    latents = c.sizes["R"] + c.sizes["M"]
    assert sum(moves[0]) - sum(moves[1]) == 2 * 4 * (B // X) * T * (latents + 3 * c.D)


LAYERS, KEPT, ZERO_2 = PLAIN.L, TWO | {"keep_weights": True}, TWO | {"zero": 2}
TABLE = """
config   mesh     one way  another                 what it sends more
PLAIN    X=2,Y=2  {}       {"remat": "attention"}  {}
# of a layer the two streams y over Y
PLAIN    X=2,Y=2  {}       {"remat": "matmuls"}    STREAMS
# attention's, too, for the MLP
PLAIN    X=2,Y=2  {}       {"remat": "block"}      STREAMS | {("ReduceScatter", "Y"): LAYERS}
# rows go there and back, as they were routed
EXPERTS  E=2      {}       {"remat": "block"}      {("AllToAll", "E"): 2 * LAYERS}
# weights that stay: else a layer's, which travel together, are gathered in both passes of each microbatch; the last
# layer's, which its backward follows at once, in one of them. A stage's backward may follow later
PLAIN    X=2      KEPT     TWO                     {("AllGather", "X"): 3 * LAYERS - 2}
PLAIN    Z=2,X=2  KEPT     TWO                     {("AllGather", "X"): 3 * LAYERS // 2}
# gradients that are scattered twice, a layer's together, beside those of the two tables; stages sum the tables'
PLAIN    X=2      TWO      TWO | EACH              {("ReduceScatter", "X"): LAYERS + 2}
PLAIN    P=2,X=2  ZERO_2   ZERO_2 | EACH           {("ReduceScatter", "X"): LAYERS + 2}
PLAIN    Z=2,X=2  TWO      TWO | EACH              {("ReduceScatter", "X"): LAYERS // 2}
"""


@pytest.mark.parametrize(("config", "sizes", "options", "others", "more"), read_table(TABLE, globals()))
def test_what_another_way_sends_more(config, sizes, options, others, more):
    """Nothing is repeated whose result nobody reads."""
    fewer, many = (counts(traced(config, sizes, **each)) for each in (options, others))
    assert (many - fewer, fewer - many) == (more, {})


def products_behind(events, op):
    """How many products are computed while each collective of this op is in flight."""
    return [
        sum(e.start < other.start < e.end and other.op == "Einsum" for other in events) for e in events if e.op == op
    ]


def test_a_cotangent_is_gathered_while_an_mlp_is_computed_again():
    """Over Y, behind its two products; without recomputation there is nothing else to do."""
    for remat, hidden in (("none", 0), ("block", 2)):
        events = traced(PLAIN, {"Y": 2}, remat=remat).events
        some = [e for e in events if e.op == "Einsum" or str(e.after).startswith("dOut[")]
        assert products_behind(some, "AllGather") == [hidden] * PLAIN.L


def test_tokens_are_routed_once():
    """How many rows, the rows, and back; their cotangents there and back. While rows go back and while their cotangents
    come, the shared expert is computed (3 products, and 6 backward), and while the cotangents go back, the gradients of
    W_in and W_gate of a rank's two experts. Computed again, rows go twice, but tokens choose their experts once."""
    events = traced(EXPERTS.with_(L=1), {"E": 2}).events
    assert products_behind(events, "AllToAll") == [0, 0, 3, 6, 4]
    assert counts(traced(EXPERTS, {"E": 2}))["AllToAll", "E"] == 5 * EXPERTS.L
    assert counts(traced(EXPERTS, {"E": 2}, remat="block"))["AllToAll", "E"] == 7 * EXPERTS.L


def attention_flops(Q, K, V, *_, **__):
    """Of torch's kernel on the CPU, which its counter does not know: from the shapes [B, N, T, H]."""
    batch, heads, queries, width = Q
    return 4 * batch * heads * queries * K[2] * width


def flops(config, remat):
    tokens, kernel = torch.zeros(B, T, dtype=torch.int64), torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with FlopCounterMode(display=False, custom_mapping={kernel: attention_flops}) as counter:
        transformer.loss_and_grads(model.init(config, 0), tokens, tokens, config, Mesh({"X": 1}), remat=remat)
    return counter.get_total_flops()


@pytest.mark.parametrize("config", [PLAIN, PLAIN.with_(gated=False, K=4)], ids=["gated", "plain"])
def test_what_is_computed_again_is_the_formula(config):
    once = flops(config, "none")
    for remat in tm.POLICIES[1:]:
        assert flops(config, remat) - once == tm.remat_flops(config, B, T, remat, last=False), remat


LARGE, X = Config("large", 8, 1024, 4096, 8, 8, 128, 64), 4
LAYER = 4 * (4 * LARGE.D * LARGE.N * LARGE.H + 3 * LARGE.D * LARGE.F)  # bytes of its matrices


def peak(config, tokens, step, **options):
    """Bytes of one rank of X=4: params, and all that the step makes."""
    mesh, params = abstract(config, {"X": X}, **options)
    ids = torch.empty(options.get("microbatches", 1), tokens, dtype=torch.int64, device="meta")
    with peak_memory() as memory:
        tree.map(torch.sum, params)  # so that they count already
        step(params, ids, ids, config, mesh, **options)
    return memory.peak


def closed_form(remat, tokens, keep_weights):
    """The fullest of the layers' backward passes. Layer l has the stored shards, the activations of layers 0 to l, its
    own computed again, its weights and the next ones gathered, its gradients whole and those of the layer above being
    reduced, the others' shards, and what lies between its lines: dAct, dTmp, dGate and silu(Gate), and two
    of the stream."""
    c, L = LARGE, LARGE.L
    saved, every = (tm.saved_bytes(c, tokens, policy, "fp32") / L for policy in (remat, "none"))
    between = every - saved + 4 * tokens * (4 * c.F + 2 * c.D)

    def held(l):
        gathered = L if keep_weights else min(2, l + 1)
        under_way, done = int(l < L - 1) * (1 + 1 / X), max(0, L - 2 - l) / X
        return (l + 1) * saved + between + LAYER * (L / X + gathered + 1 + under_way + done)

    return largest(held(l) for l in range(L))


@pytest.mark.parametrize("keep_weights", [False, True])
@pytest.mark.parametrize("remat", tm.POLICIES)
def test_peak_is_the_closed_form(remat, keep_weights):
    tokens = 2048 if keep_weights else 4096
    held = peak(LARGE, tokens, transformer.loss_and_grads, remat=remat, keep_weights=keep_weights)
    assert held == pytest.approx(closed_form(remat, tokens, keep_weights), rel=0.05)


@pytest.mark.parametrize(("zero", "layers"), [(2, LARGE.L), (3, LARGE.L / X + 2)])  # and two gathered ones
def test_after_each_microbatch_only_sums_of_shards_stay(zero, layers):
    """Beside the params: the shards' sums, one layer's gradients whole, and those of the layer above being reduced."""
    held = peak(LARGE, 4, transformer.loss_and_grads, zero=zero, **TWO, **EACH)
    assert held == pytest.approx(LAYER * (layers + (LARGE.L + 1) / X + 2), rel=0.01)  # a shard arrives, too


def test_after_each_microbatch_no_table_s_gradient_stays_whole():
    """The fullest moment has the shards of params and sums, both tables gathered, and the gradient of one of them."""
    c = LARGE.with_(V=131072)
    params, table = c.L * LAYER + 2 * 4 * c.V * c.D, 4 * c.V * c.D
    assert peak(c, 64, transformer.loss_and_grads, **TWO, **EACH) == pytest.approx(2 * params / X + 3 * table, rel=1e-3)


def test_the_loss_alone_computes_a_third_of_a_step_and_holds_the_weights_of_two_layers():
    """Those that are used, and the next ones: so few tokens that nothing else counts. Experts have no backward here,
    which would keep theirs."""
    assert 3 * traced(PLAIN, XY, transformer.loss).flops == traced(PLAIN, XY).flops
    c = LARGE.with_(name="large, experts", E=4, k=2)
    layer = 4 * (4 * c.D * c.N * c.H + 3 * c.E * c.D * c.F)
    assert peak(c, 64, transformer.loss) == pytest.approx(layer * (c.L / X + 2), rel=0.05)
