"""Arrays with scales: sharded as on one device, products within float32 of float64, bytes as the types say."""

import itertools
import math
import random

import pytest
import torch
from refused import read_table

from scaling import trace
from scaling.collectives import all_gather, all_to_all, einsum, ppermute, reduce_scatter, shard, unshard
from scaling.mesh import AbstractMesh
from scaling.models.moe import by_expert
from scaling.scaled import RECIPES, dequantize, products_of, quantize
from scaling.scaled.arrays import by_kernel, has_kernel
from scaling.spec import FORMATS, parse, parse_line

ONE, XY = AbstractMesh({}), {"X": 2, "Y": 2}
SIZES = {"B": 256, "D": 512, "F": 512}
NAMES = [name for name, f in FORMATS.items() if not f.whole]
SCALED_ROWS = pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 multiplies no scaled rows on a CPU")
KINDS = ["fp8-row", "fp8-128", "mxfp8", "nvfp4", "int4-32"]  # one of each way of holding them
AXES = ("", "_X", "_YX")
TYPES = [f"W[D{d}, F{f}] {{Q_{q}}}" for d, f in itertools.product(AXES, AXES) for q in ("D", "F", "D,F")
         if not {*d} & {*f}]  # fmt: skip
LINES = [  # what only moves: (the function, its line but for {Q})
    (all_gather, "W[D_X, F] -> W[D, F]"),
    (all_gather, "W[D_XY, F] -> W[D_X, F]"),
    (all_gather, "W[D_X, F_Y] -> W[D, F]"),
    (all_gather, "W[D, F_X] -> W[D, F]"),
    (all_to_all, "W[D_X, F] -> W[D, F_X]"),
    (all_to_all, "W[D_Y, F_X] -> W[D, F_XY]"),
    (all_to_all, "W[D, F_X] -> W[D_X, F]"),
    (shard, "W[D, F] -> W[D_X, F]"),
    (shard, "W[D, F_Y] -> W[D_X, F_Y]"),
]


def drawn(*shape, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g) * torch.exp(torch.randn(shape[0], 1, generator=g))


def plain(text):
    return text.split(" {Q")[0]


def bits(x):
    return [part.view(torch.uint8) if part.dtype.itemsize == 1 else part for part in x.parts]


def same(ours, theirs):
    return all(map(torch.equal, bits(ours), bits(theirs)))


@pytest.mark.parametrize("mesh", [XY])
def test_quantized_on_a_mesh_as_on_one_device(mesh):
    W = drawn(SIZES["D"], SIZES["F"])
    for name, text in itertools.product(KINDS, TYPES):
        spec = parse(text)
        whole = str(spec.whole())
        mine = quantize(f"{plain(text)} -> {text}", shard(plain(text), W, mesh), mesh, name)
        theirs = quantize(f"{plain(whole)} -> {whole}", W, ONE, name)
        assert same(unshard(text, mine, mesh), theirs), (name, text)  # a maximum has no order: to the bit


@pytest.mark.parametrize("mesh", [XY])
def test_what_only_moves_moves_both_parts(mesh):
    W = drawn(SIZES["D"], SIZES["F"])
    for name, (move, line), q in itertools.product(KINDS, LINES, ("{Q_D}", "{Q_F}", "{Q}")):
        before, after = (f"{part} {q}" for part in line.split(" -> "))
        x = quantize(f"{plain(before)} -> {before}", shard(plain(before), W, mesh), mesh, name)
        found = move(f"{before} -> {after}", x, mesh)
        wanted = quantize(f"{plain(after)} -> {after}", shard(plain(after), W, mesh), mesh, name)
        assert same(found, wanted), (name, line, q)
        if move is all_gather:
            assert same(move(f"{before} -> {after}", x, mesh, async_op=True).wait(), wanted)
    x = quantize("W[D_X, F] -> W[D_X, F] {Q_D}", shard("W[D_X, F]", W, mesh), mesh, "mxfp8")
    there = ppermute("W[D_X, F] {Q_D}", x, mesh, "X", [(0, 1), (1, 0)])
    other = W.unflatten(0, (2, -1))[1 - mesh.coord["X"]]
    assert same(there, quantize("W[D, F] -> W[D, F] {Q_D}", other, mesh, "mxfp8"))


@pytest.mark.parametrize("mesh", [{"X": 2}])
def test_fp8_tensor_has_one_scale(mesh):
    W = drawn(64, 32)
    x = quantize("W[D_X, F] -> W[D_X, F] {Q}", shard("W[D_X, F]", W, mesh), mesh, "fp8-tensor")
    theirs = quantize("W[D, F] -> W[D, F] {Q}", W, ONE, "fp8-tensor")
    assert x.s.shape == ()
    assert same(unshard("W[D_X, F] {Q}", x, mesh), theirs)


