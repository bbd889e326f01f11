"""The JSON of answers, as OpenAI's completions and chat completions have it."""

import secrets
import time
from collections.abc import Sequence
from typing import Any

from scaling.serve.text import TextStream
from scaling.serve.token_bytes import token_bytes_of
from scaling.serve.web.desk import AnswerPiece, TokenNote
from scaling.serve.web.words import ClientCall, Model


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
        """Return the likeliest tokens and the drawn one; if several are written alike, the others by their ids."""
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
