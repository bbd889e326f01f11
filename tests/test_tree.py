"""Trees: shards and their inverse, initial values that do not depend on the mesh, errors that name the place."""

import hashlib
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scaling import tree
from scaling.mesh import AbstractMesh
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


def mesh(coord, **sizes):
    return SimpleNamespace(sizes=sizes, coord=coord, device=torch.device("cpu"))


def coords(x, y):
    return [mesh({"X": i, "Y": j}, X=x, Y=y) for i in range(x) for j in range(y)]


def assemble(shards, spec, meshes, shape):
    whole = torch.full(shape, math.nan, dtype=shards[0].dtype)
    for local, at in zip(shards, meshes, strict=True):
        whole[spec.slices(shape, at, at.coord)] = local
    return whole


def test_map_keeps_structure_and_pairs_leaves():
    out = tree.map(lambda t, spec: (str(parse(spec)), t.ndim), WHOLE, SPECS)
    assert out["blocks"]["W_in"] == ("W_in[L, D_X, F_Y]", 3)
    assert out["norms"] == [("g[D_XY]", 1), ("s[]", 0)]
    assert tree.map(lambda a: a + 1, {"a": None, "b": 1}) == {"a": None, "b": 2}
    assert list(tree.named_leaves(WHOLE)) == [
        'params["blocks"]["W_in"]', 'params["blocks"]["W_out"]', 'params["norms"][0]', 'params["norms"][1]',
    ]  # fmt: skip


@pytest.mark.parametrize(("x", "y"), [(1, 1), (2, 1), (2, 2), (4, 1), (1, 4)])
def test_shards_cover_the_whole_and_own_their_memory(x, y):
    meshes = coords(x, y)
    shards = [tree.shard(WHOLE, SPECS, at) for at in meshes]
    for where, whole, spec in tree.paired(WHOLE, SPECS):
        parts = [tree.named_leaves(s)[where] for s in shards]
        assert all(p.is_contiguous() and p.untyped_storage().nbytes() == p.nbytes for p in parts)
        assert torch.equal(assemble(parts, spec, meshes, whole.shape), whole)
    for s, at in zip(shards, meshes, strict=True):
        tree.check(s, SPECS, SIZES, at, torch.float32)
        assert tree.nbytes(s) == tree.local_nbytes(SPECS, SIZES, at, torch.float32)
    shards[0]["norms"][1].zero_()
    assert WHOLE["norms"][1] != 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("x", "y"), [(2, 1), (1, 2), (2, 2), (4, 1)])
def test_init_is_equal_to_the_bit_on_every_mesh(x, y, dtype):
    whole = tree.init(INITS, SPECS, SIZES, coords(1, 1)[0], seed=3, dtype=dtype)
    for at in coords(x, y):
        local = tree.init(INITS, SPECS, SIZES, at, seed=3, dtype=dtype)
        tree.check(local, SPECS, SIZES, at, dtype)
        tree.map(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0), local, tree.shard(whole, SPECS, at))


@settings(deadline=None, max_examples=30, derandomize=True)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.data(), st.integers(1, 64))
def test_any_slice_is_the_slice_of_the_whole(blocks, data, chunk):
    shape = [b * data.draw(st.integers(1, 5)) for b in blocks]
    dims = list(zip("ABCD", "WXYZ", blocks, shape, strict=False))
    spec = parse("T[" + ", ".join(f"{d}_{a}" for d, a, _, _ in dims) + "]")
    sizes = {d: n for d, _, _, n in dims}
    one = mesh(dict.fromkeys("WXYZ", 0), W=1, X=1, Y=1, Z=1)
    some = mesh({a: data.draw(st.integers(0, b - 1)) for _, a, b, _ in dims}, **{a: b for _, a, b, _ in dims})
    with pytest.MonkeyPatch.context() as patch:
        whole = tree.init(tree.Normal(1.0), spec, sizes, one)
        patch.setattr(tree, "CHUNK", chunk)
        part = tree.init(tree.Normal(1.0), spec, sizes, some)
    assert torch.equal(part, whole[spec.slices(sizes, some, some.coord)])


def test_the_initial_values_are_a_normal_sample():
    one = mesh({}, X=1)
    w = tree.init(tree.Normal(0.5), "W[D, F]", {"D": 1000, "F": 1000}, one, dtype=torch.float64) / 0.5
    n = w.numel()
    assert abs(w.mean()) < 4 / n**0.5
    assert abs(w.var() - 1) < 4 * (2 / n) ** 0.5
    assert abs((w**3).mean()) < 4 * (15 / n) ** 0.5
    assert abs((w**4).mean() - 2.85) < 0.03  # 3 - 1.2/8
    for cut in (0.5, 1.0, 2.0):
        assert abs((w.abs() < cut).double().mean() - math.erf(cut / 2**0.5)) < 0.007
    for a, b in ((w[1:], w[:-1]), (w[:, 1:], w[:, :-1]), (w[:, 2:], w[:, :-2]), (w, w.T)):
        assert abs((a * b).mean()) < 0.005
    assert w.unique().numel() > 0.15 * n  # of 2**19 levels


