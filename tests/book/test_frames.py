"""What chapters draw: rings frame by frame; chunks streamed through a core, as 02_tpus has them; and layouts in memory
against numpy arrays that are laid out as XLA's documents say."""

import random
import textwrap
from types import SimpleNamespace

import numpy as np
import pytest
from refused import evaluated, refused
from running import chapter, functions

from scaling.book import hlo
from scaling.show import bars

DRAWN = SimpleNamespace(**functions("03_collectives"))

RINGS = (  # frames, how what a device holds is written, and what is drawn
    (DRAWN.gather_frames(4, 1), lambda held: DRAWN.draw_shards(held, 4), """
        device 0  A...      A..D   A.CD   ABCD
        device 1  .B..      AB..   AB.D   ABCD
        device 2  ..C.      .BC.   ABC.   ABCD
        device 3  ...D      ..CD   .BCD   ABCD"""),
    (DRAWN.gather_frames(4), lambda held: DRAWN.draw_shards(held, 4), """
        device 0  A...      AB.D   ABCD
        device 1  .B..      ABC.   ABCD
        device 2  ..C.      .BCD   ABCD
        device 3  ...D      A.CD   ABCD"""),
    (DRAWN.gather_frames(5), lambda held: DRAWN.draw_shards(held, 5), """
        device 0  A....     AB..E  ABCDE
        device 1  .B...     ABC..  ABCDE
        device 2  ..C..     .BCD.  ABCDE
        device 3  ...D.     ..CDE  ABCDE
        device 4  ....E     A..DE  ABCDE"""),
    (DRAWN.scatter_frames(4), DRAWN.partial_sum, """
        device 0  D: 0      C: 0+3  B: 0+2+3  A: 0+1+2+3
        device 1  A: 1      D: 0+1  C: 0+1+3  B: 0+1+2+3
        device 2  B: 2      A: 1+2  D: 0+1+2  C: 0+1+2+3
        device 3  C: 3      B: 2+3  A: 1+2+3  D: 0+1+2+3"""),
    (DRAWN.exchange_frames(4), DRAWN.draw_chunks, """
        device 0  a0 | a1 a2 a3  a0 d0 | d1 d2  a0 d0 c0 | c1  a0 d0 c0 b0
        device 1  b1 | b2 b3 b0  b1 a1 | a2 a3  b1 a1 d1 | d2  b1 a1 d1 c1
        device 2  c2 | c3 c0 c1  c2 b2 | b3 b0  c2 b2 a2 | a3  c2 b2 a2 d2
        device 3  d3 | d0 d1 d2  d3 c3 | c0 c1  d3 c3 b3 | b0  d3 c3 b3 a3"""),
)  # fmt: skip


def test_rings_drawn():
    """Each device sends to its neighbours alone, and in the end each has what the collective gives it."""
    for found, cell, drawn in RINGS:
        said: list = []
        page = SimpleNamespace(show=lambda text, html, said=said: said.extend([text, html()]))
        DRAWN.show_frames.__globals__["page"] = page
        DRAWN.show_frames(found, cell)
        head, _, *rows = said[0].splitlines()
        assert head.split() == " ".join(["at first", *(f"hop {i}" for i in range(1, len(found)))]).split()
        assert rows == textwrap.dedent(drawn).splitlines()[1:]
        assert said[1].count("hop ") == len(found) - 1


@pytest.mark.chapter
@pytest.mark.parametrize(
    "given",
    """
        2 4 1  1 2  LXL0....SL1....SL2....S     ....C0--...C1--...C2--.
        2 4 1  2 2  LXL0L1..SL2.S...S           ....C0--C1--C2--.
        4 2 1  2 2  LXL0--L1--SL2--S.S          ......C0..C1...C2.
        3 3 2  1 2  LXL0-...S0L1-...S1L2-...S2  .....C0-.....C1-.....C2-..
        3 3 2  2 2  LXL0-L1-S0L2-S1.S2          .....C0-C1-..C2-..
        2 4 1  2 0  L0L1..SL2.S...S             ..C0--C1--C2--.
    """.strip().splitlines(),
)
def test_chunks_wait_for_their_place_in_one_buffer_and_overlap_in_two(given):
    """Seconds of loading, multiplying and storing a chunk; buffers; seconds of a first load: a column a second.
    Each chunk is loaded, multiplied and stored, and the next one has its place after that."""
    *times, buffers, first, hbm, core = (int(word) if word.isdigit() else word for word in given.split())
    run = chapter("02_tpus").names["streamed"](3, *times, buffers=buffers, first=first)
    assert bars.text(run, round(bars.end_of(run))).splitlines() == [f"HBM  |{hbm}|", f"core |{core}|"]


