"""Documents: token ids, and which of them count in the loss."""

from typing import NamedTuple

import numpy

from scaling.models.text import Tokenizer


class Document(NamedTuple):
    """Token ids, and for each whether it counts in the loss."""

    ids: numpy.ndarray
    counted: numpy.ndarray


def plain_document(text: str, by: Tokenizer) -> Document:
    ids = _ids(text, by)
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
    pieces = [(_ids(text, by), counts) for text, counts in parts]
    return Document(
        numpy.concatenate([ids for ids, _ in pieces]),
        numpy.concatenate([numpy.full(len(ids), counts) for ids, counts in pieces]),
    )


def _ids(text: str, by: Tokenizer) -> numpy.ndarray:
    return numpy.array(by.encode(text), numpy.uint32)
