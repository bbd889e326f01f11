"""The most memory that a step holds at once, by its closed form: nothing is kept that the book throws away."""

import pytest
import torch

from scaling import tree
from scaling.book.largest import largest
from scaling.configs import Config
from scaling.cost import transformer as tm
from scaling.mesh import AbstractMesh
from scaling.models import transformer as model
from scaling.strategies import transformer
from scaling.trace.peak import peak_memory

CONFIG, X = Config("large", 8, 1024, 4096, 8, 8, 128, 64), 4


def peak(remat, tokens, keep_weights):
    """Bytes of one rank of X=4: params, and all that the step makes."""
    mesh = AbstractMesh({"X": X})
    params = model.init(CONFIG, mesh=mesh, specs=transformer.specs(CONFIG, mesh))
    ids = torch.empty(1, tokens, dtype=torch.int64, device="meta")
    with peak_memory() as memory:
        tree.map(torch.sum, params)  # so that they count already
        transformer.loss_and_grads(params, ids, ids, CONFIG, mesh, remat=remat, keep_weights=keep_weights)
    return memory.peak


def closed_form(remat, tokens, keep_weights):
    """The fullest of the layers' backward passes. Layer l has the stored shards, the activations of layers 0 to l, its
    own computed again, its weights and the next ones gathered, its gradients whole and those of the layer above being
    reduced, the others' shards, and what lies between its lines: dAct, dTmp and dGate, and two of the stream."""
    c, L = CONFIG, CONFIG.L
    layer = 4 * (4 * c.D * c.N * c.H + 3 * c.D * c.F)
    saved, every = (tm.saved_bytes(c, tokens, policy, "fp32") / L for policy in (remat, "none"))
    between = (0 if remat == "none" else every) + 4 * tokens * (3 * c.F + 2 * c.D)

    def held(l):
        gathered = L if keep_weights else min(2, l + 1)
        under_way, done = int(l < L - 1) * (1 + 1 / X), max(0, L - 2 - l) / X
        return (l + 1) * saved + between + layer * (L / X + gathered + 1 + under_way + done)

    return largest(held(l) for l in range(L))


@pytest.mark.parametrize(
    ("remat", "tokens", "keep_weights"),
    [
        ("none", 1024, False),
        ("none", 4096, False),
        ("none", 4096, True),
        ("block", 4096, False),
        ("block", 8192, False),
    ],
)
def test_peak_is_the_closed_form(remat, tokens, keep_weights):
    assert peak(remat, tokens, keep_weights) == pytest.approx(closed_form(remat, tokens, keep_weights), rel=0.05)


def test_the_loss_alone_holds_the_weights_of_two_layers():
    """Those that are used, and the next ones: so few tokens that nothing else counts. Experts have no backward here,
    which would keep theirs."""
    config, mesh = CONFIG.with_(name="large, experts", E=4, k=2), AbstractMesh({"X": X})
    params = model.init(config, mesh=mesh, specs=transformer.specs(config, mesh))
    ids = torch.empty(1, 64, dtype=torch.int64, device="meta")
    with peak_memory() as memory:
        tree.map(torch.sum, params)
        transformer.loss(params, ids, ids, config, mesh)
    layer = 4 * (4 * config.D * config.N * config.H + 3 * config.E * config.D * config.F)
    assert memory.peak == pytest.approx(layer * (config.L / X + 2), rel=0.05)
