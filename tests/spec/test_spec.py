"""The notation: reading and printing types and lines, and with which words a text that is none is refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from scaling.common.arguments import shortened
from scaling.spec import Line, ShardingError, Spec, format_axes, parse, parse_line

FAST = settings(deadline=None, max_examples=200, derandomize=True)
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


CANONICAL = [
    "W[D, F_X]",
    "W_in[D_X, F_Y]",
    "In[B_XY, D]",
    "In[B_YX, D]",
    "In[B_{data,model}, D]",
    "In[B_{X,data}, D]",
    "[B, D]",
    "[]",
    "Loss[] {U_XY}",
    "Out[B_X, D] {U_Y}",
    "KV[2, B_X, S]",
    "dW[D', F'_X] {U_{data}}",
    "fc1.weight[F, D_X]",
    "layers.0.attention.q_proj.weight[N_Y, H, D_X]",
    "0.weight[F, D_X]",
    "_orig_mod.fc1.weight[F, D] {U_X}",
]
SPELLINGS = {
    "In[B_{XY},D]": "In[B_XY, D]",
    " In [ B_XY , D ] ": "In[B_XY, D]",
    "In[B_{X,Y}, D]": "In[B_XY, D]",
    "In[B_{ data , model }, D]": "In[B_{data,model}, D]",
    "In[B_data, D]": "In[B_{data}, D]",
    "A[I]{U_X}": "A[I] {U_X}",
    "A[I] { U_XY }": "A[I] {U_XY}",
    "A[I] {U_{X,Y}}": "A[I] {U_XY}",
    "A[I] {U_YX}": "A[I] {U_XY}",
    "A[I] {U.Y}": "A[I] {U_Y}",
    "A[I]\t{U_X}\n": "A[I] {U_X}",
}


@pytest.mark.parametrize(("text", "canonical"), [*zip(CANONICAL, CANONICAL, strict=True), *SPELLINGS.items()])
def test_a_type_is_printed_in_its_canonical_form(text, canonical):
    assert str(parse(text)) == canonical
    assert parse(text) == parse(canonical)
    assert hash(parse(text)) == hash(parse(canonical))
    assert parse(parse(text)) is parse(text)


def test_the_parts_of_a_type():
    spec = parse("W[D_XY, F] {U_Z}")
    assert spec == Spec("W", (("D", ("X", "Y")), ("F", ())), ("Z",))
    assert (spec.dim_names, spec.axes, spec.unreduced) == (("D", "F"), ("X", "Y"), ("Z",))
    assert (spec.axes_of("D"), spec.axes_of("F"), spec.axes_of("B"), spec.index("F")) == (("X", "Y"), (), (), 1)
    assert spec.replicated({"X": 2, "Y": 2, "Z": 2, "W": 3}) == ("W",)
    with pytest.raises(AttributeError):
        spec.name = "V"


def test_types_made_from_types():
    spec = parse("W[D_X, F]")
    assert str(spec.with_axes("F", ("Y",))) == "W[D_X, F_Y]"
    assert str(spec.with_axes("D", ()).with_unreduced(("Y", "X"))) == "W[D, F] {U_XY}"
    assert str(spec.with_name("dW")) == "dW[D_X, F]"
    assert spec.same_sharding(parse("V[D_X, F]"))
    assert not spec.same_sharding(parse("W[D_X, F] {U_Y}"))
    for change in (lambda: spec.with_axes("F", ("X",)), lambda: spec.with_unreduced(("X",))):
        with pytest.raises(ShardingError, match="mesh axis X is used twice"):
            change()


LINES = {
    "A[I_X, J] -> A[I, J]": ("A[I_X, J] -> A[I, J]", ()),
    "A[I,J]*B[J,K]->C[I,K]": ("A[I, J] * B[J, K] -> C[I, K]", ()),
    "A[I, J] · B[J, K] → C[I, K]": ("A[I, J] * B[J, K] -> C[I, K]", ()),
    "In[B_X, D] *_D W_in[D, F] -> Tmp[B_X, F]": ("In[B_X, D] * W_in[D, F] -> Tmp[B_X, F]", ("D",)),
    "A[I, J_X] *_LOCAL B[J_X, K] -> C[I, K] {U_X}": ("A[I, J_X] * B[J_X, K] -> C[I, K] {U_X}", ()),
    "In[B] * W[B] * V[B] -> Out[B]": ("In[B] * W[B] * V[B] -> Out[B]", ()),
}


@pytest.mark.parametrize("text", LINES)
def test_lines(text):
    canonical, contract = LINES[text]
    line = parse_line(text)
    assert (str(line), line.contract) == (canonical, contract)
    again = parse_line(canonical)
    assert (again.operands, again.result) == (line.operands, line.result)
    assert parse_line(line) is line


# text -> (words of the message, what stands over the caret)
BAD = {
    "": ("expected a type such as W[D, F_X]", ""),
    "W": ("expected a type such as W[D, F_X]", ""),
    "3[D]": ("expected a type such as W[D, F_X]", "3"),
    ".W[D]": ("expected a type such as W[D, F_X]", "."),
    "fc1.[D]": ("expected a type such as W[D, F_X]: '['", "."),
    "W[9999999999999999999]": ("expected a dim", "9"),
    "W[D_X": ("expected ',' or ']'", ""),
    "W[D F]": ("expected ',' or ']'", "F"),
    "W[D,]": ("expected a dim", "]"),
    "W[, D]": ("expected a dim", ","),
    "W[D_]": ("expected a mesh axis", "]"),
    "W[D_{}]": ("expected a mesh axis", "}"),
    "W[D_1]": ("expected a mesh axis", "1"),
    "W[D_{X Y}]": ("expected '}' or ','", "Y"),
    "W[D] {U_X": ("expected '}'", ""),
    "W[D] {X}": ("expected the end", "{"),
    "W[D] and more": ("expected the end", "a"),
    "W[D_X, F_X]": ("mesh axis X is used twice", "X]"),
    "W[D_XX]": ("mesh axis X is used twice", "X]"),
    "W[D_X] {U_X}": ("mesh axis X is used twice", "X}"),
    "W[D] {U_{Y,Y}}": ("mesh axis Y is used twice", "Y}}"),
    "W[D_{data}, F_data]": ("mesh axis data is used twice", "data]"),
    "W[D, F, D]": ("dim D is used twice", "D]"),
}


@pytest.mark.parametrize("text", BAD)
def test_bad_syntax_has_a_caret_under_the_place(text):
    words, under = BAD[text]
    with pytest.raises(ShardingError) as error:
        parse(text)
    said, quoted, caret, *_ = str(error.value).split("\n")
    assert words in said
    assert quoted == "  " + text
    assert caret.strip() == "^"
    at = caret.index("^") - 2
    assert text[at:].startswith(under)
    assert under or at == len(text)


def test_named_parameters_are_names_as_they_are():
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ModuleDict({"mlp": torch.nn.Linear(3, 2)}))
    for name, p in module.named_parameters():
        dims = ", ".join("FD"[-p.dim() :])
        assert parse(f"{name}[{dims}]").name == name
    line = parse_line("mlp.fc1.weight[F, D_X] -> mlp.fc1.weight[F, D]")
    assert str(line) == "mlp.fc1.weight[F, D_X] -> mlp.fc1.weight[F, D]"


BAD_LINES = {
    "A[I]": "expected '->'",
    "A[I] -> ": "expected a type",
    "A[I] * -> B[I]": "expected a type",
    "A[I] * B[I]": "expected '->'",
    "A[I] -> B[I] -> C[I]": "expected the end",
    "A[I_X, J_X] -> A[I, J]": "mesh axis X is used twice",
    "A[I, J] *_ B[J] -> C[I]": "expected the dim contracted",
}


@pytest.mark.parametrize("text", BAD_LINES)
def test_bad_lines(text):
    with pytest.raises(ShardingError, match=BAD_LINES[text]) as error:
        parse_line(text)
    assert "\n  " + text in str(error.value)


@pytest.mark.parametrize("text", [None, 3, b"A[I]", ["A[I]"], {}, ("A", "[I]"), torch.ones(2)])
def test_what_is_no_text_is_refused(text):
    for read in (parse, parse_line):
        with pytest.raises(ShardingError, match="written as a string such as"):
            read(text)


pieces = st.sampled_from(
    [*"ABDFXYU_[]{},.*-> ·→'0123", "->", "{U_", "[D_X", "data", "W_in", "]", " {U_X}", "\n", "é", "²"]
)
text_like_types = st.lists(pieces, max_size=25).map("".join)
letters = [*map(chr, range(0x250)), *"→\u2028\ud800\U0001f600"]  # to list all there are takes 4 s
any_letters = st.lists(st.sampled_from(letters), max_size=40).map("".join)
edited = st.tuples(st.sampled_from([*CANONICAL, *LINES]), st.integers(0, 40), st.integers(0, 3), pieces).map(
    lambda t: t[0][: t[1]] + t[3] + t[0][t[1] + t[2] :]
)


@pytest.mark.slow
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
        if isinstance(spec, Line):
            assert (again.operands, again.result) == (spec.operands, spec.result)
        else:
            assert again == spec


@pytest.mark.slow
@FAST
@given(specs())
def test_every_type_prints_and_parses_back(spec):
    assert parse(str(spec)) == spec
    assert spec.validated() == spec
    assert {*spec.axes, *spec.unreduced, *spec.replicated(MESH)} == set(MESH)


def test_an_error_quotes_the_beginning_of_a_long_text():
    for length in (0, 60, 61, 12345):
        said = shortened("x" * length)
        assert said == ("x" * length if length <= 60 else "x" * 40 + f"... ({length:,} characters)")


@pytest.mark.parametrize(
    ("axes", "said"), [(("X", "Y"), "XY"), (("x",), "{x}"), (("XY",), "{XY}"), (("X", "b"), "{X,b}")]
)
def test_capital_letters_alone_are_written_without_braces(axes, said):
    assert format_axes(axes) == said


@pytest.mark.parametrize("n", [1, 30, 60, 300])
def test_an_error_shows_its_place_in_a_long_text(n):
    dims = ", ".join(f"I{i}" for i in range(n))
    with pytest.raises(ShardingError) as error:
        parse(f"A[{dims}, ?, {dims}]")
    _, quoted, caret, *_ = str(error.value).splitlines()
    assert quoted[caret.index("^")] == "?"
    assert len(quoted) <= 202


@pytest.mark.parametrize(
    ("text", "mesh", "cotangent"),
    [
        ("W[D_X, F]", {"X": 2, "Y": 2}, "dW[D_X, F] {U_Y}"),
        ("W[D_X, F] {U_Y}", {"X": 2, "Y": 2}, "dW[D_X, F]"),
        ("W[D, F]", ("Y", "X"), "dW[D, F] {U_XY}"),
        ("W[D, F] {U_X}", (), "dW[D, F]"),
        ("W[D, F]", (), "dW[D, F]"),
    ],
)
def test_the_law_of_cotangents(text, mesh, cotangent):
    assert str(parse(text).cotangent(mesh)) == cotangent
