"""Bugs that others published about caches, as tests by name. Those of scheduling are in test_engine.py, those of the
batch in test_engine_model.py, those of speculative sampling in test_speculative.py, those of caches that move from one
mesh to another in test_move.py."""

import pytest
import torch

from scaling import serve
from scaling.configs import Config
from scaling.models import transformer

CONFIG = Config("tiny", L=2, D=16, F=24, N=4, K=2, H=4, V=31)
params = transformer.init(CONFIG, 1, torch.float64)
tokens = torch.randint(0, 31, (2, 9), generator=torch.Generator().manual_seed(0))


def test_llm_compressor_2176_scales_are_not_one():
    """llm-compressor#2176, Model-Optimizer#20, vllm PR#11906: an int8 cache without its scales is refused, and those
    that it has are of its values: each key and value is found again within half a step."""
    plain = serve.prefill(params, tokens, serve.init_cache(CONFIG, 2, 9), CONFIG)[1]["KV"]
    cache = serve.prefill(params, tokens, serve.init_cache(CONFIG, 2, 9, dtype=torch.int8), CONFIG)[1]
    scale = cache["scale"][..., None].double()
    first = slice(None), 0  # the first layer, whose input is the same in both
    assert ((cache["KV"] * scale - plain)[first].abs() <= scale[first] * 0.5001).all()
    assert not (scale == 1).any()
    broken = {name: leaf for name, leaf in cache.items() if name != "scale"}
    with pytest.raises(ValueError, match="without its scales"):
        serve.decode(params, tokens[:, 0], broken | {"lengths": torch.tensor([3, 3])}, CONFIG)


def test_sglang_25790_prefill_and_decode_read_the_same_int8_cache():
    """sglang#25790: logits of a prompt at once and token by token, 110 places: both see the numbers that are stored."""
    text = torch.randint(0, 31, (1, 110), generator=torch.Generator().manual_seed(1))
    whole, _ = serve.extend(params, text, serve.init_cache(CONFIG, 1, 110, dtype=torch.int8), CONFIG)
    cache = serve.init_cache(CONFIG, 1, 110, dtype=torch.int8)
    for n in range(110):
        logits, cache = serve.decode(params, text[:, n], cache, CONFIG, donate=True)
        assert (logits - whole[:, n]).abs().max() < 1e-12, n


def test_nano_gpt_613_cached_is_uncached():
    """nanoGPT PR#613, "a bug or not?": token by token and at once, the logits differ by rounding alone."""
    whole = transformer.forward(params, tokens, config=CONFIG)
    cache = serve.init_cache(CONFIG, 2, 9)
    for n in range(9):
        logits, cache = serve.prefill(params, tokens[:, n : n + 1], cache, CONFIG)
        assert (logits - whole[:, n]).abs().max() < 1e-12
