"""Experts on a mesh: outputs, every gradient, routing and losses equal the dense computation on one device."""

import pytest
import torch
from expert_problem import EVEN, SIGMOID, SOFTMAX, mask_of, problem
from torch.func import vjp

from scaling import tree
from scaling.collectives import all_reduce
from scaling.configs import Config
from scaling.mesh import AbstractMesh, Mesh
from scaling.models import moe as one_device
from scaling.spec import format_axes, parse
from scaling.strategies import expert
from scaling.strategies.expert import routing as routing_module
from scaling.trace import trace

COEF = {"balance": 0.3, "z": 0.07}  # of the auxiliary losses, in the loss that is differentiated


def dense(config, how):
    params, x, dy = problem(config, how)

    def f(params, x):
        y, aux = one_device.dense(params, x, config, mask=mask_of(how))
        return (y * dy).sum() + sum(coef * aux[name] for name, coef in COEF.items()), (y, aux)

    leaves = tree.leaves((params, x))
    for leaf in leaves:
        leaf.requires_grad_()
    loss, (y, aux) = f(params, x)
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    grads = [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(grads, leaves, strict=True)]
    *grads, dx = grads
    names = list(tree.named_leaves(params))
    experts = one_device.choose_experts(x, params["router"], config, params.get("bias"))
    return y.detach(), {k: v.detach() for k, v in aux.items()}, dict(zip(names, grads, strict=True)), dx, experts


def whole(leaf, spec, axes, mesh):
    """The whole gradient: summed over the axes along which its array is replicated, gathered over the others."""
    spec = parse(spec).with_name("g")
    over = tuple(a for a in axes if a not in spec.axes and a in mesh.sizes)
    return tree.unshard(leaf, spec.with_unreduced(over), mesh)


def run(mesh, config, how, axis, tensor, spec, way):
    """y, aux, gradients and routing of one layer on a mesh, made whole."""
    params, x, dy = problem(config, how)
    types = expert.specs(config, axis, tensor)
    params = tree.shard(params, types, mesh)
    x, dy = tree.shard([x, dy], [spec, spec], mesh)
    options, y_axes = {"tensor": tensor, "spec": spec}, parse(spec).axes
    if (mask := mask_of(how)) is not None:
        b, t = (parse(spec).axes_of(dim) for dim in "BT")
        counted = parse("m[B, T]").with_axes("B", b).with_axes("T", [axis for axis in t if axis != tensor])
        options["mask"] = tree.shard(mask, counted, mesh)
    copies = mesh.size([tensor]) if tensor and tensor not in y_axes else 1

    def layer(params, x, routing=None):
        if routing is None:
            routing = expert.route_tokens(params, x, config, mesh, axis, **options)
        y, aux = expert.moe(params, x, config, mesh, axis, **options, routing=routing)
        return (y, aux["balance"], aux["z"]), routing

    if way == "autograd":
        leaves = tree.leaves((params, x))
        for leaf in leaves:
            leaf.requires_grad_()
        y, aux = expert.moe(params, x, config, mesh, axis, **options)
        outs, load = (y, aux["balance"], aux["z"]), aux["load"]
        cotangents = (dy / copies, *(torch.full((), c, dtype=torch.float64) for c in COEF.values()))
        *grads, dx = torch.autograd.grad(outs, leaves, cotangents, allow_unused=True)
        grads = [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(grads, leaves[:-1], strict=True)]
        outs = [out.detach() for out in outs]
    else:
        f = one_device.checkpoint_routed(layer) if way == "remat" else layer

        def outs_and_load(params, x):
            outs, routing = f(params, x)
            return outs, routing.load

        outs, pull, load = vjp(outs_and_load, params, x, has_aux=True)
        grads, dx = pull((dy / copies, *(torch.full((), c, dtype=torch.float64) for c in COEF.values())))
        grads = tree.leaves(grads)
    everywhere = tuple(dict.fromkeys((*y_axes, *([tensor] if tensor else ()))))
    U = format_axes(tuple(a for a in everywhere if a in mesh.sizes))
    aux = [all_reduce(f"a[] {{U_{U}}} -> a[]", a, mesh) for a in outs[1:]]
    named = dict(zip(tree.named_leaves(params), grads, strict=True))
    kinds = tree.named_leaves(types)
    named = {name: whole(g, kinds[name], everywhere, mesh) for name, g in named.items()}
    routing = expert.route_tokens(params, x.detach(), config, mesh, axis, **options)
    experts = routing.experts.view(x.shape[0], -1, config.k)
    at = parse(spec).with_name("e")
    if tensor and tensor in at.axes_of("T"):
        at = at.with_axes("T", [a for a in at.axes_of("T") if a != tensor])
    return (
        tree.unshard(outs[0], spec, mesh),
        dict(zip(COEF, aux, strict=True)) | {"load": load},
        named,
        whole(dx, spec, everywhere, mesh),
        tree.unshard(experts, at, mesh),
    )


def close(got, want, what):
    scale = want.abs().max().clamp(min=1e-9)
    assert (got - want).abs().max() <= 1e-11 * scale, what


