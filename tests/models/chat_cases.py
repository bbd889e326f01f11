"""Conversations (chats.json) and folders for chat_templates.toml, which tests and transformers render alike."""

import hashlib
import json
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
STORED = HERE / "chat_templates.json"
CHATS = json.loads((HERE / "chats.json").read_text(encoding="utf-8"))
TOOLS, DOCUMENTS = CHATS["tools"], CHATS["documents"]
TALKS: dict[str, list[dict[str, Any]]] = CHATS["talks"]
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
