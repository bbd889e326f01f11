"""Experts on a mesh: outputs, every gradient, routing and losses equal the dense computation on one device."""

from unittest.mock import patch

import pytest
import torch
from array_types import meta
from machine import on_ranks
from problems import SIGMOID, SOFTMAX, close, on_one_device, problem, pulled
from torch.func import vjp

from scaling import tree
from scaling.collectives import all_gather
from scaling.configs import Config
from scaling.mesh import AbstractMesh, Mesh
from scaling.models import moe as one_device
from scaling.models.pointwise import vjp as tape
from scaling.spec import format_axes, parse
from scaling.strategies import expert
from scaling.strategies.expert import routing as routing_module
from scaling.trace import trace

COEF = {"balance": 0.3, "z": 0.07}  # of the auxiliary losses, in the loss that is differentiated


def differentiated(config, how):
    """The operands of a layer, and the cotangents of y and of the losses."""
    params, x, dy = problem(config, how)
    return (params, x), (dy, *(torch.tensor(c, dtype=torch.float64) for c in COEF.values()))


def dense(config, how):
    """y, losses and gradients; routing."""

    def f(params, x):
        y, aux = one_device.dense(params, x, config)
        return y, *(aux[name] for name in COEF)

    (params, x), cotangents = differentiated(config, how)
    experts = one_device.choose_experts(x, params["router"], config, params.get("bias"), params.get("b_router"))
    return on_one_device(f, (params, x), cotangents), experts, one_device.load_of(experts, config.E)


def on_mesh(mesh, axis, tensor, spec, config, how, way):
    """The same of one layer on a mesh, made whole."""
    operands, cotangents = differentiated(config, how)
    types = expert.specs(config, axis, tensor), spec
    batch, times = (parse(spec).axes_of(dim) for dim in "BT")
    times = [axis for axis in times if axis != tensor]  # over which the tokens are split where they are routed
    tokens = parse("m[B, T]").with_axes("B", batch).with_axes("T", times)
    options = {"tensor": tensor, "spec": spec}

    def layer(params, x):
        y, aux = expert.moe(params, x, config, mesh, axis, **options)
        return y, *(aux[name] for name in COEF)

    def lines(_, params, x):
        given = config, mesh, expert.expert_layout(mesh, config.E, axis, **options)
        routing, at = expert.route_tokens(params, x, config, mesh, axis, **options), given[-1]
        x = all_gather(f"x[{at.BT_Y}, D] -> x[{at.BT}, D]", x, mesh) if at.sequence else x
        y, aux, s = expert.forward(params, {"y": x, "routing": routing}, *given)
        s = {name: value for name, value in s.items() if name not in ("Act", "Open")}

        def pull(cotangents):
            dy, *dLoss = cotangents
            return expert.backward(params, dy, dict(zip(COEF, map(float, dLoss), strict=True)), s, *given)[::-1]

        return (y, *(aux[name] for name in COEF)), pull

    partial_sum = f"a[] {{U_{format_axes(tuple(mesh.sizes))}}}"
    results = spec, partial_sum, partial_sum
    by = {"lines": lines, "vjp": vjp, "autograd": tape}[way]
    found = pulled(layer, mesh, operands, types, results, cotangents, by)
    params, x = tree.shard(operands, types, mesh)
    experts = expert.route_tokens(params, x, config, mesh, axis, **options).experts.view(len(x), -1, config.k)
    experts = tree.unshard(experts, f"e[{str(tokens)[2:-1]}, K]", mesh)
    return found, experts, expert.moe(params, x, config, mesh, axis, **options)[1]["load"]


