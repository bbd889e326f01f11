"""Trees: shards and their inverse, initial values that do not depend on the mesh, errors that name the place."""

import hashlib
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refused import refused

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
ONE = Mesh({"X": 1, "Y": 1})


def ranks_of(**sizes):
    """Each rank of a mesh, with tensors that are real."""
    coords = [AbstractMesh(sizes).coord_of(rank) for rank in range(math.prod(sizes.values()))]
    return [SimpleNamespace(sizes=sizes, coord=coord, device=torch.device("cpu")) for coord in coords]


def equal(a, b) -> bool:
    return all(map(torch.equal, tree.leaves(a), tree.leaves(b))) and tree.structure(a) == tree.structure(b)


def test_map_keeps_structure_and_pairs_leaves():
    out = tree.map(lambda t, spec: (str(parse(spec)), t.ndim), WHOLE, SPECS)
    assert out["blocks"]["W_in"] == ("W_in[L, D_X, F_Y]", 3)
    assert out["norms"] == [("g[D_XY]", 1), ("s[]", 0)]
    assert tree.map(lambda a: a + 1, {"a": None, "b": 1}) == {"a": None, "b": 2}
    names = ['["blocks"]["W_in"]', '["blocks"]["W_out"]', '["norms"][0]', '["norms"][1]']
    assert list(tree.named_leaves(WHOLE)) == ["params" + name for name in names]


@pytest.mark.parametrize("sizes", [{"X": 1, "Y": 1}, {"X": 2, "Y": 2}, {"X": 1, "Y": 4}], ids=str)
def test_shards_cover_the_whole_and_own_their_memory(sizes):
    meshes, found = ranks_of(**sizes), tree.map(lambda whole: torch.full_like(whole, math.nan), WHOLE)
    for at in meshes:
        shards = tree.shard(WHOLE, SPECS, at)
        for part, (_, whole, spec) in zip(tree.leaves(shards), tree.paired(found, SPECS), strict=True):
            whole[spec.slices(whole.shape, at, at.coord)] = part
            assert part.is_contiguous()
            assert part.untyped_storage().nbytes() == part.nbytes
        tree.check(shards, SPECS, SIZES, at, torch.float32)
        assert tree.nbytes(shards) == tree.local_nbytes(SPECS, SIZES, at, torch.float32)
    assert equal(found, WHOLE)
    shards["norms"][1].zero_()
    assert WHOLE["norms"][1] != 0


def there_and_back(at, whole):
    return tree.unshard(tree.shard(whole, SPECS, at), SPECS, at)


def test_unshard_is_the_inverse_of_shard(ranks):
    for sizes in ({"X": 1, "Y": 1}, {"X": 2, "Y": 2}):
        assert all(equal(whole, WHOLE) for whole in ranks(there_and_back, sizes, WHOLE))


@settings(deadline=None, max_examples=30, derandomize=True)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.data(), st.integers(1, 64))
def test_initial_values_are_equal_to_the_bit_on_every_mesh(blocks, data, chunk):
    shape = [b * data.draw(st.integers(1, 5)) for b in blocks]
    dims = list(zip("ABCD", "WXYZ", blocks, shape, strict=False))
    specs = {"T": "T[" + ", ".join(f"{d}_{a}" for d, a, _, _ in dims) + "]", "n": "n[]"}
    sizes, mesh = {d: n for d, _, _, n in dims}, {a: b for _, a, b, _ in dims}
    inits, rank = {"T": tree.Normal(0.5), "n": tree.Constant(3.0)}, data.draw(st.integers(0, math.prod(blocks) - 1))
    given = {"seed": 3, "dtype": data.draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))}
    with pytest.MonkeyPatch.context() as patch:
        whole = tree.init(inits, specs, sizes, ranks_of(**dict.fromkeys(mesh, 1))[0], **given)
        patch.setattr(tree, "CHUNK", chunk)
        some = ranks_of(**mesh)[rank]
        part = tree.init(inits, specs, sizes, some, **given)
    tree.check(part, specs, sizes, some, given["dtype"])
    assert equal(part, tree.shard(whole, specs, some))
    assert whole["n"] == 3


