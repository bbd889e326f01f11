"""Turn a file of text, or a line of JSON, into documents of token ids.

A document begins with the tokens that the tokenizer puts before a text, such as BOS, because generation and serving put
them there, too. It ends with the tokenizer's end of text, and so does each answer of a chat, because a model only
learns to stop where it is trained to stop. A chat template writes both itself.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy

from scaling.common.arguments import of_type
from scaling.common.console import complain, integer
from scaling.common.torchrun import first_rank
from scaling.models.template import NO_END, RESERVED, ChatTemplate, chat_template, chosen_end, ends_of, why_no_end
from scaling.models.text import Tokenizer

ASSISTANT = "assistant"  # the role whose messages count in the loss


class Document(NamedTuple):
    """Token ids, and whether each counts in the loss; `plain` is true for messages written without a chat template."""

    ids: numpy.ndarray
    counted: numpy.ndarray
    plain: bool = False


@dataclass(frozen=True)
class Reader:
    """A reader that turns text into documents.

    Attributes:
        by: The tokenizer.
        eos: The id that ends each document, or `NO_END`; None: the tokenizer's own end of text, if it has one.
        templated: Whether messages are written by the tokenizer's chat template.
        bos: Whether documents begin with the tokens that the tokenizer puts before a text.
    """

    by: Tokenizer
    eos: int | None = None
    templated: bool = True
    bos: bool = True

    @cached_property
    def end(self) -> int:
        """The id that ends each document, or `NO_END` if none does."""
        return chosen_end(self.by, self.eos)

    @property
    def prefix(self) -> list[int]:
        """The ids that begin each document that no chat template writes."""
        return [*self.by.prefix] if self.bos else []

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The chat template that came with the tokenizer, if it is used."""
        return chat_template(self.by.folder) if self.templated and self.by.folder else None

    @cached_property
    def ends(self) -> list[int]:
        """The ids at which generation stops, including the tokenizer's own end of text."""
        return [self.end, chosen_end(self.by, None), *(ends_of(self.by.folder) if self.by.folder else ())]

    def documents(self, path: Path) -> Iterator[Document]:
        """Yield the documents of a text file that hold a token: the file, or each line of JSON.

        Raises:
            ValueError: A line cannot be read; the message names the file and the line.
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
                    yield self.record(parse_json_line(line))
                except ValueError as error:
                    raise ValueError(f"{path}, line {number}: {error}") from None

    def record(self, record: Any) -> Document:
        """Return the document of {"text"}, {"prompt", "completion"}, or {"messages": [{"role", "content"}, ...]}.

        Only a text, a completion and the assistant's messages count in the loss.

        Raises:
            ValueError: The record has none of these forms.
        """
        match record:
            case {"text": str(text)}:
                return self.joined([(text, True)])
            case {"prompt": str(prompt), "completion": str(completion)}:
                return self.joined([(prompt, False), (completion, True)])
            case {"messages": [_, *_] as messages}:
                return self.chat(messages, template_variables(record))
        raise ValueError(
            'a line is {"text"}, {"prompt", "completion"} or {"messages": [...]}'
            "\n  fix: write each line in one of these ways"
        )

    def chat(self, messages: Sequence[Mapping[str, Any]], given: Mapping[str, Any]) -> Document:
        """Return the document of messages as the tokenizer's chat template writes them.

        The assistant's messages count, each with the token that ends it, unless a message has "weight": 0. If
        generation would not stop at the token after the last answer, the document ends with the end of text, which
        counts together with all tokens between the answer and it.

        Args:
            messages: The messages of the chat.
            given: The template's other variables.
        """
        learned = [is_learned(message) for message in messages]
        if self.template is None:
            if given.get("tools") or any(isinstance(each, Mapping) and each.get("tool_calls") for each in messages):
                raise ValueError(
                    "tools and their calls are written by a chat template, and none is used\n"
                    "  fix: give --tokenizer with a model's that has one, or write them into the messages' content"
                )
            return self.plain_chat(messages)
        text, spans = self.template.spans(messages, **given)
        spans = kept_spans(messages, learned, spans)
        found, places = self.by.places(text)
        counted = tokens_within(places, spans)
        ids = numpy.array(found, numpy.uint32)
        ends = numpy.isin(ids, self.ends)
        counted[1:] |= counted[:-1] & ends[1:]  # a template's span may exclude the token that ends the answer
        answered = learned[-1] and counted.any()
        last = int(counted.nonzero()[0][-1]) if answered else len(ids) - 1
        if self.end != NO_END and len(ids) and not ends[last]:
            if ids[-1] != self.end:  # the template has not written the end of text
                ids, counted = numpy.append(ids, numpy.uint32(self.end)), numpy.append(counted, False)
            counted[last:] |= answered
        return Document(ids, counted)

    def plain_chat(self, messages: Sequence[Mapping[str, Any]]) -> Document:
        """Return the document of messages without a chat template: each is "role: content" and an empty line."""
        parts = []
        for message in messages:
            match message:
                case {"role": str(role), "content": str(content)}:
                    parts += [(f"{role}: ", False), (f"{content}\n\n", is_learned(message))]
                case _:
                    raise ValueError('a message is {"role": ..., "content": ...}, both text\n  fix: write each so')
        return self.joined(parts)._replace(plain=self.templated)

    def joined(self, parts: Sequence[tuple[str, bool]]) -> Document:
        """Join (text, whether it counts) pairs into one document.

        The end of text follows each text that counts, and the last one. The tokens that begin a document count as its
        first text does. A document without text has no tokens.
        """
        ids: list[int] = []
        lengths = []
        for i, (text, counts) in enumerate(parts):
            before = len(ids)
            ids += self.by.encode(text)
            if (counts or i == len(parts) - 1) and ids and ids[-1] != self.end != NO_END:
                ids.append(self.end)
            lengths.append(len(ids) - before)
        if ids:
            ids, lengths[0] = self.prefix + ids, len(self.prefix) + lengths[0]
        return Document(numpy.array(ids, numpy.uint32), numpy.repeat([counts for _, counts in parts], lengths))


def template_variables(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables that a record with messages has for the chat template.

    Raises:
        ValueError: A name of `chat_template_kwargs` is reserved.
    """
    given = {name: record[name] for name in ("tools", "documents") if record.get(name) is not None}
    more = record.get("chat_template_kwargs") or {}
    of_type("chat_template_kwargs", more, dict)
    if taken := RESERVED & more.keys():
        fix = "leave it out: it is no variable of a template, or the line itself says it"
        raise ValueError(f"chat_template_kwargs has {min(taken)!r}\n  fix: {fix}")
    return given | more


