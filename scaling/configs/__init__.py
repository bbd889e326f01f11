"""Transformers as data. `get("llama3-70b")` looks a model up; `load("config.json")` reads a model's own file.

Plain Python: no torch.
"""

from scaling.configs.attention import Latent, Linear, RopeScaling
from scaling.configs.config import Config
from scaling.configs.sources import MODELS, Source, get, load, source_of, with_weights

__all__ = ["MODELS", "Config", "Latent", "Linear", "RopeScaling", "Source", "get", "load", "source_of", "with_weights"]
