"""A layer of experts that its tests share, and what one device computes."""

import torch

from scaling.configs import Config
from scaling.spec import parse
from scaling.strategies import expert

SIZES = {"L": 1, "D": 6, "F": 8, "N": 2, "K": 1, "H": 4, "V": 7}
SOFTMAX = Config("softmax", **SIZES, E=8, k=2)
SIGMOID = Config(
    "sigmoid", **SIZES, E=8, k=3, shared=2, routing="sigmoid", expert_groups=4, top_groups=2, routed_scale=2.5
)


def mask_of(how: str) -> "torch.Tensor | None":
    """bool[4, 6]: sequences of 6, 4, 0 and 5 tokens, the rest padding."""
    return torch.arange(6) < torch.tensor([6, 4, 0, 5])[:, None] if how == "padded" else None


def problem(config: Config, how: str):
    """Params, x[4, 6, D] and the cotangent dy, whole: normal numbers, in which no two tokens or experts are alike."""
    rng = torch.Generator().manual_seed(len(how))
    sizes = {"D": config.D, "E": config.E, "F": config.F}
    wide = {"D": config.D, "F": config.S}

    def draw(types, sizes):
        return {
            name: draw(text, wide)
            if isinstance(text, dict)
            else torch.randn(parse(text).global_shape(sizes), generator=rng, dtype=torch.float64) / 2
            for name, text in types.items()
        }

    params = draw(expert.specs(config, None), sizes)
    x, dy = (torch.randn(4, 6, config.D, generator=rng, dtype=torch.float64) for _ in range(2))
    if how == "one":  # all tokens choose expert 5 first; most others are empty
        x[..., 0] = x[..., 0].abs() + 1
        params["router"] *= 0.1
        params["router"][0] = torch.tensor([0, 0, 0, 0, 0, 9.0, 0, 0])
    if how == "ties":
        params["router"][:, 4:] = params["router"][:, :4]
        x[1] = 0
    return params, x, dy
