"""A dry run counts the FLOPs that torch's own formulas give, and shows the rank that sends and holds most."""

from dataclasses import replace
from itertools import product

import pytest
from refused import read_table
from torch.utils.flop_counter import flop_registry

from scaling.configs import Latent, get
from scaling.cost.transformer import saved_widths
from scaling.trace.count import Between
from scaling.train import counting, dry
from scaling.train.counting import count
from scaling.train.settings import Settings

DENSE = get("tiny").with_(L=2, D=16, F=32, H=8, N=4, K=2, V=64)
EXPERTS = DENSE.with_(E=4, k=2)
LATENT = DENSE.with_(K=4, latent=Latent(q_rank=12, kv_rank=10, nope=6, rope=4, value=8))
TABLE = """
what                   model                                                          mesh     recomputed
grouped queries        DENSE                                                          X=2      none
a head for each query  DENSE.with_(K=4, gated=False)                                  P=2,Y=2  block
tied                   DENSE.with_(tied=True)                                         Z=2      matmuls
windows                DENSE.with_(window=(4, None))                                  C=2      attention
latents                LATENT                                                         Y=2      block
experts                EXPERTS                                                        E=2      none
experts, again         EXPERTS                                                        X=2,Y=2  block
a shared expert        EXPERTS.with_(shared=1)                                        Z=2      none
dense layers first     EXPERTS.with_(dense_layers=1, F_dense=24, routing="sigmoid")   X=2      block
experts and latents    LATENT.with_(E=4, k=2, shared=1)                               C=2      none
"""
KINDS = {what: case for what, *case in read_table(TABLE, globals(), ("what", "recomputed"))}


def settings_of(model, remat="none", seq=16, **options) -> Settings:
    return Settings(model, "", "", 8, seq, dtype="bf16", remat=remat, **options)


class BothCounts(Between):
    """The count, and torch's own formulas for the same operations."""

    of_torch = 0

    def saw(self, function, args, given, made):
        super().saw(function, args, given, made)
        if function._overloadpacket in flop_registry and "attention" not in str(function):
            BothCounts.of_torch += flop_registry[function._overloadpacket](*args, out_val=made[0])


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_torch_s_counter(kind, monkeypatch):
    model, sizes, remat = KINDS[kind]
    monkeypatch.setattr(counting, "Between", BothCounts)
    BothCounts.of_torch = 0
    counted = count(settings_of(model, remat), sizes, backend="abstract")
    assert counted.products.amount == BothCounts.of_torch > 0


@pytest.mark.parametrize(("sizes", "pairs"), [({"X": 1}, 16 * 16 / 2), ({"C": 2}, 16 * 17 / 2)])
def test_attention_is_counted_as_a_kernel_and_as_a_ring(sizes, pairs):
    """The scores of causal pairs, of which the ring counts the diagonal whole, in 2 products forward and 5 backward."""
    settings = settings_of(DENSE)
    ranks = [count(settings, sizes, {axis: i}, documents=False) for axis, n in sizes.items() for i in range(n)]
    one = 2 * settings.batch * DENSE.L * DENSE.N * DENSE.H * pairs
    assert sum(rank.attention.amount for rank in ranks) == (2 + 5) * one
    assert all(rank.flops == rank.products.amount + rank.attention.amount for rank in ranks)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "sizes"), [
    (DENSE, {"C": 4}), (DENSE.with_(window=4), {"C": 4}), (DENSE, {"Z": 2, "C": 2}), (EXPERTS, {"P": 2, "Y": 2}),
])  # fmt: skip
def test_the_rank_that_is_shown_sends_and_holds_most_and_only_then_each_does_so(model, sizes):
    settings = replace(settings_of(model), seq=32)
    coords = [dict(zip(sizes, at, strict=True)) for at in product(*map(range, sizes.values()))]
    ranks, shown = [count(settings, sizes, coord) for coord in coords], dry.fullest(settings, sizes)
    for of in (lambda rank: rank.memory, lambda rank: rank.sent, lambda rank: rank.attention.amount):
        assert of(shown) == max(map(of, ranks))
    assert all(rank == ranks[0] for rank in ranks) == ("\neach of" in "\n" + dry.table(shown, sizes))


def test_each_active_expert_holds_what_the_widths_say():
    """By layer and token: its activations, and the rows of D that go to it and come back."""
    held, said = {}, {}
    for k in (2, 4):
        config = get("tiny").with_(D=64, F=128, E=8, k=k)
        of_layers = [count(Settings(config.with_(L=L), "", "", 32, 256, dtype="bf16"), {"X": 1}) for L in (4, 5)]
        bytes_ = [
            c.memory - 3 * c.params - c.state for c in of_layers
        ]  # params, float32 gradients, masters and moments
        held[k], said[k] = (bytes_[1] - bytes_[0]) / (2 * 32 * 256), sum(saved_widths(config, "none").values())
    assert held[4] - held[2] == pytest.approx(said[4] - said[2], rel=0.05)


@pytest.mark.parametrize(("window", "hides"), [(None, True), (64, True), (64, False)])
def test_all_layers_share_a_mask(window, hides):
    """Of documents, or of a window: a deeper model holds no more of it."""
    model, held = get("tiny").with_(D=64, F=64, N=2, K=2, H=8, V=64), []
    for L in (3, 6):
        a, b = ((model.with_(L=L, window=window), hides), (model.with_(L=L), False))
        masked, plain = (count(settings_of(one, seq=256), {"X": 1}, documents=some).memory for one, some in (a, b))
        held.append(masked - plain)
    assert held[0] == held[1] >= 256 * 256 * 2
