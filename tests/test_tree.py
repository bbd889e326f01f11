"""Trees: shards and their inverse, initial values that do not depend on the mesh, errors that name the place."""

import hashlib
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from array_types import types
from hypothesis import given, settings
from hypothesis import strategies as st
from machine import on_ranks
from problems import same
from refused import evaluated, refused

from scaling import tree
from scaling.mesh import AbstractMesh, Mesh
from scaling.spec import ShardingError, parse

SIZES = {"L": 2, "D": 8, "F": 12, "V": 4}
SPECS = {
    "blocks": {"W_in": "W_in[L, D_X, F_Y]", "W_out": parse("W_out[L, F_YX, D]")},
    "norms": ["g[D_XY]", "s[]"],
}
WHOLE = {
    "blocks": {"W_in": torch.randn(2, 8, 12), "W_out": torch.randn(2, 12, 8)},
    "norms": [torch.randn(8), torch.randn(())],
}
INITS = {
    "blocks": {"W_in": tree.Normal(0.5), "W_out": tree.Normal(1.0)},
    "norms": [tree.Constant(1.0), tree.Normal(2.0)],
}


def ranks_of(**sizes):
    """Each rank of a mesh, with tensors that are real."""
    coords = [AbstractMesh(sizes).coord_of(rank) for rank in range(math.prod(sizes.values()))]
    return [SimpleNamespace(sizes=sizes, coord=coord, device=torch.device("cpu")) for coord in coords]


def test_leaves_are_paired_and_have_the_names_that_fetch_them():
    out = tree.map(lambda t, spec: (str(parse(spec)), t.ndim), WHOLE, SPECS)
    assert out["norms"] == [("g[D_XY]", 1), ("s[]", 0)]
    assert tree.map(lambda a: a + 1, {"a": None, "b": 1}) == {"a": None, "b": 2}
    assert all(eval(where, {"params": WHOLE}) is leaf for where, leaf in tree.named_leaves(WHOLE).items())
    assert [*tree.named_leaves(WHOLE)][1:3] == ['params["blocks"]["W_out"]', 'params["norms"][0]']


@on_ranks({"X": 1, "Y": 1}, {"X": 2, "Y": 2}, {"X": 1, "Y": 4})
def test_unshard_is_the_inverse_of_shard(mesh):
    """Shards own their memory, are the blocks that their types say, and are the whole again."""
    every = [*types("XY", unreduced=False)]
    one_of_each = [torch.randn(4, 8, generator=torch.Generator().manual_seed(i)) for i in range(len(every))]
    for whole, specs, sizes in ((WHOLE, SPECS, SIZES), (one_of_each, every, {"I": 4, "J": 8})):
        shards = tree.shard(whole, specs, mesh)
        for part, full, spec in zip(tree.leaves(shards), tree.leaves(whole), tree.leaves(specs), strict=True):
            assert torch.equal(part, full[parse(spec).slices(tuple(full.shape), mesh, mesh.coord)])
            assert part.data_ptr() != full.data_ptr()
            assert part.is_contiguous()
            assert part.untyped_storage().nbytes() == part.nbytes
        tree.check(shards, specs, sizes, mesh, torch.float32)
        assert tree.nbytes(shards) == tree.local_nbytes(specs, sizes, mesh, "fp32")
        assert same(tree.unshard(shards, specs, mesh), whole)


