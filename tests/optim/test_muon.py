"""Muon beside torch.optim.Muon on one device; on meshes each form beside one device, with its bytes."""

from collections import Counter

import pytest
import torch

from scaling import optim, tree
from scaling.mesh import AbstractMesh, Mesh
from scaling.optim import orthogonal
from scaling.optim.matrices import cheapest_form
from scaling.optim.orthogonal import MatrixStack, assigned
from scaling.spec import parse
from scaling.trace import trace

MATRICES = {"in": "D -> F", "gate": "D -> F", "out": "F -> D", "Q": "D -> N H", "E": {"in": "D -> F"}, "g": ""}
SPECS = {"in": "W[L_Z, D_X, F_Y]", "gate": "W[L_Z, D_X, F_Y]", "out": "W[L_Z, F_Y, D_X]",
         "Q": "W[L_Z, D_X, N_Y, H]", "E": {"in": "W[L_Z, E_E, D_X, F_Y]"}, "g": "g[L_Z, D]"}  # fmt: skip
SIZES = {"L": 6, "E": 4, "D": 16, "F": 24, "N": 4, "H": 3}
ONE = Mesh({"X": 1})


def types(mesh):
    """SPECS without the axes that the mesh lacks."""

    def here(text):
        spec = parse(text)
        for dim in spec.dim_names:
            spec = spec.with_axes(dim, [axis for axis in spec.axes_of(dim) if axis in mesh.sizes])
        return spec

    return tree.map(here, SPECS)


def arrays(seed, dtype):
    inits = tree.map(lambda _: tree.Normal(1.0), SPECS)
    return tree.init(inits, types(ONE), SIZES, ONE, seed=seed, dtype=dtype, device="cpu")


def steps(mesh, options, dtype, donate):
    """Params after two steps, whole."""
    specs = types(mesh)
    optimizer = optim.muon(0.02, MATRICES, **options)
    params = tree.shard(arrays(0, dtype), specs, mesh)
    state = optimizer.init(params)
    for step in range(2):
        grads = tree.shard(arrays(step + 1, dtype), specs, mesh)
        params, state = optimizer.update(grads, state, params, specs=specs, mesh=mesh, donate=donate)
    assert tree.structure(state) == tree.structure(optimizer.state_specs(specs))
    return tree.unshard(params, specs, mesh)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 2e-7)])
@pytest.mark.parametrize(
    "options", [{}, {"nesterov": False}, {"weight_decay": 0.0}, {"adjust_lr_fn": "match_rms_adamw"}], ids=str
)
def test_equal_to_torch(options, dtype, limit):
    """torch has W[out, in], one matrix a parameter; its Newton-Schulz is in bfloat16, as ours by default."""
    shapes = {"tall": (24, 16), "wide": (16, 24), "square": (16, 16), "g": (5,)}
    draw = lambda: {name: torch.randn(shape, dtype=dtype) for name, shape in shapes.items()}  # noqa: E731
    specs, matrices = (dict.fromkeys(shapes, of) for of in ("W[D, F]", "D -> F"))
    specs, matrices = specs | {"g": "g[D]"}, matrices | {"g": ""}
    given = {name.replace("adjust_lr_fn", "scale"): value for name, value in options.items()}
    optimizer, params = optim.muon(0.02, matrices, **given), draw()
    theirs = {name: torch.nn.Parameter(x.t().contiguous()) for name, x in params.items()}
    reference = [
        torch.optim.Muon([theirs[name] for name in shapes if name != "g"], lr=0.02, **options),
        torch.optim.AdamW([theirs["g"]], lr=0.02, weight_decay=options.get("weight_decay", 0.1)),
    ]
    state = optimizer.init(params)
    for donate in (False, False, True):
        held, grads = (params, state["momentum"], state["rest"]["m"]), draw()
        kept = tree.map(torch.clone, held)
        params, state = optimizer.update(grads, state, params, specs=specs, donate=donate)
        found = params, state["momentum"], state["rest"]["m"]
        for old, before, new in zip(*map(tree.leaves, (held, kept, found)), strict=True):
            assert new is old if donate else torch.equal(old, before)
        for name, p in theirs.items():
            p.grad = grads[name].t().contiguous()
        for one in reference:
            one.step()
    for name, p in theirs.items():
        torch.testing.assert_close(params[name], p.detach().t(), rtol=0, atol=limit)


CASES = [({"form": form, "dtype": torch.float64}, torch.float64) for form in orthogonal.FORMS]
CASES += [({}, torch.float32), ({"master": True}, torch.bfloat16)]


def on_rank(mesh):
    return [steps(mesh, options, dtype, True) for options, dtype in CASES]


@pytest.fixture(scope="module")
def on_one_device():
    return [steps(ONE, options, dtype, False) for options, dtype in CASES]


@pytest.mark.parametrize("sizes", [{"P": 2, "X": 2}, {"X": 2, "Y": 2}, {"Z": 2, "Y": 2}, {"E": 2, "X": 2}], ids=str)
def test_every_form_on_a_mesh_equals_one_device(ranks, on_one_device, sizes):
    """Of six layers on four ranks `owned` leaves two without a matrix of some leaves."""
    for found in ranks(on_rank, sizes):
        for (options, dtype), ours, one in zip(CASES, found, on_one_device, strict=True):
            limit = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 0}[dtype]
            for (where, a), b in zip(tree.named_leaves(ours).items(), tree.leaves(one), strict=True):
                assert (a - b).abs().max() <= limit, (where, options)


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
