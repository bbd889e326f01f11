"""Muon beside torch.optim.Muon on one device; on meshes each form beside one device, with its bytes."""

from collections import Counter

import pytest
import torch
from machine import on_ranks

from scaling import optim, tree
from scaling.configs import get
from scaling.mesh import AbstractMesh, Mesh
from scaling.models import transformer
from scaling.models.leaves import specs_of
from scaling.optim import orthogonal
from scaling.optim.matrices import cheapest_form
from scaling.optim.orthogonal import MatrixStack, assigned
from scaling.spec import parse, present
from scaling.trace import trace
from scaling.train.settings import Settings, optimizer_of

MATRICES = {"in": "D -> F", "gate": "D -> F", "out": "F -> D", "Q": "D -> N H", "E": {"in": "D -> F"}, "g": ""}
SPECS = {"in": "W[L_Z, D_X, F_Y]", "gate": "W[L_Z, D_X, F_Y]", "out": "W[L_Z, F_Y, D_X]",
         "Q": "W[L_Z, D_X, N_Y, H]", "E": {"in": "W[L_Z, E_E, D_X, F_Y]"}, "g": "g[L_Z, D]"}  # fmt: skip
SIZES = {"L": 6, "E": 2, "D": 16, "F": 24, "N": 4, "H": 3}
ONE = Mesh(dict.fromkeys("XYZE", 1))


def arrays(seed, dtype):
    inits = tree.map(lambda _: tree.Normal(1.0), SPECS)
    return tree.init(inits, SPECS, SIZES, ONE, seed=seed, dtype=dtype, device="cpu")


def steps(mesh, options, dtype, donate):
    """Params after two steps, whole. Each step's are made in the buffers that are given away, or beside the others."""
    specs = tree.map(lambda spec: present(spec, mesh), SPECS)
    optimizer = optim.muon(0.02, MATRICES, **options)
    params = tree.shard(arrays(0, dtype), specs, mesh)
    state, on = optimizer.init(params), mesh if mesh.size() > 1 else None
    for step in range(2):
        grads = tree.shard(arrays(step + 1, dtype), specs, mesh)
        held = tree.leaves((params, state["momentum"], state["rest"]["m"]))
        kept = tree.map(torch.clone, held)
        params, state = optimizer.update(grads, state, params, specs=specs, mesh=on, donate=donate)
        found = tree.leaves((params, state["momentum"], state["rest"]["m"]))
        for old, before, new in zip(held, kept, found, strict=True):
            assert new is old if donate else torch.equal(old, before)
    assert tree.structure(state) == tree.structure(optimizer.state_specs(specs))
    return tree.unshard(params, specs, mesh)


def matrices_of(arrays):
    """As torch has them, W[out, in], each by itself."""
    stacks = tree.map(lambda x: x.flatten(0, 1) if x.shape[1] == SIZES["E"] else x[..., None].flatten(2), arrays)
    return tree.map(lambda stack: [matrix.t().contiguous() for matrix in stack], stacks)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 2e-7)])
@pytest.mark.parametrize(
    "options", [{}, {"nesterov": False}, {"weight_decay": 0.0}, {"adjust_lr_fn": "match_rms_adamw"}], ids=str
)
def test_equal_to_torch(options, dtype, limit):
    """Its Newton-Schulz is in bfloat16, as ours by default."""
    first, *grads = (matrices_of(arrays(seed, dtype)) for seed in range(3))
    theirs = tree.map(torch.nn.Parameter, first)
    reference = [
        torch.optim.Muon(tree.leaves(theirs | {"g": []}), lr=0.02, **options),
        torch.optim.AdamW(theirs["g"], lr=0.02, weight_decay=options.get("weight_decay", 0.1)),
    ]
    for grad in grads:
        for p, g in zip(tree.leaves(theirs), tree.leaves(grad), strict=True):
            p.grad = g
        for one in reference:
            one.step()
    given = {name.replace("adjust_lr_fn", "scale"): value for name, value in options.items()}
    for donate in (False, True):
        found = matrices_of(steps(ONE, given, dtype, donate))
        torch.testing.assert_close(found, tree.map(torch.Tensor.detach, theirs), rtol=0, atol=limit)


