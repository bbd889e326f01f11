"""Experts on a mesh: outputs, every gradient, routing and losses equal the dense computation on one device.

Each way through a layer of experts equals each token's own products."""

from functools import partial

import pytest
import torch
from problems import SIGMOID, SOFTMAX, mask_of, problem
from torch.func import vjp

from scaling import tree
from scaling.collectives import all_reduce
from scaling.configs import Config
from scaling.mesh import AbstractMesh, Mesh
from scaling.models import moe as one_device
from scaling.models.pointwise import vjp as tape
from scaling.spec import format_axes, parse
from scaling.strategies import expert
from scaling.strategies.expert import routing as routing_module
from scaling.strategies.expert import ways
from scaling.trace import trace

COEF = {"balance": 0.3, "z": 0.07}  # of the auxiliary losses, in the loss that is differentiated


def dense(config, how):
    params, x, dy = problem(config, how)

    def f(params, x):
        y, aux = one_device.dense(params, x, config, mask=mask_of(how))
        return (y * dy).sum() + sum(coef * aux[name] for name, coef in COEF.items()), (y, aux)

    leaves = [leaf.requires_grad_() for leaf in tree.leaves((params, x))]
    loss, (y, aux) = f(params, x)
    *grads, dx = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    names = list(tree.named_leaves(params))
    experts = one_device.choose_experts(x, params["router"], config, params.get("bias"))
    return y.detach(), {k: v.detach() for k, v in aux.items()}, dict(zip(names, grads, strict=True)), dx, experts


def whole(leaf, spec, axes, mesh):
    """The whole gradient: summed over the axes along which its array is replicated, gathered over the others."""
    spec = parse(spec).with_name("g")
    over = tuple(a for a in axes if a not in spec.axes and a in mesh.sizes)
    return tree.unshard(leaf, spec.with_unreduced(over), mesh)


def run(mesh, axis, tensor, spec, config, how, way):
    """y, aux, gradients and routing of one layer on a mesh, made whole."""
    params, x, dy = problem(config, how)
    types = expert.specs(config, axis, tensor)
    params = tree.shard(params, types, mesh)
    x, dy = tree.shard([x, dy], [spec, spec], mesh)
    options, y_axes, times = {"tensor": tensor, "spec": spec}, parse(spec).axes, parse(spec).axes_of("T")
    times = [axis for axis in times if axis != tensor]  # over which the tokens are split where they are routed
    if (mask := mask_of(how)) is not None:
        counted = parse("m[B, T]").with_axes("B", parse(spec).axes_of("B")).with_axes("T", times)
        options["mask"] = tree.shard(mask, counted, mesh)
    copies = mesh.size([tensor]) if tensor and tensor not in y_axes else 1

    def layer(params, x, routing=None):
        if routing is None:
            routing = expert.route_tokens(params, x, config, mesh, axis, **options)
        y, aux = expert.moe(params, x, config, mesh, axis, **options, routing=routing)
        return (y, aux["balance"], aux["z"]), routing

    f = one_device.checkpoint_routed(layer) if way == "remat" else layer
    by = tape if way == "autograd" else torch.func.vjp
    outs, pull = by(lambda params, x: f(params, x)[0], params, x)
    grads, dx = pull((dy / copies, *(torch.full((), c, dtype=torch.float64) for c in COEF.values())))
    everywhere = tuple(dict.fromkeys((*y_axes, *([tensor] if tensor else ()))))
    U = format_axes(tuple(a for a in everywhere if a in mesh.sizes))
    aux = [all_reduce(f"a[] {{U_{U}}} -> a[]", a, mesh) for a in outs[1:]]
    kinds = tree.named_leaves(types)
    named = {name: whole(g, kinds[name], everywhere, mesh) for name, g in tree.named_leaves(grads).items()}
    experts = expert.route_tokens(params, x, config, mesh, axis, **options).experts.view(x.shape[0], -1, config.k)
    at = parse(spec).with_name("e").with_axes("T", times)
    return (
        tree.unshard(outs[0], spec, mesh),
        dict(zip(COEF, aux, strict=True)) | {"load": expert.moe(params, x, config, mesh, axis, **options)[1]["load"]},
        named,
        whole(dx, spec, everywhere, mesh),
        tree.unshard(experts, at, mesh),
    )


def close(got, want, what):
    scale = want.abs().max().clamp(min=1e-9)
    assert (got - want).abs().max() <= 1e-11 * scale, what


