"""Experts whose params, sizes or mesh do not fit are refused."""

import pytest
import torch
from expert_problem import SIGMOID, SOFTMAX, problem

from scaling.mesh import AbstractMesh, Mesh
from scaling.models import moe as one_device
from scaling.spec import ShardingError
from scaling.strategies import expert


def test_refuses():
    params, x, _ = problem(SOFTMAX, "plain")
    mesh = AbstractMesh({"X": 3, "Y": 2})
    for message, axis, options in [
        ("8 experts do not divide over 3 ranks", "X", {}),
        ("fix: split B over the experts' axes Y, too", "Y", {"spec": "x[B_X, T, D]"}),
        ("fix: split F over axes that split neither tokens nor experts, not Y", "Y", {"tensor": "Y"}),
        ("rule: the tokens of a layer of experts are", "Y", {"spec": "x[B_Y, D]"}),
        ("rule: the tokens of a layer of experts are", "Y", {"spec": "x[B_Y, T, D_X]"}),
    ]:
        with pytest.raises(ShardingError, match=message):
            expert.moe(params, x, SOFTMAX, mesh, axis, **options)


@pytest.mark.parametrize(
    ("spoiled", "message"),
    [
        ({"W_gate": None}, r'params\["W_gate"\]: missing'),
        ({"shared": None}, r'params\["shared"\]\["W_gate"\]: missing'),
        ({"W_in": torch.zeros(8, 6, 8, dtype=torch.int64)}, r'params\["W_in"\](.|\n)*fix'),
        ({"W_out": torch.zeros(8, 9, 6)}, r'params\["W_out"\]: W_out\[E_X, F, D\] has the shape'),
        ({"more": torch.zeros(4)}, r'params\["more"\]: has no spec'),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_params_of_another_layer_are_refused(spoiled, message):
    params, x, _ = problem(SIGMOID, "drawn")
    expert.moe(params, x, SIGMOID, Mesh({"X": 1}), "X")
    with pytest.raises((ShardingError, ValueError), match=message):
        expert.moe(params | spoiled, x, SIGMOID, Mesh({"X": 1}), "X")


@pytest.mark.parametrize("config", [SOFTMAX, SIGMOID], ids=lambda config: config.name)
@pytest.mark.parametrize("bias", ["none", "absent", "given"])
def test_a_bias_of_the_choice_may_be_given_or_not(config, bias):
    params, x, _ = problem(config, "drawn")
    params = {name: leaf for name, leaf in params.items() if name != "bias"}
    if bias != "absent":
        params["bias"] = (
            torch.randn(config.E, generator=torch.Generator().manual_seed(1)).double() if bias == "given" else None
        )
    y, _ = expert.moe(params, x, config, Mesh({"X": 1}), "X")
    assert torch.allclose(y, one_device.dense(params, x, config)[0], rtol=1e-12, atol=1e-12)
