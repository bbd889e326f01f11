"""A corpus: one long run of tokens, cut into documents, in parts that are mapped into memory.

Read from text files (each a document), JSON lines (each line a document), rows of ids in .npy files, or the shards
that `python -m scaling.train tokenize` writes.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy

from scaling.models.text import FILE, ByteText, Tokenizer, Unknown, tokenizer

TEXT = (".txt", ".md", ".py", ".rst", ".json", ".jsonl", ".csv", "")
INDEX = "shards.json"  # of a folder of token shards
EVERYTHING: tuple[numpy.ndarray, ...] = ()
BYTES = ByteText()


class Document(NamedTuple):
    """Token ids, and for each whether it counts in the loss."""

    ids: numpy.ndarray
    counted: numpy.ndarray


@dataclass(frozen=True)
class Corpus:
    """`parts`: rows of ids, one after another; `starts`: where each document begins; `counted`: for each part which
    tokens count in the loss, if not all do."""

    parts: tuple[numpy.ndarray, ...]
    starts: numpy.ndarray
    counted: tuple[numpy.ndarray, ...] = EVERYTHING

    @cached_property
    def ends(self) -> numpy.ndarray:
        """Where each part ends."""
        return numpy.cumsum([len(part) for part in self.parts])

    def __len__(self) -> int:
        return int(self.ends[-1])

    @cached_property
    def top(self) -> int:
        """The greatest id."""
        return max(int(part.max()) for part in self.parts if len(part))

    def between(self, first: int, last: int) -> tuple[numpy.ndarray, numpy.ndarray | None]:
        """(the ids from place `first` to `last`, which of them count; None: all)."""
        ids = self._joined(self.parts, first, last).astype(numpy.int64)
        return ids, self._joined(self.counted, first, last) if self.counted else None

    def _joined(self, parts: tuple[numpy.ndarray, ...], first: int, last: int) -> numpy.ndarray:
        at, pieces = int(numpy.searchsorted(self.ends, first, side="right")), []
        while first < last:
            begin = int(self.ends[at]) - len(parts[at])
            pieces.append(parts[at][first - begin : last - begin])
            first, at = min(last, int(self.ends[at])), at + 1
        return pieces[0] if len(pieces) == 1 else numpy.concatenate(pieces)


def open_corpus(path, by: Tokenizer = BYTES) -> Corpus:
    """The corpus of a file or of a folder of files, sorted by name.

    Ids and text do not go together. ValueError or OSError that names the file, and the line, for what cannot be read.
    """
    kind, files = check_data(path := Path(path), by)
    if kind == "shards":
        return _shards(path, by)
    if kind == "ids":
        return _joined([_row(p) for p in files], path)
    if isinstance(by, ByteText) and not any(p.suffix == ".jsonl" for p in files):
        return _joined([numpy.memmap(p, numpy.uint8, "r") for p in files if _readable(p)], path)
    read = [document for p in files for document in documents(p, by) if len(document.ids)]
    counted = tuple(d.counted for d in read) if not all(d.counted.all() for d in read) else EVERYTHING
    return _joined([d.ids for d in read], path, counted)


def kind_of_data(path) -> str:
    """ "shards", "ids" (rows of them) or "text", of a file or of a folder. ValueError if there is none of them."""
    return _files(Path(path))[0]


def check_data(path: Path, by: Tokenizer) -> tuple[str, list[Path]]:
    """(which kind, its files) of a file or a folder. ValueError unless it holds what this tokenizer reads; of shards
    only the index is opened."""
    kind, files = _files(path)
    if kind == "shards":
        shards_index(path, by)
    if kind == "text" and isinstance(by, Unknown):
        raise ValueError(
            f"{files[0]}: is text, and {by.name} has no {FILE}"
            "\n  fix: give --tokenizer with the model's, or rows of ids"
        )
    return kind, files


def _files(path: Path) -> tuple[str, list[Path]]:
    """(which kind, its files)."""
    if (path / INDEX).is_file():
        return "shards", []
    found = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    ids = [p for p in found if p.suffix == ".npy"]
    files = ids or [p for p in found if p.suffix in TEXT or p == path]
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder\n  fix: give the path of one")
    if not files:
        raise ValueError(f"{path}: no text and no .npy of tokens to read\n  fix: give a folder that holds some")
    if parts := [p for p in ids if (p.parent / INDEX).is_file()]:
        raise ValueError(f"{parts[0]}: is a part of shards\n  fix: give their folder, {parts[0].parent}")
    return "ids" if ids else "text", files


def _joined(rows: list, path: Path, counted: tuple[numpy.ndarray, ...] = EVERYTHING) -> Corpus:
    """Rows of ids, each a document, as a corpus. ValueError if there is not one token."""
    if not sum(map(len, rows)):
        raise ValueError(f"{path}: holds no text\n  fix: give a file that holds some")
    starts = numpy.cumsum([0, *(len(part) for part in rows[:-1])])
    return Corpus(tuple(rows), starts, counted)


def _readable(path: Path) -> int:
    """Its bytes. OSError that names it if it cannot be opened."""
    with path.open("rb"):
        return path.stat().st_size


def _row(path: Path) -> numpy.ndarray:
    """A .npy of ids, mapped into memory."""
    try:
        ids = numpy.load(path, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read: {error}\n  fix: give a file that can be read") from error
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"{path}: not a row of token ids\n  fix: give a one-dimensional .npy of whole numbers")
    return ids


def documents(path: Path, by: Tokenizer) -> Iterator[Document]:
    """The documents of a text file: one, or one a line of JSON. ValueError that names the file and the line."""
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            if path.suffix != ".jsonl":
                yield plain_document(lines.read(), by)
                return
            for number, line in enumerate(lines, 1):
                if line.strip():
                    try:
                        yield chat_document(json.loads(line), by)
                    except ValueError as error:
                        raise ValueError(f"{path}, line {number}: {error}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8: {error}\n  fix: convert it, or leave it out") from None


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


def shards_index(folder: Path, by: Tokenizer) -> dict:
    """What a folder of token shards says of them. ValueError unless this tokenizer made their ids."""
    index = json.loads((folder / INDEX).read_text())
    name = index["tokenizer"]
    if "identity" not in index and name != "bytes" and not Path(name).exists():  # written before they said so
        raise ValueError(
            f"{folder}: was made with {name}, which is not there: nothing says which tokenizer that was"
            "\n  fix: tokenize the text again"
        )
    if (index["identity"] if "identity" in index else tokenizer(name).identity) != by.identity:
        whose = f"those of {by.name}" if by.identity else f"known to be those of {by.name}, which has no {FILE}"
        raise ValueError(
            f"{folder}: its ids are those of {name}, not {whose}"
            "\n  fix: tokenize the text by the tokenizer of the model, or give its own with --tokenizer"
        )
    return index


def _shards(folder: Path, by: Tokenizer) -> Corpus:
    """The corpus of a folder of token shards. ValueError that names the shard that is missing or cut short, or if they
    are of another tokenizer."""
    index = shards_index(folder, by)
    for name, nbytes in index["bytes"].items():
        if not (folder / name).is_file() or (folder / name).stat().st_size != nbytes:
            raise ValueError(f"{folder / name}: missing or cut short\n  fix: write the shards again")
    counted = tuple(numpy.load(folder / name, mmap_mode="r") for name in index["counted"])
    corpus = Corpus(
        tuple(_row(folder / name) for name in index["tokens"]), numpy.load(folder / index["starts"]), counted
    )
    corpus.__dict__["top"] = index["top"]  # known: the shards need not be read for it
    return corpus
