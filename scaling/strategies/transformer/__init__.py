"""A Transformer under every axis (Parts 4 and 5): P pods, Z stages, X data and FSDP, C context, Y tensor, E experts.

Call `loss_and_grads(params, tokens, targets, config, mesh)`, with params that `shard` has cut to the types of `specs`.
One text serves every mesh: an axis that the mesh lacks, or that has size 1, drops out. docs/a-training-step.md is the
walk of a debugger through these files; to read them, start at `api.loss_and_grads` and go on in this order:

    api      the calls: their options, and this rank's tokens
    step     the call resolved for one mesh, and checked once: a `TrainStep`; types has the leaves' types
    layers   the layers run, forward and back: how weights come and gradients go
    ends     the params outside the layers: embedding, and head with the loss; the vocabulary over Y
    layer    one layer's typed lines, forward and backward; some models have theirs in models.latent, models.linear
    stages   the layers over Z, under any schedule
    lora     adapters beside frozen weights
"""

from typing import TYPE_CHECKING

from scaling.common.lazy import lazy

if TYPE_CHECKING:
    from scaling.strategies.transformer.api import logprobs, loss, loss_and_grads, shard, unshard
    from scaling.strategies.transformer.step import StepOptions
    from scaling.strategies.transformer.types import grad_specs, specs

__all__ = ["StepOptions", "grad_specs", "logprobs", "loss", "loss_and_grads", "shard", "specs", "unshard"]

_HOMES = {  # module -> its names that are passed on here: the types need no torch
    "scaling.strategies.transformer.api": ("logprobs", "loss", "loss_and_grads", "shard", "unshard"),
    "scaling.strategies.transformer.step": ("StepOptions",),
    "scaling.strategies.transformer.types": ("grad_specs", "specs"),
}
__getattr__, __dir__ = lazy("scaling.strategies.transformer", _HOMES)
