"""`python -m scaling.train tokenize --data FOLDER --out SHARDS`: text to shards of ids, which training reads from disk.

SHARDS/tokens-00000.npy, ...     ids, of 16 bits if the vocabulary allows it
       counted-00000.npy, ...    which ids count in the loss; only written if some do not
       starts.npy                the position of the first token of each document
       tokenizer.json, ...       the tokenizer and its companion files, unless the ids are bytes
       shards.json               the files with their bytes, which tokenizer made them, and which id ends each document;
                                 written last
"""

import json
import shutil
from pathlib import Path

import numpy

from scaling.common.console import Parser, complain, complaining, integer
from scaling.models.text import Tokenizer, copy_companions, tokenizer
from scaling.train.corpus import INDEX, TEXT
from scaling.train.documents import Reader, add_options, check_options, end_of_documents, nothing_counts, untemplated
from scaling.train.durable import replaced


def write_shards(source, out, by: Tokenizer, shard_tokens: int, eos: int | None = None, templated: bool = True) -> dict:
    """Tokenize a file or a folder into shards and return their index.

    Args:
        source: The file or folder of text.
        out: The folder to write, which must be empty or new.
        by: The tokenizer.
        shard_tokens: The number of tokens at which a shard ends, with the document that reaches it.
        eos: As in `corpus.open_corpus`.
        templated: As in `corpus.open_corpus`.

    Raises:
        ValueError: A file cannot be read, `out` is not empty, or there is no text, or none that counts in the loss.
        OSError: A file cannot be read or written.
    """
    source, out = Path(source), Path(out)
    if out.is_dir() and any(out.iterdir()):
        raise ValueError(f"{out}: is not empty\n  fix: give another --out")
    files = sorted(p for p in source.rglob("*") if p.suffix in TEXT) if source.is_dir() else [source]
    files = [p for p in files if p.is_file()]
    if not files:
        raise ValueError(f"{source}: no text to read\n  fix: give a file, or a folder that holds some")
    out.mkdir(parents=True, exist_ok=True)
    try:
        return _written(source, files, out, Reader(by, eos, templated), shard_tokens)
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
        raise nothing_counts(source)
    save("starts.npy", numpy.array(starts, numpy.int64))
    if all_count:
        for name in index["counted"]:
            (out / name).unlink()
            del index["bytes"][name]
        index["counted"] = []
    if by.identity != "bytes":
        copy_companions(Path(by.name), out)
    replaced(out / INDEX, json.dumps(index))
    if plain:
        complain(f"warning: {untemplated(source, by)}")
    return index


@complaining(ValueError, OSError)
def main(argv=None) -> int:
    """Run the command; return the exit code."""
    parser = Parser(prog="python -m scaling.train tokenize", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", required=True, help="a file or a folder: text, or .jsonl of texts or chats")
    parser.add_argument("--out", required=True, help="the folder of shards to write")
    parser.add_argument("--tokenizer", default="bytes", help="bytes (default), a tokenizer.json, or a folder with one")
    parser.add_argument("--shard-tokens", type=integer(1), default=10**8, help="tokens per shard (default 1e8)")
    add_options(parser)
    args = parser.parse_args(argv)
    check_options(parser, args)
    by = tokenizer(args.tokenizer)
    how = end_of_documents(by, args), not args.no_template
    index = write_shards(args.data, args.out, by, args.shard_tokens, *how)
    tokens = sum(len(numpy.load(Path(args.out) / name, mmap_mode="r")) for name in index["tokens"])
    print(f"{tokens:,} tokens in {len(index['tokens'])} shards, the greatest id {index['top']}: {args.out}")
    return 0