CASES = [({"form": form, "dtype": torch.float64}, torch.float64) for form in orthogonal.FORMS]
CASES += [({"master": True}, torch.bfloat16)]


@on_ranks({"X": 2, "Y": 2}, {"Z": 2, "Y": 2}, {"E": 2, "X": 2})
@pytest.mark.parametrize(("options", "dtype"), CASES, ids=str)
def test_every_form_on_a_mesh_equals_one_device(mesh, options, dtype):
    """Of six layers on four ranks `owned` leaves two without a matrix of some leaves; over E some leaves are whole."""
    found, wanted = steps(mesh, options, dtype, donate=True), steps(ONE, options, dtype, donate=False)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12 if dtype == torch.float64 else 0)


@pytest.mark.parametrize("form", orthogonal.FORMS)
def test_bytes_are_those_of_the_closed_form(form):
    """M[6, 24, 16] in bfloat16 over X=2,Y=2; on_shards in float32, whose Gram matrices are 16 x 16."""
    mesh = AbstractMesh({"X": 2, "Y": 2})
    specs = {"W_in": "W[L, D_X, F_Y]"}
    optimizer = optim.muon(0.02, {"W_in": "D -> F"}, form=form)
    params = {"W_in": torch.empty(6, 8, 12, device="meta")}
    with trace() as log:
        optimizer.update(params, optimizer.init(params), params, specs=specs, mesh=mesh)
    V, gram = 6 * 24 * 16, 6 * 16 * 16
    padded = V * 8 // 6  # six matrices in the places of eight; over one axis, half of them is sent
    wanted = {
        "gathered": {"AllGather": 2 * (V // 2 + V)},
        "owned": {"AllToAll": 2 * 2 * 2 * padded // 2},
        "on_shards": {"AllToAll": 2 * 4 * V // 2, "AllReduce": 5 * 4 * gram + 4 * 6},
    }[form]
    assert {op: sum(e.nbytes for e in log.collectives() if e.op == op) for op in wanted} == wanted
    assert {event.op for event in log.collectives()} == {*wanted}


def test_each_matrix_has_one_owner_and_the_least_loaded_have_most():
    for S, R in ((1, 3), (3, 2), (6, 4), (9, 4)):
        loads = [float(r) for r in range(R)]
        places, counts = assigned(S, loads, 10.0)
        held = Counter(place // -(-S // R) for place in places)
        assert len({*places}) == S
        assert [held[rank] for rank in range(R)] == counts == sorted(counts)[::-1]
        assert loads == [r + 10 * c for r, c in enumerate(counts)]


def test_cheapest_by_bytes_and_flops():
    """Few large matrices over many ranks: each rank cannot own one, and their Gram matrices are small beside them."""
    stack = MatrixStack(parse("M[S, O_Y, I_X]"), AbstractMesh({"X": 8, "Y": 8}))
    for shape, dtype, wanted in [
        ((64, 512, 512), torch.bfloat16, "owned"),
        ((64, 512, 512), torch.float32, "owned"),
        ((1, 2048, 128), torch.float32, "on_shards"),
        ((1, 2048, 128), torch.bfloat16, "gathered"),
    ]:
        assert cheapest_form(shape, stack, 2550.0, dtype) == wanted


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_tables_norms_and_routers_do_not_decay(name):
    config = get("tiny").with_(E=4, k=2)
    params = transformer.init(config)
    rule = optimizer_of(Settings(config, "", "", lr=0.1, warmup=0, weight_decay=0.5, optimizer=name))
    given = {"specs": specs_of(config), "mesh": AbstractMesh({})}
    new, _ = rule.update(tree.map(torch.zeros_like, params), rule.init(params), params, **given)
    pairs = zip(tree.named_leaves(params), tree.leaves(params), tree.leaves(new), strict=True)
    kept = {where.split('"')[-2] for where, before, after in pairs if torch.equal(before, after)}
    assert kept == {"embed", "norm_attn", "norm_mlp", "router", "norm"}
