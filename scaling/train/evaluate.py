"""The loss of held-out sequences on any mesh: a last batch that is not full is filled with rows that do not count."""

import math

import torch

from scaling import tree
from scaling.strategies import transformer
from scaling.strategies.axes import present
from scaling.train.settings import Settings
from scaling.train.tokens import Batches

IGNORED = -100  # a target that does not count


def local(x: torch.Tensor, mesh) -> torch.Tensor:
    """This rank's rows and tokens of x[B, T], whole on every rank."""
    return tree.shard(x.to(mesh.device), str(present("t[B_PXE, T_C]", mesh)), mesh)


def evaluate(params, valid: Batches, settings: Settings, mesh) -> float:
    """The mean loss over the targets that count of the first `eval_batches` batches (0: all), in nats; no gradients.

    exp of it is the perplexity. Experts' auxiliary terms are left out.
    """
    config, rows = settings.model.with_(aux_coef=0.0, z_coef=0.0), settings.batch // settings.microbatches
    last = min(valid.sequences, settings.eval_batches * settings.batch or valid.sequences)
    total, count = 0.0, 0
    for first in range(0, last, rows):
        some, targets, segments = (filled(x, rows) for x in valid.rows(range(first, min(first + rows, last))))
        targets[last - first :] = IGNORED
        if counted := int((targets != IGNORED).sum()):
            batch = [local(x, mesh) for x in (some, targets)]
            loss = transformer.loss(params, *batch, config, mesh, segments=local(segments, mesh))
            total, count = total + loss.item() * counted, count + counted
    return total / count if count else math.nan


def filled(x: torch.Tensor, rows: int) -> torch.Tensor:
    """x[b, T] -> x[rows, T], with rows of zeros."""
    return torch.cat([x, x.new_zeros(rows - len(x), *x.shape[1:])])