def test_the_values_depend_on_seed_and_place_alone():
    one, sizes = mesh({}, X=1), {"D": 6}
    specs = {"a": "a[D]", "b": "b[D]"}
    inits = {"a": tree.Normal(1.0), "b": tree.Normal(1.0)}
    torch.manual_seed(1)
    p, rng = tree.init(inits, specs, sizes, one, seed=0), torch.get_rng_state()
    assert torch.equal(rng, torch.get_rng_state())
    torch.manual_seed(2)
    q = tree.init({"b": tree.Normal(1.0), "a": tree.Normal(1.0)}, specs, sizes, one, seed=0)
    assert torch.equal(p["a"], q["a"])
    assert not torch.equal(p["a"], p["b"])
    assert not torch.equal(p["a"], tree.init(inits, specs, sizes, one, seed=1)["a"])


def test_the_values_are_those_of_splitmix64_in_plain_python():
    def mix(x):
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
        return x ^ (x >> 31)

    key = int.from_bytes(hashlib.sha256(b'7 params["W"]').digest()[:8], "little")
    wanted = []
    for i in range(40):
        counters = [(key + (2 * i + j) * 0x9E3779B97F4A7C15) % 2**64 for j in (0, 1)]
        total = sum((mix(c) >> shift) & 0xFFFF for c in counters for shift in (0, 16, 32, 48))
        wanted.append((total - 4 * 65535) / math.sqrt(8 * (65536**2 - 1) / 12))
    one = mesh({}, X=1)
    found = tree.init({"W": tree.Normal(1.0)}, {"W": "W[D, F]"}, {"D": 4, "F": 10}, one, seed=7, dtype=torch.float64)
    assert found["W"].flatten().tolist() == wanted


def test_an_abstract_mesh_gives_meta_tensors_of_any_size():
    at = AbstractMesh({"X": 64, "Y": 8})
    sizes = {"L": 80, "D": 8192, "F": 28672, "V": 4}
    p = tree.init(INITS, SPECS, sizes, at, dtype=torch.bfloat16)
    assert p["blocks"]["W_in"].is_meta
    tree.check(p, SPECS, sizes, at, torch.bfloat16)
    assert tree.nbytes(p) == tree.local_nbytes(SPECS, sizes, at, "bf16")


def test_check_names_the_leaf():
    at = mesh({"X": 0, "Y": 0}, X=2, Y=2)
    with pytest.raises(ShardingError, match=r'params\["blocks"\]\["W_in"\].*W_in\[L, D_X, F_Y\].*\(2, 4, 6\)') as e:
        tree.check(WHOLE, SPECS, SIZES, at)
    assert "(2, 8, 12)" in str(e.value)
    assert "tree.shard" in str(e.value)
    local = tree.shard(WHOLE, SPECS, at)
    with pytest.raises(ShardingError, match=r'grads\["blocks"\]\["W_in"\].*float64.*float32'):
        tree.check(local, SPECS, SIZES, at, torch.float64, name="grads")
    with pytest.raises(ShardingError, match=r'params\["norms"\]\[1\]: must be a tensor typed s\[\]; found float'):
        tree.check({**local, "norms": [local["norms"][0], 1.0]}, SPECS, SIZES, at)
    with pytest.raises(ShardingError, match=r'params\["W"\]: must be a tensor typed W\[D_X, F_Y\]; found float'):
        tree.check({"W": 1.0}, {"W": "W[D_X, F_Y]"}, SIZES, at)
    tree.check({}, {}, SIZES, at)
    with pytest.raises(ShardingError, match=r'params\["blocks"\].*missing.*1 more'):
        tree.check({"norms": local["norms"]}, SPECS, SIZES, at)
    with pytest.raises(ShardingError, match=r'params\["head"\]: has no spec\n  fix: give each leaf its type'):
        tree.shard({**WHOLE, "head": torch.ones(1)}, SPECS, at)


def there_and_back(at, whole):
    return tree.unshard(tree.shard(whole, SPECS, at), SPECS, at)


def test_unshard_is_the_inverse_of_shard(ranks):
    for sizes in ({"X": 1, "Y": 1}, {"X": 2, "Y": 2}):
        for whole in ranks(there_and_back, sizes, WHOLE):
            tree.map(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0), whole, WHOLE)


def test_errors_of_shard_and_init():
    at = mesh({"X": 0, "Y": 0}, X=3, Y=1)
    with pytest.raises(ShardingError, match=r'params\["W"\]: W\[D_X\]: dim D of size 8 does not divide'):
        tree.shard({"W": torch.ones(8)}, {"W": "W[D_X]"}, at)
    for call in (tree.shard, lambda t, s, m: tree.init({"W": tree.Normal(1.0)}, s, {"D": 8}, m)):
        with pytest.raises(ShardingError, match=r'params\["W"\].*unreduced'):
            call({"W": torch.ones(8)}, {"W": "W[D] {U_X}"}, at)
    with pytest.raises(ShardingError, match=r"Normal\(std\) or Constant"):
        tree.init({"W": 0.1}, {"W": "W[D]"}, {"D": 8}, at)
    with pytest.raises(ShardingError, match="unknown dtype"):
        tree.local_nbytes({}, {}, at, "float31")


def test_one_array_is_not_called_params():
    with pytest.raises(ShardingError, match=r"^array: x\[B_X, D\]: dim B of size 3 does not divide"):
        tree.shard(torch.zeros(3, 2), "x[B_X, D]", AbstractMesh({"X": 2}))
