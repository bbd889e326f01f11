"""Latent attention on a mesh: equal to one device under every axis, and its bytes and FLOPs are the closed form's."""

import pytest
import test_transformer_mesh as on_meshes
import torch
from test_transformer_mesh import EXPERTS, PLAIN

from scaling import tree
from scaling.configs import Latent, RopeScaling
from scaling.cost.transformer import attention_params
from scaling.mesh import AbstractMesh
from scaling.models import transformer as model
from scaling.models.attention import fused
from scaling.models.leaves import without
from scaling.models.rope import tables
from scaling.spec import parse
from scaling.strategies import transformer
from scaling.strategies.transformer.layer import Context, layer, layer_backward
from scaling.strategies.transformer.stages import stored_places
from scaling.trace import trace

LATENT = PLAIN.with_(name="latent", K=4, theta=1e4, latent=Latent(q_rank=12, kv_rank=10, nope=6, rope=4, value=8))
LATENT = LATENT.with_(rope_scaling=RopeScaling("yarn", 4.0, 1.0, 32.0, 8, mscale=0.8, mscale_all=1.2))
DEEPSEEK = EXPERTS.with_(name="deepseek", K=4, routing="sigmoid", expert_groups=2, latent=LATENT.latent)
FIRST = DEEPSEEK.with_(name="dense first", L=DEEPSEEK.L + 1, dense_layers=2, F_dense=40, window=None)
DEEP = FIRST.with_(name="dense first, deep", L=5, window=(None, 5, 3, None, 4), aux_coef=0.0)
CASES = [
    (LATENT, {"X": 2}, {"microbatches": 2}, True, 0.1, 0.01),
    (LATENT, {"Y": 2}, {}, True, 0.1, 0.01),
    (LATENT, {"X": 2, "Y": 2}, {"remat": "block", "microbatches": 2}, False, 0.1, 0.0),
    (LATENT, {"Z": 2}, {"microbatches": 4}, True, 0.1, 0.01),
    (LATENT.with_(window=(None, 5)), {"C": 2, "Y": 2}, {"context": "zigzag", "remat": "matmuls"}, True, 0.1, 0.01),
    (DEEPSEEK, {"E": 2}, {"remat": "block"}, False, 0.0, 0.0),
    (DEEPSEEK, {"E": 2, "Y": 2}, {}, False, 0.0, 0.0),
    (FIRST, {"E": 2, "Y": 2}, {}, False, 0.0, 0.0),
    (FIRST, {"X": 2}, {"remat": "block"}, True, 0.1, 0.01),
    (DEEP, {"Z": 2, "X": 2}, {"microbatches": 2, "remat": "block"}, True, 0.1, 0.01),
    (DEEP.with_(L=6, window=None), {"Z": 2, "E": 2}, {"microbatches": 4, "schedule": "interleaved"}, False, 0.0, 0.0),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0].name} {c[1]}".replace("'", ""))
def test_latent_attention_is_one_device_s(ranks, case):
    on_meshes.test_equal_to_one_device(ranks, case)


@pytest.mark.parametrize("sizes", [{"Y": 2}, {"X": 2, "Y": 4}], ids=str)
def test_what_a_layer_sends_and_multiplies_is_the_closed_form(sizes):
    """Over Y the latents R + M of each token travel instead of the stream D, in both passes; C_Q and C_KV each way."""
    B, T, mesh, config = 4, 8, AbstractMesh(sizes), LATENT
    D, X, Y = config.D, sizes.get("X", 1), sizes["Y"]
    types = tree.map(lambda text: without(text, ("X", "Z")), transformer.specs(config, mesh)["layers"])
    W = {
        name: torch.empty(parse(text.replace("[L, ", "[")).local_shape(config.sizes, mesh), device="meta")
        for name, text in types.items()
    }
    x = torch.empty(B // X, T // Y, D, device="meta")
    rope = tables(torch.arange(T, device="meta"), config.rotary, config.theta, None, x.dtype)
    at = Context(config, mesh, rope, lambda Q, K, V, window: fused(Q, K, V, window=window)).of_layer(0)
    with trace() as forward:
        _, _, saved = layer(W, x, at)
    with trace() as backward:
        layer_backward(W, x, saved, at)
    latents = config.sizes["R"] + config.sizes["M"]
    flops = 2 * B * T * (attention_params(config) + 3 * D * config.F) // (X * Y)
    for log, times in ((forward, 1), (backward, 2)):
        assert len(log.collectives()) == 5
        assert log.book_bytes == 4 * (B // X) * T * (latents + 3 * D)
        assert log.flops == times * flops


@pytest.mark.parametrize("z", [0, 1])
def test_dense_layers_first_are_made_as_shards_on_every_stage(z):
    """And of the uneven stack after them what the stage holds."""
    mesh = AbstractMesh({"Z": 2}, {"Z": z})
    types, places = transformer.specs(DEEP, mesh), stored_places(DEEP, mesh)
    made = model.init(DEEP, 0, torch.float64, "cpu", mesh=mesh, specs=types, places=places)
    wanted = transformer.shard(model.init(DEEP, 0, torch.float64), DEEP, mesh)
    assert all(map(torch.equal, tree.leaves(made), tree.leaves(wanted)))
    assert tree.structure(made) == tree.structure(wanted)
