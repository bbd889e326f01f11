"""The models and prompts whose greedy completions Hugging Face's generate was asked for: made again from seeds."""

import json
import random
from pathlib import Path

import torch

from scaling.configs import Config
from scaling.models import transformer

TABLE = Path(__file__).parent / "greedy.json"
NEW, PROMPTS = 12, 50
SIZES = {"L": 2, "D": 32, "F": 48, "N": 4, "H": 8, "V": 67, "theta": 1e4}
CONFIGS = {
    "untied": Config("untied", K=4, **SIZES),
    "tied": Config("tied", K=4, tied=True, **SIZES),
    "gqa": Config("gqa", K=2, **SIZES),
    "mqa": Config("mqa", K=1, tied=True, **SIZES),
}


def params_of(name: str) -> dict:
    return transformer.init(CONFIGS[name], list(CONFIGS).index(name), torch.float32)


def prompts_of(name: str) -> list[list[int]]:
    """50 prompts of 1 to 24 tokens."""
    chance = random.Random(name)
    return [[chance.randrange(2, SIZES["V"]) for _ in range(chance.randint(1, 24))] for _ in range(PROMPTS)]


def stored() -> dict[str, list[list[int]]]:
    return json.loads(TABLE.read_text())