@settings(deadline=None, max_examples=20, derandomize=True)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.data(), st.integers(1, 64))
def test_initial_values_are_equal_to_the_bit_on_every_mesh(blocks, data, chunk):
    shape = [b * data.draw(st.integers(1, 5)) for b in blocks]
    dims = list(zip("ABCD", "WXYZ", blocks, shape, strict=False))
    specs = {"T": "T[" + ", ".join(f"{d}_{a}" for d, a, _, _ in dims) + "]", "n": "n[]"}
    sizes, mesh = {d: n for d, _, _, n in dims}, {a: b for _, a, b, _ in dims}
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
    make = partial(tree.init, {"T": tree.Normal(0.5), "n": tree.Constant(3.0)}, specs, sizes, seed=3, dtype=dtype)
    some = ranks_of(**mesh)[data.draw(st.integers(0, math.prod(blocks) - 1))]
    whole = make(ranks_of(**dict.fromkeys(mesh, 1))[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree, "CHUNK", chunk)
        part = make(some)
    tree.check(part, specs, sizes, some, dtype)
    assert same(part, tree.shard(whole, specs, some))
    assert whole["n"] == 3


def test_the_values_are_those_of_splitmix64_in_plain_python():
    """They depend on seed, place and index alone."""

    def mix(x):
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
        return x ^ (x >> 31)

    state = torch.get_rng_state()
    for seed, name in ((7, "V"), (7, "W"), (8, "W")):
        init, sizes = {name: tree.Normal(1.0)}, {"D": 4, "F": 10}
        found = tree.init(init, {name: "T[D, F]"}, sizes, Mesh({}), seed, torch.float64)
        key = int.from_bytes(hashlib.sha256(f'{seed} params["{name}"]'.encode()).digest()[:8], "little")
        wanted = []
        for i in range(40):
            counters = [(key + (2 * i + j) * 0x9E3779B97F4A7C15) % 2**64 for j in (0, 1)]
            total = sum((mix(c) >> shift) & 0xFFFF for c in counters for shift in (0, 16, 32, 48))
            wanted.append((total - 4 * 65535) / math.sqrt(8 * (65536**2 - 1) / 12))
        assert found[name].flatten().tolist() == wanted
    assert torch.equal(state, torch.get_rng_state())


AT, THREE = ranks_of(X=2, Y=2)[0], ranks_of(X=3, Y=1)[0]
LOCAL = tree.shard(WHOLE, SPECS, AT)
SHAPES = 'params["blocks"]["W_in"]: W_in[L, D_X, F_Y] has the shape (2, 4, 6) on each device ((2, 8, 12) in all)'


def checked(changed, specs=SPECS, **options):
    return tree.check(changed, specs, SIZES, AT, **options)


def made(spec="W[D]", init=INITS["norms"][1]):
    return tree.init({"W": init}, {"W": spec}, {"D": 8}, THREE)


REFUSED = {
    "checked(WHOLE)": SHAPES,
    "checked(LOCAL | {'norms': [torch.ones(3), LOCAL['norms'][1]]})": "give an array of that sha",
    "checked(LOCAL, dtype=torch.float64, name='grads')":
        'grads["blocks"]["W_in"]: W_in[L, D_X, F_Y] must have the dtype torch.float64; found torc',
    "checked(LOCAL | {'norms': [LOCAL['norms'][0], 1.0]})": "tensor typed s[]; found float",
    "checked({'norms': LOCAL['norms']})":
        'params["blocks"]["W_in"]: missing: the specs have W_in[L, D_X, F_Y] there (and 1 more)',
    "checked({'W': torch.ones(8).to_sparse()}, {'W': 'W[D]'})": "must be dense; found torch.sparse_coo",
    "checked({'V': torch.ones(8), 'W': torch.ones(8, device='meta')}, dict.fromkeys('VW', 'W[D]'))":
        "is on meta, another leaf on cpu",
    "tree.shard({**WHOLE, 'head': torch.ones(1)}, SPECS, AT)":
        'params["head"]: has no spec\n  fix: give each leaf its type',
    "tree.shard({'W': torch.ones(8)}, {'W': 'W[D_X]'}, THREE)":
        'params["W"]: W[D_X]: dim D of size 8 does not divide',
    "tree.shard({'W': 'x'}, {'W': 'W[D]'}, AT)": 'params["W"]: must be a tensor typed W[D]; fo',
    "tree.shard({'W': torch.ones(8)}, {'W': 'W[D_Q]'}, AT)": "unknown mesh axis Q",
    "tree.shard(torch.zeros(3, 2), 'x[B_X, D]', AT)": "array: x[B_X, D]: dim B of size 3 does",
    "tree.shard({'W': torch.ones(8)}, {'W': 'W[D] {U_X}'}, AT)": "is unreduced",
    "made('W[D] {U_X}')": 'params["W"]: W[D] {U_X} is unreduced', "made(init=0.1)": "Normal(std) or Constant",
    "tree.local_nbytes({}, {}, AT, 'float31')": "unknown dtype",
}  # fmt: skip
test_refused = refused(evaluated(REFUSED, globals()), ShardingError)
