"""Resolve the argument of --model: `source_of`, which every command calls.

It may be a name of the catalogue, a table of sizes (config.json, FILE.toml), a Hugging Face folder, a run of
`scaling.train`, FILE.gguf, or org/name on the Hugging Face hub.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from scaling.common.arguments import of_type, read_table
from scaling.configs import hub
from scaling.configs.catalogue import MEASURED, MODELS
from scaling.configs.config import Config
from scaling.configs.files import load

RUN, MODEL = "run.toml", "model"  # in a run's folder: its options, and the files that came with its model
CONFIGS = ("config.json", "config.toml")
ON_THE_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]*[A-Za-z0-9_]", re.ASCII)
WAYS = "a Hugging Face folder, a run of scaling.train, FILE.gguf or org/name on the hub"  # sources that have weights
HELP = f"a config.json, {WAYS}; or one of {', '.join(MODELS)}"


@dataclass(frozen=True)
class Source:
    """A model's sizes, and the folder of its weights and tokenizer; "" if there are only sizes."""

    config: Config
    folder: str = ""

    @property
    def is_run(self) -> bool:
        """Whether the weights are the checkpoints of a run."""
        return bool(self.folder) and (Path(self.folder) / RUN).is_file()


def source_of(model: "str | Path", *, sizes_only: bool = False) -> Source:
    """Return the sizes of a model and the folder of its weights.

    A model of the hub is downloaded, and FILE.gguf is written as a Hugging Face folder, once, into their caches. With
    `sizes_only` no weights are fetched or written for these two, and their folder is "".

    Raises:
        ValueError: `model` is none of the forms above.
    """
    path = Path(model)
    if (name := _named(str(model))) and not path.exists():
        return Source((MODELS | MEASURED)[name])
    if path.is_dir():
        return Source(_config_of_folder(path), str(path))
    if path.suffix == ".gguf":
        from scaling.configs import gguf  # it needs numpy, which no other module here does

        if not path.is_file():
            raise ValueError(f"{path}: no such file\n  fix: give the path of a .gguf file")
        if sizes_only:
            return Source(gguf.config_of(path))
        folder = gguf.as_folder(path)
        return Source(_config_of_folder(folder), str(folder))
    if path.suffix in (".json", ".toml"):
        return Source(load(path))
    if not path.exists() and ON_THE_HUB.fullmatch(str(model)):
        folder = hub.folder_of(str(model), sizes_only)
        config = _config_of_folder(folder).with_(name=str(model))
        return Source(config, "" if sizes_only else str(folder))
    named = f"a .json or .toml file, or one of {', '.join(MODELS | MEASURED)}"
    raise ValueError(f"unknown model {str(model)!r}\n  fix: give {WAYS}, {named}")


def with_weights(model: "str | Path") -> Source:
    """Return the source of a model that has weights. Raise a ValueError if it has only sizes."""
    if not (found := source_of(model)).folder:
        raise ValueError(f"{model}: has sizes and no weights\n  fix: give {WAYS}")
    return found


def get(model: "str | Path | Config") -> Config:
    """Return the sizes of a model that `source_of` knows, such as "llama3-70b", "LLaMA-3 70B" or "org/name"."""
    return model if isinstance(model, Config) else source_of(model, sizes_only=True).config


def _named(model: str) -> str | None:
    letters = {"".join(c for c in name.lower() if c.isalnum()): name for name in MODELS | MEASURED}
    return letters.get("".join(c for c in model.lower() if c.isalnum()))


def _config_of_folder(folder: Path) -> Config:
    if (folder / RUN).is_file():
        options = read_table(folder / RUN)
        of_type(f"{folder / RUN}: model", options.get("model"), str)
        if options["model"] != MODEL:  # a name, or perhaps a path in runs that kept no model
            return get(options["model"])
        return _config_of_folder(folder / MODEL).with_(name=folder.resolve().name)
    for name in CONFIGS:
        if (folder / name).is_file():
            return load(folder / name).with_(name=folder.name)
    raise ValueError(
        f"{folder}: neither a Hugging Face folder (config.json) nor a run of scaling.train (run.toml)"
        "\n  fix: give one of the two"
    )
