"""Open a corpus, which is one long sequence of tokens, cut into documents and stored in memory-mapped parts.

It is read from text files (each a document), JSON lines (each line a document), one-dimensional .npy files of ids (each
a document), or the shards that `python -m scaling.train tokenize --data FOLDER --out SHARDS` writes:

SHARDS/tokens-00000.npy, ...     ids, of 16 bits if the vocabulary allows it
       counted-00000.npy, ...    which ids count in the loss; only written if some do not
       starts.npy                the position of the first token of each document
       tokenizer.json, ...       the tokenizer and its companion files, unless the ids are bytes
       shards.json               the files with their bytes, which tokenizer made them, and which ids begin and end each
                                 document; written last
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy

from scaling.common.console import Parser, complain, complaining, integer
from scaling.models.template import NO_END
from scaling.models.text import FILE, ByteText, Tokenizer, Unknown, copy_companions, tokenizer
from scaling.train.documents import (
    Reader,
    add_options,
    check_options,
    end_of_documents,
    nothing_counts_error,
    untemplated_warning,
)
from scaling.train.durable import write_atomically

TEXT = (".txt", ".md", ".py", ".rst", ".json", ".jsonl", ".csv", "")
INDEX = "shards.json"  # the index in a folder of token shards
EVERYTHING: tuple[numpy.ndarray, ...] = ()
BYTES = ByteText()


@dataclass(frozen=True)
class Corpus:
    """A sequence of tokens, cut into documents.

    Attributes:
        parts: Arrays of ids, which follow each other.
        starts: The position of the first token of each document.
        counted: Which tokens of each part count in the loss; empty if all do.
        notes: Warnings for whoever trains on the corpus.
    """

    parts: tuple[numpy.ndarray, ...]
    starts: numpy.ndarray
    counted: tuple[numpy.ndarray, ...] = EVERYTHING
    notes: tuple[str, ...] = ()

    @cached_property
    def ends(self) -> numpy.ndarray:
        """The position at which each part ends."""
        return numpy.cumsum([len(part) for part in self.parts])

    def __len__(self) -> int:
        return int(self.ends[-1])

    @cached_property
    def top(self) -> int:
        """The greatest id."""
        return max(int(part.max()) for part in self.parts if len(part))

    def between(self, first: int, last: int) -> tuple[numpy.ndarray, numpy.ndarray | None]:
        """Return the ids from position `first` to `last`, and which of them count, or None if all do."""
        ids = self._joined(self.parts, first, last).astype(numpy.int64)
        return ids, self._joined(self.counted, first, last) if self.counted else None

    def _joined(self, parts: tuple[numpy.ndarray, ...], first: int, last: int) -> numpy.ndarray:
        at, pieces = int(numpy.searchsorted(self.ends, first, side="right")), []
        while first < last:
            begin = int(self.ends[at]) - len(parts[at])
            pieces.append(parts[at][first - begin : last - begin])
            first, at = min(last, int(self.ends[at])), at + 1
        return pieces[0] if len(pieces) == 1 else numpy.concatenate(pieces)


def open_corpus(
    path, by: Tokenizer = BYTES, eos: int | None = None, templated: bool = True, bos: bool = True
) -> Corpus:
    """Return the corpus of a file or of a folder of files, sorted by name.

    If a folder holds .npy files, its text is not read, and a note says so. Rows of ids are read unchanged, and shards
    hold the beginnings and ends of documents that `tokenize` wrote.

    Args:
        path: The file or folder.
        by: The tokenizer.
        eos: The id that ends each document of text; None is the tokenizer's own end of text, `NO_END` is none.
        templated: Whether messages are written by the tokenizer's chat template.
        bos: Whether documents of text begin with the tokens that the tokenizer puts before a text.

    Raises:
        ValueError: The data cannot be read; the message names the file, and the line.
        OSError: A file cannot be opened.
    """
    kind, files = check_data(path := Path(path), by)
    if kind == "shards":
        return _shards(path, Reader(by, eos, templated, bos))
    if kind == "ids":
        unread = [p for p in text_files(path) if p.suffix in (".txt", ".jsonl")]
        why = f"is not read, because {path} holds .npy files of ids\n  fix: keep ids and text in two folders"
        notes = (f"{unread[0]}: {why}",) if unread else ()
        return _joined([[_row(p)] for p in files], path, notes=notes)
    if isinstance(by, ByteText) and not any(p.suffix == ".jsonl" for p in files):
        rows = [numpy.memmap(p, numpy.uint8, "r") for p in files if _readable(p)]
        end = numpy.array([] if eos in (None, NO_END) else [eos], numpy.uint32)
        return _joined([[row, end] if len(end) and row[-1] != eos else [row] for row in rows], path)
    read = [document for p in files for document in Reader(by, eos, templated, bos).documents(p)]
    if read and not any(d.counted.any() for d in read):
        raise nothing_counts_error(path)
    counted = tuple(d.counted for d in read) if not all(d.counted.all() for d in read) else EVERYTHING
    notes = (untemplated_warning(path, by),) if any(document.plain for document in read) else ()
    return _joined([[d.ids] for d in read], path, counted, notes)


def check_data(path: Path, by: Tokenizer) -> tuple[str, list[Path]]:
    """Return the kind of data in a file or folder, and its files; only the index of shards is opened.

    Raises:
        ValueError: The data are not what this tokenizer reads.
    """
    kind, files = kind_and_files(path)
    if kind == "shards":
        shards_index(path, by)
    if kind == "text" and isinstance(by, Unknown):
        raise ValueError(
            f"{files[0]}: is text, and {by.name} has no {FILE}"
            "\n  fix: give --tokenizer with the model's, or rows of ids"
        )
    return kind, files


def kind_and_files(path: Path) -> tuple[str, list[Path]]:
    """Return whether a file or folder holds "shards", "ids" (rows of them) or "text", and its files.

    Raises:
        ValueError: It holds none of them, or is only a part of shards.
    """
    if (path / INDEX).is_file():
        return "shards", []
    ids = [p for p in (sorted(path.rglob("*.npy")) if path.is_dir() else [path]) if p.suffix == ".npy" and p.is_file()]
    files = ids or text_files(path)
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder\n  fix: give the path of one")
    if not files:
        raise ValueError(f"{path}: no text and no .npy of tokens to read\n  fix: give a folder that holds some")
    if parts := [p for p in ids if (p.parent / INDEX).is_file()]:
        raise ValueError(f"{parts[0]}: is a part of shards\n  fix: give their folder, {parts[0].parent}")
    return "ids" if ids else "text", files


def text_files(path: Path) -> list[Path]:
    """Return the files of text in a folder, sorted by name, or the path itself if it is a file."""
    found = sorted(p for p in path.rglob("*") if p.suffix in TEXT) if path.is_dir() else [path]
    return [p for p in found if p.is_file()]


def _joined(
    documents: Sequence[Sequence[numpy.ndarray]],
    path: Path,
    counted: tuple[numpy.ndarray, ...] = EVERYTHING,
    notes: tuple[str, ...] = (),
) -> Corpus:
    """Join documents, each a list of arrays of ids, into a corpus; ValueError if there is not one token."""
    lengths = [sum(map(len, rows)) for rows in documents]
    if not sum(lengths):
        raise ValueError(f"{path}: holds no text\n  fix: give a file that holds some")
    parts = tuple(row for rows in documents for row in rows)
    return Corpus(parts, numpy.cumsum([0, *lengths[:-1]]), counted, notes)


def _readable(path: Path) -> int:
    """Return the size of a file in bytes; OSError, which names it, if it cannot be opened."""
    with path.open("rb"):
        return path.stat().st_size


def _row(path: Path) -> numpy.ndarray:
    """Map a .npy file of ids into memory; ValueError if it is not a row of token ids."""
    try:
        ids = numpy.load(path, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read: {error}\n  fix: give a file that can be read") from error
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"{path}: not a row of token ids\n  fix: give a one-dimensional .npy of whole numbers")
    if ids.dtype.kind == "i" and len(ids) and (least := ids.min()) < 0:
        raise ValueError(f"{path}: holds the id {least}\n  rule: ids begin with 0\n  fix: give other ids")
    return ids


def shards_index(folder: Path, by: Tokenizer) -> dict:
    """Return the index of a folder of token shards.

    Raises:
        ValueError: Another tokenizer made their ids, or none is known to have made them.
    """
    index = json.loads((folder / INDEX).read_text())
    if index.get("identity") != by.identity:
        whose = f"those of {by.name}" if by.identity else f"known to be those of {by.name}, which has no {FILE}"
        raise ValueError(
            f"{folder}: its ids are those of {index['tokenizer']}, not {whose}"
            "\n  fix: tokenize the text by the tokenizer of the model, or give its own with --tokenizer"
        )
    return index


def _shards(folder: Path, reader: Reader) -> Corpus:
    """Return the corpus of a folder of token shards.

    Raises:
        ValueError: A shard is missing or cut short, or another tokenizer made the ids.
    """
    index, eos, prefix = shards_index(folder, reader.by), reader.end, reader.prefix
    for name, nbytes in index["bytes"].items():
        if not (folder / name).is_file() or (folder / name).stat().st_size != nbytes:
            raise ValueError(f"{folder / name}: missing or cut short\n  fix: write the shards again")
    counted = tuple(numpy.load(folder / name, mmap_mode="r") for name in index["counted"])
    parts, ended, notes = tuple(_row(folder / name) for name in index["tokens"]), index["eos"], []
    if eos not in (NO_END, ended):
        how = "without an end of text" if ended == NO_END else f"with the id {ended}"
        notes.append(f"{folder}: its documents end {how}, not with {eos}\n  fix: tokenize the text again")
    if prefix and prefix != index.get("bos", []):  # older shards have no "bos", and no ids there
        notes.append(
            f"{folder}: its documents do not begin with {prefix}, which generate and serve put before a text"
            "\n  fix: tokenize the text again; or give --no-bos, if it is meant"
        )
    corpus = Corpus(parts, numpy.load(folder / index["starts"]), counted, tuple(notes))
    corpus.__dict__["top"] = index["top"]  # from the index, so that the shards need not be read for it
    return corpus


def write_shards(
    source,
    out,
    by: Tokenizer,
    shard_tokens: int,
    eos: int | None = None,
    templated: bool = True,
    bos: bool = True,
) -> dict:
    """Tokenize a file or a folder into shards and return their index.

    Args:
        source: The file or folder of text.
        out: The folder to write, which must be empty or new.
        by: The tokenizer.
        shard_tokens: The number of tokens at which a shard ends, with the document that reaches it.
        eos: As in `corpus.open_corpus`.
        templated: As in `corpus.open_corpus`.
        bos: As in `corpus.open_corpus`.

    Raises:
        ValueError: A file cannot be read, `out` is not empty, or there is no text, or none that counts in the loss.
        OSError: A file cannot be read or written.
    """
    source, out = Path(source), Path(out)
    if out.is_dir() and any(out.iterdir()):
        raise ValueError(f"{out}: is not empty\n  fix: give another --out")
    files = text_files(source)
    if not files:
        raise ValueError(f"{source}: no text to read\n  fix: give a file, or a folder that holds some")
    out.mkdir(parents=True, exist_ok=True)
    try:
        return _written(source, files, out, Reader(by, eos, templated, bos), shard_tokens)
    except BaseException:
        shutil.rmtree(out)  # no shards without their index
        raise


def _written(source: Path, files: list[Path], out: Path, reader: Reader, shard_tokens: int) -> dict:
    """Write the documents of the files as shards into `out`; return their index."""
    by, plain = reader.by, False
    dtype = numpy.uint16 if max(by.vocabulary, reader.end + 1) <= 1 << 16 else numpy.uint32
    index = {
        "tokenizer": by.name,
        "identity": by.identity,
        "bos": reader.prefix,
        "eos": reader.end,
        "tokens": [],
        "counted": [],
        "starts": "starts.npy",
        "top": 0,
        "bytes": {},
    }
    starts, held, size, total, all_count, any_count = [], [], 0, 0, True, False

    def save(name: str, x: numpy.ndarray) -> str:
        numpy.save(out / name, x)
        index["bytes"][name] = (out / name).stat().st_size
        return name

    def flush() -> None:
        nonlocal held, size
        number = len(index["tokens"])
        index["tokens"].append(save(f"tokens-{number:05}.npy", numpy.concatenate([d.ids for d in held]).astype(dtype)))
        index["counted"].append(save(f"counted-{number:05}.npy", numpy.concatenate([d.counted for d in held])))
        held, size = [], 0

    for path in files:
        for document in reader.documents(path):
            starts.append(total)
            held.append(document)
            total, size = total + len(document.ids), size + len(document.ids)
            index["top"] = max(index["top"], int(document.ids.max()))
            all_count, any_count = all_count and document.counted.all(), any_count or document.counted.any()
            plain = plain or document.plain
            if size >= shard_tokens:
                flush()
    if held:
        flush()
    if not total:
        raise ValueError(f"{source}: holds no text\n  fix: give a file that holds some")
    if not any_count:
        raise nothing_counts_error(source)
    save("starts.npy", numpy.array(starts, numpy.int64))
    if all_count:
        for name in index["counted"]:
            (out / name).unlink()
            del index["bytes"][name]
        index["counted"] = []
    if by.identity != "bytes":
        copy_companions(Path(by.name), out)
    write_atomically(out / INDEX, json.dumps(index))
    if plain:
        complain(f"warning: {untemplated_warning(source, by)}")
    return index


@complaining(ValueError, OSError)
def tokenize(argv=None) -> int:
    """Run the command tokenize; return the exit code."""
    what = "write text as shards of ids, which training reads from disk"
    parser = Parser(prog="python -m scaling.train tokenize", description=what)
    parser.add_argument("--data", required=True, help="a file or a folder: text, or .jsonl of texts or chats")
    parser.add_argument("--out", required=True, help="the folder of shards to write")
    parser.add_argument("--tokenizer", default="bytes", help="bytes (default), a tokenizer.json, or a folder with one")
    parser.add_argument("--shard-tokens", type=integer(1), default=10**8, help="tokens per shard (default 1e8)")
    add_options(parser)
    args = parser.parse_args(argv)
    check_options(parser, args)
    by = tokenizer(args.tokenizer)
    how = end_of_documents(by, args), not args.no_template, not args.no_bos
    index = write_shards(args.data, args.out, by, args.shard_tokens, *how)
    tokens = sum(len(numpy.load(Path(args.out) / name, mmap_mode="r")) for name in index["tokens"])
    print(f"{tokens:,} tokens in {len(index['tokens'])} shards, the greatest id {index['top']}: {args.out}")
    return 0
