"""A step traced at sizes that are primes says what the step takes at any sizes, on any mesh, by any recipe."""

import random
from dataclasses import replace
from math import prod

import pytest
from refused import read_table

from scaling.configs import get
from scaling.trace.symbols import NotMonomial, Symbols
from scaling.train import programs
from scaling.train.counting import count
from scaling.train.programs import step_by_symbols
from scaling.train.settings import Settings
from scaling.train.structure import FEW

DENSE, EXPERTS = get("llama3-8b"), get("mixtral-8x7b")
CHUNKS = EXPERTS.with_(E=8, k=1, shared=1, routing="inputs", window=(1024, 2048, None, 1024) * 8, chunked=True)
LATENTS = get("deepseek-v3").with_(E=16, k=4, expert_groups=1, top_groups=1, F_shared=1024, dense_layers=1)
TABLE = """
what                   model
dense                  DENSE
a head for each query  DENSE.with_(K=16, N=16)
tied                   DENSE.with_(tied=True)
a window               DENSE.with_(window=512)
windows                DENSE.with_(window=(512, None) * 16)
caps                   DENSE.with_(score_cap=50.0, logit_cap=30.0)
few heads              DENSE.with_(K=2, N=16)
one head a rank        DENSE.with_(K=4, N=16)
experts                EXPERTS.with_(E=8, k=2)
many experts           EXPERTS.with_(E=64, k=4)
a shared expert        EXPERTS.with_(E=16, k=2, shared=1, F_shared=1024)
a dense layer first    EXPERTS.with_(E=8, k=2, dense_layers=1, F_dense=2048)
dense layers between   EXPERTS.with_(E=8, k=2, dense_layers=tuple(range(1, 32, 2)), F_dense=2048)
latents                LATENTS
chunks                 CHUNKS.with_(unrotated=(2, 5), qk_norm=True, qk_bare=True, query_growth=0.1)
"""
KINDS = dict(read_table(TABLE, globals(), ("what",)))


def drawn(kind: str, seed: int) -> tuple:
    """A job: its settings, its mesh, the rank's coordinates, and whose buffers count."""
    draw = random.Random(f"{kind} {seed}")
    model, pick = KINDS[kind], draw.choice
    sizes = {"P": pick([1, 2]), "Z": pick([1, 1, 2]), "X": pick([1, 4, 8]), "C": pick([1, 1, 2]), "Y": pick([1, 2, 4])}
    sizes = {axis: n for axis, n in (sizes | {"E": pick([1, 2, 4]) if model.moe else 1}).items() if n > 1}
    sizes = sizes or {"X": 4}
    M, L = pick([4, 8]) if "Z" in sizes else pick([1, 2, 5]), pick([6, 7, 8])
    windows = model.window[:L] if isinstance(model.window, tuple) else model.window
    dense = tuple(l for l in model.dense if l < L)
    if len(dense) > 1:  # no stage stores them
        sizes.pop("Z", None)
    model = model.with_(
        L=L, window=windows, dense_layers=dense, D=pick([2048, 4096]) * 2, F=pick([1024, 3584]), V=pick([32000, 128256])
    )
    settings = Settings(
        model, "", "", prod(sizes.get(axis, 1) for axis in "PXE") * M * pick([1, 2]), pick([1024, 2048, 4096]),
        microbatches=M, dtype="bf16", zero=pick([0, 1, 2, 3]),
        remat=pick(["none", "block", "matmuls", "attention"]),
    )  # fmt: skip
    coord = {axis: sizes[axis] - 1 for axis in "ZC" if axis in sizes and (axis == "C" or draw.random() < 0.5)}
    pipeline = pick(["1f1b", "zb-h1", "interleaved:2", "dualpipev"]) if "Z" in sizes and M == 8 else "1f1b"
    backend = pick(["gloo", "abstract"])
    reduce = pick(["once", "each"]) if settings.zero else "once"
    return replace(settings, pipeline=pipeline, reduce=reduce), sizes, coord, backend


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "seed", [0, pytest.param(1, marks=pytest.mark.slow), *(pytest.param(n, marks=pytest.mark.sweep) for n in (2, 3, 4))]
)
def test_a_drawn_job_is_counted_as_its_own_step(kind, seed, monkeypatch):
    given = drawn(kind, seed)
    wanted = count(*given)
    if kind != "many experts":  # some of whose sizes are sums
        monkeypatch.setattr(programs, "count_on_disk", None)  # nothing is counted at its own sizes
    found = step_by_symbols(*given)
    assert found.lines == wanted.lines
    for name in ("products", "reads", "attention", "params", "state", "memory"):
        assert getattr(found, name) == getattr(wanted, name), name
    for name in ("plain", "curved"):  # where the squares of few gradients are summed, a row is not full
        assert getattr(found, name).number == getattr(wanted, name).number
        assert getattr(found, name).amount == pytest.approx(getattr(wanted, name).amount, rel=1e-6)


def test_memory_of_stages_that_reduce_in_each_microbatch_is_linear_from_three_layers_on():
    model = DENSE.with_(L=8, D=4096, F=3584, V=32000)
    settings = Settings(model, "", "", 8, 1024, microbatches=2, dtype="bf16", remat="block", reduce="each")
    for stage in (0, 1):
        given = settings, {"Z": 2, "X": 4}, {"Z": stage}, "abstract"
        assert step_by_symbols(*given).memory == count(*given).memory


def test_what_is_no_product_of_the_sizes_is_refused_and_counted_at_its_own_sizes(monkeypatch):
    symbols = Symbols((("b", 13, 13), ("D", 17 * 19, 17), ("X", 19, 19)), (("b+1", 14 * 23),), (2,))
    assert symbols.monomial(4 * 13 * 17).single == ((("D", 1), ("X", -1), ("b", 1)), 4)
    assert symbols.monomial(14 * 23 * 19).single == ((("X", 1), ("b+1", 1)), 1)
    with pytest.raises(NotMonomial, match="29 is not a product"):
        symbols.monomial(29)
    with pytest.raises(NotMonomial, match="are also products"):
        replace(symbols, sums=(("b+1", 26),)).monomial(13)
    tiny = get("tiny").with_(L=2, D=32, F=64, H=8, N=4, K=2)
    for change in ({"rotary_share": 0.5}, {"dropout": 0.1}):
        long = Settings(tiny.with_(L=5, **change), "", "", 4, 16)
        assert step_by_symbols(long, {"X": 2}).products == count(long, {"X": 2}).products
    learned = Settings(tiny.with_(L=5, learned_positions=16), "", "", 4, 16)  # fewer than would be traced
    assert step_by_symbols(learned, {"X": 2}).memory == count(learned, {"X": 2}).memory
    with pytest.raises(ValueError, match="sequences of 17 tokens"):
        step_by_symbols(replace(learned, seq=17), {"X": 2})
    settings = Settings(tiny, "", "", 20, 16, microbatches=10, optimizer="muon", dtype="fp16")
    assert step_by_symbols(settings, {"X": 2}) == count(settings, {"X": 2})


def test_the_loss_may_hold_most_of_a_step_in_any_number_of_chunks():
    model = DENSE.with_(L=5, D=512, F=64, N=8, K=8, H=16)
    given = Settings(model, "", "", 48, 8192, microbatches=3, dtype="bf16", remat="block"), {"X": 8}
    assert programs.loss_chunks(*given)[0] > FEW
    assert step_by_symbols(*given).memory == count(*given).memory
