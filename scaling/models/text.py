"""Text to token ids and back, and which tokenizer the ids of a model, a run or a corpus belong to.

Bytes are built in; a tokenizer.json needs the library `tokenizers`, of the extra `hf`. Ids mean nothing without their
tokenizer, so its `identity` is stored with them: in the shards of a corpus, in runs and in exports.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

from scaling.common.arguments import read_table, table_if_any
from scaling.common.lazy import needing
from scaling.configs.sources import COMPANIONS, MODEL, RUN, TEMPLATES

FILE = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"  # special tokens and chat templates
GENERATION = "generation_config.json"  # a file that comes with weights: how to sample, and the ids that end a text
ID_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")  # of config.json: ids that belong to the tokenizer
IDENTITY = "tokenizer_identity"  # of an export's config.json
NAME = "tokenizer_name"  # of run.toml: where it came from
BYTES = 256


class Tokenizer(Protocol):
    """Text to ids and back.

    Attributes:
        name: Where it comes from.
        identity: Equal for equal tokenizers.
        vocabulary: Ids lie in 0..vocabulary - 1.
        longest: The number of characters of the longest token.
        prefix: The ids that the tokenizer puts before a text, such as that of a BOS token.
        folder: The folder of the files that came with it, such as a chat template; None if there are none.
    """

    name: str
    identity: str
    vocabulary: int
    longest: int
    prefix: tuple[int, ...]
    folder: Path | None

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Return the ids of a text; with `special`, including the tokens that the tokenizer puts around a text."""
        ...

    def places(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of a text, and the span (start, end) of each id's characters in the text."""
        ...

    def id_of(self, token: str) -> int | None:
        """Return the id of the token that is written like this; None without such a token."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of these ids."""
        ...


class ByteText:
    """Each byte of UTF-8 text is a token; ids from 256 on are ignored."""

    name, identity, vocabulary, longest, prefix = "bytes", "bytes", BYTES, 1, ()
    folder: Path | None = None

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Return the ids of a text."""
        return list(text.encode())

    def places(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of a text and the span of each."""
        return self.encode(text), [(i, i + 1) for i, character in enumerate(text) for _ in character.encode()]

    def id_of(self, token: str) -> int | None:
        """Return None: no token has a name."""
        return None

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of these ids."""
        return bytes(int(id) for id in ids if id < BYTES).decode(errors="replace")


class FromFile:
    """A tokenizer.json. It is a ValueError if it cannot be read, or the library is not installed."""

    def __init__(self, path: "str | Path"):
        if not Path(path).is_file():
            raise ValueError(f"{path}: no such file\n  fix: give the path of a tokenizer.json")
        with needing(f"{path}:", "hf"):
            from tokenizers import Tokenizer as Loaded
            from tokenizers.models import WordLevel
        try:
            self.loaded = Loaded.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(
                f"{path}: not a tokenizer.json: {error}\n  fix: give a file that the tokenizers library wrote"
            ) from error
        self.loaded.no_truncation()  # a file may ask to cut every text, or to pad it: neither is part of the text
        self.loaded.no_padding()
        if hasattr(self.loaded.model, "dropout"):
            self.loaded.model.dropout = None  # would tokenize a text differently each time, and on each rank
        self.name, self.identity = str(path), sha256(Path(path).read_bytes()).hexdigest()
        vocabulary = self.loaded.get_vocab()
        self.vocabulary, self.longest = max(vocabulary.values(), default=-1) + 1, max(map(len, vocabulary), default=1)
        self.folder = Path(path).parent if Path(path).name == FILE else None
        self.growing = growing_steps(self.name, self.loaded)
        around = self.loaded.post_process(Loaded(WordLevel({"a": 0})).encode("a"))  # any text of one token
        begin = next((i for i, text in enumerate(around.sequence_ids) if text is not None), 0)
        self.prefix = tuple(around.ids[:begin])

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Return the ids of a text."""
        return self._encoded(text, special).ids

    def places(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of a text and the span of each."""
        found = self._encoded(text)
        return found.ids, found.offsets

    def _encoded(self, text: str, special: bool = False) -> Any:
        try:
            check_growth(self.name, self.growing, text)
            return self.loaded.encode(text, add_special_tokens=special)
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # raised by the library, which exports no class for it
                raise
            why = f"{self.name}: the library tokenizers cannot read a text by it: {error}"
            raise ValueError(f"{why}\n  fix: give another text, or another tokenizer.json") from None

    def id_of(self, token: str) -> int | None:
        """Return the id of a token, or None."""
        return self.loaded.token_to_id(token)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of these ids."""
        return self.loaded.decode([int(i) for i in ids])


class Unknown:
    """The tokenizer of a model that came without one: prompts must be ids, and text is refused."""

    identity, vocabulary, longest, prefix = "", 0, 1 << 62, ()
    folder: Path | None = None

    def __init__(self, place: "str | Path"):
        self.name = str(place)

    def places(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Refuse a text."""
        return self.encode(text), []

    def id_of(self, token: str) -> int | None:
        """Return None."""
        return None

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Refuse a text."""
        raise ValueError(
            f"{self.name}: has no {FILE}: nothing says which ids of its model a text is"
            f"\n  fix: put the model's {FILE} there, or give ids in place of text"
        )

    def decode(self, ids: Sequence[int]) -> str:
        """Return an empty text."""
        return ""


def tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer of a name: "bytes", the path of a tokenizer.json, or a folder that has one."""
    if name == "bytes":
        return ByteText()
    path = Path(name)
    return _read(path / FILE if path.is_dir() else path)


def _read(path: Path) -> Tokenizer:
    """Read a tokenizer.json. One that `write_bytes` wrote is the tokenizer of bytes, and needs no library."""
    if path.is_file() and path.read_text(errors="replace") == json.dumps(of_bytes()):
        return ByteText()
    return FromFile(path)


def tokenizer_of(folder: "str | Path", vocabulary: int) -> Tokenizer:
    """Return the tokenizer of a model's folder, or of a run's, whose model has `vocabulary` ids.

    It is the folder's own file if there is one; else bytes if there are 256 ids or a run says so; else `Unknown`.

    Raises:
        ValueError: The file has more ids than the model, or is not the one that the run or export was written with.
    """
    folder = Path(folder)
    home = home_of(folder)
    if (home / FILE).is_file():
        by = _read(home / FILE)
        key, record = ("identity", RUN) if (folder / RUN).is_file() else (IDENTITY, "config.json")
        if table_if_any(folder / record).get(key) not in (None, "", by.identity):
            raise ValueError(
                f"{home / FILE}: is not the tokenizer that {folder} was written with\n  fix: copy that one there; or, "
                f"if both make the same ids, take {key} out of {record}"
            )
        return checked_tokenizer(by, vocabulary, str(folder))
    if (folder / RUN).is_file():
        options = read_table(folder / RUN)
        name = options.get("tokenizer", "bytes")
        if name != "bytes":
            return checked_tokenizer(tokenizer(name), vocabulary, str(folder)) if name else Unknown(folder)
        known = options.get("identity") == "bytes"  # older runs say "bytes" by default
        return ByteText() if known or vocabulary == BYTES else Unknown(folder)
    return ByteText() if vocabulary == BYTES else Unknown(folder)


def checked_tokenizer(by: Tokenizer, vocabulary: int, model: str) -> Tokenizer:
    """Return the tokenizer. Raise a ValueError if it has ids that the model lacks, unless it is that of bytes."""
    if by.identity != "bytes" and by.vocabulary > vocabulary:
        raise ValueError(
            f"{by.name}: has the ids 0..{by.vocabulary - 1}, but {model} has {vocabulary}"
            "\n  fix: give the tokenizer that belongs to this model, or a model with a greater vocabulary"
        )
    return by


def home_of(folder: "str | Path") -> Path:
    """Return the folder of the files that came with a model: its own folder, or a run's subfolder for them."""
    folder = Path(folder)
    return folder / MODEL if (folder / RUN).is_file() else folder


def copy_companions(source: "str | Path", out: Path, names: Sequence[str] = (*COMPANIONS, TEMPLATES)) -> None:
    """Copy the files that came with a folder's weights or tokenizer; a `source` file is copied as tokenizer.json."""
    source = Path(source)
    source = source.parent if source.name == FILE else source
    if source.resolve() == out.resolve():
        return
    out.mkdir(parents=True, exist_ok=True)
    if source.is_file():
        shutil.copyfile(source, out / FILE)
        return
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)
        elif (source / name).is_dir():
            shutil.copytree(source / name, out / name, dirs_exist_ok=True)


def write_bytes(out: Path) -> None:
    """Write the tokenizer of bytes as files of Hugging Face's."""
    (out / FILE).write_text(json.dumps(of_bytes()))
    (out / TOKENIZER_CONFIG).write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}\n')


def of_bytes() -> dict[str, Any]:
    """Return the tokenizer.json in which byte b is token b.

    Bytes are named as in Hugging Face's ByteLevel: a printable byte by its own character, others by the characters
    from 256 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, BYTES)]
    rest = [b for b in range(BYTES) if b not in printable]
    vocab = {chr(b): b for b in printable} | {chr(BYTES + i): b for i, b in enumerate(rest)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"type": "BPE", "vocab": vocab, "merges": []}
    return {"version": "1.0", "added_tokens": [], "pre_tokenizer": level, "decoder": level, "model": model}


# A tokenizer.json may have replacements that make a text grow without bound: seven that each write "a" ten times turn
# one "a" into ten million characters, in 12 s; seventy never end. So each is tried alone on a part of the text, before
# the library applies all of them to the whole text.

UNCHECKED, MOST_TIMES = 16, 100  # factors of growth: up to the first none is checked, beyond the second it is refused
CONTENT = 256  # characters that one replacement may write
PART = 1000  # characters that are checked at a time, so that no step takes much memory
FIX = "give the tokenizer.json that the model came with"


def replacements(part: Any) -> Iterator[dict[str, Any]]:
    """Yield the steps of a normalizer or of a decoder of the library `tokenizers`, as its file has them."""
    waiting = [json.loads(part.__getstate__())] if part is not None else []
    while waiting:
        step = waiting.pop(0)
        inner = step.get("normalizers", step.get("decoders"))
        if inner is None:
            yield step
        else:
            waiting = [*inner, *waiting]


def growth(steps: list[dict[str, Any]]) -> float:
    """Return the largest factor by which a text can grow. A regular expression may match between characters."""
    times = 1.0
    for step in steps:
        if step["type"] == "Replace":
            written, pattern = len(step["content"]), step["pattern"].get("String")
            times *= 1 + written if not pattern else max(1.0, written / len(pattern))
    return times


def growing_steps(name: str, loaded: Any) -> list[Any]:
    """Return the normalizers to be tried one by one on each text; none where no text can grow much.

    Raises:
        ValueError: The file's decoder may make a text ever longer, or one replacement writes too much.
    """
    steps, decoder = [*replacements(loaded.normalizer)], [*replacements(loaded.decoder)]
    contents = [step["content"] for step in (*steps, *decoder) if step["type"] == "Replace"]
    why, longest = "", max(map(len, contents), default=0)
    if longest > CONTENT:
        why = f"a replacement writes {longest:,} characters, of at most {CONTENT}"
    elif growth(decoder) > MOST_TIMES:
        why = f"its decoder may make a text {growth(decoder):,.0f} times as long, of at most {MOST_TIMES}"
    if why:
        raise ValueError(f"{name}: {why}\n  fix: {FIX}")
    if growth(steps) <= UNCHECKED:
        return []
    empty = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
    return [type(loaded).from_str(json.dumps(empty | {"normalizer": step})).normalizer for step in steps]


def check_growth(name: str, steps: list[Any], text: str) -> None:
    """Raise a ValueError if the normalizers make a part of a text too long. Each step is checked before the next."""
    for begin in range(0, len(text) if steps else 0, PART):
        part = text[begin : begin + PART]
        for step in steps:
            part = step.normalize_str(part)
            if len(part) > MOST_TIMES * PART:
                raise ValueError(
                    f"{name}: its normalizers make a text more than {MOST_TIMES} times as long\n  fix: {FIX}"
                )
