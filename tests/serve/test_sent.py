"""What serving sends: in each form of decoding the collectives that its one-line types derive, Part 7's; and a cache
that is moved from the mesh that prefills to the mesh that decodes: bitwise, by the plan's bytes."""

import pytest
import torch
from machine import on_ranks
from refused import read_table
from torch.utils.flop_counter import FlopCounterMode

from scaling import serve, tree
from scaling.algebra import derive
from scaling.collectives import all_gather
from scaling.configs import Config, Latent
from scaling.mesh import AbstractMesh, Mesh
from scaling.models import transformer as model
from scaling.serve.cache import SCALED
from scaling.trace import trace

CONFIG = Config("plain", 2, 16, 24, 4, 2, 8, 32, qk_norm=True)
LATENT = CONFIG.with_(K=4, qk_norm=False, latent=Latent(q_rank=12, kv_rank=10, nope=6, rope=4, value=8))
B, S, LENGTHS = 4, 8, [5, 2, 7, 3]
# of ranks 0 to 3; where K < Y, two copies of a head
FROM = """
mesh     form         page  dtype
Y=4      heads        None  torch.float32
Z=2,Y=2  heads        3     torch.bfloat16
Y=2,Z=2  heads_batch  None  torch.int8
Z=4      heads_batch  None  torch.float8_e4m3fn
Z=2,Y=2  sequence     None  torch.float64
X=2,Y=2  2d           4     torch.float32
"""
# of ranks 4 to 7
TO = """
mesh     form      page  places of a row
Y=4      heads     None  S
Y=2,Z=2  heads     3     12
Z=4      sequence  None  12
Y=2,X=2  2d        4     S
"""
SOURCES, TARGETS = (read_table(table, globals(), ("form",)) for table in (FROM, TO))
PAIRS = [(CONFIG, source, TARGETS[(i + 1 + n) % 4]) for i, source in enumerate(SOURCES) for n in range(2)]
PAIRS += [(LATENT, source, TARGETS[i % 3]) for i, source in enumerate(SOURCES[:4])]


