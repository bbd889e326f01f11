"""A model's chat template and the ends of its texts: from messages to the text that the model has learnt to go on from.

    template = chat_template(folder)
    template.render([{"role": "user", "content": "Hi"}], add_generation_prompt=True)

Templates are read and rendered as transformers reads and renders them. A template is a program that comes with the
model, so another process runs it (`template_process.py`): it may take `SECONDS` of processor time and write
`MOST_WRITTEN` characters. It needs jinja2, of the extra `hf`.
"""

import atexit
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any

from scaling.common.arguments import of_type, table_if_any, whole_numbers
from scaling.configs.sources import RUN, TEMPLATES
from scaling.models.text import FILE, GENERATION, TOKENIZER_CONFIG, Tokenizer, home_of

SECONDS = 2.0  # limit of processor time for one rendering
MOST_WRITTEN = 8 << 20  # limit of characters that it may write
TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
REASONING = ("reasoning_content", "thinking", "reasoning")  # keys of a message under which a model's thoughts may be
EXTRA = "extra_special_tokens"  # a key of tokenizer_config.json
RESERVED = {  # names that `chat_template_kwargs` may not have: callers set them, or they are not variables
    "messages", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize", "self",
}  # fmt: skip
STAND_IN = "Q7answerQ7"  # rendered in place of an answer; occurs in no text
GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ChatTemplate:
    """A folder's chat template.

    Attributes:
        templates: The template's text by its name; "default" is the one for messages without tools.
        tokens: The special tokens that a template may write, such as `bos_token`.
        folder: Where it was read.
    """

    templates: Mapping[str, str]
    tokens: dict[str, str]
    folder: Path

    def render(
        self,
        messages: Messages,
        /,
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """Return the messages as one text.

        Args:
            messages: Such as [{"role": "user", "content": "Hi"}].
            add_generation_prompt: Whether the text goes on up to where the assistant's next answer begins.
            tools: The functions that the model may call, as JSON schemas.
            documents: The texts that the answer may quote.
            kwargs: Other variables of this template, such as `enable_thinking`.

        Raises:
            ValueError: The template refuses the messages, or exceeds its limits.
        """
        given = {"add_generation_prompt": add_generation_prompt, "tools": tools, "documents": documents}
        return self._run(messages, **given, **kwargs)[0]

    def spans(self, messages: Messages, /, **kwargs: Any) -> tuple[str, list[tuple[int, int]]]:
        """Return the messages as one text, and the spans of the assistant's answers: [(start, end), ...].

        A span ends after the token that ends the answer. A template may mark its answers by `{% generation %}`.
        Otherwise they are found by rendering: an answer begins where the messages before it end with
        `add_generation_prompt`, or else where its content begins.

        Raises:
            ValueError: `render` would raise it, or an answer cannot be found in the text.
        """
        text, spans = self._run(messages, **kwargs)
        if not GENERATION_TAG.search(self._chosen(kwargs.get("tools"))):
            answers = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
            spans = [self._span(list(messages), i, text, kwargs) for i in answers]
        return text, spans

    def _chosen(self, tools: Any) -> str:
        """Return the template for these tools. Raise a ValueError if the folder has none."""
        name = "tool_use" if tools is not None and "tool_use" in self.templates else "default"
        if name not in self.templates:
            raise ValueError(
                f"{self.folder}: no chat template is the default; there are {', '.join(sorted(self.templates))}"
                "\n  fix: name one of them default"
            )
        return self.templates[name]

    def _run(self, messages: Messages, /, **kwargs: Any) -> tuple[str, list[tuple[int, int]]]:
        """Render the messages; return the text, and the spans that `{% generation %}` marks."""
        if isinstance(messages, str | Mapping) or not all(isinstance(message, Mapping) for message in messages):
            raise ValueError('messages are objects such as {"role": "user", "content": "Hi"}\n  fix: give a list')
        if not messages:
            raise ValueError("there is no message\n  fix: give at least one")
        variables = {"add_generation_prompt": False, "tools": None, "documents": None}
        variables |= self.tokens | kwargs | {"messages": [_prepared(message) for message in messages]}
        template = self._chosen(variables["tools"])
        return _renderer(os.getpid()).render(template, variables)

    def _span(self, messages: list, i: int, text: str, kwargs: dict[str, Any]) -> tuple[int, int]:
        """Return where message i's answer begins and ends in the text of all messages."""

        def attempt(some: list, **more: Any) -> str | None:
            try:
                return self._run(some, **kwargs | more)[0]
            except ValueError:  # a template may refuse a part of a conversation
                return None

        content = [{"type": "text", "text": STAND_IN}] if isinstance(messages[i].get("content"), list) else STAND_IN
        other = attempt([*messages[:i], {"role": "assistant", "content": content}, *messages[i + 1 :]])
        start = end = None
        if other and other.count(STAND_IN) == 1:
            head, _, tail = other.partition(STAND_IN)
            start = len(head) if text.startswith(head) else None
            end = self._ended(text, len(text) - len(tail)) if text.endswith(tail) else None
        prompt = attempt(messages[:i], add_generation_prompt=True)
        if prompt and text.startswith(prompt):
            start = len(prompt) if not text[len(prompt) : start].strip() or prompt != attempt(messages[:i]) else start
        if end is None and (whole := attempt(messages[: i + 1])):  # the end of an answer depends on its content
            end = len(_shared(whole, text).rstrip())
        if start is None or end is None or end < start:
            raise ValueError(
                f"{self.folder}: where message {i} begins and ends cannot be found in its chat template's text"
                "\n  fix: write {% generation %} before the answer in the template, and {% endgeneration %} after it"
            )
        return start, end

    def _ended(self, text: str, end: int) -> int:
        """Return the end of the special token that follows `end`, perhaps after white space; else `end`."""
        found = self._special.match(text, end)
        return found.end() if found else end

    @cached_property
    def _special(self) -> "re.Pattern[str]":
        known = {*self.tokens.values()}
        known |= {token["content"] for token in table_if_any(self.folder / FILE).get("added_tokens") or ()}
        longest = sorted(filter(None, known), key=len, reverse=True)
        return re.compile(rf"\s*(?:{'|'.join(map(re.escape, longest))})" if longest else "(?!)")


def chat_template(folder: "str | Path") -> ChatTemplate | None:
    """Return the chat template of a model's folder or of a run's; None where it has none.

    Raises:
        ValueError: A file cannot be read, or jinja2 is not installed.
    """
    home = home_of(folder)
    if not (templates := dict(_templates(home))):
        return None
    if find_spec("jinja2") is None:
        raise ValueError(f"{home}: its chat template needs jinja2\n  fix: pip install 'scaling-book-torch[hf]'")
    return ChatTemplate(templates, special_tokens(home), home)


def _templates(home: Path) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of each template, from template files or else from tokenizer_config.json."""
    files = {path.stem: path for path in sorted((home / TEMPLATES).glob("*.jinja"))}
    if (own := home / "chat_template.jinja").is_file():
        files = {"default": own} | files
    for name, path in files.items():
        try:
            yield name, path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: is not text: {error}\n  fix: write it as UTF-8") from None
    path = home / TOKENIZER_CONFIG
    if files or (given := table_if_any(path).get("chat_template")) is None:
        return
    where = f"{path}: chat_template"
    of_type(where, given, str, list)
    for entry in [{"name": "default", "template": given}] if isinstance(given, str) else given:
        of_type(where, entry, dict)
        for key in ("name", "template"):
            of_type(f"{where}: {key}", entry.get(key), str)
        yield entry["name"], entry["template"]


def special_tokens(home: Path) -> dict[str, str]:
    """Return the special tokens by name, as tokenizer_config.json and special_tokens_map.json have them.

    A token is a text, or an object whose `content` is the text; null is left out. As in transformers the map
    counts where tokenizer_config.json has no `added_tokens_decoder`, and then wins. Names of a model's own, which end
    with "_token" or are in `extra_special_tokens`, are the other way round: what tokenizer_config.json writes wins.
    Those in its `model_specific_special_tokens` count if it has no others.
    """
    options = table_if_any(home / TOKENIZER_CONFIG)
    old = table_if_any(home / "special_tokens_map.json") if "added_tokens_decoder" not in options else {}
    own = {name: token for name, token in options.items() if name not in TOKENS and name.endswith("_token")}
    objects = {name: token for name, token in own.items() if isinstance(token, dict) and "__type" in token}
    found = {name: options[name] for name in TOKENS if name in options} | objects
    found |= {name: token for name, token in old.items() if name in TOKENS or name.endswith("_token")}
    mine = {name: token for name, token in own.items() if isinstance(token, str)} | _table(options, EXTRA)
    found |= mine or _table(options, "model_specific_special_tokens")
    found |= _table(old, EXTRA)
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _table(options: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the table of a key, or an empty one if the key is missing or holds something else."""
    return found if isinstance(found := options.get(key), dict) else {}


def _prepared(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message for a template: without nulls, and with its reasoning under the keys that templates read.

    transformers' `apply_chat_template` does both from version 5 on, and its `render_jinja_template` only the second.
    """
    found = {key: value for key, value in message.items() if value is not None}
    thought = next((found[name] for name in REASONING if name in found), None)
    return found if thought is None else {"thinking": thought} | found | {"reasoning_content": thought}


def _shared(one: str, two: str) -> str:
    """Return the longest common prefix of two texts."""
    low, high = 0, min(len(one), len(two))
    while low < high:  # comparing whole texts is much faster than a loop over characters
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == two[:middle] else (low, middle - 1)
    return one[:low]


class _Renderer:
    """The process that renders. It starts with the first template, and again after a template has ended it."""

    def __init__(self):
        self.lock, self.pid = Lock(), os.getpid()
        self.process: subprocess.Popen[bytes] | None = None
        atexit.register(self.end)

    def render(self, template: str, variables: dict[str, Any]) -> tuple[str, list[tuple[int, int]]]:
        job = {"template": template, "variables": variables, "seconds": SECONDS, "most": MOST_WRITTEN}
        try:
            line = json.dumps(job, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"a chat template gets what JSON can say, and {error}\n  fix: give texts and numbers"
            ) from None
        with self.lock:
            answer = self._ask(line)
        if "error" in answer:
            raise ValueError(
                f"the chat template does not take these messages: {answer['error']}"
                "\n  fix: give messages as this model knows them, or another template"
            )
        return answer["text"], [(start, end) for start, end in answer["spans"]]

    def _ask(self, line: bytes) -> dict[str, Any]:
        if self.process is None:
            program = str(Path(__file__).with_name("template_process.py"))
            self.process = subprocess.Popen(
                [sys.executable, "-P", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        process, answer = self.process, b""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            pass
        finally:
            if not answer.endswith(b"\n"):  # it has ended; or after Ctrl-C, so that no later job gets this answer
                self.end()
        if self.process is not None:
            return json.loads(answer.decode("utf-8", "surrogatepass"))
        slow = process.returncode == -signal.SIGPROF
        return {"error": f"it takes more than {SECONDS:g} s" if slow else f"it ended with {process.returncode}"}

    def end(self) -> None:
        process, self.process = self.process, None
        if process is not None and self.pid == os.getpid():  # not in a forked child, which may end earlier
            process.kill()
            process.communicate()


@cache
def _renderer(pid: int) -> _Renderer:
    """Return the renderer of this process; a forked child gets its own."""
    return _Renderer()


# The ends of text: the ids at which generation stops, and the one that ends each document of a corpus

NO_END = -1  # in run.toml: nothing ends a document


def ends_of(folder: "str | Path", by: Tokenizer | None = None) -> tuple[int, ...]:
    """Return the ids that end a text (eos) according to a model's folder or a run's; () if it names none.

    generation_config.json has precedence over config.json. Where neither says anything, the `eos_token` of
    tokenizer_config.json counts, whose id the tokenizer `by` knows. A run adds the id that its documents ended with.
    """
    home, found = home_of(folder), []
    for name in (GENERATION, "config.json"):
        path = home / name
        if (given := table_if_any(path).get("eos_token_id")) is not None:
            found = whole_numbers(f"{path}: eos_token_id", given if isinstance(given, list) else [given])
            break
    else:
        found = [id for id in [_named_end(home, by)] if id is not None] if by else []
    ended = table_if_any(Path(folder) / RUN).get("eos_id", NO_END)
    return (*found, *(id for id in [ended] if id != NO_END and id not in found))


def end_of_text(by: Tokenizer) -> int | None:
    """Return the id that ends a text of a tokenizer: its folder's `eos_token`, or else the first of `ends_of`.

    None for bytes, and where the folder names none.
    """
    if by.folder is None:
        return None
    if (id := _named_end(by.folder, by)) is not None:
        return id
    return next((id for id in ends_of(by.folder) if id < by.vocabulary), None)


def chosen_end(by: Tokenizer, eos: int | None) -> int:
    """Return the id that ends a document: the one asked for, or for None the tokenizer's own; `NO_END` for none."""
    found = end_of_text(by) if eos is None else eos
    return NO_END if found is None else found


def why_no_end(by: Tokenizer) -> str:
    """Explain in words why a tokenizer has no end of text: its folder names none, or only ones it does not have."""
    named = special_tokens(by.folder).get("eos_token") if by.folder else None
    if named is not None:
        return f"{by.name} does not have the eos_token of its tokenizer_config.json, {named!r}"
    if by.folder and (ids := ends_of(by.folder)):
        return f"{by.name} does not have the eos_token_id of its folder, {ids[0]}: it has 0..{by.vocabulary - 1}"
    return f"nothing says which token of {by.name} ends a text"


def _named_end(home: Path, by: Tokenizer) -> int | None:
    """Return the id of a folder's `eos_token`; None where it names none, or one that the tokenizer does not have."""
    named = special_tokens(home)
    return by.id_of(named["eos_token"]) if "eos_token" in named else None