def is_learned(message: Any) -> bool:
    """Return whether a message counts in the loss.

    The assistant's messages do, unless they have "weight": 0, as in files for OpenAI's fine-tuning.

    Raises:
        ValueError: The weight is neither 0 nor 1, or the message with a weight has another role.
    """
    if not isinstance(message, Mapping):
        return False
    is_answer, weight = message.get("role") == ASSISTANT, message.get("weight")
    if weight is None:
        return is_answer
    if not is_answer or isinstance(weight, bool) or weight not in (0, 1):
        whose = "an answer" if is_answer else f"a message of {message.get('role')!r}"
        raise ValueError(
            f'{whose} has "weight": {json.dumps(weight)}'
            "\n  rule: only an answer has a weight, which is 0 (not learned) or 1\n  fix: leave it out, or give 0 or 1"
        )
    return weight == 1


def kept_spans(
    messages: Sequence[Mapping[str, Any]], learned: Sequence[bool], spans: list[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Return the spans of the answers that count in the loss, given the spans that a template marked, in order.

    Raises:
        ValueError: Some answers do not count, and the template does not mark each answer once.
    """
    answers = [i for i, message in enumerate(messages) if message.get("role") == ASSISTANT]
    if all(learned[i] for i in answers):
        return spans
    if len(spans) != len(answers):
        raise ValueError(
            f'an answer has "weight": 0, and the chat template marks {len(spans)} spans for {len(answers)} answers'
            "\n  rule: which span is whose is known where each answer has one"
            "\n  fix: leave the weight out, or write the answers that are not learned into other lines"
        )
    return [span for i, span in zip(answers, spans, strict=True) if learned[i]]


def parse_json_line(line: str) -> Any:
    """Return the value of a line of JSON; ValueError if it is not JSON, or holds half of a surrogate pair."""
    try:
        value = json.loads(line)
        if r"\ud" in line.lower():
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{error}\n  fix: write each line as JSON, in UTF-8 without a byte order mark") from None


def tokens_within(places: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> numpy.ndarray:
    """Return which tokens have characters within the spans.

    Args:
        places: The (first, end) characters of each token. A token of white space may have an empty range, and is then
            given the characters since the previous token.
        spans: The (first, end) characters of the text that counts.
    """
    first, last = numpy.array(places, int).reshape(-1, 2).T
    before = numpy.concatenate([[0], numpy.maximum.accumulate(last)[:-1]]) if len(last) else last
    first = numpy.where(first < last, first, before)
    counted = numpy.zeros(len(last), bool)
    for start, end in spans:
        counted |= (last > start) & (first < end)
    return counted


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for turning text into documents."""
    parser.add_argument(
        "--no-bos", action="store_true", help="do not begin documents with what the tokenizer puts before a text (BOS)"
    )
    parser.add_argument("--no-eos", action="store_true", help="do not end documents with the tokenizer's end of text")
    parser.add_argument(
        "--eos-id", type=integer(NO_END), metavar="ID",
        help="the id that ends each document (default: the tokenizer's end of text; bytes have none)",
    )  # fmt: skip
    parser.add_argument(
        "--no-template", action="store_true", help='write messages as "role: content", not by the chat template'
    )


def check_options(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    """Exit with the parser's usage if the options of `add_options` that were given exclude each other."""
    if given.no_eos and given.eos_id is not None:
        parser.error("--no-eos and --eos-id exclude each other: give one of them")


def end_of_documents(by: Tokenizer, args: argparse.Namespace, text: bool = True) -> int:
    """Return the id that ends each document, by the options and the tokenizer, or `NO_END` if none does.

    `text`: whether there is text to end. If so, rank 0 warns if the tokenizer has no end of text.
    """
    if args.no_eos:
        return NO_END
    found = chosen_end(by, args.eos_id)
    if found == NO_END and args.eos_id is None and text and by.identity not in ("", "bytes") and first_rank():
        complain(
            f"warning: {why_no_end(by)}, so documents have no end"
            "\n  fix: put a tokenizer_config.json with its eos_token beside it, or give --eos-id, or --no-eos"
        )
    return found


def nothing_counts_error(path: Path) -> ValueError:
    """Return the error for text in which no token counts in the loss."""
    return ValueError(
        f"{path}: nothing in it counts in the loss\n  rule: completions and what the assistant says count"
        '\n  fix: give lines that have some, with the role "assistant"'
    )


def untemplated_warning(path: Path, by: Tokenizer) -> str:
    """Return the warning about messages that no chat template has written."""
    return (
        f'{path}: its messages are written as "role: content": {by.name} has no chat template'
        "\n  fix: put the model's chat_template.jinja beside its tokenizer.json; or --no-template, if it is meant"
    )
