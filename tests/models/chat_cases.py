"""Conversations and folders for chat_templates.toml, which tests and transformers render alike."""

import hashlib
import json
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
STORED = HERE / "chat_templates.json"
TOOLS = [
    {"type": "function", "function": {
        "name": "weather", "description": "Tell <the> weather of a città.",
        "parameters": {"type": "object", "required": ["city"], "properties": {
            "city": {"type": "string", "description": "its name"}, "days": {"type": ["integer", "null"]},
            "units": {"type": "array", "items": {"type": "string"}, "enum": ["°C", "°F"]},
        }},
    }},
    {"type": "function", "function": {"name": "now", "description": "", "parameters": {"properties": {}}}},
]  # fmt: skip
DOCUMENTS = [{"title": "One & two", "text": 'A "quoted" text.'}, {"title": "B", "text": "漢字"}]
CALL = {
    "id": "abc123def",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Zürich <1>", "days": None}},
}
USER, SYSTEM = {"role": "user", "content": "Hi <b>\n "}, {"role": "system", "content": "Be brief. /no_think"}
SAID = {"role": "assistant", "content": " Hello 漢🙂.\n"}
TALKS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "system": [SYSTEM, USER],
    "talk": [USER, SAID, {"role": "user", "content": "And?"}, {"role": "assistant", "content": "That is all"}],
    "tool": [
        USER, {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "abc123def", "name": "weather", "content": '{"rain": "no"}'},
        {"role": "assistant", "content": "Dry."}, {"role": "user", "content": "Thanks"},
    ],
    "thought": [
        USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes"}, USER,
        {"role": "assistant", "content": "No", "reasoning": "well", "name": None},
    ],
    "parts": [{"role": "user", "content": [{"type": "text", "text": " see "}, {"type": "image", "image": "x"}]}],
}  # fmt: skip
GO = {"add_generation_prompt": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "one": ("one", {}), "one, on": ("one", GO), "system, on": ("system", GO),
    "talk": ("talk", {}), "talk, on": ("talk", GO),
    "tools": ("one", {"tools": TOOLS}), "no tools": ("system", {"tools": [], "documents": []}),
    "tool, on": ("tool", GO | {"tools": TOOLS}), "thought": ("thought", {}), "parts": ("parts", GO),
    "not thinking": ("talk", GO | {"enable_thinking": False, "controls": {"citations": "é"}}),
    "documents": ("one", {"documents": DOCUMENTS, "controls": {"citations": True}, "bos_token": "<other>"}),
}  # fmt: skip
ANSWERS = "talk"  # where spans are compared


@cache
def templates() -> dict[str, dict[str, Any]]:
    return tomllib.loads((HERE / "chat_templates.toml").read_text(encoding="utf-8"))


def folder_of(name: str, here: Path) -> Path:
    """Write a model's folder with this template."""
    row, folder = templates()[name], here / name
    config: dict[str, Any] = {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}}
    config["eos_token"] |= {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    config |= {"chat_template": row["template"]} if "template" in row else {}
    files = {"tokenizer_config.json": json.dumps(config | row.get("config", {}))} | row.get("files", {})
    for file, text in files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text, encoding="utf-8")
    return folder


def digest(text: str) -> str:
    return text if text == "refused" else hashlib.sha256(text.encode()).hexdigest()[:16]