def placed(config, dtype, mesh, form, page, length=S):
    """This rank's part of a whole cache, as its type says: heads repeated where it has R, rows in pages. It is
    KV[2, L, B, S, K, H], or latents KV[1, L, B, S, 1, M], and scale[.., K], zero where no token is held."""
    g, shape = torch.Generator().manual_seed(0), (1, 2, B, S, 1, 14) if config.latent else (2, 2, B, S, 2, 8)
    held = (torch.arange(S) < torch.tensor(LENGTHS)[:, None])[:, :, None]
    KV = (torch.randint(1, 100, shape, generator=g) * held[..., None]).to(dtype)
    scale, cache = torch.rand(shape[:-1], generator=g) * held, {"lengths": torch.tensor(LENGTHS)}
    for name, x in {"KV": KV, **({"scale": scale} if dtype in SCALED else {})}.items():
        x = torch.cat([x, torch.zeros_like(x[:, :, :, : length - S])], 3)
        if (Y := mesh.sizes.get("Y", 1)) > 2 and not config.latent:
            x = x[:, :, :, :, [y * CONFIG.K // Y for y in range(Y)]]
        x = tree.shard(x, serve.cache_specs(config, mesh, form=form, scaled=True)[name], mesh)
        if page is not None:
            x = torch.nn.functional.pad(x.movedim(3, -1), (0, -x.shape[3] % page)).movedim(-1, 3)
            x = x.unflatten(3, (-1, page)).flatten(2, 3)
            cache["pages"] = (torch.arange(B * -(-length // page)) % x.shape[2]).view(B, -1)
        cache[name] = x.contiguous()
    return cache


@on_ranks({"W": 8})
def test_every_pair_of_types(mesh):
    """TensorRT-LLM#6507, sglang PR#15674, #19086, vllm#14952, prefill and decode under other degrees: pages whose dims
    are read in another order, copies of a head counted twice, ranks that wait for ever. Each to more room than it
    had, or as much as divides."""
    held = 2 * 2 * B * max(LENGTHS) * 2 * 8  # of the places below the longest row, one copy
    meshes = {}
    for config, (sizes, form, page, dtype), (to_sizes, to, to_page, length) in PAIRS:
        for first, some in ((0, sizes), (4, to_sizes)):
            meshes.setdefault((first, str(some)), Mesh(some, ranks=range(first, first + 4)))
        a, b = meshes[0, str(sizes)], meshes[4, str(to_sizes)]
        cache = placed(config, dtype, a, form, page) if a.member else None
        with trace() as log:
            room = None if (page, to) == (3, "sequence") else length  # 9 places, which become 12 over Z=4
            new = serve.move(cache, config, a, b, form=form, target_form=to, page=to_page, length=room)
        wanted = placed(config, dtype, b, to, to_page, length) if b.member else {}
        assert (new or {}).keys() == wanted.keys()
        for name, x in wanted.items():
            assert torch.equal(new[name].float(), x.float())
            assert new[name].dtype == x.dtype
        if config.latent:
            continue
        mine = sum(e.wire_bytes for e in log.events if getattr(e.before, "name", "") == "KV")
        sent = all_gather("n[R_W] -> n[R]", torch.tensor([mine]), mesh).tolist()
        copies = 2 if to_sizes == {"Y": 4} else 1  # each KV head goes to the two ranks that hold it
        assert sum(sent) == held * copies * dtype.itemsize, (sizes, to_sizes)
        assert sizes != {"Y": 4} or min(sent[:4]) > 0.2 * sum(sent)  # copies of a head share the sending


WIDE = Config("plain", 1, 64, 256, 16, 16, 8, 32, gated=False)
ROWS, LONG = 16, 1024
SIZES = WIDE.sizes | {"B": ROWS, "S": LONG}
SENT = {  # form: (mesh, {other arrays that are sent: how often}, attention, MLP)
    "heads": (
        {"Z": 2, "Y": 4}, {"x": 1, "logits": 2},
        "y[B_Z, D] *_D W_Q[D, N_Y, H] *_H K[B_Z, S, N_Y, H] *_S V[B_Z, S, N_Y, H] *_N W_O[N_Y, H, D] -> Attn[B_Z, D]",
        "y[B_Z, D] * W_in[D, F_Y] * W_out[F_Y, D] -> Out[B_Z, D]",
    ),
    "heads_batch": (
        {"Y": 4, "Z": 2}, {"x": 1, "logits": 1},
        "y[B, D] *_D W_Q[D, N_YZ, H] *_H K[B_Z, S, N_Y, H] *_S V[B_Z, S, N_Y, H] *_N W_O[N_YZ, H, D] -> Attn[B, D]",
        "y[B, D] * W_in[D, F_YZ] * W_out[F_YZ, D] -> Out[B, D]",
    ),
    "sequence": (
        {"Y": 4, "Z": 2}, {"x": 1, "logits": 1, "m": 1, "L": 1},  # the softmax's statistics
        "y[B, D] *_D W_Q[D, N_YZ, H] *_H K[B, S_Z, N_Y, H] *_S V[B, S_Z, N_Y, H] *_N W_O[N_YZ, H, D] -> Attn[B, D]",
        "y[B, D] * W_in[D, F_YZ] * W_out[F_YZ, D] -> Out[B, D]",
    ),
    "2d": (  # the norms' mean squares, the new keys and values
        {"X": 2, "Y": 2, "Z": 2}, {"x": 1, "logits": 2, "s": 3, "K": 1, "V": 1},
        "y[B, D_XYZ] *_D W_Q[D_X, N_YZ, H] *_H K[B_XZ, S, N_Y, H] *_S V[B_XZ, S, N_Y, H] *_N W_O[N_YZ, H, D_X] "
        "-> Attn[B, D_XYZ]",
        "y[B, D_XYZ] * W_in[D_X, F_YZ] * W_out[F_YZ, D_X] -> Out[B, D_XYZ]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", SENT)
def test_a_layer_sends_what_its_types_derive(form):
    """In one decode step of one layer."""
    sizes, others, *lines = SENT[form]
    mesh = AbstractMesh(sizes)
    params = model.init(WIDE, mesh=mesh, specs=serve.specs(WIDE, mesh, form=form))
    cache = serve.init_cache(WIDE, ROWS, LONG, mesh=mesh, form=form)
    with trace() as log:
        serve.decode(params, torch.empty(ROWS, dtype=torch.int64, device="meta"), cache, WIDE, mesh, form=form)
    events = [(event.before.name, event.op, event.axes, event.nbytes) for event in log.collectives()]
    steps = [step for line in lines for step in derive(line, sizes=SIZES, mesh=sizes).forward]
    wanted = [(step.op, step.axes, step.nbytes(SIZES, sizes, 4)) for step in steps]  # of float32
    assert sorted(name for name, *_ in events if name in others) == sorted(n for n in others for _ in range(others[n]))
    found = [event[1:] for event in events if event[0] not in others]
    if form == "2d":  # the last norm, before the logits
        assert found.pop()[0] == "AllGather"
    assert found == [step for step in wanted if step[2]]  # that sends something


@pytest.mark.parametrize("T", [1, 16])
def test_flops_of_latents_are_the_fewer(T):
    """Absorbed for one query, plain for a prompt: a place and head take 2 (2 M) a query, or 2 C W and 2 (2 A) a query;
    values are computed as wide as keys are."""
    latent = Latent(q_rank=24, kv_rank=48, nope=6, rope=4, value=8)
    config = WIDE.with_(latent=latent)
    params, cache = model.init(config, device="meta"), serve.init_cache(config, ROWS, LONG)
    cache = {name: x.to("meta") for name, x in cache.items()}
    with FlopCounterMode(display=False) as counter:
        serve.extend(params, torch.empty(ROWS, T, dtype=torch.int64, device="meta"), cache, config)
    C, A, W, M = 48, 10, 14, 52
    absorbed, plain = 2 * T * (2 * M) * LONG + 2 * T * C * W, 2 * C * W * LONG + 2 * T * 2 * A * LONG
    per_token = config.D * (24 + M) + 24 * config.N * A + config.N * 8 * config.D + config.D * (2 * config.F + config.V)
    assert counter.get_total_flops() == 2 * ROWS * T * per_token + ROWS * config.N * min(absorbed, plain)
    assert (absorbed < plain) == (T == 1)
