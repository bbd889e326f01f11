"""A cache moved from the mesh that prefills to the mesh that decodes: bitwise, by the plan's bytes."""

import pytest
import torch

from scaling import serve, tree
from scaling.collectives import plan_transfer
from scaling.configs import Config, Latent
from scaling.mesh import AbstractMesh, Mesh
from scaling.models import transformer as model
from scaling.serve.handover import refined
from scaling.trace import trace

CONFIG = Config("plain", 2, 16, 24, 4, 2, 8, 32, qk_norm=True)
LATENT = CONFIG.with_(K=4, qk_norm=False, latent=Latent(q_rank=12, kv_rank=10, nope=6, rope=4, value=8))
B, S, LENGTHS = 4, 8, [5, 2, 7, 3]
SOURCES = [  # (mesh of ranks 0 to 3, form, page, dtype)
    ({"Y": 4}, "heads", None, torch.float32),  # K < Y: two copies of a head
    ({"Z": 2, "Y": 2}, "heads", 3, torch.bfloat16),
    ({"Y": 2, "Z": 2}, "heads_batch", None, torch.int8),
    ({"Z": 2, "Y": 2}, "sequence", None, torch.float64),
    ({"X": 2, "Y": 2}, "2d", 4, torch.float32),
]
TARGETS = [  # of ranks 4 to 7
    ({"Y": 4}, "heads", None),
    ({"Y": 2, "Z": 2}, "heads", 3),
    ({"Z": 4}, "sequence", None),
    ({"Y": 2, "X": 2}, "2d", 4),
]


def whole(dtype):
    """KV[2, L, B, S, K, H] and scale[2, L, B, S, K], zero where no token is held."""
    g = torch.Generator().manual_seed(0)
    held = (torch.arange(S) < torch.tensor(LENGTHS)[:, None])[:, :, None]
    KV = torch.randint(1, 100, (2, 2, B, S, 2, 8), generator=g).to(dtype) * held[..., None]
    return KV, torch.rand(2, 2, B, S, 2, generator=g) * held


def placed(name, x, mesh, form, page):
    """This rank's part of whole KV or scales, as its type says: heads repeated where it has R, rows in pages."""
    if CONFIG.K % (Y := mesh.sizes.get("Y", 1)):
        x = x[:, :, :, :, [y * CONFIG.K // Y for y in range(Y)]]
    x = tree.shard(x, serve.cache_specs(CONFIG, mesh, form=form, int8=True)[name], mesh)
    if page is None:
        return x.contiguous()
    x = torch.nn.functional.pad(x.movedim(3, -1), (0, -x.shape[3] % page)).movedim(-1, 3)
    return x.unflatten(3, (-1, page)).flatten(2, 3).contiguous()


def table(pool, page):
    return (torch.arange(B * -(-S // page)) % pool.shape[2]).view(B, -1)


def every_pair(world):
    found, targets = [], [Mesh(sizes, ranks=range(4, 8)) for sizes, *_ in TARGETS]
    for sizes, form, page, dtype in SOURCES:
        a, cache = Mesh(sizes, ranks=range(4)), None
        KV, scale = whole(dtype)
        if a.member:
            cache = {"KV": placed("KV", KV, a, form, page), "lengths": torch.tensor(LENGTHS)}
            cache |= {"scale": placed("scale", scale, a, form, page)} if dtype == torch.int8 else {}
            cache |= {"pages": table(cache["KV"], page)} if page else {}
        for b, (_, to, to_page) in zip(targets, TARGETS, strict=True):
            with trace() as log:
                new = serve.move(cache, CONFIG, a, b, form=form, target_form=to, page=to_page, length=S)
            right = new is None
            if b.member:
                right = torch.equal(new["KV"], placed("KV", KV, b, to, to_page)) and new["KV"].dtype == dtype
                right = right and new["lengths"].tolist() == LENGTHS
                right = right and (
                    dtype != torch.int8 or torch.equal(new["scale"], placed("scale", scale, b, to, to_page))
                )
                right = right and (not to_page or torch.equal(new["pages"], table(new["KV"], to_page)))
            found.append((right, [e.wire_bytes for e in log.events if getattr(e.before, "name", "") == "KV"]))
    return found


def test_every_pair_of_types(ranks):
    """TensorRT-LLM#6507, sglang PR#15674, #19086, vllm#14952, prefill and decode under other degrees: pages whose dims
    are read in another order, copies of a head counted twice, ranks that wait for ever."""
    results = ranks(every_pair, {"W": 8})
    assert all(right for found in results for right, _ in found)
    held = 2 * 2 * B * max(LENGTHS) * 2 * 8  # of the places below the longest row, one copy
    for i, (sizes, form, _, dtype) in enumerate(SOURCES):
        for j, (to_sizes, to, _) in enumerate(TARGETS):
            sent = sum(sum(found[i * len(TARGETS) + j][1]) for found in results)
            copies = 2 if to_sizes == {"Y": 4} else 1  # each KV head goes to the two ranks that hold it
            assert sent == held * copies * dtype.itemsize, (sizes, form, to_sizes, to)


def test_copies_of_a_head_share_the_sending():
    mesh = refined(AbstractMesh({"Y": 4}), CONFIG)
    assert mesh.sizes == {"Y": 2, "R": 2}
    types = "KV[2, L, B, S, K_Y, H] -> KV[2, L, B, S, K, H]"
    sent = [0] * 4
    for message in plan_transfer(types, (2, 2, 4, 8, 2, 8), mesh, AbstractMesh({"A": 2})):
        sent[message.source] += message.numel
    assert sum(sent) == 2 * 2 * 2 * 4 * 8 * 2 * 8
    assert max(sent) - min(sent) <= 2 * 2 * 4 * 8 * 8


def prefill_then_decode(world, tokens, config):
    a, b = Mesh({"Y": 2}, ranks=range(2)), Mesh({"Y": 1, "Z": 2}, ranks=range(2, 4))
    params, cache = model.init(config, 0, torch.float64), None
    lengths = torch.tensor(LENGTHS)
    if a.member:
        mine = tree.shard(params, serve.specs(config, a), a)
        cache = serve.init_cache(config, B, S, mesh=a)
        _, cache = serve.prefill(mine, tokens, cache, config, a, lengths=lengths)
    cache = serve.move(cache, config, a, b, target_form="heads_batch", page=4, length=12)
    if not b.member:
        return None
    mine = tree.shard(params, serve.specs(config, b, form="heads_batch"), b)
    return serve.decode(mine, tokens[range(B), lengths], cache, config, b, form="heads_batch")[0]


@pytest.mark.parametrize("config", [CONFIG, LATENT], ids=["heads", "latent"])
def test_prefill_on_one_mesh_decode_on_another(ranks, config):
    g = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 32, (B, S), generator=g)
    params = model.init(config, 0, torch.float64)
    logits = model.forward(params, tokens, config=config)
    wanted = logits[range(B), LENGTHS]
    results = ranks(prefill_then_decode, {"W": 4}, tokens, config)
    assert results[:2] == [None, None]
    for found in results[2:]:
        assert (found - wanted).abs().max() <= 1e-12 * wanted.abs().max()
