"""The models and prompts whose completions other libraries were asked for, made again from seeds, and their answers."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from probes import first_drawn

from scaling.configs import Config

HERE = Path(__file__).parent
PAGE = 32  # tokens of vLLM's


class Table(NamedTuple):
    """`new` tokens of each of a model's prompts."""

    path: Path
    new: int
    configs: dict[str, Config]
    prompts: Callable[[random.Random], list[list[int]]]

    def params_of(self, name: str) -> dict:
        return first_drawn(self.configs[name], list(self.configs).index(name), torch.float32)

    def prompts_of(self, name: str) -> list[list[int]]:
        return self.prompts(random.Random(name))

    def stored(self) -> dict[str, Any]:
        return json.loads(self.path.read_text())


def _alike(chance: random.Random) -> list[list[int]]:
    """12 prompts, of which some share one or two pages; lengths of whole pages are among them."""
    stem = [chance.randrange(2, 128) for _ in range(2 * PAGE)]
    own = [[chance.randrange(2, 128) for _ in range(chance.randint(1, 40))] for _ in range(10)]
    return [stem, stem[:PAGE], *(stem[: chance.choice([0, PAGE, 2 * PAGE])] + some for some in own)]


small = {"L": 2, "D": 32, "F": 48, "N": 4, "H": 8, "V": 67, "theta": 1e4}
large = {"L": 2, "D": 64, "F": 96, "N": 4, "H": 32, "V": 128, "theta": 1e4}
GREEDY = Table(  # Hugging Face's generate: by model the completions
    HERE / "greedy.json", 12, {
        "untied": Config("untied", K=4, **small), "tied": Config("tied", K=4, tied=True, **small),
        "gqa": Config("gqa", K=2, **small), "mqa": Config("mqa", K=1, tied=True, **small),
    }, lambda chance: [[chance.randrange(2, 67) for _ in range(chance.randint(1, 24))] for _ in range(50)],
)  # fmt: skip
VLLM = Table(  # by model "tokens", and "cached", the prompts' tokens found when all are asked for once more
    HERE / "vllm.json", 12, {
        "gqa": Config("gqa", K=2, **large), "mqa, tied": Config("mqa, tied", K=1, tied=True, **large),
    }, _alike,
)  # fmt: skip
