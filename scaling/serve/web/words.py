"""Read and write the JSON of OpenAI's completions and chat completions.

This follows OpenAI's public API reference (platform.openai.com/docs/api-reference, completions and chat). `top_k` and
`min_p` are served in addition to its own fields. A field that would change the answer and is not served is refused.
"""

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from scaling.common.arguments import quoted
from scaling.models.template import RESERVED
from scaling.serve.requests import (
    TOO_LONG,
    Defaults,
    Fields,
    Request,
    RequestError,
    Sampling,
    blaming,
    check_prompt_fits,
    read_ids,
    requests_of,
)
from scaling.serve.states import Options
from scaling.serve.text import TextStream, token_bytes_of

NO_MODEL = "model_not_found"
COMMON = (
    "model", "stream", "stream_options", "stop", "seed", "temperature", "top_p", "top_k", "min_p", "n", "logprobs",
    "max_tokens",
)  # fmt: skip
PLAIN = (*COMMON, "prompt", "echo", "best_of")
CHAT = (*COMMON, "messages", "max_completion_tokens", "top_logprobs", "chat_template_kwargs")
NO_EFFECT = (  # fields without effect on any token
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
)  # fmt: skip
NEUTRAL = {  # fields that are not served, and the values with which they change nothing
    "frequency_penalty": (0,), "presence_penalty": (0,), "repetition_penalty": (1,), "logit_bias": ({},),
    "suffix": ("",), "tools": ([],), "tool_choice": ("none", "auto"), "parallel_tool_calls": (True, False),
    "functions": ([],), "function_call": ("none", "auto"), "response_format": ({"type": "text"},),
    "modalities": (["text"],), "verbosity": ("medium",), "reasoning_effort": ("none",), "min_tokens": (0,),
    "ignore_eos": (False,), "stop_token_ids": ([],), "skip_special_tokens": (True,), "add_generation_prompt": (True,),
}  # fmt: skip
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}  # as templates know them
EMPTY = ("tool_calls", "annotations")  # fields of an answer that a client sends back
USUAL_TOKENS = 16  # tokens of a completion that does not say how many, as with OpenAI
CHOICES = 64  # answers of one call
TOP_PLAIN, TOP_CHAT = 5, 20  # the largest numbers of likeliest tokens


class Model(NamedTuple):
    """The served model: its name for clients, and the functions that turn their texts into ids and back."""

    name: str
    tokenizer: Any
    V: int
    ends: tuple[int, ...]
    chat: Callable[..., str] | None  # (messages, **chat_template_kwargs) -> text
    options: Options
    most: int | None = None  # tokens of an answer, if a client does not say
    longest: int | None = None  # tokens of the longest text that the model is made for
    sampling: Sampling = Sampling(1.0)  # how tokens are drawn, if a client does not say


class ClientCall(NamedTuple):
    """A call that can be served: a request for each of its answers."""

    chat: bool
    requests: list[Request]
    asked: int  # tokens of the prompts, each once
    top: int  # how many likeliest tokens are wanted with each; -1: no log-probabilities
    stream: bool
    usage: bool  # whether a stream ends with it
    echo: tuple[str, ...] = ()  # the text of each answer's prompt, if answers begin with it
    silent: bool = False  # whether only the prompt is wanted


