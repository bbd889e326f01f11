"""Inference (Parts 7 and 8): caches, prefill and decode, sampling, the engine and its parts.

Call `generate(params, prompts, config, max_new_tokens)`, or `prefill` and `decode` with a cache of `init_cache`. Start
reading at `generation.generate`, which is one screen over `step.prefill` and `step.decode`. The names of this package
are loaded when they are first used, because the scheduler and the simulator need no torch.

    types    the types of params and caches, by form; weights with scales
    cache    init_cache: contiguous, in pages, 8 bits; moved to another mesh
    slots    the new tokens' places in a cache, and which places they see
    step     prefill, decode, extend
    fixed    decode steps of few shapes without host reads, compiled or captured; a model with its pages
    forms    one listing for each way to shard a decode step
    sampling, generation         from logits to tokens; generate, stream, score
    requests                     a request as data, read from JSON
    states, pages, scheduler     the engine's state machine, without torch
    simulate, engine             a trace of requests in time: modelled, and computed
    text, loading                for the commands
    command, generate_command    `python -m scaling.serve`, `python -m scaling.generate`
    web                          the engine behind HTTP: the extra `serve`
"""

from typing import TYPE_CHECKING

from scaling.common.lazy import lazy

if TYPE_CHECKING:
    from scaling.serve.cache import init_cache, move
    from scaling.serve.generation import generate, score, stream
    from scaling.serve.requests import Sampling
    from scaling.serve.step import decode, extend, prefill
    from scaling.serve.types import cache_specs, quantize, specs

__all__ = [
    "Sampling",
    "cache_specs",
    "decode",
    "extend",
    "generate",
    "init_cache",
    "move",
    "prefill",
    "quantize",
    "score",
    "specs",
    "stream",
]

_HOMES = {  # module -> its names that are passed on here
    "scaling.serve.cache": ("init_cache", "move"),
    "scaling.serve.generation": ("generate", "score", "stream"),
    "scaling.serve.requests": ("Sampling",),
    "scaling.serve.step": ("decode", "extend", "prefill"),
    "scaling.serve.types": ("cache_specs", "quantize", "specs"),
}

__getattr__, __dir__ = lazy("scaling.serve", _HOMES)
