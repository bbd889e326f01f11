"""Transformers as data. `get("llama3-70b")` looks a model up; `load("config.json")` reads a model's own file.

Plain Python: no torch.

    config, attention           Config, one transformer in the book's letters, and its kinds of attention
    sources                     find a model by its name, folder, file or place on the hub
    hugging_face, ..._write     read and write config.json; `model_types` has the keys that each class reads
    gguf, gguf_tokenizer        read llama.cpp's files
"""

from scaling.configs.attention import Latent, Linear, RopeScaling
from scaling.configs.config import Config
from scaling.configs.sources import MODELS, Source, get, load, source_of, with_weights

__all__ = ["MODELS", "Config", "Latent", "Linear", "RopeScaling", "Source", "get", "load", "source_of", "with_weights"]