def read_body(body: bytes, model: Model, chat: bool, ids: Iterator[int]) -> ClientCall:
    """Return the requests of a body, numbered by `ids`; a RequestError says why a body is refused."""
    fields = Fields(body)
    fields.only((*(CHAT if chat else PLAIN), *NEUTRAL, *NO_EFFECT))
    if (name := fields.given.get("model", model.name)) != model.name:
        raise RequestError(f"model {name!r:.80} is not served here\n  fix: give {model.name!r}", "model", NO_MODEL)
    for field, neutral in NEUTRAL.items():
        if field in fields.given and not any(_is(fields.given[field], value) for value in neutral):
            raise RequestError(f"{field}={quoted(fields.given[field])} is not served\n  fix: leave it out", field)
    word = "max_completion_tokens" if chat and "max_completion_tokens" in fields.given else "max_tokens"
    if word != "max_tokens" and fields.given.get("max_tokens", most := fields.given[word]) != most:
        what = f"max_tokens={quoted(fields.given['max_tokens'])} is not max_completion_tokens={quoted(most)}"
        raise RequestError(f"{what}\n  fix: leave one of them out", "max_tokens")
    with blaming("messages" if chat else "prompt"):
        prompts = [_chat_ids(fields, model)] if chat else _prompts(fields, model)
    if chat:
        top = _top_of_chat(fields)
    else:
        top = fields.whole("logprobs", -1, 0, TOP_PLAIN) if "logprobs" in fields.given else -1
    n, tokens = fields.whole("n", 1, 1, CHOICES), sum(map(len, prompts))
    if n * len(prompts) > CHOICES:
        raise RequestError(f"{n * len(prompts)} answers in one call\n  fix: ask for at most {CHOICES}", "n")
    if fields.whole("best_of", n, 1, 1 << 40) != n:
        raise RequestError("best_of is not served where it is not n\n  fix: leave it out", "best_of")
    longest, length = max(map(len, prompts)), model.options.length
    room, sensible = length - longest, min(length, model.longest or length) - longest
    unsaid = max(1, min(sensible, model.most or (length if chat else USUAL_TOKENS)))
    texts = _echoed(fields, prompts, model, top) if not chat and fields.flag("echo") else []
    requests = requests_of(
        fields, [prompt for prompt in prompts for _ in range(n)], ids, model.tokenizer, model.ends,
        Defaults(unsaid, word, model.sampling, secrets.randbits(62), least=0 if texts else 1),
    )  # fmt: skip
    if requests[0].max_new_tokens > room:
        what = f"{room} tokens are left for the answer: this model's maximum context length is {length}"
        raise RequestError(f"{what} tokens\n  fix: give a shorter prompt, or a smaller {word}", word, TOO_LONG)
    silent = not requests[0].max_new_tokens  # the token after the prompt is computed nevertheless
    if texts:
        requests = [r._replace(max_new_tokens=max(1, r.max_new_tokens), scored=top >= 0) for r in requests]
    echo = tuple(text for text in texts for _ in range(n))
    return ClientCall(chat, requests, tokens, top, fields.flag("stream"), _usage_wanted(fields), echo, silent)


def _echoed(fields: Fields, prompts: list[tuple[int, ...]], model: Model, top: int) -> list[str]:
    """Return the text of each prompt."""
    if top >= 0 and model.options.policy != "chunked":
        reason = f'echo with logprobs is not served by --policy {model.options.policy}, but by "chunked"'
        raise RequestError(f"{reason}\n  fix: leave one of them out", "echo")
    given = fields.given["prompt"]
    given = given if isinstance(given, list) and isinstance(given[0], str | list) else [given]
    return [
        one if isinstance(one, str) else model.tokenizer.decode(ids) for one, ids in zip(given, prompts, strict=True)
    ]