def check(results, config, how):
    y, aux, grads, dx, experts = dense(config, how)
    for got_y, got_aux, got_grads, got_dx, got_experts in results:
        assert torch.equal(got_experts, experts)
        assert torch.equal(got_aux["load"], aux["load"])
        close(got_y, y, "y")
        close(got_dx, dx, "dx")
        for name in COEF:
            close(got_aux[name], aux[name], name)
        for name, want in grads.items():
            close(got_grads[name], want, name)


ONE_AXIS = [
    (1, SOFTMAX, "plain", "vjp"),
    (2, SOFTMAX, "ties", "remat"),
    (2, SIGMOID, "one", "autograd"),
    (4, SOFTMAX, "one", "vjp"),
    (4, SIGMOID, "plain", "remat"),
    (4, SOFTMAX.with_(k=1, gated=False, capacity=0.6), "plain", "autograd"),
    (4, SIGMOID.with_(capacity=0.5), "one", "vjp"),
]


@pytest.mark.parametrize(("n", "config", "how", "way"), ONE_AXIS)
def test_equals_dense(ranks, n, config, how, way):
    check(ranks(run, {"X": n}, config, how, "X", None, "x[B_X, T, D]", way), config, how)


@pytest.mark.parametrize("config", EVEN, ids=str)
@pytest.mark.parametrize("how", ["plain", "padded"])
def test_what_the_load_is_to_be_even_over(ranks, config, how):
    check(ranks(run, {"X": 2}, config, how, "X", None, "x[B_X, T, D]", "remat"), config, how)


@pytest.mark.slow
@pytest.mark.parametrize("config", EVEN, ids=str)
def test_what_the_load_is_to_be_even_over_on_two_axes(ranks, config):
    for sizes, axis, tensor, spec in MESHES:
        check(ranks(run, sizes, config, "padded", axis, tensor, spec, "vjp"), config, "padded")


MESHES = [
    ({"X": 2, "Y": 2}, "X", "Y", "x[B_X, T, D]"),
    ({"X": 2, "Y": 2}, "X", "Y", "x[B_X, T_Y, D]"),
    ({"X": 2, "E": 2}, "E", None, "x[B_XE, T, D]"),
    ({"X": 2, "C": 2}, "X", None, "x[B_X, T_C, D]"),
    ({"X": 2, "E": 2}, "EX", None, "x[B_EX, T, D]"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "axis", "tensor", "spec"), MESHES)
@pytest.mark.parametrize("config", [SIGMOID, SOFTMAX.with_(capacity=0.4)], ids=["sigmoid", "capacity"])
def test_equals_dense_on_two_axes(ranks, sizes, axis, tensor, spec, config):
    check(ranks(run, sizes, config, "plain", axis, tensor, spec, "vjp"), config, "plain")


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


def test_a_choice_made_twice_would_differ():
    """On one device: a chooser that answers otherwise the second time changes nothing, since nobody asks."""
    params, x, dy = problem(SOFTMAX, "plain")
    asked = []

    def layer(params, x, experts):
        if experts is None:
            experts = (one_device.choose_experts(x, params["router"], SOFTMAX) + len(asked)) % SOFTMAX.E
            asked.append(experts)
        y, aux = one_device.forward(params, x, SOFTMAX, experts)
        return (y, aux["z"]), experts

    def grads(f):
        return vjp(lambda params, x: f(params, x)[0], params, x)[1]((dy, torch.ones((), dtype=x.dtype)))

    remade = grads(one_device.checkpoint_routed(layer))
    assert len(asked) == 1
    asked.clear()
    plain = grads(lambda params, x: layer(params, x, None))
    for a, b in zip(tree.leaves(remade), tree.leaves(plain), strict=True):
        close(a, b, "remat")


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


def test_a_capacity_keeps_the_first_tokens_of_an_odd_batch():
    config = SOFTMAX.with_(capacity=0.6)
    params, *_ = problem(config, "plain")
    x = torch.randn(3, 5, config.D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    routing = routing_module.route_tokens(params, x, config, Mesh({"X": 1}), "X")
    room, kept = routing_module.capacity_of(config, 15), dict.fromkeys(range(config.E), 0)
    for token in one_device.choose_experts(x, params["router"], config, params.get("bias")).flatten(0, 1).tolist():
        for expert_of_token in token:
            kept[expert_of_token] += kept[expert_of_token] < room
    assert list(routing.counts) == list(kept.values())
    assert sum(kept.values()) < 15 * config.k


@pytest.mark.parametrize(("sizes", "reordered"), [({"X": 1}, False), ({"X": 2}, True), ({"X": SOFTMAX.E}, False)])
def test_rows_are_put_in_order_only_if_several_ranks_send_to_several_experts(sizes, reordered):
    mesh, types = AbstractMesh(sizes), expert.specs(SOFTMAX, "X")
    dims = {"D": SOFTMAX.D, "E": SOFTMAX.E, "F": SOFTMAX.F}
    params = tree.map(lambda text: torch.empty(parse(text).local_shape(dims, mesh), device="meta"), types)
    x = torch.empty(2, 4, SOFTMAX.D, device="meta")
    routing = routing_module.route_tokens(params, x, SOFTMAX, mesh, "X")
    assert (routing.order is not None) == reordered
