"""What attention over a split sequence, experts and dropout would broadcast, wrap round or take for true: refused."""

import pytest
import torch

from scaling.configs import Config
from scaling.mesh import Mesh
from scaling.models.dropout import dropout
from scaling.strategies import context
from scaling.strategies.expert import moe

MESH, NAN = Mesh({"X": 1, "C": 1}), float("nan")
G = torch.Generator().manual_seed(0)
Q, K, V = (torch.randn(2, 8, heads, 4, generator=G) for heads in (4, 2, 2))
ATTENTION = {
    **{f"causal {c!r}": {"causal": c} for c in ("no", None, 1)},
    **{f"scale {s!r}": {"scale": s} for s in (NAN, float("inf"), 0.0, -1.0, True, "1")},
    **{f"window {w!r}": {"window": w} for w in (0, 2.5, "2", True)},
    **{f"axis {axis!r}": {"axis": axis} for axis in (None, 3, "Q")},
    "segments a list": {"segments": [[0] * 8] * 2},
    "segments elsewhere": {"segments": torch.zeros(2, 8, device="meta").long()},
    "keys elsewhere": {"K": K.to("meta")},
    "no queries": {"Q": None},
}


@pytest.mark.parametrize("given", ATTENTION.values(), ids=ATTENTION)
def test_attention_is_asked_for_what_there_is(given):
    given = {"Q": Q, "K": K, "V": V} | given
    with pytest.raises(ValueError, match="fix:" if given.get("axis") != "Q" else "unknown mesh axis"):
        context.attention(given.pop("Q"), given.pop("K"), given.pop("V"), MESH, **given)


PLACES = {
    "a dim beyond": lambda: context.to_zigzag(Q, 9, MESH),
    "a dim by name": lambda: context.from_zigzag(Q, "1", MESH),
    "no tensor": lambda: context.to_zigzag(None, 1, MESH),
    "an odd half": lambda: context.positions("zigzag", 7, MESH),
    "positions of no form": lambda: context.positions("plain", 8, MESH),
    "positions below 0": lambda: context.positions("ring", -8, MESH),
    **{f"work of {t!r} on {c!r}": lambda t=t, c=c: context.work("ring", t, c) for t, c in ((8, 0), (8.0, 2), (-8, 2))},
    "work of no window": lambda: context.work("ring", 8, 2, window=-3),
    "work of a text": lambda: context.work("ring", 8, 2, causal="no"),
}


@pytest.mark.parametrize("call", PLACES.values(), ids=PLACES)
def test_places_are_whole_numbers_that_divide(call):
    with pytest.raises(ValueError, match="fix:"):
        call()


EXPERTS = Config("experts", L=1, D=4, F=8, N=2, K=2, H=2, V=16, E=4, k=2)
SHAPES = {"router": (4, 4), "W_in": (4, 4, 8), "W_gate": (4, 4, 8), "W_out": (4, 8, 4)}
PARAMS = {name: torch.randn(shape, generator=G) for name, shape in SHAPES.items()}
ROWS = torch.randn(2, 3, 4, generator=G)
LAYERS = {
    "a router of ints": {"router": PARAMS["router"].long()},
    "a router of fewer": {"router": PARAMS["router"][:, :2]},
    "fewer experts": {"W_in": PARAMS["W_in"][:2]},
    "a gate of another width": {"W_gate": PARAMS["W_gate"][..., :4]},
    "swapped": {"W_out": PARAMS["W_in"]},
    "one bias for all": {"bias": torch.zeros(1)},
    "no router": {"router": None},
}


@pytest.mark.parametrize("changed", LAYERS.values(), ids=LAYERS)
def test_experts_are_those_of_the_config(changed):
    with pytest.raises(ValueError, match="fix:"):
        moe(PARAMS | changed, ROWS, EXPERTS, MESH, "X")


@pytest.mark.parametrize("x", [None, ROWS[0], ROWS.long(), ROWS[..., :2]], ids=["none", "2 dims", "ints", "another D"])
def test_rows_are_floats_of_three_dims(x):
    with pytest.raises(ValueError, match="fix:"):
        moe(PARAMS, x, EXPERTS, MESH, "X")
    with pytest.raises(ValueError, match="fix:"):
        moe(PARAMS, ROWS, EXPERTS.with_(E=8), MESH, "X")


DROPS = [{"rate": rate} for rate in (1.0, 2.0, -0.5, NAN, "0.5")]
DROPS += [{"samples": torch.arange(1)}, {"positions": torch.arange(1)}, {"x": ROWS.long()}, {"x": ROWS[0]}]
DROPS += [{"seed": 1.5}]


@pytest.mark.parametrize("given", DROPS, ids=lambda given: " ".join(given))
def test_dropout_has_a_place_for_each_element(given):
    plain = {"rate": 0.5, "seed": 3, "samples": torch.arange(2), "positions": torch.arange(3), "x": ROWS} | given
    with pytest.raises(ValueError, match="fix:"):
        dropout(plain.pop("x"), "attention", **plain)
