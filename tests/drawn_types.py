"""Types drawn at random, for the properties that every type has."""

from hypothesis import settings
from hypothesis import strategies as st

from scaling.spec import Spec

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
