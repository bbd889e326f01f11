"""Text to token ids and back: bytes, built in, or a Hugging Face tokenizer.json (the extra `hf`)."""

from pathlib import Path
from typing import NamedTuple, Protocol

import numpy


class Tokenizer(Protocol):
    """`name` says where it comes from; ids lie in 0..vocabulary - 1."""

    name: str
    vocabulary: int

    def encode(self, text: str) -> numpy.ndarray: ...

    def decode(self, ids) -> str: ...


class Bytes:
    """Each byte of UTF-8 is a token."""

    name, vocabulary = "bytes", 256

    def encode(self, text: str) -> numpy.ndarray:
        return numpy.frombuffer(text.encode(), numpy.uint8)

    def decode(self, ids) -> str:
        return bytes(int(i) for i in ids).decode(errors="replace")


class FromFile:
    """A tokenizer.json, by the library `tokenizers`."""

    def __init__(self, path):
        if not Path(path).is_file():
            raise ValueError(f"{path}: no such file\n  fix: give the path of a tokenizer.json")
        try:
            from tokenizers import Tokenizer as Loaded
        except ImportError:
            raise ValueError(
                f"{path}: needs the library tokenizers\n  fix: pip install 'scaling-book-torch[hf]'"
            ) from None
        try:
            self.loaded = Loaded.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(
                f"{path}: not a tokenizer.json: {error}\n  fix: give a file that the tokenizers library wrote"
            ) from error
        self.name, self.vocabulary = str(path), self.loaded.get_vocab_size()

    def encode(self, text: str) -> numpy.ndarray:
        return numpy.array(self.loaded.encode(text, add_special_tokens=False).ids, numpy.uint32)

    def decode(self, ids) -> str:
        return self.loaded.decode([int(i) for i in ids])


def tokenizer(name: str) -> Tokenizer:
    """ "bytes", a tokenizer.json, or a folder that has one."""
    if name == "bytes":
        return Bytes()
    path = Path(name)
    return FromFile(path / "tokenizer.json" if path.is_dir() else path)


class Document(NamedTuple):
    """Token ids, and for each whether it counts in the loss."""

    ids: numpy.ndarray
    counted: numpy.ndarray


def plain_document(text: str, by: Tokenizer) -> Document:
    ids = by.encode(text)
    return Document(ids, numpy.ones(len(ids), bool))


def chat_document(record, by: Tokenizer) -> Document:
    """A line of JSON: {"text"}, {"prompt", "completion"}, or {"messages": [{"role", "content"}, ...]}.

    Only a text, a completion and what the assistant says count in the loss. A message is "role: content" and an empty
    line. ValueError for anything else.
    """
    match record:
        case {"text": str(text)}:
            return plain_document(text, by)
        case {"prompt": str(prompt), "completion": str(completion)}:
            parts = [(prompt, False), (completion, True)]
        case {"messages": [_, *_] as messages}:
            parts = []
            for message in messages:
                match message:
                    case {"role": str(role), "content": str(content)}:
                        parts += [(f"{role}: ", False), (f"{content}\n\n", role == "assistant")]
                    case _:
                        raise ValueError(
                            'a message is {"role": ..., "content": ...}, both text\n  fix: write each message so'
                        )
        case _:
            raise ValueError(
                'a line is {"text"}, {"prompt", "completion"} or {"messages": [...]}'
                "\n  fix: write each line in one of these ways"
            )
    pieces = [(by.encode(text), counts) for text, counts in parts]
    return Document(
        numpy.concatenate([ids for ids, _ in pieces]),
        numpy.concatenate([numpy.full(len(ids), counts) for ids, counts in pieces]),
    )
