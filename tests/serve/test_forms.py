"""What each form of decoding sends: the collectives that its one-line types derive, and Part 7's bytes."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from scaling import serve
from scaling.algebra import derive
from scaling.configs import Config, Latent
from scaling.mesh import AbstractMesh
from scaling.models import transformer as model
from scaling.trace import trace

CONFIG = Config("plain", 1, 64, 256, 16, 16, 8, 32, gated=False)
B, S = 16, 1024
BYTES = 4  # float32
SIZES = CONFIG.sizes | {"B": B, "S": S}
FORMS = {  # form: (mesh, attention, MLP, {other arrays that are sent: how often})
    "heads": (
        {"Z": 2, "Y": 4},
        "y[B_Z, D] *_D W_Q[D, N_Y, H] *_H K[B_Z, S, N_Y, H] *_S V[B_Z, S, N_Y, H] *_N W_O[N_Y, H, D] -> Attn[B_Z, D]",
        "y[B_Z, D] * W_in[D, F_Y] * W_out[F_Y, D] -> Out[B_Z, D]",
        {"x": 1, "logits": 2},
    ),
    "heads_batch": (
        {"Y": 4, "Z": 2},
        "y[B, D] *_D W_Q[D, N_YZ, H] *_H K[B_Z, S, N_Y, H] *_S V[B_Z, S, N_Y, H] *_N W_O[N_YZ, H, D] -> Attn[B, D]",
        "y[B, D] * W_in[D, F_YZ] * W_out[F_YZ, D] -> Out[B, D]",
        {"x": 1, "logits": 1},
    ),
    "sequence": (
        {"Y": 4, "Z": 2},
        "y[B, D] *_D W_Q[D, N_YZ, H] *_H K[B, S_Z, N_Y, H] *_S V[B, S_Z, N_Y, H] *_N W_O[N_YZ, H, D] -> Attn[B, D]",
        "y[B, D] * W_in[D, F_YZ] * W_out[F_YZ, D] -> Out[B, D]",
        {"x": 1, "logits": 1, "m": 1, "L": 1},  # the softmax's statistics
    ),
    "2d": (
        {"X": 2, "Y": 2, "Z": 2},
        "y[B, D_XYZ] *_D W_Q[D_X, N_YZ, H] *_H K[B_XZ, S, N_Y, H] *_S V[B_XZ, S, N_Y, H] *_N W_O[N_YZ, H, D_X] "
        "-> Attn[B, D_XYZ]",
        "y[B, D_XYZ] * W_in[D_X, F_YZ] * W_out[F_YZ, D_X] -> Out[B, D_XYZ]",
        {"x": 1, "logits": 2, "s": 3, "K": 1, "V": 1},  # the norms' mean squares, the new keys and values
    ),
}


def sent(form):
    """[(array, op, axes, V)] of one decode step of one layer."""
    mesh = AbstractMesh(FORMS[form][0])
    params = model.init(CONFIG, mesh=mesh, specs=serve.specs(CONFIG, mesh, form=form))
    cache = serve.init_cache(CONFIG, B, S, mesh=mesh, form=form)
    with trace() as log:
        serve.decode(params, torch.empty(B, dtype=torch.int64, device="meta"), cache, CONFIG, mesh, form=form)
    return [(event.before.name, event.op, event.axes, event.nbytes) for event in log.collectives()]


@pytest.mark.parametrize("form", FORMS)
def test_a_layer_sends_what_its_types_derive(form):
    sizes, attention, mlp, others = FORMS[form]
    wanted = []
    for line in (attention, mlp):
        steps = derive(line, sizes=SIZES, mesh=sizes).forward
        wanted += [(s.op, s.axes, s.nbytes(SIZES, sizes, BYTES)) for s in steps if s.nbytes(SIZES, sizes, BYTES)]
    events = sent(form)
    assert sorted(name for name, *_ in events if name in others) == sorted(n for n in others for _ in range(others[n]))
    found = [event for name, *event in events if name not in others]
    if form == "2d":  # the last norm, before the logits
        assert found.pop()[0] == "AllGather"
    assert [tuple(event) for event in found] == wanted


def test_bytes_of_part_7():
    """Megatron's AllReduce of BD, twice; two AllToAlls of B N H / Y; Question 7's BD/X, BF/(YZ) and BD/X."""
    D, F, NH = CONFIG.D, CONFIG.F, CONFIG.N * CONFIG.H

    def moved(form, *names):
        return [(op, nbytes // BYTES) for name, op, _, nbytes in sent(form) if name in names]

    assert moved("heads", "Attn", "Out") == [("AllReduce", B // 2 * D)] * 2
    assert moved("heads_batch", "Q", "O", "Attn") == [("AllToAll", B * NH // 4)] * 2 + [("AllReduce", B * D)]
    assert moved("sequence", "Q", "O") == [("AllGather", B * NH // 4), ("ReduceScatter", B * NH // 4)]
    question_7 = [("AllGather", B * D // 2), ("AllReduce", B * F // 4), ("ReduceScatter", B * D // 2)]
    assert moved("2d", "y", "Tmp", "Out")[1:4] == question_7


@pytest.mark.parametrize("T", [1, 16])
def test_flops_of_latents_are_the_fewer(T):
    """Absorbed for one query, plain for a prompt: a place and head take 2 (2 M) a query, or 2 C W and 2 (2 A) a query;
    values are computed as wide as keys are."""
    latent = Latent(q_rank=24, kv_rank=48, nope=6, rope=4, value=8)
    config = CONFIG.with_(latent=latent)
    params, cache = model.init(config, device="meta"), serve.init_cache(config, B, S)
    cache = {name: x.to("meta") for name, x in cache.items()}
    with FlopCounterMode(display=False) as counter:
        serve.extend(params, torch.empty(B, T, dtype=torch.int64, device="meta"), cache, config)
    C, A, W, M = 48, 10, 14, 52
    absorbed, plain = 2 * T * (2 * M) * S + 2 * T * C * W, 2 * C * W * S + 2 * T * 2 * A * S
    per_token = config.D * (24 + M) + 24 * config.N * A + config.N * 8 * config.D + config.D * (2 * config.F + config.V)
    assert counter.get_total_flops() == 2 * B * T * per_token + B * config.N * min(absorbed, plain)
    assert (absorbed < plain) == (T == 1)
