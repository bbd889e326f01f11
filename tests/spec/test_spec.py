"""The notation: reading and printing types and lines, with which words a text that is none is refused; and what a type
says of sizes: local shapes, slices, bytes."""

import itertools
import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refused import evaluated, refused

from scaling.common.arguments import shortened
from scaling.spec import Line, ShardingError, Spec, dtype_bytes, format_axes, parse, parse_line

FAST = settings(deadline=None, max_examples=100, derandomize=True)
MESH = {"X": 4, "Y": 2, "data": 2}


@st.composite
def specs(draw, axes=tuple(MESH)):
    """Types over the axes of MESH, with some axes sharded, some unreduced, some replicated."""
    order = draw(st.permutations(axes))
    dims = draw(st.lists(st.sampled_from("BDFHIJ"), unique=True, max_size=3))
    places = [draw(st.sampled_from([*dims, "U", "replicated"])) for _ in order]
    placed = {d: tuple(axis for axis, place in zip(order, places, strict=True) if place == d) for d in [*dims, "U"]}
    name = draw(st.sampled_from(["", "W", "W_in", "dW_out'"]))
    return Spec(name, tuple((d, placed[d]) for d in dims), tuple(sorted(placed["U"])))


CANONICAL = (  # what is printed as it is written
    "[]", "Loss[] {U_XY}", "KV[2, B_X, S]", "dW[D', F'_X] {U_{data}}", "In[B_{X,data}, D]",
    "layers.0.attention.q_proj.weight[N_Y, H, D_X]", "0.weight[F, D_X]", "_orig_mod.fc1.weight[F, D] {U_X}",
    "A[I_X, J] -> A[I, J]", "mlp.fc1.weight[F, D_X] -> 0.weight[F]", "In[B] * W[B] * V[B] -> Out[B]",
)  # fmt: skip
SPELLINGS = {
    "In[B_{XY},D]": "In[B_XY, D]",
    " In [ B_XY , D ] ": "In[B_XY, D]",
    "In[B_{X,Y}, D]": "In[B_XY, D]",
    "In[B_{ data , model }, D]": "In[B_{data,model}, D]",
    "In[B_data, D]": "In[B_{data}, D]",
    "A[I]\t{U_X}\n": "A[I] {U_X}",
    "A[I] {U_YX}": "A[I] {U_XY}",
    "A[I] {U.Y}": "A[I] {U_Y}",
    "A[I,J]*B[J,K]->C[I,K]": "A[I, J] * B[J, K] -> C[I, K]",
    "A[I, J] · B[J, K] → C[I, K]": "A[I, J] * B[J, K] -> C[I, K]",
    "In[B_X, D] *_D W_in[D, F] -> Tmp[B_X, F]": "In[B_X, D] * W_in[D, F] -> Tmp[B_X, F]",
    "A[I, J_X] *_LOCAL B[J_X, K] -> C[I, K] {U_X}": "A[I, J_X] * B[J_X, K] -> C[I, K] {U_X}",
}
TEXTS = dict(zip(CANONICAL, CANONICAL, strict=True)) | SPELLINGS


@pytest.mark.parametrize("text", TEXTS)
def test_a_type_and_a_line_are_printed_in_their_canonical_form(text):
    read = parse_line if "->" in TEXTS[text] else parse
    found, again = read(text), read(TEXTS[text])
    assert str(found) == TEXTS[text]
    assert read(found) is found
    if read is parse:
        assert {found: 1}[again]  # equal, and of one hash
    else:
        assert (again.operands, again.result) == (found.operands, found.result)
        assert found.contract == (("D",) if "*_D" in text else ())


def test_the_parts_of_a_type_and_types_made_from_it():
    spec = parse("W[D_XY, F] {U_Z}")
    assert spec == Spec("W", (("D", ("X", "Y")), ("F", ())), ("Z",))
    assert (spec.dim_names, spec.axes, spec.unreduced) == (("D", "F"), ("X", "Y"), ("Z",))
    assert (spec.axes_of("D"), spec.axes_of("F"), spec.axes_of("B"), spec.index("F")) == (("X", "Y"), (), (), 1)
    with pytest.raises(AttributeError):
        spec.name = "V"
    spec = parse("W[D_X, F]")
    assert str(spec.with_axes("F", ("Y",))) == "W[D_X, F_Y]"
    assert str(spec.with_axes("D", ()).with_unreduced(("Y", "X"))) == "W[D, F] {U_XY}"
    assert str(spec.with_name("dW")) == "dW[D_X, F]"
    assert [spec.same_sharding(parse(text)) for text in ("V[D_X, F]", "W[D_X, F] {U_Y}")] == [True, False]
    for change in (lambda: spec.with_axes("F", ("X",)), lambda: spec.with_unreduced(("X",))):
        with pytest.raises(ShardingError, match="mesh axis X is used twice"):
            change()