EVEN = [  # what else the load is to be even over
    SIGMOID.with_(balance_by="sequence", F_shared=10),
    SOFTMAX.with_(balance_first=True),
    SIGMOID.with_(balance_by="sequence", balance_first=True, capacity=0.5),
]
OTHERS = [(config, "plain", "lines") for config in EVEN]
TWO_AXES = [(SIGMOID, "plain", "lines"), (SOFTMAX.with_(capacity=0.4), "plain", "lines")]
VARIANTS = [  # of GPT-OSS, Llama 4, Qwen2
    (SOFTMAX.with_(expert_bias=True, clamp=0.7), "plain", "lines"),
    (SIGMOID.with_(routing="inputs", k=1, norm_topk=False, capacity=1.0), "plain", "lines"),
    (SOFTMAX.with_(shared=2, shared_gate=True, norm_topk=False), "plain", "lines"),
]
X = "x[B_X, T, D]"
CASES = {  # mesh, the experts' axes, the features', the tokens' type: (config, tokens, how it is differentiated)
    "X=1": ({"X": 1}, "X", None, X, [(SOFTMAX, "plain", "lines")]),
    "X=2": ({"X": 2}, "X", None, X, [(SOFTMAX, "ties", "lines"), (SIGMOID, "one", "autograd"), *OTHERS]),
    "X=4": (
        {"X": 4}, "X", None, X,
        [(SOFTMAX, "one", "lines"), (EVEN[0], "plain", "lines"), (SIGMOID.with_(capacity=0.5), "one", "vjp"),
         (SOFTMAX.with_(k=1, gated=False, capacity=0.6), "plain", "lines")],
    ),
    "X=2 Y=2": ({"X": 2, "Y": 2}, "X", "Y", X, [*TWO_AXES, OTHERS[2]]),
    "X=2 Y=2, tokens": ({"X": 2, "Y": 2}, "X", "Y", "x[B_X, T_Y, D]", [*TWO_AXES, *OTHERS, *VARIANTS]),
    "X=2 E=2": ({"X": 2, "E": 2}, "E", None, "x[B_XE, T, D]", [TWO_AXES[1], *OTHERS]),
    "X=2 C=2": ({"X": 2, "C": 2}, "X", None, "x[B_X, T_C, D]", [TWO_AXES[0], *OTHERS, VARIANTS[1]]),
    "EX": ({"X": 2, "E": 2}, "EX", None, "x[B_EX, T, D]", [*TWO_AXES, (EVEN[1], "plain", "vjp")]),
}  # fmt: skip


@pytest.mark.parametrize(("mesh", "axis", "tensor", "spec", "kinds"), CASES.values(), ids=CASES)
def test_equals_dense(mesh, axis, tensor, spec, kinds):
    for config, how, way in kinds:
        wanted, *routing = dense(config, how)
        found, *routed = on_mesh(mesh, axis, tensor, spec, config, how, way)
        assert all(map(torch.equal, routed, routing))
        close({f"{config} {how} {way}": found}, wanted, 1e-11)


@pytest.mark.parametrize("config", [SOFTMAX, SIGMOID], ids=lambda config: config.name)
@pytest.mark.parametrize("bias", [{}, {"bias": None}, {"bias": torch.arange(8).double().cos()}])
def test_a_bias_of_the_choice_may_be_given_or_not(config, bias):
    params, x, _ = problem(config, "drawn")
    params = {name: leaf for name, leaf in params.items() if name != "bias"} | bias
    y, _ = expert.moe(params, x, config, Mesh({"X": 1}), "X")
    close(y, one_device.dense(params, x, config)[0])