def _is(value: Any, other: Any) -> bool:
    """Return whether two values of JSON are the same: true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _usage_wanted(fields: Fields) -> bool:
    options = fields.given.get("stream_options", {})
    known = {"include_usage", "include_obfuscation"}  # the second adds characters that clients leave out
    if not isinstance(options, dict) or not all(
        name in known and isinstance(value, bool) for name, value in options.items()
    ):
        raise RequestError(
            'stream_options is not an object such as {"include_usage": true}\n  fix: give that', "stream_options"
        )
    return options.get("include_usage", False)


def _top_of_chat(fields: Fields) -> int:
    top = fields.whole("top_logprobs", 0, 0, TOP_CHAT)
    if fields.flag("logprobs"):
        return top
    if top:
        raise RequestError("top_logprobs without logprobs\n  fix: give logprobs: true with it", "top_logprobs")
    return -1


def _prompts(fields: Fields, model: Model) -> list[tuple[int, ...]]:
    """Return the ids of a text, of a list of texts, of a list of ids, or of a list of such lists."""
    if "prompt" not in fields.given:
        raise ValueError("there is no prompt\n  fix: give a text, ids, or a list of these")
    prompt = fields.given["prompt"]
    many = isinstance(prompt, list) and prompt and all(isinstance(one, str | list) for one in prompt)
    if many and len(prompt) > CHOICES:
        raise ValueError(f"{len(prompt)} prompts in one call\n  fix: give at most {CHOICES}")
    if not many and not isinstance(prompt, str | list):
        raise ValueError("prompt is neither a text nor a list\n  fix: give a text, ids, or a list of these")
    room = model.options.length - 1  # a token is generated
    return [tuple(read_ids(one, model.tokenizer, model.V, room)) for one in (prompt if many else [prompt])]


def _chat_ids(fields: Fields, model: Model) -> tuple[int, ...]:
    if model.chat is None:
        raise ValueError(f"{model.name} has no chat template\n  fix: call /v1/completions with a plain prompt")
    given = fields.given.get("messages")
    if not isinstance(given, list) or not given:
        raise ValueError("messages is not a list of messages\n  fix: give at least one")
    room = model.options.length - 1
    check_prompt_fits(len(given), "messages", room, room)
    messages = [_message(i, message) for i, message in enumerate(given)]
    check_prompt_fits(sum(len(m["content"]) for m in messages), "characters", room, room * model.tokenizer.longest)
    options = fields.given.get("chat_template_kwargs", {})
    if not isinstance(options, dict) or RESERVED & options.keys():
        raise RequestError(
            "chat_template_kwargs is not an object of what the chat template knows beside the messages"
            f'\n  fix: give one such as {{"enable_thinking": false}}, without {", ".join(sorted(RESERVED))}',
            "chat_template_kwargs",
        )
    text = model.chat(messages, **options)
    if (named := next((i for i, message in enumerate(messages) if "name" in message), None)) is not None:
        nameless = [{key: value for key, value in message.items() if key != "name"} for message in messages]
        if text == model.chat(nameless, **options):
            why = f"messages[{named}]: this model's chat template does not write the name of who says it"
            raise RequestError(f"{why}\n  fix: leave it out, or write it into the content", f"messages[{named}].name")
    return tuple(read_ids(text, model.tokenizer, model.V, room, special=False))


def _message(i: int, message: Any) -> dict[str, str]:
    """Return message i as chat templates take it."""
    place = f"messages[{i}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError(f"{place} has no role\n  fix: give an object with a role and a content", f"{place}.role")
    if (role := ROLES.get(message["role"])) is None:
        why = f"{place}: its role is {message['role']!r:.80}, which is not served"
        raise RequestError(f"{why}\n  fix: give one of {', '.join(ROLES)}", f"{place}.role")
    for key, value in message.items():
        if key not in ("role", "content", "name") and not (key in EMPTY and value == []):
            raise RequestError(f"{place}: {key!r:.80} is not served\n  fix: leave it out", f"{place}.{key:.80}")
    content, name = message.get("content"), message.get("name", "")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        texts = [part.get("text") for part in content]
        content = "".join(texts) if all(isinstance(text, str) for text in texts) else None
    if not isinstance(content, str):
        why = f"{place}: its content is not text\n  fix: give a text, or a list of parts of text"
        raise RequestError(why, f"{place}.content")
    if not isinstance(name, str):
        raise RequestError(f"{place}: its name is not a text\n  fix: leave it out", f"{place}.name")
    return {"role": role, "content": content} | ({"name": name} if name else {})


class TokenNote(NamedTuple):
    """A token, its log-probability in nats, and the likeliest tokens as [(id, logprob)], before temperature.

    The first token of a prompt has none.
    """

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class AnswerPiece(NamedTuple):
    """A piece of an answer that has become certain.

    The last piece has the reason, the number of all tokens, and the number of the prompt's tokens that were cached.
    """

    text: str
    notes: tuple[TokenNote, ...] = ()
    reason: str | None = None
    tokens: int = 0
    cached: int = 0

    @classmethod
    def joined(cls, pieces: Sequence["AnswerPiece"]) -> "AnswerPiece":
        """Return all pieces of an answer as one."""
        notes = tuple(note for piece in pieces for note in piece.notes)
        return pieces[-1]._replace(text="".join(piece.text for piece in pieces), notes=notes)


class AnswerWriter:
    """The writer of the JSON of one call's answers."""

    def __init__(self, call: ClientCall, model: Model):
        self.call, self.model = call, model
        kind = "chat.completion" if call.chat else "text_completion"
        self.around = {
            "id": f"{'chatcmpl' if call.chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": kind + ".chunk" * (call.chat and call.stream),
            "created": int(time.time()),
            "model": model.name,
        }
        self.pieces = token_bytes_of(model.tokenizer)
        before = [() if call.echo else request.prompt for request in call.requests]
        self.texts = [TextStream(model.tokenizer, (), prompt) for prompt in before]
        self.lengths = [0] * len(call.requests)  # characters of these texts so far
        self.tokens = self.cached = 0

    def first(self) -> list[dict]:
        """Return the first events of a chat's stream."""
        delta = {"role": "assistant", "content": ""}
        begin = {"delta": delta, "logprobs": None, "finish_reason": None}
        return [self.answer([{"index": i} | begin]) for i in range(len(self.call.requests))] if self.call.chat else []

    def answer(self, choices: list[dict], **more: Any) -> dict:
        """Return the whole answer, or an event of a stream."""
        return self.around | {"choices": choices} | more

    def choice(self, index: int, piece: AnswerPiece) -> dict:
        """Return a choice with this piece of its answer."""
        self.tokens += piece.tokens
        self.cached += piece.cached
        said: dict = {"text": piece.text}
        if self.call.chat and self.call.stream:
            said = {"delta": {"content": piece.text} if piece.text else {}}
        elif self.call.chat:
            said = {"message": {"role": "assistant", "content": piece.text}}
        return {"index": index} | said | {
            "logprobs": self._logprobs(index, piece.notes), "finish_reason": piece.reason
        }  # fmt: skip

    def usage(self) -> dict:
        """Return the numbers of tokens of the choices so far."""
        asked = self.call.asked
        counts = {"prompt_tokens": asked, "completion_tokens": self.tokens, "total_tokens": asked + self.tokens}
        return counts | {"prompt_tokens_details": {"cached_tokens": self.cached}}

    def _logprobs(self, index: int, notes: Sequence[TokenNote]) -> dict | None:
        if self.call.top < 0:
            return None
        stream, rows = self.texts[index], []
        for note in notes:
            first, offset = stream.begins, self.lengths[index]
            self.lengths[index] += len(stream.push(note.id))
            rows.append((note, first, offset))
        if self.call.chat:
            content = [
                self._of(note.id, note.logprob, first)
                | {"top_logprobs": [self._of(id, value, first) for id, value in note.top]}
                for note, first, _ in rows
            ]
            return {"content": content, "refusal": None}
        top = [self._top(note, first) for note, first, _ in rows] if self.call.top else None
        return {
            "tokens": [self._text(note.id, first) for note, first, _ in rows],
            "token_logprobs": [note.logprob for note in notes],
            "top_logprobs": top, "text_offset": [offset for *_, offset in rows],
        }  # fmt: skip

    def _top(self, note: TokenNote, first: bool) -> dict[str, float] | None:
        """Return {text: log-probability} of the likeliest tokens and the drawn one.

        If several have the same text, all but the first are named by their ids.
        """
        if note.logprob is None:
            return None
        found = {self._text(note.id, first): note.logprob}
        for id, logprob in note.top:
            if id != note.id:
                text = self._text(id, first)
                found[f"token_id:{id}" if text in found else text] = logprob
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def _of(self, id: int, logprob: float | None, first: bool) -> dict:
        piece = self.pieces.bytes_of(id, first)
        return {"token": self._text(id, first), "logprob": logprob, "bytes": list(piece) or None}

    def _text(self, id: int, first: bool) -> str:
        """Return a token's text; bytes that are no whole characters are written as OpenAI writes them."""
        piece = self.pieces.bytes_of(id, first)
        try:
            return piece.decode() if piece else self.pieces.name(id)
        except UnicodeDecodeError:
            return "bytes:" * (not self.call.chat) + "".join(f"\\x{byte:02x}" for byte in piece)
