"""Params, and short tables of gradients, for tests that compare with stored numbers of others."""

import torch

from scaling import tree
from scaling.mesh import AbstractMesh
from scaling.models import transformer


def shaken(config):
    """Params of which no gain is 1 and no bias 0."""
    specs = transformer.specs_of(config)
    noise = tree.map(lambda _: tree.Normal(0.1), specs)
    more = tree.init(noise, specs, config.sizes, AbstractMesh({}), 4, torch.float64, "cpu")
    return tree.map(torch.add, transformer.init(config, 3, torch.float64), more)


def probes(grads) -> dict[str, list[float]]:
    """Two numbers a leaf, of which any change in it changes one: its norm, and its product with a fixed vector."""
    found = {}
    for name, leaf in tree.named_leaves(grads, "").items():
        along = torch.arange(leaf.numel(), dtype=leaf.dtype).cos()
        found[name] = [leaf.norm().item(), (leaf.flatten() @ along).item()]
    return found
