"""The models and prompts whose greedy completions and prefix hits vLLM's CPU build was asked for: made from seeds."""

import json
import random
from pathlib import Path

import torch

from scaling.configs import Config
from scaling.models import transformer

TABLE = Path(__file__).parent / "vllm.json"
NEW, PROMPTS, PAGE = 12, 12, 32
SIZES = {"L": 2, "D": 64, "F": 96, "N": 4, "H": 32, "V": 128, "theta": 1e4}
CONFIGS = {"gqa": Config("gqa", K=2, **SIZES), "mqa, tied": Config("mqa, tied", K=1, tied=True, **SIZES)}


def params_of(name: str) -> dict:
    return transformer.init(CONFIGS[name], list(CONFIGS).index(name), torch.float32)


def prompts_of(name: str) -> list[list[int]]:
    """12 prompts, of which some share one or two pages; lengths of whole pages are among them."""
    chance = random.Random(name)
    stem = [chance.randrange(2, SIZES["V"]) for _ in range(2 * PAGE)]
    own = [[chance.randrange(2, SIZES["V"]) for _ in range(chance.randint(1, 40))] for _ in range(PROMPTS - 2)]
    return [stem, stem[:PAGE], *(stem[: chance.choice([0, PAGE, 2 * PAGE])] + some for some in own)]


def stored() -> dict[str, dict[str, list]]:
    """By model: "tokens", and "cached", the prompts' tokens found when all are asked for once more."""
    return json.loads(TABLE.read_text())
