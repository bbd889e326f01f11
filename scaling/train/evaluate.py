"""The loss of held-out sequences on any mesh: a last batch that is not full is filled with rows that do not count."""

import math
from collections.abc import Sequence

import torch

from scaling import tree
from scaling.strategies import transformer
from scaling.strategies.axes import present
from scaling.train.batches import IGNORED, Batches
from scaling.train.settings import Settings


def local(x: torch.Tensor, mesh) -> torch.Tensor:
    """This rank's rows and tokens of x[B, T], whole on every rank."""
    return tree.shard(x.to(mesh.device), str(present("t[B_PXE, T_C]", mesh)), mesh)


def evaluate(params, valid: Sequence[Batches], settings: Settings, mesh) -> float:
    """The mean loss over the targets that count, in nats, of the first `eval_batches` batches of each corpus (0: all).

    exp of it is the perplexity. Experts' auxiliary terms are left out, and no gradient is computed.
    """
    config, rows = settings.model.with_(aux_coef=0.0, z_coef=0.0), settings.batch // settings.microbatches
    total, count = 0.0, 0
    for held in valid:
        last = min(held.sequences, settings.eval_batches * settings.batch or held.sequences)
        for first in range(0, last, rows):
            some, targets, segments = (_filled(x, rows) for x in held.rows(range(first, min(first + rows, last))))
            targets[last - first :] = IGNORED
            if counted := int((targets != IGNORED).sum()):
                some, targets, segments = (local(x, mesh) for x in (some, targets, segments))
                loss = transformer.loss(params, some, targets, config, mesh, segments=segments)
                total, count = total + loss.item() * counted, count + counted
    return total / count if count else math.nan


def _filled(x: torch.Tensor, rows: int) -> torch.Tensor:
    """x[b, T] -> x[rows, T], with rows of zeros."""
    return torch.cat([x, x.new_zeros(rows - len(x), *x.shape[1:])])
