"""Documents: what a file of text, or a line of JSON, becomes in a corpus.

A document ends with the tokenizer's end of text, and so does each answer of a chat: a model learns to stop where it is
trained to.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy

from scaling.common.console import complain, integer
from scaling.common.torchrun import first_rank
from scaling.models.ends import NO_END, end_of_text
from scaling.models.text import Tokenizer

ASSISTANT = "assistant"  # the role whose messages count in the loss


class Document(NamedTuple):
    """Token ids, and for each whether it counts in the loss. `plain`: messages that no chat template has written."""

    ids: numpy.ndarray
    counted: numpy.ndarray
    plain: bool = False


@dataclass(frozen=True)
class Reader:
    """What turns text into documents: a tokenizer, and the id that ends each of them (`NO_END`: none does)."""

    by: Tokenizer
    eos: int = NO_END

    def documents(self, path: Path) -> Iterator[Document]:
        """Yield the documents of a text file that hold a token: the file, or each line of JSON.

        Raises:
            ValueError: It names the file and the line that cannot be read.
        """
        try:
            with path.open(encoding="utf-8", newline="") as lines:
                found = self._lines(path, lines) if path.suffix == ".jsonl" else [self.joined([(lines.read(), True)])]
                yield from (document for document in found if len(document.ids))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8: {error}\n  fix: convert it, or leave it out") from None

    def _lines(self, path: Path, lines: Iterator[str]) -> Iterator[Document]:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield self.record(json.loads(line))
                except ValueError as error:
                    raise ValueError(f"{path}, line {number}: {error}") from None

    def record(self, record: Any) -> Document:
        """Return the document of {"text"}, {"prompt", "completion"}, or {"messages": [{"role", "content"}, ...]}.

        Only a text, a completion and what the assistant says count in the loss. ValueError for anything else.
        """
        match record:
            case {"text": str(text)}:
                return self.joined([(text, True)])
            case {"prompt": str(prompt), "completion": str(completion)}:
                return self.joined([(prompt, False), (completion, True)])
            case {"messages": [_, *_] as messages}:
                return self.plain_chat(messages)
        raise ValueError(
            'a line is {"text"}, {"prompt", "completion"} or {"messages": [...]}'
            "\n  fix: write each line in one of these ways"
        )

    def plain_chat(self, messages: Sequence[Mapping[str, Any]]) -> Document:
        """Return messages as they are written where there is no chat template: "role: content" and an empty line."""
        parts = []
        for message in messages:
            match message:
                case {"role": str(role), "content": str(content)}:
                    parts += [(f"{role}: ", False), (f"{content}\n\n", role == ASSISTANT)]
                case _:
                    raise ValueError('a message is {"role": ..., "content": ...}, both text\n  fix: write each so')
        return self.joined(parts)._replace(plain=True)

    def joined(self, parts: Sequence[tuple[str, bool]]) -> Document:
        """Return texts, each with whether it counts, as one document; one that counts ends with the end of text."""
        ids: list[int] = []
        lengths = []
        for i, (text, counts) in enumerate(parts):
            before = len(ids)
            ids += self.by.encode(text)
            if (counts or i == len(parts) - 1) and ids and ids[-1] != self.eos != NO_END:
                ids.append(self.eos)
            lengths.append(len(ids) - before)
        return Document(numpy.array(ids, numpy.uint32), numpy.repeat([counts for _, counts in parts], lengths))


def add_ends(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how documents end."""
    parser.add_argument("--no-eos", action="store_true", help="do not end documents with the tokenizer's end of text")
    parser.add_argument(
        "--eos-id", type=integer(NO_END), metavar="ID",
        help="the id that ends each document (default: the tokenizer's end of text; bytes have none)",
    )  # fmt: skip


def end_of_documents(by: Tokenizer, args: argparse.Namespace, text: bool = True) -> int:
    """Return the id that ends each document, by the options and the tokenizer; `NO_END` if none does.

    `text`: whether there are documents to end. If so, it says of a tokenizer without an end of text what to do.
    """
    if args.no_eos:
        return NO_END
    found = end_of_text(by) if args.eos_id is None else args.eos_id
    if found is None and text and by.identity not in ("", "bytes") and first_rank():
        complain(
            f"warning: nothing says which token of {by.name} ends a text, so documents have no end"
            "\n  fix: put a tokenizer_config.json with its eos_token beside it, or give --eos-id, or --no-eos"
        )
    return NO_END if found is None else found


def untemplated(path: Path, by: Tokenizer) -> str:
    """Return what to say of messages that no chat template has written."""
    return (
        f'{path}: its messages are written as "role: content": {by.name} has no chat template'
        "\n  fix: put the model's chat_template.jinja, or its tokenizer_config.json, beside its tokenizer.json"
    )