@on_ranks({"X": 4})
def test_bytes_are_real_and_computing_again_routes_nothing(mesh):
    """Of a forward, and of a backward that computes the layer again; choosing again there would raise."""
    params, x, dy = problem(SOFTMAX, "plain")
    types = expert.specs(SOFTMAX, "X"), "x[B_X, T, D]", "dy[B_X, T, D]"
    params, x, dy = tree.shard((params, x, dy), types, mesh)

    given = SOFTMAX, mesh, expert.expert_layout(mesh, SOFTMAX.E, "X")
    with trace() as forward:
        s = {"y": x, "routing": expert.route_tokens(params, x, SOFTMAX, mesh, "X")}
        expert.forward(params, s, *given)
    again = patch.object(routing_module, "choose_experts", side_effect=AssertionError("experts are chosen again"))
    with again, trace() as backward:
        expert.backward(params, dy, dict.fromkeys(COEF, 0.0), expert.forward(params, s, *given)[2], *given)

    experts = tree.unshard(expert.route_tokens(params, x, SOFTMAX, mesh, "X").experts, "e[S_X, K]", mesh)
    to = torch.stack([torch.bincount(each.flatten() // 2, minlength=4) for each in experts.chunk(4)])  # from, to
    row, rank = SOFTMAX.D * 8, mesh.rank
    sent, received = (row * int(of.sum() - of[rank]) for of in (to[rank], to[:, rank]))
    held = 4 * row * int(to[:, rank].sum())
    there = ("AllToAll", "Row[G, E_X, R, D]", 4 * row * 12, sent)
    back = ("AllToAll", "Out[G_X, E, R, D]", held, received)
    chosen = [("AllReduce", "load[E]", 8 * 8, 2 * 3 * 16), ("AllToAll", "n[G, E_X]", 4 * 8 * 8, 3 * 16)]
    turned = [
        ("AllToAll", "dOut[G, E_X, R, D]", 4 * row * 12, sent),
        ("AllToAll", "dRow[G_X, E, R, D]", held, received),
    ]
    for log, wanted in ((forward, [*chosen, there, back]), (backward, [there, back, *turned])):
        assert [(e.op, str(e.after), e.nbytes, e.wire_bytes) for e in log.collectives()] == wanted


@pytest.mark.parametrize("capacity", [None, 1.25, 0.5])
def test_bytes_on_thousands_of_chips(capacity):
    """DeepSeek-V3's layer on 2048 x 2 abstract chips: forward and backward have the closed form's bytes and FLOPs."""
    mesh, (B, T), (D, F, E) = AbstractMesh({"P": 32, "X": 64, "Y": 2}), (2048, 4096), (7168, 2048, 256)
    sizes = {"L": 1, "D": D, "F": F, "N": 1, "K": 1, "H": 1, "V": 1, "E": E, "k": 8}
    config = Config("big", **sizes, shared=1, routing="sigmoid", capacity=capacity)
    types, dims = expert.specs(config, "X", "Y"), config.sizes

    def layer(params, x):
        y, aux = expert.moe(params, x, config, mesh, "X", tensor="Y", spec="x[B_PX, T_Y, D]")
        return y, aux["balance"] + aux["z"]

    params = tree.map(lambda text: meta(parse(text).local_shape(dims, mesh), dtype=torch.bfloat16), types)
    x = meta(B // 2048, T // 2, D, dtype=torch.bfloat16)
    with trace() as log:
        with trace() as forward:
            outs, pull = vjp(layer, params, x)
        grads, dx = pull(outs)
    assert outs[0].shape == dx.shape == x.shape
    tree.check(grads, types, dims, mesh)
    rows = T * config.k * (1 if capacity is None else min(capacity, 1))
    big = [e for e in log.collectives() if "R" in e.after.dim_names]
    assert [e.axes for e in big] == [("X",)] * 4
    assert sum(e.nbytes for e in big) == 4 * 64 * rows * D * 2
    assert sum(e.wire_bytes for e in big) == 4 * rows * D * 2 * 63 / 64
    assert sum(e.flops for e in forward.events) == 2 * 3 * (rows + T) * D * F / 2


@pytest.mark.parametrize(("n", "reordered"), [(1, False), (2, True), (SOFTMAX.E, False)])
def test_rows_are_put_in_order_only_if_several_ranks_send_to_several_experts(n, reordered):
    mesh, dims = AbstractMesh({"X": n}), {"D": SOFTMAX.D, "E": SOFTMAX.E, "F": SOFTMAX.F}
    params = tree.map(lambda text: meta(parse(text).local_shape(dims, mesh)), expert.specs(SOFTMAX, "X"))
    x = meta(2, 4, SOFTMAX.D)
    assert (expert.route_tokens(params, x, SOFTMAX, mesh, "X").order is not None) == reordered
