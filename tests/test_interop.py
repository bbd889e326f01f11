"""DTensor's placements and JAX's PartitionSpec, and DTensor's redistribute as an oracle of our reshardings."""

import itertools

import pytest
import torch
from array_types import types
from machine import on_ranks
from refused import evaluated, named, refused
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard  # noqa: F401 - calls in tables name them
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset as dtensors_block

from scaling import collectives, interop
from scaling.algebra import reshard
from scaling.algebra.layouts import arrangements, subsets
from scaling.book.arrays import largest
from scaling.mesh import AbstractMesh
from scaling.spec import ShardingError, Spec, parse

MESH = {"X": 2, "Y": 2}


def placed(placement):
    return Spec.from_placements((placement, Replicate()), MESH, ("I", "J"))


NOT_SAID_BY_DTENSOR = """
call                              words of its error
parse('A[I_Z]').placements(MESH)  unknown mesh axis
placed(Partial('max'))            only Shard of one of the 2 dims
placed(Shard(5))                  only Shard of one of the 2 dims
"""
test_what_dtensor_cannot_say = refused(evaluated(NOT_SAID_BY_DTENSOR, globals()), ShardingError)


@pytest.mark.parametrize("sizes", [(2,), (2, 3), (2, 3, 2), (2, 2, 2)], ids=str)
def test_placements_of_every_type(sizes):
    """There and back; and each device's block is where DTensor has it, by its own arithmetic."""
    mesh = dict(zip("YXZ", sizes, strict=False))  # the mesh's own order counts
    shape, seen = (48, 72), set()
    for dims in arrangements(tuple(mesh), 2):
        idle = tuple(axis for axis in mesh if axis not in {*dims[0], *dims[1]})
        for unreduced in subsets(idle, least=0):
            spec = parse(str(Spec("A", (("I", dims[0]), ("J", dims[1])), unreduced)))
            placements = spec.placements(mesh)
            seen.add(placements)
            assert [axis for axis, one in zip(mesh, placements, strict=True) if one.is_partial()] == [*unreduced]
            assert Spec.from_placements(placements, AbstractMesh(mesh), ("I", "J"), "A") == spec
            for at in itertools.product(*map(range, mesh.values())):
                found = dtensors_block(shape, (*mesh.values(),), at, placements)
                ours = spec.slices(shape, mesh, dict(zip(mesh, at, strict=True)))
                assert found == (tuple(s.stop - s.start for s in ours), tuple(s.start for s in ours)), (spec, at)
    assert len(seen) == {1: 4, 2: 18, 3: 92}[len(mesh)]


def test_partition_spec():
    for text, jax in {
        "A[I, J]": "P(None, None)",
        "A[I_YX, J_Z]": "P(('Y', 'X'), 'Z')",
        "A[I_data, J_model]": "P('data', 'model')",
        "A[I_X, J] {U_Y}": "P('X', None, unreduced={'Y'})",
    }.items():
        assert interop.to_partition_spec(text) == jax
        assert interop.from_partition_spec(jax, ("I", "J"), "A") == parse(text)
    assert str(interop.from_partition_spec("jax.sharding.PartitionSpec('X')", ("I", "J"), "A")) == "A[I_X, J]"
    assert interop.from_partition_spec("P((), ('X',))", ("I", "J"), "A") == parse("A[I, J_X]")


NO_SPECS = "P('X', None, None)|P(x)|Q('X')|P('X'|P('X', axes=2)|P(5)|P(b'X')|P(True)|P({'X'})|P(['X'])|P(1.5)|P(*'X')"
NO_SPECS += "|P('X', unreduced='X')|P('X', unreduced=3)|P()()|P||\0"


def test_what_is_no_partition_spec():
    deep = "(" * 300, "P(" + "(" * 300, "P(" + "-" * 100_000 + "1)"
    for text in (*NO_SPECS.split("|"), *deep, 5, None, ("X", None)):
        with pytest.raises(ShardingError, match="is not a PartitionSpec of 2 dims") as error:
            interop.from_partition_spec(text, ("I", "J"))
        assert max(map(len, str(error.value).splitlines())) < 120