FUSION = (
    "%fusion.3 = bf16[32,32,4096]{2,1,0:T(8,128)(2,1)S(1)} fusion(bf16[32,32,8192]{2,1,0:T(8,128)(2,1)S(1)} "
    "%fusion.32), kind=kCustom, calls=%all-reduce-scatter.3"
)
DOT = (
    "ROOT %dot.4 = f32[16,128]{1,0} dot(f32[256,16]{1,0} %convert.3, f32[128,256]{1,0} %Arg_0.1), "
    "lhs_contracting_dims={0}, rhs_contracting_dims={1}"
)


def laid_out(shape: hlo.Shape) -> list[int]:
    """The elements' numbers in memory, -1 for padding: transposed, padded and cut by numpy, one level after another."""
    x = np.arange(int(np.prod(shape.shape))).reshape(shape.shape).transpose(shape.order[::-1])
    for tile in shape.tiles:
        x = x.reshape((1,) * (len(tile) - x.ndim) + x.shape)
        front = x.ndim - len(tile)
        x = np.pad(x, [(0, 0)] * front + [(0, -n % t) for n, t in zip(x.shape[front:], tile, strict=True)],
                   constant_values=-1)  # fmt: skip
        cut = [part for n, t in zip(x.shape[front:], tile, strict=True) for part in (n // t, t)]
        x = x.reshape(*x.shape[:front], *cut)
        pairs = range(front, x.ndim)
        x = x.transpose(*range(front), *pairs[::2], *pairs[1::2])
    return x.ravel().tolist()


@pytest.mark.parametrize("seed", range(20))
def test_offsets_of_elements_in_tiled_layouts(seed):
    rng = random.Random(seed)
    dims = rng.randint(1, 4)
    order = rng.sample(range(dims), dims)
    tiles = [tuple(rng.randint(1, 4) for _ in range(rng.randint(1, min(dims, 2)))) for _ in range(rng.randint(0, 3))]
    sizes = tuple(rng.randint(1, 6) for _ in range(dims))
    shape = hlo.Shape(rng.choice(["f32", "bf16", "s8"]), sizes, tuple(order), tuple(tiles))
    memory = laid_out(shape)
    assert shape.padded_bytes == len(memory) * shape.itemsize
    for number, index in enumerate(np.ndindex(*shape.shape)):
        assert memory[shape.offset(*index) // shape.itemsize] == number
    assert hlo.parse_shape(str(shape)) == shape


def test_the_books_picture():
    small = hlo.parse_shape("f32[3,5]{1,0:T(2,2)}")
    assert (small.padded, small.padded_bytes / small.nbytes) == ((4, 6), 1.6)
    with pytest.raises(IndexError):
        small.offset(3, 0)


def test_lines_of_a_program_are_read():
    fusion = hlo.operation(FUSION)
    assert (fusion.name, fusion.op, fusion.result.space) == ("fusion.3", "fusion", 1)
    assert fusion.operands == (("fusion.32", hlo.parse_shape("bf16[32,32,8192]{2,1,0:T(8,128)(2,1)S(1)}")),)
    assert dict(fusion.attributes) == {"kind": "kCustom", "calls": "%all-reduce-scatter.3"}
    dot = hlo.operation(DOT)
    assert [name for name, _ in dot.operands] == ["convert.3", "Arg_0.1"]
    assert dict(dot.attributes) == {"lhs_contracting_dims": "{0}", "rhs_contracting_dims": "{1}"}


NO_SHAPES = ("f32(3,5)", "q7[3]", "f32[3,5]{1,1}", "f32[3,5]{0}", "f32[3]{0:T(0)}", "f32[3]{0:Q}")
REFUSED = {f"hlo.parse_shape({text!r})": "layout" for text in NO_SHAPES}
REFUSED["hlo.operation('fusion.3 is a fusion')"] = "is not an operation"
test_refused = refused(evaluated(REFUSED, globals()))
