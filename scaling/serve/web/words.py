"""The JSON of OpenAI's completions and chat completions: what a client sends, and what it gets.

After OpenAI's public API reference (platform.openai.com/docs/api-reference, completions and chat). `top_k` and `min_p`
are served beside its own fields. A field that would change the answer and is not served is refused.
"""

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from scaling.serve import scheduler
from scaling.serve.requests import Defaults, Fields, Request, read_ids, requests_of
from scaling.serve.states import Options
from scaling.serve.web.desk import AnswerPiece, TokenNote

COMMON = (
    "model",
    "stream",
    "stream_options",
    "stop",
    "seed",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "logprobs",
)
PLAIN = (*COMMON, "prompt", "max_tokens", "echo", "best_of", "suffix")
CHAT = (*COMMON, "messages", "max_tokens", "max_completion_tokens", "top_logprobs", "tools", "response_format")
CHAT += ("chat_template_kwargs",)
NO_EFFECT = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")  # on any token
NEUTRAL = {  # not served, but for the value that changes nothing
    "frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},), "echo": (False,), "best_of": (1,),
    "suffix": ("",), "tools": ([],), "response_format": ({"type": "text"},),
}  # fmt: skip
MOST = 16  # tokens of a completion that says none, as OpenAI's
CHOICES = 64  # answers of one call
TOP_PLAIN, TOP_CHAT = 5, 20  # the likeliest tokens beside each, at most


class NotServed(ValueError):
    """A model of another name: status 404."""


class Model(NamedTuple):
    """What is served: its name for clients, and what turns their texts into ids and back."""

    name: str
    tokenizer: Any
    V: int
    ends: tuple[int, ...]
    chat: Callable[..., str] | None  # (messages, **chat_template_kwargs) -> text
    options: Options
    most: int | None = None  # tokens of an answer, where a client says none
    longest: int | None = None  # tokens of a text that the model is made for


class ClientCall(NamedTuple):
    """A call that can be served: a request for each of its answers."""

    chat: bool
    requests: list[Request]
    asked: int  # tokens of the prompts, each once
    top: int  # the likeliest tokens that are wanted beside each; -1: no log-probabilities
    stream: bool
    usage: bool  # whether a stream ends with it


def read_body(body: bytes, model: Model, chat: bool, ids: Iterator[int]) -> ClientCall:
    """What a body asks for, in requests with these ids. ValueError with the reason, NotServed for another model."""
    fields = Fields(body)
    fields.only((*(CHAT if chat else PLAIN), *NEUTRAL, *NO_EFFECT))
    if (name := fields.given.get("model", model.name)) != model.name:
        raise NotServed(f"model {name!r:.80} is not served here\n  fix: give {model.name!r}")
    for field, neutral in NEUTRAL.items():
        if field in fields.given and fields.given[field] not in neutral:
            raise ValueError(f"{field} is not served\n  fix: leave it out")
    word = "max_completion_tokens" if chat and "max_completion_tokens" in fields.given else "max_tokens"
    if chat:
        prompts, top = [_chat_ids(fields, model)], _top_of_chat(fields)
    else:
        prompts = _prompts(fields, model)
        top = fields.whole("logprobs", -1, 0, TOP_PLAIN) if "logprobs" in fields.given else -1
    n, tokens = fields.whole("n", 1, 1, CHOICES), sum(map(len, prompts))
    if n * len(prompts) > CHOICES:
        raise ValueError(f"{n * len(prompts)} answers in one call\n  fix: ask for at most {CHOICES}")
    length = min(model.options.length, model.longest or model.options.length)
    room = length - max(map(len, prompts))
    unsaid = Defaults(model.most or (max(1, room) if chat else MOST), word, 1.0, secrets.randbits(62))
    prompts = [prompt for prompt in prompts for _ in range(n)]
    requests = requests_of(fields, prompts, ids, model.tokenizer, model.ends, unsaid)
    for request in requests:
        if why := scheduler.refusal(request, model.options):
            raise ValueError(f"{why}\n  fix: give a shorter prompt, or a smaller {word}")
    options = fields.given.get("stream_options", {})
    if not isinstance(options, dict) or not isinstance(options.get("include_usage", False), bool):
        raise ValueError('stream_options is not an object such as {"include_usage": true}\n  fix: give that')
    return ClientCall(chat, requests, tokens, top, fields.flag("stream"), options.get("include_usage", False))


def _top_of_chat(fields: Fields) -> int:
    if fields.flag("logprobs"):
        return fields.whole("top_logprobs", 0, 0, TOP_CHAT)
    if fields.given.get("top_logprobs"):
        raise ValueError("top_logprobs without logprobs\n  fix: give logprobs: true with it")
    return -1


