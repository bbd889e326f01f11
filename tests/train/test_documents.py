"""Text that becomes tokens: no token is cut off or added."""

import json

import pytest

pytest.importorskip("tokenizers", reason="needs the library: pip install tokenizers")

from tokenizers import Tokenizer, models, pre_tokenizers

from scaling.models.text import tokenizer
from scaling.serve.requests import read_requests
from scaling.train.corpus import open_corpus

WORDS = ["<s>", "</s>", "the", "dog", "ran"]


def written(folder) -> Tokenizer:
    """Write a tokenizer of words into a folder; return it as the library has it."""
    by = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="ran"))
    by.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    by.add_special_tokens(["<s>", "</s>"])
    by.save(f"{folder}/tokenizer.json")
    return by


@pytest.mark.parametrize("texts", ["short", "long"])
@pytest.mark.parametrize("which", ["truncation", "padding", "both"])
def test_a_file_s_own_truncation_and_padding_change_no_token(tmp_path, which, texts):
    """In corpora, prompts and requests; the library itself says what a text is without them."""
    loaded = written(tmp_path)
    if which != "padding":
        loaded.enable_truncation(4, stride=1)
    if which != "truncation":
        loaded.enable_padding(length=16, pad_id=1, pad_token="</s>")
    loaded.save(file := f"{tmp_path}/tokenizer.json")
    text = "the dog ran" if texts == "short" else "the dog ran " * 50
    loaded.no_truncation()
    loaded.no_padding()
    (tmp_path / "text.txt").write_text(text)
    ids = open_corpus(tmp_path / "text.txt", by := tokenizer(file)).between(0, len(text.split()))[0].tolist()
    (request,), _ = read_requests(json.dumps({"prompt": text}), by, 32, (), 1)
    assert ids == loaded.encode(text).ids
    assert list(request.request.prompt) == by.encode(text, special=True) == loaded.encode(text).ids
