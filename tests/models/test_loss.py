"""The loss of one device, beside torch's cross entropy."""

import pytest
import torch
import torch.nn.functional as F

from scaling.configs import Config
from scaling.models import transformer


def test_targets_smoothing_and_z_loss_are_torch_s():
    """Targets of their own, some of which do not count, beside torch's cross entropy of the same logits."""
    config = Config("plain", 1, 16, 24, 2, 2, 8, 32)
    params, g = transformer.init(config, 0, torch.float64), torch.Generator().manual_seed(3)
    tokens, targets = (torch.randint(0, config.V, (2, 6), generator=g) for _ in range(2))
    targets[0, :3] = -100
    weights = torch.rand(2, 6, generator=g, dtype=torch.float64)
    logits = transformer.forward(params, tokens, config=config).flatten(0, 1)
    w = weights.flatten() * (targets.flatten() != -100)
    ce = F.cross_entropy(logits, targets.flatten(), reduction="none", label_smoothing=0.1)
    wanted = (w * (ce + 0.01 * logits.logsumexp(-1).square())).sum() / w.sum()
    given = {"targets": targets, "weights": weights, "label_smoothing": 0.1, "z_loss": 0.01}
    got = transformer.loss(params, tokens, config=config, **given)
    torch.testing.assert_close(got, wanted, rtol=1e-13, atol=0)
    with pytest.raises(ValueError, match="targets must be"):
        transformer.loss(params, tokens, config=config, targets=targets[:, :3])
