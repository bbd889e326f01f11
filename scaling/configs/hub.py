"""A model of the Hugging Face hub, downloaded into the hub's own cache. Needs huggingface_hub, of the extra `hf`."""

from pathlib import Path

SIZES = ["config.json"]
COMPANIONS = (  # files that come with a model's weights, in addition to config.json
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "generation_config.json",
    "chat_template.jinja", "chat_template.json", "tokenizer.model", "vocab.json", "merges.txt",
)  # fmt: skip
TEMPLATES = "additional_chat_templates"  # a folder of named chat templates, NAME.jinja
FILES = [*SIZES, *COMPANIONS, f"{TEMPLATES}/*.jinja", "model*.safetensors", "model.safetensors.index.json"]
INSTEAD = "choose a model with config.json and safetensors; of one in GGUF, download the file and give FILE.gguf"


def folder_of(name: str, sizes_only: bool = False) -> Path:
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
    except Exception as error:  # the network's errors are of whichever library it uses
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
