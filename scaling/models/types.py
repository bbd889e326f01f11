"""The types of a decoder-only transformer's params, and which models are computed. No torch is needed."""

from collections.abc import Callable
from functools import lru_cache

from scaling.configs import Config
from scaling.models.leaves import Leaf, leaves_of
from scaling.spec import parse

AXES = ("P", "Z", "X", "C", "Y", "E")  # of a training mesh

SCALINGS = ("linear", "llama3", "yarn")  # of rotary frequencies: `models.rope`


def uncomputed(config: Config) -> list[str]:
    """What the model has that no code here computes, by name."""
    found = list(config.uncomputed)
    headed = {"biases": config.attention_bias or config.output_bias, "qk_norm": config.qk_norm}
    found += [f"latent attention with {name}" for name, has in headed.items() if has and config.latent]
    if config.dense_layers and not (config.moe and config.dense_layers < config.L):
        found.append(f"dense_layers={config.dense_layers} without layers with experts after them")
    found += [f"{config.norms} norms a layer"] if config.norms != 2 else []
    if config.rope_scaling and config.rope_scaling.kind not in SCALINGS:
        found.append(f"rope_scaling of type {config.rope_scaling.kind!r}")
    if config.moe and config.activation is not None:
        found.append(f"activation {config.activation!r} in experts")
    return found


def computes(config: Config) -> bool:
    """Whether `models.transformer` computes that model."""
    return not uncomputed(config)


def check_computed(config: Config) -> None:
    """ValueError that names what is not computed, if anything is not."""
    if found := uncomputed(config):
        raise ValueError(
            f"{config.name}: not computed here: {', '.join(found)}"
            "\n  fix: choose a model that is, or take what is not computed out of the config"
        )


def specs_of(config: Config) -> dict:
    """The types of this model's params, whole. ValueError for a model that is not computed."""
    check_computed(config)
    return types_of(config, lambda name, leaf: without(leaf.trained, AXES))


def types_of(config: Config, type_of: Callable[[str, Leaf], str]) -> dict:
    """The tree of this model's types, each made of a leaf's name and its line in the table."""

    def each(leaves: dict) -> dict:
        return {name: each(leaf) if isinstance(leaf, dict) else type_of(name, leaf) for name, leaf in leaves.items()}

    return each(leaves_of(config))


@lru_cache(maxsize=4096)
def without(text: str, gone: tuple[str, ...]) -> str:
    """The type with none of its dims split over these axes."""
    spec = parse(text)
    for dim, axes in spec.dims:
        spec = spec.with_axes(dim, [axis for axis in axes if axis not in gone])
    return str(spec)
