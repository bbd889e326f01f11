"""The casts of arrays with scales, compared with rules that are written out number by number, torch and torchao."""

import math

import pytest
import torch

from scaling.mesh import AbstractMesh
from scaling.scaled import dequantize, quantize
from scaling.scaled.rounding import FP4, TOP, packed, rounded, widened
from scaling.spec import FORMATS

ONE = AbstractMesh({})
ROWS = "W[M, K] -> W[M, K] {Q_K}"
BACK = "W[M, K] {Q_K} -> W[M, K]"
EXPONENT = {"float8_e4m3fn": 8, "float8_e5m2": 15}  # of the largest number, as the OCP specification of MX has it
ROW_FORMATS = [name for name, f in FORMATS.items() if not f.whole]


def drawn(seed=0, rows=64, K=256):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, K, generator=g) * torch.exp(3 * torch.randn(rows, 1, generator=g))
    x[1], x[2, :40], x[3, ::3], x[4] = 0, 0, 0, 1e-20
    return x


def test_fp4_goes_to_the_nearest_even():
    x = torch.linspace(-7, 7, 2801)

    def nearest(v: float) -> float:
        size = min(range(8), key=lambda i: (abs(FP4[i] - min(abs(v), 6.0)), i % 2))
        return math.copysign(FP4[size], v)

    f = FORMATS["nvfp4"]
    found = widened(rounded(x[:2800], f), f)
    assert found.tolist() == [nearest(v) for v in x[:2800].tolist()]


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8-rceil", "mxfp8-e5m2"])
def test_mx_follows_the_rules_of_its_specification(name):
    f, x = FORMATS[name], drawn()
    found = quantize(ROWS, x, ONE, f)
    for row in range(0, 64, 7):
        for block in range(256 // 32):
            some = x[row, 32 * block : 32 * block + 32]
            amax, top = float(some.abs().max()), TOP[f.values]
            if amax == 0:
                power = -127
            elif f.ceil:  # the least power of two by which nothing is above the largest number
                power = next(n for n in range(-127, 128) if amax <= top * 2.0**n)
            else:
                power = max(-127, math.frexp(amax)[1] - 1 - EXPONENT[f.values])
            assert found.s.view(torch.uint8)[row, block] == power + 127
            scaled = torch.tensor([min(max(v / 2.0**power, -top), top) for v in some.tolist()])
            assert torch.equal(found.q[row, 32 * block : 32 * block + 32], scaled.to(found.q.dtype))


def test_nvfp4_follows_its_rules():
    x = drawn(2)
    found = quantize(ROWS, x, ONE, "nvfp4")
    assert found.t is not None
    assert float(found.t) == pytest.approx(float(x.abs().max()) / (448 * 6), rel=1e-6)
    blocks = x.unflatten(1, (-1, 16))
    s = (blocks.abs().amax(-1) / 6 / found.t).clamp(2**-6, 448).to(torch.float8_e4m3fn)
    assert torch.equal(found.s.float(), s.float())
    codes = widened(found.q, FORMATS["nvfp4"]).unflatten(1, (-1, 16))
    error = (blocks / (s.float() * found.t)[..., None] - codes).abs()
    assert (error <= 1.0 + 1e-5).all()  # half of the widest gap, 4 to 6, of what is not clamped: s rounds by 1/16


@pytest.mark.parametrize("name", ROW_FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dequantized_is_within_the_bound_of_the_format(name, dtype):
    f = FORMATS[name]
    for seed in range(4):
        x = drawn(seed).to(dtype)
        y = dequantize(BACK, quantize(ROWS, x, ONE, f), ONE)
        assert y.dtype == dtype
        amax = x.float().abs().unflatten(1, (-1, f.block or 256)).amax(-1).repeat_interleave(f.block or 256, 1)
        # of a number at most amax: half a gap at the top, which FLOOR clamps by up to 1/8, NVFP4 by its scale's 1/16
        bound = {"float8_e4m3fn": 1 / 8 if name == "mxfp8" else 1 / 14, "float8_e5m2": 1 / 8, "int8": 1 / 254}
        bound |= {"float4_e2m1fn": 1 / 6 + 1 / 16, "int4": 1 / 14}
        least = float(x.float().abs().max()) / 448 / 64 if name == "nvfp4" else 1e-15
        error = (y.float() - x.float()).abs()
        assert (error <= amax * (bound[f.values] + (2**-8 if dtype == torch.bfloat16 else 1e-5)) + least).all(), name


@pytest.mark.parametrize("name", ROW_FORMATS)
@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_what_is_not_finite_stays_so(name, odd):
    x = torch.ones(4, 128)
    x[2, 5] = odd
    y = dequantize(BACK, quantize(ROWS, x, ONE, name), ONE)
    assert not torch.isfinite(y[2, 5])


@pytest.mark.parametrize("name", ROW_FORMATS)
def test_zeros_stay_zeros_on_shapes_of_every_kind(name):
    for rows in (0, 1, 3):
        x = torch.zeros(rows, 128)
        assert torch.equal(dequantize(BACK, quantize(ROWS, x, ONE, name), ONE), x)


def test_two_values_share_a_byte():
    code = torch.arange(16, dtype=torch.uint8)
    assert packed(code).tolist() == [0x10 + 0x22 * i for i in range(8)]


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8-rceil", "mxfp8-e5m2", "nvfp4", "fp8-row", "fp8-row-e5m2"])
def test_equal_to_torchao(name):
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    f, x = FORMATS[name], drawn(3)
    y = quantize(ROWS, x, ONE, f)
    if name == "nvfp4":
        from torchao.prototype.mx_formats import nvfp4_tensor as nv

        s, q = nv.nvfp4_quantize(x, 16, nv.per_tensor_amax_to_scale(x.abs().max()))[:2]
    elif f.block:
        mode = mx.ScaleCalculationMode.RCEIL if f.ceil else mx.ScaleCalculationMode.FLOOR
        s, q = mx.to_mx(x, getattr(torch, f.values), 32, mode)
    else:
        from torchao.float8.config import ScalingGranularity
        from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
        from torchao.float8.float8_training_tensor import LinearMMConfig

        how = {"scaling_granularity": ScalingGranularity.AXISWISE, "axiswise_dim": -1}
        r = hp_tensor_to_float8_dynamic(x, getattr(torch, f.values), LinearMMConfig(), **how)
        s, q = r._scale.reciprocal().flatten(), r._data
    assert torch.equal(y.q.view(torch.uint8), q.view(torch.uint8))
    assert torch.equal(y.s.view(torch.uint8).flatten(), s.view(torch.uint8).flatten())
