"""The bytes that each token adds to a text.

A token that is decoded alone does not show them: half of a character decodes to nothing, and many tokenizers leave out
the space before the first word of a text, so that " true" and "true" look the same.
"""

import re
from functools import lru_cache
from typing import Any

from scaling.models.text import ByteText, of_bytes

BROKEN = "\ufffd"  # the replacement for bytes that are no whole character
LETTERS: dict[str, int] = of_bytes()["model"]["vocab"]  # how byte-level tokenizers write bytes
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # how tokenizers with byte fallback write one


class TokenBytes:
    """The bytes that each token of a tokenizer adds to a text in which it is not the first token.

    Attributes:
        joined: Whether a text is the concatenation of its tokens' bytes.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer, self._known = tokenizer, dict[tuple[int, bool], bytes]()
        self._loaded = getattr(tokenizer, "loaded", None)
        decoder = type(getattr(self._loaded, "decoder", None)).__name__
        self.joined = isinstance(tokenizer, ByteText) or decoder == "ByteLevel"
        self._before: list[int] = [] if self.joined else self._word()

    def bytes_of(self, id: int, first: bool = False) -> bytes:
        """Return the bytes that this token adds to a text, b"" for one that decodes to nothing, such as an end of text.

        `first`: whether the text begins with the token.
        """
        if (id, first) not in self._known:
            self._known[id, first] = self._found(id, [] if first else self._before)
        return self._known[id, first]

    def name(self, id: int) -> str:
        """Return the name of a token without bytes."""
        return self._written(id) or f"token_id:{id}"

    def _written(self, id: int) -> str:
        """Return the token's spelling in the tokenizer's file."""
        return (self._loaded.id_to_token(id) if self._loaded is not None else None) or ""

    def _found(self, id: int, before: list[int]) -> bytes:
        if isinstance(self.tokenizer, ByteText):
            return bytes([id]) if id < 256 else b""
        start, text = self.tokenizer.decode(before), self.tokenizer.decode([*before, id])
        text = text[len(start) :] if text.startswith(start) else self.tokenizer.decode([id])
        return text.encode() if BROKEN not in text else _spelled(self._written(id))

    def _word(self) -> list[int]:
        """Return one token that is a word, after which others are decoded; [] if the tokenizer has no such token."""
        for id in range(self.tokenizer.vocabulary):
            text = self.tokenizer.decode([id])
            if text.isascii() and text.isalnum() and not BYTE.fullmatch(self._written(id)):
                return [id]
        return []


@lru_cache(8)
def token_bytes_of(tokenizer: Any) -> TokenBytes:
    """Return the bytes of a tokenizer's tokens, computed once per tokenizer."""
    return TokenBytes(tokenizer)


def _spelled(token: str) -> bytes:
    """Return the bytes of a token that holds parts of characters, from its spelling in the tokenizer's file."""
    if found := BYTE.fullmatch(token):
        return bytes([int(found[1], 16)])
    return bytes(LETTERS[letter] for letter in token) if LETTERS.keys() >= {*token} else token.encode()