def test_bytes_sent_are_those_of_the_parts():
    mesh, sizes = AbstractMesh({"X": 4, "Y": 2}), {"D": 4096, "F": 1024}
    W = torch.empty(1024, 512, device="meta", dtype=torch.bfloat16)
    for name, share in {"mxfp8": 33 / 64, "fp8-128": 0.5 + 1 / 64, "nvfp4": 9 / 32, "fp8-row": 0.5}.items():
        before, after = "W[D_X, F_Y] {Q_D}", "W[D, F_Y] {Q_D}"
        x = quantize(f"{plain(before)} -> {before}", W, mesh, name)
        assert x.nbytes == parse(before).nbytes(sizes, mesh, name)
        with trace.trace() as log:
            y = all_gather(f"{before} -> {after}", x, mesh)
        sent = sum(event.nbytes for event in log.events)
        parts = zip(parse(before).parts(name), parse(after).parts(name), y.parts, strict=True)
        assert sent == sum(part.nbytes for was, now, part in parts if was != now)  # a scale that lacks D stays
        assert sent == pytest.approx(share * 4096 * 512 * 2)
        assert y.nbytes == parse(after).nbytes(sizes, mesh, name)
    with trace.trace() as log:  # the maximum of what X splits: two of 512 float32, nothing for a format with blocks
        quantize("W[D_X, F_Y] -> W[D_X, F_Y] {Q_D}", W, mesh, "fp8-row")
    assert [(e.op, e.nbytes) for e in log.events] == [("AllReduce", 4 * 512)]
    with trace.trace() as log:
        quantize("W[D_X, F_Y] -> W[D_X, F_Y] {Q_D}", W, mesh, "mxfp8")
    assert not log.events


PRODUCTS = read_table(
    """
line                                               summed
"In[B, D] {Q_D} * W[D, F] {Q_D} -> Out[B, F]"      "D"
"In[B, D] {Q} * W[D, F] {Q} -> Out[B, F]"          "D"
"In[B, D] {Q_B} * dOut[B, F] {Q_B} -> dW[D, F]"    "B"
"dOut[B, F] {Q_F} * W[D, F] {Q_D,F} -> dIn[D, B]"  "F"
"In[B, D] * W[D, F] {Q_D} -> Out[B, F]"            "D"
""",
    globals(),
)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("line", "summed"), PRODUCTS)
def test_a_product_is_that_of_the_dequantized_in_float64(name, line, summed):
    typed = parse_line(line)
    for seed in range(3):
        xs, wides = [], []
        for i, spec in enumerate(typed.operands):
            x = drawn(*(SIZES[dim] for dim in spec.dim_names), seed=10 * seed + i)
            held = quantize(f"{plain(str(spec))} -> {spec}", x, ONE, name) if spec.scaled else x
            xs.append(held)
            wides.append((dequantize(f"{spec} -> {plain(str(spec))}", held, ONE) if spec.scaled else x).double())
        bare = " * ".join(plain(str(spec)) for spec in typed.operands) + f" -> {typed.result}"
        exact, most = einsum(bare, *wides), einsum(bare, *(x.abs() for x in wides))
        error = (einsum(line, *xs).double() - exact).abs()
        assert (error <= most * (2.0**-24 * math.sqrt(SIZES[summed]) * 8)).all()


@pytest.mark.parametrize("precision", RECIPES)
def test_grouped_products_are_those_of_the_dequantized_in_float64(precision):
    """Each expert multiplies its own rows, perhaps none."""
    r, rng = RECIPES[precision], random.Random(7)
    for seed in range(6):
        E, D, F = rng.randint(1, 5), 128 * rng.randint(1, 3), 128 * rng.randint(1, 2)
        counts = [rng.choice((0, 1, 7, 40)) for _ in range(E)]
        n, W = max(1, sum(counts)), drawn(E * D, F).unflatten(0, (E, D))
        Row, dOut = drawn(n, D, seed=seed), drawn(n, F, seed=seed + 50)
        counts[-1] += n - sum(counts)

        def held(line, x, format):
            q = quantize(line, x, ONE, format)
            return q, dequantize(" -> ".join(line.split(" -> ")[::-1]), q, ONE).double()

        forward, wide = held("W[E, D, F] -> W[E, D, F] {Q_D}", W, r.forward)
        back, wide_back = held("W[E, D, F] -> W[E, D, F] {Q_F}", W, r.weights)
        rows = held("Row[R, D] -> Row[R, D] {Q_D}", Row, r.forward)[1].split(counts)
        cotangents = held("d[R, F] -> d[R, F] {Q_F}", dOut, r.cotangents)[1].split(counts)

        product = products_of(precision, {}, ONE.optional)
        Out = by_expert("Row[R, D] * W[D, F] -> Out[R, F]", Row, forward, counts, product)
        dRow = by_expert("dOut[R, F] * W[D, F] -> dRow[R, D]", dOut, back, counts, product)
        wanted = [
            (Out, torch.cat([x @ w for x, w in zip(rows, wide, strict=True)])),
            (dRow, torch.cat([d @ w.T for d, w in zip(cotangents, wide_back, strict=True)])),
        ]
        for found, exact in wanted:
            assert found.dtype == torch.float32
            torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5 * float(exact.abs().max()))