# text -> (words of the message, what stands over the caret); lines begin with A[
BAD = {
    "": ("expected a type such as W[D, F_X]", ""),
    ".W[D]": ("expected a type such as W[D, F_X]", "."),
    "fc1.[D]": ("expected a type such as W[D, F_X]: '['", "."),
    "W[9999999999999999999]": ("expected a dim", "9"),
    "W[D F]": ("expected ',' or ']'", "F"),
    "W[, D]": ("expected a dim", ","),
    "W[D_]": ("expected a mesh axis", "]"),
    "W[D_1]": ("expected a mesh axis", "1"),
    "W[D_{X Y}]": ("expected '}' or ','", "Y"),
    "W[D] {U_X": ("expected '}'", ""),
    "W[D] {X}": ("expected the end", "{"),
    "W[D] and more": ("expected the end", "a"),
    "W[D_XX]": ("mesh axis X is used twice", "X]"),
    "W[D_X] {U_X}": ("mesh axis X is used twice", "X}"),
    "W[D, F, D]": ("dim D is used twice", "D]"),
    "A[I]": ("expected '->'", ""),
    "A[I] -> ": ("expected a type", ""),
    "A[I] * -> B[I]": ("expected a type", "-> B[I]"),
    "A[I] -> B[I] -> C[I]": ("expected the end", "-> C[I]"),
    "A[I_X, J_X] -> A[I, J]": ("mesh axis X is used twice", "X] -> A[I, J]"),
    "A[I, J] *_ B[J] -> C[I]": ("expected the dim contracted", "B[J] -> C[I]"),
}


@pytest.mark.parametrize("text", BAD)
def test_bad_syntax_has_a_caret_under_the_place(text):
    words, under = BAD[text]
    with pytest.raises(ShardingError) as error:
        (parse_line if text.startswith("A[") else parse)(text)
    said, quoted, caret, *_ = str(error.value).split("\n")
    assert words in said
    assert quoted == "  " + text
    assert caret.strip() == "^"
    at = caret.index("^") - 2
    assert text[at:].startswith(under)
    assert under or at == len(text)


@pytest.mark.parametrize("text", [None, 3, b"A[I]", ["A[I]"], {}, torch.ones(2)])
def test_a_value_that_is_not_text_is_refused(text):
    for read in (parse, parse_line):
        with pytest.raises(ShardingError, match="written as a string such as"):
            read(text)


pieces = st.sampled_from(
    [*"ABDFXYU_[]{},.*-> ·→'0123", "->", "{U_", "[D_X", "data", "W_in", "]", " {U_X}", "\n", "é", "²"]
)
text_like_types = st.lists(pieces, max_size=25).map("".join)
letters = [*map(chr, range(0x250)), *"→\u2028\ud800\U0001f600"]  # to list all there are takes 4 s
any_letters = st.lists(st.sampled_from(letters), max_size=40).map("".join)
edited = st.tuples(st.sampled_from([*TEXTS]), st.integers(0, 40), st.integers(0, 3), pieces).map(
    lambda t: t[0][: t[1]] + t[3] + t[0][t[1] + t[2] :]
)


@FAST
@given(st.one_of(any_letters, text_like_types, edited))
def test_any_text_parses_and_round_trips_or_is_a_sharding_error(text):
    for read in (parse, parse_line):
        try:
            spec = read(text)
        except ShardingError:
            continue
        again = read(str(spec))
        assert str(again) == str(spec)
        assert again == spec or isinstance(spec, Line)


def test_the_edges_of_what_is_printed():
    """Capital letters alone are written without braces; of a long text an error quotes the place or the beginning."""
    axes = [("X", "Y"), ("x",), ("XY",), ("X", "b")]
    assert [*map(format_axes, axes)] == ["XY", "{x}", "{XY}", "{X,b}"]
    assert [shortened("x" * n) for n in (60, 61)] == ["x" * 60, "x" * 40 + "... (61 characters)"]
    for n in (1, 30, 60, 300):
        dims = ", ".join(f"I{i}" for i in range(n))
        with pytest.raises(ShardingError) as error:
            parse(f"A[{dims}, ?, {dims}]")
        _, quoted, caret, *_ = str(error.value).splitlines()
        assert quoted[caret.index("^")] == "?"
        assert len(quoted) <= 202


