"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685): some matrices W are replaced by the sum W + s A B.

W is frozen, so it has no gradient and no optimizer state; the factors A and B are trained. Their types follow from
the type of W in `models.leaves`: A has the inputs of W and the rank r, B has r and the outputs of W.

    W_Q[L_Z, D_X, N_Y, H]      A[L_Z, D_X, r]       B[L_Z, r, N_Y, H]
    W_O[L_Z, N_Y, H, D_X]      A[L_Z, N_Y, H, r]    B[L_Z, r, D_X]
    W_UQ[L_Z, R_X, N_Y, A]     A[L_Z, R_X, r]       B[L_Z, r, N_Y, A]
    W_in[L_Z, E_E, D_X, F_Y]   A[L_Z, E_E, D_X, r]  B[L_Z, E_E, r, F_Y]

So s A B is a product of shards with the type of W, which takes no communication. Adapters are a separate tree, by the
stack of the layers: {"layers": {"W_Q": {"A": ..., "B": ...}}}, and "dense" in models with dense layers first.

The sum has the dtype of W, so training computes exactly as the merged model does. In bfloat16 the sum loses what is
below half a unit in the last place of W: where s A B is 1e-3 of W, 78% of its effect on x W; at 1e-2 17%, at 1e-1 2%.
PEFT computes x W + s (x A) B, which loses 0.3%, and loses as much as is lost here when the adapters are merged.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from scaling.configs import Config
from scaling.models.leaves import LAYER, Leaf, leaves_of, specs_of
from scaling.spec import Spec, parse

MATRICES = tuple(name for name in LAYER if name.startswith("W_"))


@dataclass(frozen=True)
class Lora:
    """The matrices that have adapters, their rank r, and alpha: the product A B is multiplied by s = alpha / r."""

    rank: int
    on: tuple[str, ...] = ("W_Q", "W_V")
    alpha: float = 16.0

    @property
    def scale(self) -> float:
        """The factor s."""
        return self.alpha / self.rank

    def check(self, config: Config) -> None:
        """Raise a ValueError unless adapters of these matrices of the model are computed here."""
        leaves = leaves_of(config)["layers"]
        able = [] if config.linear else [name for name in MATRICES if name in leaves]
        if wrong := [name for name in self.on if name not in able] or ([""] if not self.on or not able else []):
            fix = f"choose among {', '.join(able)}" if able else "train all of its params, without adapters"
            raise ValueError(
                f"{config.name}: no adapter is computed for {wrong[0] or 'any leaf'}\n"
                "  rule: adapters are of matrices of attention, of MLPs and of experts, not of linear layers\n"
                f"  fix: {fix}"
            )
        if len({*self.on}) < len(self.on) or self.rank < 1:
            what = f"rank {self.rank} on {', '.join(self.on)}"
            raise ValueError(f"adapters of {what}\n  fix: give a rank of at least 1, and each matrix once")


def rounding_note(lora: Lora | None, dtype: str) -> str:
    """Return a warning if the sums W + s A B are rounded to 16 bits, or "" if they are not."""
    if lora is None or dtype not in ("bf16", "fp16"):
        return ""
    bits = {"bf16": 8, "fp16": 11}[dtype]
    return (
        f"--dtype {dtype}: W + s A B is rounded to {bits} bits, so small adapters have little effect"
        "\n  rule: in bf16 78% of it is lost where s A B is 1e-3 of W, 17% at 1e-2, 2% at 1e-1"
        "\n  fix: give --dtype fp32, or a larger --lora-alpha or --lr"
    )


def sizes_of(config: Config, lora: Lora) -> dict[str, int]:
    """Return the sizes of the model's dims, and of r."""
    return config.sizes | {"r": lora.rank}


def adapted_leaves(config: Config, lora: Lora) -> dict[str, dict[str, Leaf]]:
    """Return the leaves of the matrices that have adapters, by the stack of the layers."""
    leaves = leaves_of(config)
    stacks = [stack for stack in ("dense", "layers") if stack in leaves]
    return {stack: {name: leaves[stack][name] for name in lora.on} for stack in stacks}


def adapter_specs(config: Config, lora: Lora, specs: Mapping | None = None) -> dict[str, dict[str, dict[str, str]]]:
    """Return the types of adapters for params of the types `specs`; by default the types of whole adapters."""
    types = specs_of(config) if specs is None else specs
    return {
        stack: {name: factors(str(types[stack][name]), leaf.start) for name, leaf in leaves.items()}
        for stack, leaves in adapted_leaves(config, lora).items()
    }


def num_adapter_params(config: Config, lora: Lora, active: bool = False) -> int:
    """Return the number of params of all adapters; with `active`, of the experts' only those of one token count."""
    sizes = sizes_of(config, lora) | ({"E": config.k} if active else {})
    pairs = [pair for stack in adapter_specs(config, lora).values() for pair in stack.values()]
    types = [parse(text) for pair in pairs for text in pair.values()]
    return sum(math.prod(sizes[dim] for dim, _ in spec.dims) for spec in types)


@lru_cache(maxsize=4096)
def factors(weight: str, inputs: str) -> dict[str, str]:
    """Return the types of A and B for a matrix of this type, stacked over its first dim, with these inputs.

    Each expert has its own A and B.
    """
    (stack, *rest), r = parse(weight).dims, ("r", ())
    experts = [dim for dim in rest if dim[0] == "E"]
    ins, outs = ([dim for dim in rest if dim[0] != "E" and (dim[0] in inputs) == wanted] for wanted in (True, False))
    return {"A": str(Spec("A", (stack, *experts, *ins, r))), "B": str(Spec("B", (stack, *experts, r, *outs)))}


@lru_cache(maxsize=4096)
def product_line(weight: str, inputs: str, stacked: bool = True) -> str:
    """Return the typed line of A B for a matrix of this type, stacked over layers or for one layer."""
    types: Any = [parse(text) for text in (*factors(weight, inputs).values(), weight)]
    A, B, W = (spec if stacked else Spec(spec.name, spec.dims[1:]) for spec in types)
    return f"{A} * {B} -> {W}"