def _prompts(fields: Fields, model: Model) -> list[list[int]]:
    """Of a text, a list of texts, a list of ids, or a list of such lists."""
    if "prompt" not in fields.given:
        raise ValueError("there is no prompt\n  fix: give a text, ids, or a list of these")
    prompt = fields.given["prompt"]
    many = isinstance(prompt, list) and prompt and all(isinstance(one, str | list) for one in prompt)
    if many and len(prompt) > CHOICES:
        raise ValueError(f"{len(prompt)} prompts in one call\n  fix: give at most {CHOICES}")
    if not many and not isinstance(prompt, str | list):
        raise ValueError("prompt is neither a text nor a list\n  fix: give a text, ids, or a list of these")
    return [read_ids(one, model.tokenizer, model.V) for one in (prompt if many else [prompt])]


def _chat_ids(fields: Fields, model: Model) -> list[int]:
    if model.chat is None:
        raise ValueError(f"{model.name} has no chat template\n  fix: call /v1/completions with a plain prompt")
    messages = fields.given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages is not a list of messages\n  fix: give at least one")
    told = [_message(i, message) for i, message in enumerate(messages)]
    options = fields.given.get("chat_template_kwargs", {})
    if not isinstance(options, dict) or {"messages", "add_generation_prompt"} & options.keys():
        raise ValueError(
            "chat_template_kwargs is not an object of what the chat template knows beside the messages"
            '\n  fix: give one such as {"enable_thinking": false}'
        )
    text = model.chat(told, **options)
    return read_ids(model.tokenizer.encode(text), model.tokenizer, model.V)


def _message(i: int, message: Any) -> dict[str, str]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f"messages[{i}] has no role\n  fix: give an object with a role and a content")
    if unknown := sorted(set(message) - {"role", "content", "name"}):
        raise ValueError(f"messages[{i}]: {unknown[0]!r:.80} is not served\n  fix: leave it out")
    content = message.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        texts = [part.get("text") for part in content]
        content = "".join(texts) if all(isinstance(text, str) for text in texts) else None
    if not isinstance(content, str):
        raise ValueError(f"messages[{i}]: its content is not text\n  fix: give a text, or a list of parts of text")
    return {"role": message["role"], "content": content}


class AnswerWriter:
    """The JSON of one call's answers."""

    def __init__(self, call: ClientCall, model: Model):
        self.call, self.model = call, model
        kind = "chat.completion" if call.chat else "text_completion"
        self.around = {
            "id": f"{'chatcmpl' if call.chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": kind + ".chunk" * (call.chat and call.stream),
            "created": int(time.time()),
            "model": model.name,
        }
        self.lengths = [0] * len(call.requests)  # of the texts so far, in characters
        self.tokens = self.cached = 0

    def first(self) -> list[dict]:
        """What a stream of chat begins with."""
        delta = {"role": "assistant", "content": ""}
        begin = {"delta": delta, "logprobs": None, "finish_reason": None}
        return [self.answer([{"index": i} | begin]) for i in range(len(self.call.requests))] if self.call.chat else []

    def answer(self, choices: list[dict], **more: Any) -> dict:
        """All of it, or a part of a stream."""
        return self.around | {"choices": choices} | more

    def choice(self, index: int, piece: AnswerPiece) -> dict:
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
        """Of the choices so far."""
        asked = self.call.asked
        counts = {"prompt_tokens": asked, "completion_tokens": self.tokens, "total_tokens": asked + self.tokens}
        return counts | {"prompt_tokens_details": {"cached_tokens": self.cached}}

    def _logprobs(self, index: int, notes: Sequence[TokenNote]) -> dict | None:
        if self.call.top < 0:
            return None
        if self.call.chat:
            return {
                "content": [self._of(n.id, n.logprob) | {"top_logprobs": [self._of(*t) for t in n.top]} for n in notes]
            }
        texts = [self._text(note.id) for note in notes]
        offsets = []
        for text in texts:
            offsets.append(self.lengths[index])
            self.lengths[index] += len(text)
        top = [{self._text(id): logprob for id, logprob in reversed(note.top)} for note in notes]
        return {
            "tokens": texts, "token_logprobs": [note.logprob for note in notes],
            "top_logprobs": top if self.call.top else None, "text_offset": offsets,
        }  # fmt: skip

    def _of(self, id: int, logprob: float) -> dict:
        text = self._text(id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    def _text(self, id: int) -> str:
        return self.model.tokenizer.decode([id])
