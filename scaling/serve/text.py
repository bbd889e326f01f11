"""Text while it is generated: the bytes that each token adds, streamed, and stopped.

A token that is decoded alone does not show its bytes: half of a character decodes to nothing, and many tokenizers leave
out the space before the first word of a text, so that " true" and "true" look the same.
"""

import codecs
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from scaling.models.text import ByteText, Unknown, of_bytes

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


PRECEDING = 5  # ids before a text that are decoded with its first ones
CHARACTER = 4  # the most tokens of one character, which has at most so many bytes


class TextStream:
    """Turn ids into text, and give out each piece as soon as no later id can change it.

    Certain text has whole characters, and does not end with what may be the start of a stop text. `push(id)` and, at
    the end, `rest()` return the text that has become certain. `stopped`: a stop text is complete, and the text ends
    before it. If there are several, the text ends before the one that was complete first.

    Args:
        tokenizer: The tokenizer of the ids.
        stops: The texts before which this text ends.
        before: The ids that the text follows, because some tokenizers leave out the space at the beginning of a text.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = (), before: Sequence[int] = ()):
        if stops and isinstance(tokenizer, Unknown):
            raise ValueError(f"{tokenizer.name}: a stop text needs its tokenizer\n  fix: put its tokenizer.json there")
        self.tokenizer, self.stops = tokenizer, [*filter(None, stops)]
        self.pieces = token_bytes_of(tokenizer)
        self.reader = codecs.getincrementaldecoder("utf-8")(errors="replace") if self.pieces.joined else None
        self.ids = (
            [] if self.pieces.joined else list(before[-PRECEDING:])
        )  # the last that gave text, and the ones after
        self.read = tokenizer.decode(self.ids)  # the text that the first `before` of them gave
        if self.read.endswith(BROKEN):
            self.ids, self.read = [], ""
        self.before = len(self.ids)
        self.held = ""  # text not yet given out: the first characters of a stop text
        self.stopped = False

    def push(self, id: int) -> str:
        """Return the text that this token makes certain."""
        if self.stopped or not (added := self.pieces.bytes_of(id)):
            return ""
        if self.reader is not None:
            return self._certain(self.reader.decode(added))
        self.ids.append(id)
        text = self.tokenizer.decode(self.ids)
        if len(self.ids) - self.before < CHARACTER and (text.endswith(BROKEN) or not text.startswith(self.read)):
            return ""
        if not (new := text[len(self.read) :]):
            return ""
        self.ids = self.ids[self.before :]
        self.before, self.read = len(self.ids), self.tokenizer.decode(self.ids)
        return self._certain(new)

    @property
    def begins(self) -> bool:
        """Whether there is no text before the next token, so that it may be written like the first of a text."""
        return self.reader is None and not self.read

    def rest(self) -> str:
        """Return the rest of the text when no token follows."""
        if self.stopped:
            return ""
        if self.reader is not None:
            new = self.reader.decode(b"", final=True)
        else:
            new = self.tokenizer.decode(self.ids)[len(self.read) :]
        given = self._certain(new)
        return given if self.stopped else given + self.held

    def _certain(self, new: str) -> str:
        """Return the certain part of the text that was held back and this new text after it."""
        text = self.held + new
        found = [(begin + len(stop), -len(stop)) for stop in self.stops if (begin := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            return text[: sum(min(found))]
        starts = (i for i in range(len(text)) if any(stop.startswith(text[i:]) for stop in self.stops))
        cut = next(starts, len(text))
        self.held = text[cut:]
        return text[:cut]
