"""A tokenizer as GGUF has it, lists of tokens, merges and types, as the files of a Hugging Face folder.

GGUF has only the name of the rule that splits text before the merges; PRE_TOKENIZERS has the rules known here.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # token types of GGUF
END_TEXTS = (  # texts of tokens that always end a generation in llama.cpp
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
)  # fmt: skip
FILLING = {  # tokens for filling in the middle that end a generation, if the file does not name one
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
FILLED = (  # tokens for filling in the middle that are always control tokens
    "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<PRE>", "<|code_prefix|>", "<|prefix|>", "<|fim_suffix|>",
    "<fim-suffix>", "<fim_suffix>", "<SUF>", "<|code_suffix|>", "<|suffix|>", "<|fim_middle|>", "<fim-middle>",
    "<fim_middle>", "<MID>", "<|code_middle|>", "<|middle|>",
)  # fmt: skip
SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")  # never control tokens, whatever the file says
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def unread(path: Path, what: str) -> ValueError:
    """Return the error for a feature that changes a model and is not read from GGUF."""
    return ValueError(
        f"{path}: has {what}, which is not read from GGUF"
        "\n  fix: give the model's Hugging Face folder, or its name on the hub"
    )


def _bytes(regex: bool) -> dict:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": regex}


def _split(pattern: str) -> dict:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


PRE_TOKENIZERS = {
    "gpt-2": [_bytes(True)],
    "smollm": [{"type": "Digits", "individual_digits": True}, _bytes(True)],
    "qwen2": [_split(WORDS % ""), _bytes(False)],
    "llama-bpe": [_split(WORDS % "{1,3}"), _bytes(False)],
}
NORMALIZERS = {"qwen2": {"type": "NFC"}}
WHOLE = ("llama-bpe",)  # a word that is a token is taken before any merge; and a text begins with bos


def tokenizer_files(path: Path, field: Callable[[str], Any]) -> dict[str, dict]:
    """Return tokenizer.json, tokenizer_config.json with the chat template and generation_config.json with the ends.

    `field(key)` gives a value of the file, or None. ValueError for a tokenizer of another kind.
    """
    model, pre = field("tokenizer.ggml.model"), field("tokenizer.ggml.pre")
    if model != "gpt2" or pre not in PRE_TOKENIZERS:
        said = f"tokenizer is {model!r} with the pre-tokenizer {pre!r}"
        raise ValueError(
            f"{path}: its {said}; read are 'gpt2' with {', '.join(PRE_TOKENIZERS)}"
            "\n  fix: give the model's Hugging Face folder, or its name on the hub"
        )
    tokens, merges = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.merges")
    types = field("tokenizer.ggml.token_type")
    if not tokens or merges is None or not types or len(types) != len(tokens):
        raise ValueError(f"{path}: lacks its tokenizer's tokens, merges or types\n  fix: download the file again")
    named = ("bos", "eos", "eot", "eom", "unknown", "padding", *FILLING)
    special = {name: field(f"tokenizer.ggml.{name}_token_id") for name in named}
    if wrong := [name for name, id in special.items() if id is not None and not 0 <= id < len(tokens)]:
        raise ValueError(
            f"{path}: {wrong[0]}_token_id is not one of its {len(tokens)} tokens\n  fix: give a whole file"
        )
    ends, types = _ends(tokens, types, special)
    added = [
        {
            "id": id, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
            "special": kind != USER_DEFINED,
        }
        for id, (text, kind) in enumerate(zip(tokens, types, strict=True)) if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]  # fmt: skip
    if field("tokenizer.ggml.add_eos_token"):
        raise unread(path, "an end of text after each prompt (add_eos_token)")
    begins = field("tokenizer.ggml.add_bos_token")
    begins = pre in WHOLE if begins is None else begins
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": NORMALIZERS.get(pre), "decoder": _bytes(True),
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[pre]},
        "post_processor": _begun(special["bos"], tokens) if begins and special["bos"] is not None else None,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": pre in WHOLE,
            "vocab": {text: id for id, text in enumerate(tokens)}, "merges": [merge.split(" ") for merge in merges],
        },
    }  # fmt: skip
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    config = {theirs: tokens[id] for name, theirs in names.items() if (id := special[name]) is not None}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if template := field("tokenizer.chat_template"):
        config["chat_template"] = template
    ids = {"bos_token_id": special["bos"], "eos_token_id": ends or None, "pad_token_id": special["padding"]}
    generation = {name: id for name, id in ids.items() if id is not None}
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": config, "generation_config.json": generation}


def _ends(tokens: list[str], types: list[int], special: dict[str, int | None]) -> tuple[list[int], list[int]]:
    """Return the ids that end a generation and the types of all tokens, both as llama.cpp corrects them by text."""
    ids, types = {text: id for id, text in enumerate(tokens)}, list(types)
    texts = [*END_TEXTS, *(text for name, group in FILLING.items() if special[name] is None for text in group)]
    found = {ids[text] for text in texts if text in ids}
    for id in found | {ids[text] for text in FILLED if text in ids}:
        types[id] = CONTROL
    for text in SHOWN:
        if text in ids:
            types[ids[text]] = USER_DEFINED
    found |= {id for name in ("eos", "eot", "eom", *FILLING) if (id := special[name]) is not None}
    there = {tokens[id] for id in found}
    calls = "<|call|>" in there or "<|calls|>" in there
    if calls and "<|end|>" in there and ("<|return|>" in there or "<|flush|>" in there):  # a message's end, no turn's
        found.remove(ids["<|end|>"])
        types[ids["<|end|>"]] = USER_DEFINED
    if {"<|tool_response>", "</s>"} <= there:
        found.remove(ids["</s>"])
        types[ids["</s>"]] = NORMAL
    return sorted(found), types


def _begun(bos: int, tokens: list[str]) -> dict:
    """Return the part of tokenizer.json that puts the beginning of text before each text."""
    text = tokens[bos]
    parts = [{"SpecialToken": {"id": text, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    second = [{"SpecialToken": {"id": text, "type_id": 1}}, {"Sequence": {"id": "B", "type_id": 1}}]
    return {
        "type": "TemplateProcessing", "single": parts, "pair": parts + second,
        "special_tokens": {text: {"id": text, "ids": [bos], "tokens": [text]}},
    }  # fmt: skip
