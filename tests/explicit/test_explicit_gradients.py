"""Gradients of explicit mode beside JAX's, in types and values (tests/oracles/explicit_gradients_jax.py), on ranks."""

import json
from pathlib import Path

import pytest
import torch
from gradient_programs import digest, function, numbers, typed_programs
from random_programs import MESH, SIZES

from scaling import explicit
from scaling.mesh import AbstractMesh
from scaling.spec import parse

TABLE = json.loads(Path(__file__).with_name("jax_gradients.json").read_text())["programs"]


def array(shape, seed: int, type: str, mesh):
    values = numbers(torch.Size(shape).numel(), seed)
    return explicit.array(torch.tensor(values, dtype=torch.float64).view(shape), type, mesh)


def derivatives(program, types, mesh) -> list[explicit.Array]:
    """The result and the gradients of all arguments."""
    run = function(program, types, explicit.einsum, explicit.reshard, torch.tanh)
    given = zip(program.shapes, program.in_types, strict=True)
    y, pull = explicit.vjp(run, *(array(shape, i, type, mesh) for i, (shape, type) in enumerate(given)))
    shape = [SIZES[d] for d in parse(program.out_type).dim_names]
    return [y, *pull(array(shape, 50, program.out_type, mesh))]


def on_ranks(mesh, part: slice) -> list[list[list[float]]]:
    whole = [
        [x.whole() for x in derivatives(program, types, mesh)] for program, types in typed_programs(part.stop)[part]
    ]
    return [[digest(x.flatten().tolist()) for x in arrays] for arrays in whole] if mesh.rank == 0 else []


PARTS = pytest.mark.parametrize(
    "part",
    [pytest.param(slice(12), marks=pytest.mark.slow), pytest.param(slice(12, 50), marks=pytest.mark.sweep)],
    ids=str,
)


@PARTS
def test_values_are_jaxs(ranks, part):
    got = ranks(on_ranks, {"X": 2, "Y": 2}, part)[0]
    for ours, theirs in zip(got, TABLE[part], strict=True):
        for mine, (_, wanted) in zip(ours, theirs, strict=True):
            assert wanted[2] > 0
            mine, close = torch.tensor(mine, dtype=torch.float64), {"rtol": 1e-12, "atol": 1e-12 * wanted[2]}
            torch.testing.assert_close(mine, torch.tensor(wanted, dtype=torch.float64), **close)


@PARTS
def test_types_are_jaxs_with_the_reduction_left_to_the_caller(part):
    """Dims are split as JAX says; over the other axes JAX has reduced the gradient, and here it is still unreduced."""
    mesh = AbstractMesh(MESH)
    for (program, types), theirs in zip(typed_programs(part.stop)[part], TABLE[part], strict=True):
        y, *grads = derivatives(program, types, mesh)
        assert y.layout.unreduced == ()
        for got, (wanted, _) in zip([y, *grads], theirs, strict=True):
            assert ",".join("".join(axes) or "-" for axes in got.layout.dims) == wanted
        for got in grads:
            assert {*got.layout.unreduced} == {"X", "Y"} - {axis for axes in got.layout.dims for axis in axes}
