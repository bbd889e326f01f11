"""Layouts against numpy arrays that are laid out as XLA's documents say; the book's two pictures; its lines read."""

import random

import numpy as np
import pytest

from scaling.book import hlo

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


def random_shape(rng: random.Random) -> hlo.Shape:
    dims = rng.randint(1, 4)
    order = list(range(dims))
    rng.shuffle(order)
    tiles = [tuple(rng.randint(1, 4) for _ in range(rng.randint(1, min(dims, 2)))) for _ in range(rng.randint(0, 3))]
    shape = tuple(rng.randint(1, 6) for _ in range(dims))
    return hlo.Shape(rng.choice(["f32", "bf16", "s8"]), shape, tuple(order), tuple(tiles))


@pytest.mark.parametrize("seed", range(60))
def test_every_element_lies_where_it_does(seed):
    shape = random_shape(random.Random(seed))
    memory = laid_out(shape)
    assert shape.padded_bytes == len(memory) * shape.itemsize
    for number, index in enumerate(np.ndindex(*shape.shape)):
        assert memory[shape.offset(*index) // shape.itemsize] == number
    assert hlo.parse_shape(str(shape)) == shape


def test_the_books_pictures():
    """f32[3,5] in tiles of 2 x 2 is padded to 4 x 6; bf16[4,8]: pairs of rows, a column at a time."""
    small = hlo.parse_shape("f32[3,5]{1,0:T(2,2)}")
    assert small.padded == (4, 6)
    assert small.padded_bytes / small.nbytes == 1.6
    assert [small.offset(*at) // 4 for at in ((0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (2, 0))] == [0, 1, 2, 3, 4, 12]
    pairs = hlo.parse_shape("bf16[4,8]{1,0:T(2,4)(2,1)}")
    assert [pairs.offset(*at) // 2 for at in ((0, 0), (1, 0), (0, 1), (1, 1), (0, 4), (2, 0))] == [0, 1, 2, 3, 8, 16]


def test_lines_of_a_program_are_read():
    fusion = hlo.operation(FUSION)
    assert (fusion.name, fusion.op, fusion.result.space) == ("fusion.3", "fusion", 1)
    assert fusion.operands == (("fusion.32", hlo.parse_shape("bf16[32,32,8192]{2,1,0:T(8,128)(2,1)S(1)}")),)
    assert dict(fusion.attributes) == {"kind": "kCustom", "calls": "%all-reduce-scatter.3"}
    dot = hlo.operation(DOT)
    assert [name for name, _ in dot.operands] == ["convert.3", "Arg_0.1"]
    assert dict(dot.attributes) == {"lhs_contracting_dims": "{0}", "rhs_contracting_dims": "{1}"}


@pytest.mark.parametrize("text", ["f32(3,5)", "q7[3]", "f32[3,5]{1,1}", "f32[3,5]{0}", "f32[3]{0:T(0)}", "f32[3]{0:Q}"])
def test_what_is_no_layout_is_refused(text):
    with pytest.raises(ValueError, match="layout"):
        hlo.parse_shape(text)


def test_an_index_outside_is_refused():
    with pytest.raises(IndexError):
        hlo.parse_shape("f32[3,5]{1,0:T(2,2)}").offset(3, 0)


def test_what_is_no_operation_is_refused():
    with pytest.raises(ValueError, match="is not an operation"):
        hlo.operation("fusion.3 is a fusion")