# P('XY') in JAX is one axis, not two: read as two it would be another sharding
NOT_SAID = named(r"""
placements                type
P('XY')
    one axis to JAX, but types read it as the axes X, Y\n  fix: write ('X', 'Y') if those are meant
P(None, ('Z', 'XY'))      'XY' is one axis to JAX
P('X', unreduced={'DP'})  'DP' is one axis to JAX
P('my_axis')              'my_axis' cannot name a mesh axis
P('')                     '' cannot name a mesh axis
P(('X', 5))               5 cannot name a mesh axis
P(('X', ('Y',)))          cannot name a mesh axis
P('X', unreduced={'X'})   used twice
P('X', 'X')               used twice
""")
CALLS = {f"interop.from_partition_spec({text!r}, ('I', 'J'))": words for text, words in NOT_SAID.items()}
CALLS["interop.from_partition_spec('P()', ('I_X',))"] = "which is another type"
test_what_types_cannot_say = refused(evaluated(CALLS, globals()), ShardingError)


def dtensor_bytes(before, after, shape, mesh):
    """Bytes sent by DTensor's own steps, from the placements it passes through; None where torch hides them."""
    try:
        from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
        from torch.distributed.tensor._redistribute import _gen_transform_infos

        meta = TensorMeta(torch.Size(shape), (shape[1], 1), torch.float64)
        ends = [spec.placements(mesh) for spec in (before, after)]
        infos = _gen_transform_infos(*(DTensorSpec(mesh.device_mesh, end, tensor_meta=meta) for end in ends))
    except (ImportError, TypeError):
        return None
    sizes, placements, sent = list(mesh.sizes.values()), list(ends[0]), 0
    for info in infos:
        n, local = sizes[info.mesh_dim], shape[0] * shape[1] * 8
        for size, placement in zip(sizes, placements, strict=True):
            local //= size if placement.is_shard() else 1
        source, target = info.src_dst_placements
        kinds = "".join(type(p).__name__[0] for p in (source, target))  # S, R or P
        sent += {"SR": local * n, "PS": local, "PR": 2 * local, "SS": local}.get(kinds, 0) * (n - 1) / n
        placements[info.mesh_dim] = target
    return sent


@on_ranks(MESH)
def test_redistribute_agrees_and_sends_no_less(mesh):
    """Both from every type to every type without partial sums, which DTensor does not redistribute to."""
    every = [spec for spec in types(MESH) if all([*axes] == sorted(axes) for _, axes in spec.dims)]
    pairs = [(src, dst) for src in every for dst in every if not dst.unreduced]
    assert len(pairs) == 16 * 9
    shape, errors, more = (4, 8), [], []
    whole = torch.arange(32, dtype=torch.float64).view(shape)
    for src, dst in pairs[::7]:
        local = collectives.shard(str(src.with_unreduced(()).with_name("")), whole, mesh) / mesh.size(src.unreduced)
        placed, target = (spec.placements(mesh) for spec in (src, dst))
        theirs = DTensor.from_local(local, mesh.device_mesh, placed, run_check=False).redistribute(placements=target)
        spec, shard_of_theirs = Spec.from_placements(theirs.placements, mesh, ("I", "J"), "A"), theirs.to_local()
        mine = collectives.reshard(f"{src} -> {dst}", local, mesh)
        same = spec == dst and mine.shape == shard_of_theirs.shape
        errors.append((mine - shard_of_theirs).abs().max().item() if same else float("inf"))
        theirs_sent = dtensor_bytes(src, dst, shape, mesh)
        if theirs_sent is not None:
            more.append(reshard(src, dst, shape, mesh).wire_bytes(shape, mesh, 8) - theirs_sent)
    assert largest(errors) < 1e-12
    assert max(more, default=0) < 1e-9
    assert min(more, default=-1) < -1e-9
