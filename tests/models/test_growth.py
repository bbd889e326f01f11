"""Tokenizers whose replacements make texts grow are refused in bounded time, and no others."""

import json
import time

import pytest

pytest.importorskip("tokenizers", reason="needs the library: pip install tokenizers")

from tokenizers import Tokenizer

from scaling.models.text import FromFile, of_bytes


def replaced(count: int, pattern: dict, content: str, kind: str = "normalizers") -> dict:
    return {"type": "Sequence", kind: [{"type": "Replace", "pattern": pattern, "content": content}] * count}


A = {"String": "a"}
NESTED = {"type": "Sequence", "normalizers": [replaced(3, A, "a" * 10), replaced(4, A, "a" * 10)]}
GROWING = {  # parts of a tokenizer.json, of which most write more than a machine holds
    "seven": {"normalizer": replaced(7, A, "a" * 10)}, "seventy": {"normalizer": replaced(70, A, "a" * 10)},
    "nested": {"normalizer": NESTED}, "between": {"normalizer": replaced(40, {"Regex": "(?=a)"}, "a")},
    "anywhere": {"normalizer": replaced(40, {"Regex": ""}, "a")}, "two long": {"normalizer": replaced(2, A, "a" * 200)},
    "a longer": {"normalizer": replaced(1, A, "a" * 1000)},
    "decoder": {"decoder": replaced(7, A, "a" * 10, "decoders")},
}  # fmt: skip
FINE = {
    "Llama's": {"normalizer": {"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    ]}, "decoder": {"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
    ]}},
    "many": {"normalizer": replaced(12, {"Regex": " {2,}"}, "▁")}, "one": {"normalizer": replaced(1, A, "a" * 10)},
    "composed": {"normalizer": {"type": "NFKC"}}, "none": {},
}  # fmt: skip


def file_of(parts: dict, tmp_path) -> str:
    (tmp_path / "tokenizer.json").write_text(json.dumps(of_bytes() | parts))
    return str(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("name", GROWING)
def test_a_text_that_grows_without_bound_is_refused_at_once(name, tmp_path):
    path, start = file_of(GROWING[name], tmp_path), time.process_time()
    with pytest.raises(ValueError, match=r"tokenizer\.json: (its|a) .*\n  fix: give the tokenizer\.json that"):
        FromFile(path).encode("b" * 1500 + "a" * 1000)
    assert time.process_time() - start < 2


@pytest.mark.parametrize("name", FINE)
def test_others_read_a_text_as_the_library_does(name, tmp_path):
    by, text = FromFile(path := file_of(FINE[name], tmp_path)), "a  ﷺ b " * 400
    assert by.encode(text) == Tokenizer.from_file(path).encode(text).ids
    assert by.decode(by.encode("a b")) == Tokenizer.from_file(path).decode(by.encode("a b"))


def test_a_pattern_that_the_library_gives_up_is_refused(tmp_path, capfd):
    pattern = {"type": "Split", "pattern": {"Regex": "(a+)+b"}, "behavior": "Isolated", "invert": False}
    by = FromFile(file_of({"pre_tokenizer": pattern}, tmp_path))
    with pytest.raises(ValueError, match=r"cannot read a text by it.*\n  fix: give another text"):
        by.encode("a" * 40)
    capfd.readouterr()  # what the library prints of it
