"""Optimizers as pure functions over pytrees: `update(grads, state, params) -> (params, state)`.

    optimizer = adamw(3e-4, weight_decay=0.1)
    state = optimizer.init(params)
    grads, norm = clip_by_global_norm(grads, SPECS, mesh, 1.0)
    params, state = optimizer.update(grads, state, params, specs=SPECS, mesh=mesh)

SGD and AdamW are elementwise, so they update shards without communication; Muon communicates where it needs whole
matrices. The state has the specs of the params. The updates equal SGD, AdamW and Muon of torch.optim. Nothing
is changed in place unless the caller gives its buffers away (`donate=True`).
"""

from scaling.optim.clipping import clip_by_global_norm, global_norm, loss_scaled, scaled_to
from scaling.optim.matrices import muon
from scaling.optim.rules import Optimizer, adamw, sgd

__all__ = [
    "Optimizer",
    "adamw",
    "clip_by_global_norm",
    "global_norm",
    "loss_scaled",
    "muon",
    "scaled_to",
    "sgd",
]
