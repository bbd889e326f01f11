"""Resolve the argument of --model: `source_of`, which every command calls.

It may be a name of models.toml, a table of sizes (config.json, FILE.toml), a Hugging Face folder, a run of
`scaling.train`, FILE.gguf, or org/name on the Hugging Face hub. A model of the hub is downloaded into the hub's own
cache, which needs huggingface_hub, of the extra `hf`.
"""

import re
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from scaling.common.arguments import of_type, read_table
from scaling.configs.attention import Latent, Linear, attention_of
from scaling.configs.config import Config
from scaling.configs.hugging_face import read_config


def table_config(table: dict[str, Any], path: Path) -> Config:
    """Return the model from the table of the file `path`."""
    try:
        if {"model_type", "hidden_size", "text_config"} & table.keys():
            table = read_config(table)
        for name, kind in (("latent", Latent), ("linear", Linear)):
            if isinstance(part := table.get(name), dict):
                table[name] = attention_of(kind, name, part)
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


def _published() -> dict[str, dict[str, Config]]:
    """Return the models of models.toml by group and name."""
    path, found = Path(__file__).with_name("models.toml"), {}
    for group, tables in tomllib.loads(path.read_text(encoding="utf-8")).items():
        models = {name: table_config(table, path) for name, table in tables.items()}
        found[group] = {name: model.with_(name=name, source=tables[name]["source"]) for name, model in models.items()}
    return found


PUBLISHED = _published()
MODELS, MEASURED = PUBLISHED["models"], PUBLISHED["measured"]  # MEASURED: of published runs
RUN, MODEL = "run.toml", "model"  # in a run's folder: its options, and the files that came with its model
CONFIGS = ("config.json", "config.toml")
ON_THE_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]*[A-Za-z0-9_]", re.ASCII)
WAYS = "a Hugging Face folder, a run of scaling.train, FILE.gguf or org/name on the hub"  # sources that have weights
HELP = f"a config.json, {WAYS}; or one of {', '.join(MODELS)}"
SIZES = ["config.json"]
COMPANIONS = (  # files that come with a model's weights, in addition to config.json
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "generation_config.json",
    "chat_template.jinja", "chat_template.json", "tokenizer.model", "vocab.json", "merges.txt",
)  # fmt: skip
TEMPLATES = "additional_chat_templates"  # a folder of named chat templates, NAME.jinja
FILES = [*SIZES, *COMPANIONS, f"{TEMPLATES}/*.jinja", "model*.safetensors", "model.safetensors.index.json"]
INSTEAD = "choose a model with config.json and safetensors; of one in GGUF, download the file and give FILE.gguf"


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
        folder = folder_on_hub(str(model), sizes_only)
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


def load(path: "str | Path") -> Config:
    """Read a model from a file: a table in the book's letters (TOML or JSON), or a Hugging Face config.json."""
    path = Path(path)
    if not path.exists():
        raise ValueError(f"{path}: no such file\n  fix: give a config.json, or a .toml file")
    return table_config(read_table(path), path)


def folder_on_hub(name: str, sizes_only: bool = False) -> Path:
    """Return the folder of org/name in the cache, and download it if it is not there yet.

    It holds weights as safetensors (no pickles, which may run code), the tokenizer and the chat template. Without a
    network the cache is used alone.

    Raises:
        ValueError: The hub does not have this name, keeps it private, or cannot be reached.
    """
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
    except ImportError:
        raise ValueError(
            f"{name}: there is no such file or folder here, and a model of the hub needs huggingface_hub\n"
            "  fix: pip install 'scaling-book-torch[hf]', or give the path of a folder"
        ) from None
    try:
        folder = Path(snapshot_download(name, allow_patterns=SIZES if sizes_only else FILES))
    except GatedRepoError:
        raise ValueError(
            f"{name}: the hub gives it to those only who have accepted its license\n"
            f"  fix: accept it on the page of {name} and log in with `hf auth login`, or set HF_TOKEN"
        ) from None
    except RepositoryNotFoundError:
        raise ValueError(
            f"{name}: there is no such file or folder here, and the hub has no such model or keeps it private\n"
            "  fix: check the name; for a private model log in with `hf auth login`, or set HF_TOKEN"
        ) from None
    except Exception as error:  # each library for the network has other errors
        raise ValueError(
            f"{name}: is not here, and the hub cannot be reached ({_first_line(error)})\n"
            "  fix: connect to the network, or give the path of a folder that was downloaded before"
        ) from None
    if not (folder / "config.json").is_file():
        raise ValueError(f"{name}: has no config.json on the hub\n  fix: {INSTEAD}")
    if not sizes_only and not any(folder.glob("model*.safetensors")):
        raise ValueError(f"{name}: has no safetensors on the hub; pickles are not read\n  fix: {INSTEAD}")
    return folder


def _first_line(error: BaseException) -> str:
    cause = error.__cause__ or error
    return " ".join([f"{type(cause).__name__}:", *str(cause).strip().splitlines()[:1]])
