"""The JSON of answers, as OpenAI's completions and chat completions have it."""

import secrets
import time
from collections.abc import Sequence
from typing import Any

from scaling.serve.web.desk import AnswerPiece, TokenNote
from scaling.serve.web.words import ClientCall, Model


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
