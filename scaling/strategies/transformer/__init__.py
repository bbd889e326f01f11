"""A Transformer under every axis (Parts 4 and 5): P pods, Z stages, X data and FSDP, C context, Y tensor, E experts.

    api     what a step is asked for, checked once            types    the params' types as they are stored
    layer   one layer's typed lines, forward and backward     latent, experts   what only some models have in it
    ends    embedding and loss, the vocabulary over Y         stages   the layers over Z, under any schedule
    step    the layers run, forward and back                  moves    how weights come and gradients go
    contexts   where a rank's tokens lie                      lora     adapters beside frozen weights

One text serves every mesh: an axis that the mesh lacks, or that has size 1, drops out.
"""

from typing import TYPE_CHECKING

from scaling.common.lazy import lazy

if TYPE_CHECKING:
    from scaling.strategies.transformer.api import logprobs, loss, loss_and_grads, shard, unshard
    from scaling.strategies.transformer.types import grad_specs, specs

__all__ = ["grad_specs", "logprobs", "loss", "loss_and_grads", "shard", "specs", "unshard"]

_HOMES = {  # module -> what of it stands here: the types need no torch
    "scaling.strategies.transformer.api": ("logprobs", "loss", "loss_and_grads", "shard", "unshard"),
    "scaling.strategies.transformer.types": ("grad_specs", "specs"),
}
__getattr__, __dir__ = lazy("scaling.strategies.transformer", _HOMES)