def test_the_values_are_those_of_splitmix64_in_plain_python():
    """They depend on seed, place and index alone."""

    def mix(x):
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
        return x ^ (x >> 31)

    state = torch.get_rng_state()
    for seed, names in ((7, "VW"), (8, "WA")):
        inits, specs = dict.fromkeys(names, tree.Normal(1.0)), {name: f"{name}[D, F]" for name in names}
        found = tree.init(inits, specs, {"D": 4, "F": 10}, ONE, seed=seed, dtype=torch.float64)
        for name in names:
            key = int.from_bytes(hashlib.sha256(f'{seed} params["{name}"]'.encode()).digest()[:8], "little")
            wanted = []
            for i in range(40):
                counters = [(key + (2 * i + j) * 0x9E3779B97F4A7C15) % 2**64 for j in (0, 1)]
                total = sum((mix(c) >> shift) & 0xFFFF for c in counters for shift in (0, 16, 32, 48))
                wanted.append((total - 4 * 65535) / math.sqrt(8 * (65536**2 - 1) / 12))
            assert found[name].flatten().tolist() == wanted
    assert torch.equal(state, torch.get_rng_state())


def test_an_abstract_mesh_gives_meta_tensors_of_any_size():
    at, sizes = AbstractMesh({"X": 64, "Y": 8}), {"L": 80, "D": 8192, "F": 28672, "V": 4}
    p = tree.init(INITS, SPECS, sizes, at, dtype=torch.bfloat16)
    assert p["blocks"]["W_in"].is_meta
    tree.check(p, SPECS, sizes, at, torch.bfloat16)
    assert tree.nbytes(p) == tree.local_nbytes(SPECS, sizes, at, "bf16")


AT, THREE = ranks_of(X=2, Y=2)[0], ranks_of(X=3, Y=1)[0]
LOCAL = tree.shard(WHOLE, SPECS, AT)
SHAPES = 'params["blocks"]["W_in"]: W_in[L, D_X, F_Y] has the shape (2, 4, 6) on each device ((2, 8, 12) in all)'


def checked(changed, specs=SPECS, **options):
    return lambda: tree.check(changed, specs, SIZES, AT, **options)


def made(spec="W[D]", init=INITS["norms"][1]):
    return lambda: tree.init({"W": init}, {"W": spec}, {"D": 8}, THREE)


test_refused = refused(
    {
        "whole arrays": (checked(WHOLE), SHAPES),
        "another shape": (checked(LOCAL | {"norms": [torch.ones(3), LOCAL["norms"][1]]}), "give an array of that sha"),
        "another dtype": (checked(LOCAL, dtype=torch.float64, name="grads"), 'grads["blocks"]["W_in"]: W_in[L, D_X'),
        "dtypes": (checked(LOCAL, dtype=torch.float64), "must have the dtype torch.float64; found torch.float32"),
        "a number": (checked(LOCAL | {"norms": [LOCAL["norms"][0], 1.0]}), "tensor typed s[]; found float"),
        "a number alone": (checked({"W": 1.0}, {"W": "W[D_X, F_Y]"}), 'params["W"]: must be a tensor typed W[D_X, F'),
        "no blocks": (checked({"norms": LOCAL["norms"]}), 'params["blocks"]["W_in"]: missing'),
        "how many are missing": (checked({"norms": LOCAL["norms"]}), "(and 1 more)"),
        "sparse": (checked({"W": torch.ones(8).to_sparse()}, {"W": "W[D]"}), "must be dense; found torch.sparse_coo"),
        "two devices": (checked({"V": torch.ones(8), "W": torch.ones(8, device="meta")}, dict.fromkeys("VW", "W[D]")),
                        "is on meta, another leaf on cpu"),
        "no spec": (lambda: tree.shard({**WHOLE, "head": torch.ones(1)}, SPECS, AT),
                    'params["head"]: has no spec\n  fix: give each leaf its type'),
        "does not divide": (lambda: tree.shard({"W": torch.ones(8)}, {"W": "W[D_X]"}, THREE),
                            'params["W"]: W[D_X]: dim D of size 8 does not divide'),
        "one array": (lambda: tree.shard(torch.zeros(3, 2), "x[B_X, D]", AT), "array: x[B_X, D]: dim B of size 3 does"),
        "shards of partial sums": (lambda: tree.shard({"W": torch.ones(8)}, {"W": "W[D] {U_X}"}, AT), "is unreduced"),
        "inits of partial sums": (made("W[D] {U_X}"), 'params["W"]: W[D] {U_X} is unreduced'),
        "an init that is a number": (made(init=0.1), "Normal(std) or Constant"),
        "bytes of no dtype": (lambda: tree.local_nbytes({}, {}, AT, "float31"), "unknown dtype"),
    },
    ShardingError,
)  # fmt: skip
