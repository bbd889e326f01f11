"""Ends of text: the ids at which generation stops, and the one that ends each document of a corpus."""

from pathlib import Path

from scaling.common.arguments import table_if_any, whole_numbers
from scaling.configs.sources import RUN
from scaling.models.template import special_tokens
from scaling.models.text import GENERATION, Tokenizer, home_of

NO_END = -1  # in run.toml: nothing ends a document


def ends_of(folder: "str | Path", by: Tokenizer | None = None) -> tuple[int, ...]:
    """Return the ids that end a text (eos) according to a model's folder or a run's; () if it names none.

    generation_config.json has precedence over config.json. Where neither says anything, the `eos_token` of
    tokenizer_config.json counts, whose id the tokenizer `by` knows. A run adds the id that its documents ended with.
    """
    home, found = home_of(folder), []
    for name in (GENERATION, "config.json"):
        path = home / name
        if (given := table_if_any(path).get("eos_token_id")) is not None:
            found = whole_numbers(f"{path}: eos_token_id", given if isinstance(given, list) else [given])
            break
    else:
        found = [id for id in [_named_end(home, by)] if id is not None] if by else []
    ended = table_if_any(Path(folder) / RUN).get("eos_id", NO_END)
    return (*found, *(id for id in [ended] if id != NO_END and id not in found))


def end_of_text(by: Tokenizer) -> int | None:
    """Return the id that ends a text of a tokenizer: its folder's `eos_token`, or else the first of `ends_of`.

    None for bytes, and where the folder names none.
    """
    if by.folder is None:
        return None
    if (id := _named_end(by.folder, by)) is not None:
        return id
    return next((id for id in ends_of(by.folder) if id < by.vocabulary), None)


def chosen_end(by: Tokenizer, eos: int | None) -> int:
    """Return the id that ends a document: the one asked for, or for None the tokenizer's own; `NO_END` for none."""
    found = end_of_text(by) if eos is None else eos
    return NO_END if found is None else found


def why_no_end(by: Tokenizer) -> str:
    """Explain in words why a tokenizer has no end of text: its folder names none, or only ones it does not have."""
    named = special_tokens(by.folder).get("eos_token") if by.folder else None
    if named is not None:
        return f"{by.name} does not have the eos_token of its tokenizer_config.json, {named!r}"
    if by.folder and (ids := ends_of(by.folder)):
        return f"{by.name} does not have the eos_token_id of its folder, {ids[0]}: it has 0..{by.vocabulary - 1}"
    return f"nothing says which token of {by.name} ends a text"


def _named_end(home: Path, by: Tokenizer) -> int | None:
    """Return the id of a folder's `eos_token`; None where it names none, or one that the tokenizer does not have."""
    named = special_tokens(home)
    return by.id_of(named["eos_token"]) if "eos_token" in named else None
