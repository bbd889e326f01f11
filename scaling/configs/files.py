"""Models from names and from files: `get`, `load`."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from scaling.arguments import read_table
from scaling.configs.catalogue import MODELS
from scaling.configs.config import Config, Latent
from scaling.configs.hugging_face import read_config


def _letters(name: str) -> str:
    return "".join(c for c in str(name).lower() if c.isalnum())


def get(model: "str | Config") -> Config:
    """The model of this name ("llama3-70b", "LLaMA-3 70B") or of this file (.json, .toml); or a ValueError."""
    if isinstance(model, Config):
        return model
    for name, config in MODELS.items():
        if _letters(name) == _letters(model):
            return config
    if Path(model).suffix in (".json", ".toml"):
        return load(model)
    raise ValueError(f"unknown model {model!r}\n  fix: give a .json or .toml file, or one of {', '.join(MODELS)}")


def load(path: "str | Path") -> Config:
    """A model from a file: a table in the book's letters (TOML or JSON), or a Hugging Face config.json."""
    path = Path(path)
    if not path.exists():
        raise ValueError(f"{path}: no such file\n  fix: give a config.json, or a .toml file")
    table = read_table(path)
    try:
        if "hidden_size" in table or "text_config" in table:
            table = read_config(table)
        if isinstance(latent := table.get("latent"), dict):
            table["latent"] = Latent.of(latent)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    given: dict[str, Any] = {"name": path.stem, "source": str(path)} | table
    names = {field.name for field in fields(Config)}
    missing, unknown = [letter for letter in "LDFNKHV" if letter not in given], sorted(given.keys() - names)
    if missing or unknown:
        raise ValueError(
            f"{path}: lacks {', '.join(missing) or 'nothing'}; does not know {', '.join(unknown) or 'none'}"
            "\n  fix: add what it lacks, and leave out what is not known"
        )
    return Config(**given)
