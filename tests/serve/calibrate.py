"""A cost of the engine's steps from steps that were measured: what the simulator asks on this machine. No torch.

A step's seconds are taken as a sum of what it holds, each at a price that is at least 0: a call of prefill and one of
decode; the tokens of each, as they are computed (prompts are padded to the longest, keys to the longest row); and the
keys that they read. The prices are a least-squares fit in relative errors, so that short steps count as long ones do.
"""

from collections.abc import Sequence

import numpy

from scaling.serve.simulate import ActionTime, WorkSpan
from scaling.serve.states import Move, Run, Work

PRICED = (
    "a call",
    "a token",
    "a key read",
    "a call of decode",
    "a row of decode",
    "a key read in decode",
    "a page moved",
)


def amounts(action: Run | Move, page: int) -> list[float]:
    """How much of each of `PRICED` a step has."""
    if isinstance(action, Move):
        return [0.0] * 6 + [-(-action.tokens // page)]
    prompts = [work for work in action.works if len(work.tokens) > 1]
    return [*_of(prompts), *_of([work for work in action.works if len(work.tokens) == 1]), 0.0]


def _of(works: Sequence[Work]) -> list[float]:
    if not works:
        return [0.0] * 3
    tokens = len(works) * max(work.width for work in works)
    return [1.0, tokens, tokens * max(work.start + work.width for work in works)]


def fit(spans: Sequence[WorkSpan], page: int) -> dict[str, float]:
    """Seconds for one of each of `PRICED`, from measured spans. ValueError without any."""
    if not spans:
        raise ValueError("there are no measured steps to calibrate on\n  fix: serve a trace with the engine first")
    seconds = numpy.array([span.end - span.start for span in spans])
    A = numpy.array([amounts(span.action, page) for span in spans], dtype=float)
    expected, prices = seconds, numpy.zeros(len(PRICED))
    for _ in range(4):  # relative to what is expected, not to what was measured: that would favour what was fast
        weight = 1 / numpy.maximum(expected, 1e-3 * seconds.mean())
        prices = _nonnegative(A * weight[:, None], seconds * weight)
        expected = A @ prices
    return dict(zip(PRICED, prices.tolist(), strict=True))


def _nonnegative(A: numpy.ndarray, y: numpy.ndarray) -> numpy.ndarray:
    """argmin |A x - y| over x >= 0: columns whose x would be negative are left out, the worst first."""
    scale = numpy.abs(A).max(0)
    kept = list(numpy.flatnonzero(scale))
    while kept:
        x = numpy.linalg.lstsq(A[:, kept] / scale[kept], y, rcond=None)[0]
        if x.min() >= 0:
            found = numpy.zeros(A.shape[1])
            found[kept] = x / scale[kept]
            return found
        kept.pop(int(x.argmin()))
    return numpy.zeros(A.shape[1])


def cost(prices: dict[str, float], page: int) -> ActionTime:
    """cost(action) -> seconds at these prices, for `simulate`."""
    row = numpy.array([prices[name] for name in PRICED])
    return lambda action: float(row @ amounts(action, page))
