import itertools
from functools import partial

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from scaling.models.attention import dot_product_attention, flash_attention, sdpa

IDS = torch.tensor([[0] * 4 + [1] * 5 + [7] * 4, [3] * 13])  # the ids of packed documents


def qkv(B=2, T=13, S=13, N=4, K=2, H=8):
    make = torch.Generator().manual_seed(0)
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, H)
    return [torch.randn(shape, dtype=torch.float64, generator=make, requires_grad=True) for shape in shapes]


def by_hand(Q, K, V, window=None, segments=None, scale=None):
    """Attention query by query, over the keys that it sees."""
    (B, T, N, H), (_, S, heads, _) = Q.shape, K.shape
    rows = []
    for b, t, n in itertools.product(range(B), range(T), range(N)):
        at = S - T + t
        keys = [s for s in range(at + 1) if window is None or at - s < window]
        keys = [s for s in keys if segments is None or segments[b, s] == segments[b, at]]
        k, v = (x[b, keys, n * heads // N] for x in (K, V))
        rows.append((Q[b, t, n] @ k.T * (H**-0.5 if scale is None else scale)).softmax(-1) @ v)
    return torch.stack(rows).view(B, T, N, H)


@pytest.mark.parametrize(("T", "S"), [(13, 13), (5, 13), (1, 9)])
@pytest.mark.parametrize(
    "given", [{}, {"window": 3}, {"segments": True}, {"window": 4, "segments": True, "scale": 0.7}]
)
def test_attention_query_by_query_forward_and_backward(T, S, given):
    inputs = qkv(T=T, S=S)
    given = given | ({"segments": IDS[:, :S]} if "segments" in given else {})
    want = by_hand(*inputs, **given)
    cotangent = torch.randn(want.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    slopes = torch.autograd.grad(want, inputs, cotangent)
    for attention in (sdpa, dot_product_attention, flash_attention, partial(flash_attention, block=4)):
        got = attention(*inputs, **given)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(torch.autograd.grad(got, inputs, cotangent), slopes, rtol=1e-11, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.*not yet implemented the batching rule", "ignore:`torch.jit.script`")
def test_under_torch_func():
    inputs = [x.detach() for x in qkv(T=6, S=6)]
    tangents = [torch.randn_like(x) for x in inputs]
    many = [torch.stack([x, t]) for x, t in zip(inputs, tangents, strict=True)]

    def slopes(f):
        return torch.vmap(torch.func.grad(lambda *a: f(*a).sin().sum(), argnums=(0, 1, 2)))(*many)

    for f in (sdpa, partial(flash_attention, block=2)):
        torch.testing.assert_close(slopes(f), slopes(dot_product_attention), rtol=1e-11, atol=1e-12)
    ours, wanted = (torch.func.jvp(f, tuple(inputs), tuple(tangents)) for f in (sdpa, dot_product_attention))
    torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-12)


def test_flash_attention_skips_the_future():
    with FlopCounterMode(display=False) as counter:
        flash_attention(*qkv(B=1, T=64, S=64, N=2, K=1), block=16)
    assert counter.get_total_flops() == 4 * 64 * 64 * 2 * 8 * 10 / 16  # 10 of the 16 pairs of blocks are visible
