"""Text as it is generated: streamed, and stopped."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scaling.common.arguments import read_table, whole_numbers
from scaling.models.text import Unknown, home_of

BROKEN = "\ufffd"  # what stands for bytes that are no whole character


class TextStream:
    """Ids in, text out as soon as it is certain: whole characters, and nothing that may be the start of a stop string.

    `push(id)` and, at the end, `rest()` give the text that has become certain. `stopped`: a stop string has come; the
    text ends before it.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()):
        if stops and isinstance(tokenizer, Unknown):
            raise ValueError(f"{tokenizer.name}: a stop text needs its tokenizer\n  fix: put its tokenizer.json there")
        self.tokenizer, self.stops = tokenizer, [stop for stop in stops if stop]
        self.reader = tokenizer.reader()
        self.ids: list[int] = []  # the last that gave text, and those after: a token's text depends on what is before
        self.before, self.read = 0, ""  # how many of them gave text, and this text
        self.held = ""  # text that is not given yet
        self.stopped = False

    def push(self, id: int) -> str:
        if self.stopped:
            return ""
        if self.reader is not None:
            self.held += self.reader.decode(bytes([id]) if id < 256 else b"")
        else:
            self.ids.append(id)
            text = self.tokenizer.decode(self.ids)
            if text.endswith(BROKEN) or not text.startswith(self.read):
                return ""
            if new := text[len(self.read) :]:
                self.held += new
                self.ids = self.ids[self.before :]
                self.before, self.read = len(self.ids), self.tokenizer.decode(self.ids)
        return self._certain()

    def rest(self) -> str:
        if self.stopped:
            return ""
        if self.reader is not None:
            self.held += self.reader.decode(b"", final=True)
        else:
            self.held += self.tokenizer.decode(self.ids)[len(self.read) :]
        return self._certain(end=True)

    def _certain(self, end: bool = False) -> str:
        if found := [at for at in (self.held.find(stop) for stop in self.stops) if at >= 0]:
            self.stopped = True
            given, self.held = self.held[: min(found)], ""
            return given
        most = 0
        if not end:
            starts = (stop[:n] for stop in self.stops for n in range(1, len(stop)))
            most = max((len(start) for start in starts if self.held.endswith(start)), default=0)
        cut = len(self.held) - most
        given, self.held = self.held[:cut], self.held[cut:]
        return given


def ends_of(folder: "str | Path") -> tuple[int, ...]:
    """The ids that end a text (eos), by the folder's, or a run's, generation_config.json or config.json; none if they
    name none."""
    folder = home_of(folder)
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        found = read_table(path).get("eos_token_id") if path.is_file() else None
        if found is not None:
            return tuple(whole_numbers(f"{path}: eos_token_id", found if isinstance(found, list) else [found]))
    return ()
