"""Text as it is generated: streamed, stopped and put into a chat. A chat template needs jinja2, which torch brings."""

from collections.abc import Callable, Mapping, Sequence
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


def chat_prompt(folder: "str | Path", messages: Sequence[Mapping[str, str]]) -> str:
    """The messages [{"role": "user", "content": ...}] as the folder's, or a run's, chat template writes them, up to the
    answer."""
    return chat_template(folder)(messages)


def chat_template(folder: "str | Path") -> Callable[[Sequence[Mapping[str, str]]], str]:
    """What `chat_prompt` writes by. ValueError where the folder has none, or jinja2 is not there."""
    folder = home_of(folder)
    table = folder / "tokenizer_config.json"
    options = read_table(table) if table.is_file() else {}
    file = folder / "chat_template.jinja"
    template = file.read_text() if file.is_file() else options.get("chat_template")
    if not isinstance(template, str):
        raise ValueError(f"{folder}: has no chat template\n  fix: give a plain prompt")
    try:
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise ValueError("a chat template needs jinja2\n  fix: pip install jinja2") from None
    text = {name: options[name] for name in ("bos_token", "eos_token") if name in options}
    text = {name: token["content"] if isinstance(token, dict) else token for name, token in text.items()}
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _refuse
    compiled = environment.from_string(template)

    def write(messages: Sequence[Mapping[str, str]]) -> str:
        return compiled.render(messages=list(messages), add_generation_prompt=True, **text)

    return write


def _refuse(why: str) -> None:
    """What a template calls where the messages are not such as its model knows."""
    raise ValueError(f"{why}\n  fix: give messages as this model knows them")
