"""Transformers as data. `get("llama3-70b")` looks a model up; `load("config.json")` reads a model's own file.

Plain Python: no torch.
"""

from scaling.configs.catalogue import MODELS
from scaling.configs.config import Config, Latent, RopeScaling
from scaling.configs.files import get, load

__all__ = ["MODELS", "Config", "Latent", "RopeScaling", "get", "load"]