@SCALED_ROWS
@pytest.mark.parametrize("line", [
    "In[B, D] {Q_D} * W[D, F] {Q_D} -> Out[B, F]", "W[D, F] {Q_F} * dOut[B, F] {Q_F} -> dIn[B, D]",
    "In[B, D] {Q_B} * dOut[B, F] {Q_B} -> dW[D, F]", "In[B, D] {Q} * W[D, F] {Q} -> Out[B, F]",
])  # fmt: skip
def test_a_gpus_kernel_gives_what_is_emulated(line):
    """On the CPU torch has that kernel, too."""
    typed, held = parse_line(line), []
    for i, spec in enumerate(typed.operands):
        x = drawn(*({"B": 64, "D": 128, "F": 48}[dim] for dim in spec.dim_names), seed=i).bfloat16()
        name = "fp8-row-e5m2" if spec.name == "dOut" else "fp8-row"
        held.append(quantize(f"{plain(str(spec))} -> {spec}", x, ONE, name))
    emulated = einsum(line, *held)
    assert not has_kernel(*held)
    torch.testing.assert_close(by_kernel(typed, *held), emulated, rtol=2**-6, atol=0.01 * float(emulated.abs().max()))


@pytest.mark.parametrize("mesh", [XY])
def test_a_layer_and_its_gradients_sharded_as_on_one_device(mesh):
    In, W, dOut = (
        drawn(SIZES["B"], SIZES["D"]),
        drawn(SIZES["D"], SIZES["F"], seed=1),
        drawn(SIZES["B"], SIZES["F"], seed=2),
    )
    for name in KINDS:
        # FSDP over X, tensor parallel over Y: Out and its two gradients
        w = quantize("W[D_X, F_Y] -> W[D_X, F_Y] {Q_D}", shard("W[D_X, F_Y]", W, mesh), mesh, name)
        w = all_gather("W[D_X, F_Y] {Q_D} -> W[D, F_Y] {Q_D}", w, mesh)
        x = quantize("In[B_X, D] -> In[B_X, D] {Q_D}", shard("In[B_X, D]", In, mesh), mesh, name)
        Out = unshard("Out[B_X, F_Y]", einsum("In[B_X, D] {Q_D} * W[D, F_Y] {Q_D} -> Out[B_X, F_Y]", x, w), mesh)
        d = shard("dOut[B_X, F_Y]", dOut, mesh)
        x = quantize("In[B_X, D] -> In[B_X, D] {Q_B}", shard("In[B_X, D]", In, mesh), mesh, name)
        d_B = quantize("dOut[B_X, F_Y] -> dOut[B_X, F_Y] {Q_B}", d, mesh, name)
        dW = einsum("In[B_X, D] {Q_B} * dOut[B_X, F_Y] {Q_B} -> dW[D, F_Y] {U_X}", x, d_B)
        dW = unshard("dW[D_X, F_Y]", reduce_scatter("dW[D, F_Y] {U_X} -> dW[D_X, F_Y]", dW, mesh), mesh)
        d_F = quantize("dOut[B_X, F_Y] -> dOut[B_X, F_Y] {Q_F}", d, mesh, name)
        w = quantize("W[D, F_Y] -> W[D, F_Y] {Q_F}", shard("W[D, F_Y]", W, mesh), mesh, name)
        dIn = unshard(
            "dIn[B_X, D] {U_Y}", einsum("dOut[B_X, F_Y] {Q_F} * W[D, F_Y] {Q_F} -> dIn[B_X, D] {U_Y}", d_F, w), mesh
        )

        def one(a, b, q, line, A, B, name=name):
            a, b = (f"{text} -> {text} {{Q_{q}}}" for text in (a, b))
            return einsum(line, quantize(a, A, ONE, name), quantize(b, B, ONE, name))

        alone = (
            one("In[B, D]", "W[D, F]", "D", "In[B, D] {Q_D} * W[D, F] {Q_D} -> Out[B, F]", In, W),
            one("In[B, D]", "dOut[B, F]", "B", "In[B, D] {Q_B} * dOut[B, F] {Q_B} -> dW[D, F]", In, dOut),
            one("dOut[B, F]", "W[D, F]", "F", "dOut[B, F] {Q_F} * W[D, F] {Q_F} -> dIn[B, D]", dOut, W),
        )
        for ours, theirs in zip((Out, dW, dIn), alone, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))


def test_types_read_back_as_written():
    for text in (*TYPES, "W[D] {Q}", "x[B_X, T, D_Y] {Q_B,T}"):
        spec = parse(text)
        assert parse(str(spec)) == spec == parse(str(spec).replace("{Q", "{ Q"))
        assert spec.cotangent(("X", "Y")).scaled == ()
        for part in itertools.chain(*(spec.parts(name) for name in NAMES)):
            assert parse(str(part)) == part
    assert str(parse("W[D, F] {Q_F,D}")) == "W[D, F] {Q}"
    assert [*map(str, parse("W[D_X, F] {Q_D}").parts("nvfp4"))] == ["W.q[D/2_X, F]", "W.s[D/16_X, F]", "W.t[]"]
    assert parse("W.s[D/32_X, F]").local_shape({"D": 256, "F": 8}, {"X": 4}) == (2, 8)