@FAST
@given(specs(), st.lists(st.integers(1, 3), min_size=3, max_size=3), st.sampled_from(["bf16", "fp32", "int8", "int4"]))
def test_a_device_has_the_block_that_its_coordinates_count(spec, blocks, dtype):
    """Of each dim, the first axis being the major one; all have the bytes of a block. And the type is read as it is
    printed, and has the cotangent that the law says."""
    assert parse(str(spec)) == spec.validated() == spec
    for axes in (MESH, ("Y", "X"), ()):
        summed = {*axes} - {*spec.axes, *spec.unreduced}
        assert spec.cotangent(axes) == Spec(f"d{spec.name}", spec.dims, tuple(sorted(summed)))
    assert {*spec.axes, *spec.unreduced, *spec.replicated(MESH)} == {*MESH}
    local = tuple(blocks[: len(spec.dims)])
    sizes = {dim: n * math.prod(MESH[axis] for axis in axes) for (dim, axes), n in zip(spec.dims, local, strict=True)}
    assert spec.local_shape(sizes, MESH) == local
    for at in itertools.product(*map(range, MESH.values())):
        coord, wanted = dict(zip(MESH, at, strict=True)), []
        for (_, axes), n in zip(spec.dims, local, strict=True):
            block = 0
            for axis in axes:
                block = block * MESH[axis] + coord[axis]
            wanted.append(slice(block * n, block * n + n))
        assert spec.slices(sizes, MESH, coord) == tuple(wanted)
    nbytes = math.prod(local) * dtype_bytes(dtype)
    assert (spec.nbytes(sizes, MESH, dtype), spec.total_nbytes(sizes, MESH, dtype)) == (nbytes, 16 * nbytes)


def test_sizes_by_name_by_shape_and_by_the_dim_itself():
    spec, loss = parse("KV[2, B_X, S]"), parse("Loss[] {U_X}")
    assert spec.global_shape({"B": 8, "S": 3}) == spec.global_shape((2, 8, 3)) == (2, 8, 3)
    assert spec.local_shape(torch.empty(2, 8, 3).shape, {"X": 4}) == (2, 2, 3)
    assert (loss.local_shape({}, {"X": 4}), loss.nbytes((), {"X": 4}, torch.float32)) == ((), 4)
    assert parse("A[I_X]").local_shape((0,), {"X": 4}) == (0,)


REFUSED = {
    "parse('W[D_XY, F]').local_shape({'D': 12, 'F': 3}, {'X': 4, 'Y': 2})": (
        "dim D of size 12 does not divide into 8 blocks (X=4 * Y=2)\n  fix: make D a multiple of 8"
    ),
    "parse('W[D_Z]').local_shape((12,), {'X': 4})": "unknown mesh axis Z: the mesh has X=4",
    "parse('W[D] {U_Z}').replicated({})": "unknown mesh axis Z: the mesh has no axes",
    "parse('W[D, F]').global_shape({'D': 2})": "dim F needs a size, an int >= 0; got None",
    "parse('W[D]').global_shape({'D': -2})": "got -2",
    "parse('W[D]').global_shape((2, 3))": "has 1 dims, but the sizes given are (2, 3)",
    "parse('KV[2, B]').global_shape((3, 4))": "dim 2 says its own size, but the array has",
    "parse('W[D_X]').slices((8,), {'X': 4}, {})": "needs X in 0..3",
    "parse('W[D_X]').slices((8,), {'X': 4}, {'X': 4})": "needs X in 0..3",
    "parse('W[D]').nbytes((8,), {}, 'float33')": "unknown dtype 'float33'",
    **{f"dtype_bytes({dtype!r})": "unknown dtype" for dtype in (0, -1, None, "")},
}
test_sizes_that_do_not_fit_are_refused = refused(evaluated(REFUSED, globals()), ShardingError)


def test_dtypes_by_name_by_torch_and_by_bytes():
    given = ("bf16", "int4", "fp32", torch.float64, torch.bfloat16, 2, 0.5)
    assert [dtype_bytes(d) for d in given] == [2, 0.5, 4, 8, 2, 2, 0.5]
    for name in ("bf16", "fp16", "f16", "fp32", "f32", "fp64", "f64", "int8", "uint8", "int16", "int64", "bool"):
        full = re.sub(r"^f(p?)(?=\d)", "float", name).replace("bf16", "bfloat16")
        assert dtype_bytes(name) == dtype_bytes(full) == getattr(torch, full).itemsize
    assert parse("W[D]").nbytes((3,), {}, "int4") == 1.5
    assert isinstance(parse("W[D]").nbytes((4,), {}, "int4"), int)
