"""Params, and short tables of gradients, for tests that compare with stored numbers of others."""

import torch

from scaling import serve, tree
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


MORE = {"starcoder2": 0.1}  # all its products have biases, which they add before a product is rounded, and we after it
TEXTS = torch.randint(61, (128, 16), generator=torch.Generator().manual_seed(0))


def rounded(config) -> dict:
    """Params in bfloat16."""
    return tree.map(lambda p: p.to(torch.bfloat16), shaken(config))


def of_bf16(config) -> list[float]:
    """Each text's error of logits in bfloat16: half of the text by prefill, and the other by decode steps."""
    params, found = rounded(config), []
    for dtype in (torch.bfloat16, torch.float32):
        own = tree.map(lambda p, dtype=dtype: p.to(dtype), params)
        half, cache = TEXTS.shape[1] // 2, serve.init_cache(config, *TEXTS.shape)
        logits, cache = serve.extend(own, TEXTS[:, :half], cache, config, donate=True)
        steps = [logits]
        for tokens in TEXTS[:, half:].T:
            logits, cache = serve.decode(own, tokens, cache, config, donate=True)
            steps.append(logits[:, None])
        found.append(torch.cat(steps, 1))
    return relative_errors(*found)


def relative_errors(low, wide) -> list[float]:
    """The norm of the difference of each text's logits[B, T, V], over that of the wider ones."""
    low, wide = low.double().flatten(1), wide.double().flatten(1)
    return ((low - wide).norm(dim=1) / wide.norm(dim=1)).tolist()


def bound_of(ours, theirs) -> float:
    """The upper end of the one-sided 95% interval of the mean of ours minus theirs, text by text.

    A text in which a rounding chooses other experts has several times the usual error: it is left out."""
    both = torch.tensor([ours, theirs], dtype=torch.float64)
    usual = (both < 2 * both.median(1, keepdim=True).values).all(0)
    more = both[0, usual] - both[1, usual]
    return (more.mean() + 1.645 * more.std() / len(more) ** 0.5).item()
