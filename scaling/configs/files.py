"""Read models from files: `load`."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from scaling.common.arguments import read_table
from scaling.configs.attention import Latent
from scaling.configs.config import Config
from scaling.configs.hugging_face import read_config


def load(path: "str | Path") -> Config:
    """Read a model from a file: a table in the book's letters (TOML or JSON), or a Hugging Face config.json."""
    path = Path(path)
    if not path.exists():
        raise ValueError(f"{path}: no such file\n  fix: give a config.json, or a .toml file")
    return table_config(read_table(path), path)


def table_config(table: dict[str, Any], path: Path) -> Config:
    """Return the model from the table of the file `path`."""
    try:
        if {"model_type", "hidden_size", "text_config"} & table.keys():
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