EVEN = [  # what else the load is to be even over, and what padding does not count
    SIGMOID.with_(balance_by="sequence", F_shared=10),
    SOFTMAX.with_(balance_first=True),
    SIGMOID.with_(balance_by="sequence", balance_first=True, capacity=0.5),
]
TWO_AXES = [(SIGMOID, "plain", "vjp"), (SOFTMAX.with_(capacity=0.4), "plain", "vjp")]
TWO_AXES += [(config, "padded", "vjp") for config in EVEN]
X = "x[B_X, T, D]"
CASES = {  # mesh, the experts' axes, the features', the tokens' type: (config, tokens, how it is differentiated)
    "X=1": ({"X": 1}, "X", None, X, [(SOFTMAX, "plain", "vjp")]),
    "X=2": (
        {"X": 2}, "X", None, X,
        [(SOFTMAX, "ties", "remat"), (SIGMOID, "one", "autograd")]
        + [(config, how, "remat") for config in EVEN for how in ("plain", "padded")],
    ),
    "X=4": (
        {"X": 4}, "X", None, X,
        [
            (SOFTMAX, "one", "vjp"),
            (SIGMOID, "plain", "remat"),
            (SOFTMAX.with_(k=1, gated=False, capacity=0.6), "plain", "autograd"),
            (SIGMOID.with_(capacity=0.5), "one", "vjp"),
        ],
    ),
    "X=2 Y=2": ({"X": 2, "Y": 2}, "X", "Y", X, TWO_AXES),
    "X=2 Y=2, tokens": ({"X": 2, "Y": 2}, "X", "Y", "x[B_X, T_Y, D]", TWO_AXES),
    "X=2 E=2": ({"X": 2, "E": 2}, "E", None, "x[B_XE, T, D]", TWO_AXES),
    "X=2 C=2": ({"X": 2, "C": 2}, "X", None, "x[B_X, T_C, D]", TWO_AXES),
    "EX": ({"X": 2, "E": 2}, "EX", None, "x[B_EX, T, D]", TWO_AXES),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_equals_dense(ranks, case):
    sizes, *layout, kinds = CASES[case]
    for config, how, way in kinds:
        y, aux, grads, dx, experts = dense(config, how)
        for got_y, got_aux, got_grads, got_dx, got_experts in ranks(run, sizes, *layout, config, how, way):
            assert torch.equal(got_experts, experts)
            assert torch.equal(got_aux["load"], aux["load"])
            close(got_y, y, "y")
            close(got_dx, dx, "dx")
            for name in COEF:
                close(got_aux[name], aux[name], name)
            for name, want in grads.items():
                close(got_grads[name], want, name)


@pytest.mark.parametrize("config", [SOFTMAX, SIGMOID], ids=lambda config: config.name)
@pytest.mark.parametrize("bias", [{}, {"bias": None}, {"bias": torch.arange(8).double().cos()}])
def test_a_bias_of_the_choice_may_be_given_or_not(config, bias):
    params, x, _ = problem(config, "drawn")
    params = {name: leaf for name, leaf in params.items() if name != "bias"} | bias
    y, _ = expert.moe(params, x, config, Mesh({"X": 1}), "X")
    close(y, one_device.dense(params, x, config)[0], "y")


def moved_and_remade(mesh, config):
    """The trace of a forward and of a backward that computes the layer again; choosing again there would raise."""
    params, x, dy = problem(config, "plain")
    spec = "x[B_X, T, D]"
    params, (x, dy) = tree.shard(params, expert.specs(config, "X"), mesh), tree.shard([x, dy], [spec, spec], mesh)

    def layer(params, x, routing):
        if routing is None:
            routing = expert.route_tokens(params, x, config, mesh, "X")
        return (expert.moe(params, x, config, mesh, "X", routing=routing)[0],), routing

    with trace() as forward:
        _, pull = vjp(lambda params, x: one_device.checkpoint_routed(layer)(params, x)[0], params, x)

    def once_more(*_, **__):
        raise AssertionError("experts are chosen again")

    whole, routing_module.choose_experts = routing_module.choose_experts, once_more
    try:
        with trace() as backward:
            pull((dy,))
    finally:
        routing_module.choose_experts = whole
    experts = expert.route_tokens(params, x, config, mesh, "X").experts
    return experts, [
        [(e.op, str(e.after), e.nbytes, e.wire_bytes) for e in t.collectives()] for t in (forward, backward)
    ]


def test_bytes_are_real_and_computing_again_routes_nothing(ranks):
    results = ranks(moved_and_remade, {"X": 4}, SOFTMAX)
    to = [torch.bincount(experts.flatten() // 2, minlength=4) for experts, _ in results]
    row = SOFTMAX.D * 8
    for rank, (_, (forward, backward)) in enumerate(results):
        sent = row * int(to[rank].sum() - to[rank][rank])
        received = row * int(sum(t[rank] for t in to) - to[rank][rank])
        held = 4 * row * int(sum(t[rank] for t in to))
        there = ("AllToAll", "Row[G, E_X, R, D]", 4 * row * 12, sent)
        back = ("AllToAll", "Out[G_X, E, R, D]", held, received)
        counts = [("AllReduce", "load[E]", 8 * 8, 2 * 3 * 16), ("AllToAll", "n[G, E_X]", 4 * 8 * 8, 3 * 16)]
        assert forward == [*counts, there, back]
        turned = [
            ("AllToAll", "dOut[G, E_X, R, D]", 4 * row * 12, sent),
            ("AllToAll", "dRow[G_X, E, R, D]", held, received),
        ]
        assert backward == [there, back, *turned]


BIG = Config("big", L=1, D=7168, F=2048, N=1, K=1, H=1, V=1, E=256, k=8, shared=1, routing="sigmoid")


@pytest.mark.parametrize("capacity", [None, 1.25, 0.5])
def test_bytes_on_thousands_of_chips(capacity):
    """DeepSeek-V3's layer on 2048 x 2 abstract chips: forward and backward have the closed form's bytes and FLOPs."""
    config, sizes = BIG.with_(capacity=capacity), {"P": 32, "X": 64, "Y": 2}
    mesh, spec, (B, T) = AbstractMesh(sizes), "x[B_PX, T_Y, D]", (2048, 4096)
    types, D, F = expert.specs(config, "X", "Y"), config.D, config.F
    dims = {"D": D, "E": config.E, "F": F}
    params = tree.map(
        lambda text: torch.empty(parse(text).local_shape(dims, mesh), dtype=torch.bfloat16, device="meta"), types
    )
    x = torch.empty(B // 2048, T // 2, config.D, dtype=torch.bfloat16, device="meta")

    def layer(params, x):
        y, aux = expert.moe(params, x, config, mesh, "X", tensor="Y", spec=spec)
        return y, aux["balance"] + aux["z"]

    with trace() as log:
        with trace() as forward:
            outs, pull = vjp(layer, params, x)
        grads, dx = pull(outs)
    assert outs[0].shape == dx.shape == x.shape
    tree.check(grads, types, dims | {"F": F}, mesh)
    rows = T * config.k * (1 if capacity is None else min(capacity, 1))
    big = [e for e in log.collectives() if "R" in e.after.dim_names]
    assert [e.axes for e in big] == [("X",)] * 4
    assert sum(e.nbytes for e in big) == 4 * 64 * rows * D * 2
    assert sum(e.wire_bytes for e in big) == 4 * rows * D * 2 * 63 / 64
    assert sum(e.flops for e in forward.events) == 2 * 3 * (rows + T) * D * F / 2


@pytest.mark.parametrize(("n", "reordered"), [(1, False), (2, True), (SOFTMAX.E, False)])
def test_rows_are_put_in_order_only_if_several_ranks_send_to_several_experts(n, reordered):
    mesh, dims = AbstractMesh({"X": n}), {"D": SOFTMAX.D, "E": SOFTMAX.E, "F": SOFTMAX.F}
    shapes = tree.map(lambda text: parse(text).local_shape(dims, mesh), expert.specs(SOFTMAX, "X"))
    params = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    x = torch.empty(2, 4, SOFTMAX.D, device="meta")
    assert (expert.route_tokens(params, x, SOFTMAX, mesh, "X").order is not None) == reordered


S, D, F, E = 12, 5, 7, 4
CHOICES = {
    "one": torch.tensor([[s * s % E] for s in range(S)]),
    "two": torch.tensor([[s * s % E, (s + 1) % E] for s in range(S)]),
    "empty experts": torch.tensor([[2 * (s % 2)] for s in range(S)]),
    "all to one": torch.full((S, 2), 3),
}


def drawn(*shape, seed):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


A, W, dOut = drawn(S, D, seed=0), drawn(E, D, F, seed=1), drawn(S, F, seed=2)


TYPES = ["Out[S_X, F]", "A[S_X, D]", "W[E_X, D, F]"]


def on_mesh(mesh):
    a, w, d_out = tree.shard([A, W, dOut], [*TYPES[1:], TYPES[0]], mesh)
    forms = {"gathered": ways.gathered, "ragged": ways.ragged, "in chunks": partial(ways.ragged, chunk=1)}
    forms = {name: partial(way, mesh=mesh) for name, way in forms.items()}
    if mesh.size() == 1:
        forms |= {"masked loop": ways.masked_loop, "grouped": ways.grouped}
    for what, experts in CHOICES.items():  # beside a copy of its experts for each token
        out, pull = vjp(lambda A, W, experts=experts: torch.einsum("sd,skdf->skf", A, W[experts]).mean(1), A, W)
        wanted = tree.shard([out, *pull(dOut)], TYPES, mesh)
        mine = tree.shard([experts], ["B[S_X, k]"], mesh)[0]
        for name, way in forms.items():
            out, pull = vjp(lambda a, w, way=way, mine=mine: way(a, w, mine), a, w)
            for got, want in zip((out, *pull(d_out)), wanted, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12, msg=f"{name}, {what}")


@pytest.mark.parametrize("X", [1, 2, 4])
def test_each_way_is_each_token_s_own_products(ranks, X):
    ranks(on_mesh, {"X": X})
