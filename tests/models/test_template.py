"""Chat templates beside transformers' `apply_chat_template`; where answers are; limits of what a template may do.

Tokenizers whose replacements make texts grow are refused in bounded time, and no others."""

import contextlib
import itertools
import json
import subprocess
import sys
import time
from datetime import datetime
from functools import partial

import pytest
from chat_cases import ANSWERS, CASES, STORED, TALKS, digest, folder_of, templates

from scaling.models import template as module
from scaling.models.template import ChatTemplate, chat_template
from scaling.models.text import ByteText, FromFile, copy_companions, of_bytes
from scaling.serve.states import Options
from scaling.serve.web.words import Model, read_body

pytest.importorskip("jinja2")
tokenizers = pytest.importorskip("tokenizers", reason="needs the library: pip install tokenizers")
HI = [{"role": "user", "content": "Hi <b>"}]


def of(text: str, tmp_path, **tokens) -> ChatTemplate:
    return ChatTemplate({"default": text}, tokens, tmp_path)


@pytest.mark.parametrize("name", templates())
def test_templates_are_rendered_as_transformers_does(name, tmp_path):
    """By its numbers, which tests/oracles/chat_templates.py stores, and shows as texts."""
    template, found = chat_template(folder_of(name, tmp_path)), {}
    assert template is not None
    for case, (talk, given) in CASES.items():
        found[case] = "refused"
        with contextlib.suppress(ValueError):
            found[case] = digest(template.render(TALKS[talk], **given))
    if "spans" in (stored := json.loads(STORED.read_text())[name]):
        found["spans"] = digest(json.dumps(template.spans(TALKS[ANSWERS])[1]))
    assert found == stored


CALL = '{"city": "Zürich <1>", "days": null}'
ENDS = [
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|return|>",
    "<end_of_turn>",
    "<｜end▁of▁sentence｜>",
    "<|user|>",
]
FOUND = {  # (template, talk): what the assistant says in it, with the token that ends it, by hand
    ("chatml", "talk"): [" Hello 漢🙂.\n<|im_end|>", "That is all<|im_end|>"],
    ("llama 3.1", "tool"): [f'{{"name": "weather", "parameters": {CALL}}}<|eom_id|>', "Dry.<|eot_id|>"],
    ("mistral 1", "talk"): [" Hello 漢🙂.\n</s>", "That is all</s>"],
    ("qwen 3", "talk"): [" Hello 漢🙂.\n<|im_end|>", "<think>\n\n</think>\n\nThat is all<|im_end|>"],
    ("qwen 3", "thought"): ["Yes<|im_end|>", "<think>\nwell\n</think>\n\nNo<|im_end|>"],
    ("qwen 2.5", "tool"): [
        f'<tool_call>\n{{"name": "weather", "arguments": {CALL}}}\n</tool_call><|im_end|>', "Dry.<|im_end|>",
    ],
    ("gemma", "talk"): ["Hello 漢🙂.<end_of_turn>", "That is all<end_of_turn>"],
    ("phi 3", "talk"): [" Hello 漢🙂.\n<|end|>", "That is all<|end|>"],  # and no end of the whole text
    ("zephyr", "talk"): [" Hello 漢🙂.\n</s>", "That is all</s>"],
    ("deepseek r1", "thought"): ["\n\nYes<｜end▁of▁sentence｜>", "No<｜end▁of▁sentence｜>"],
    ("vicuna", "talk"): [" Hello 漢🙂.</s>", " That is all</s>"],
    ("alpaca", "talk"): [" Hello 漢🙂.\n", "That is all"],
    ("glm 4", "talk"): ["\nHello 漢🙂.<|user|>", "\nThat is all"],  # an answer ends where the user's turn begins
    ("gpt-oss", "talk"): [
        "<|channel|>final<|message|> Hello 漢🙂.\n<|end|>", "<|channel|>final<|message|>That is all<|return|>",
    ],
}  # fmt: skip


@pytest.mark.parametrize(("name", "talk"), FOUND)
def test_answers_are_found_where_no_template_marks_them(name, talk, tmp_path):
    folder = folder_of(name, tmp_path)
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"content": token} for token in ENDS]}))
    text, spans = chat_template(folder).spans(TALKS[talk])
    assert [text[start:end] for start, end in spans] == FOUND[name, talk]


@pytest.mark.parametrize("name", ["loop controls", "white space", "text"])
def test_an_answer_that_is_not_in_the_text_is_refused(name, tmp_path):
    with pytest.raises(ValueError, match=r"message \d begins and ends cannot be found.*\n  fix: write {% generation"):
        chat_template(folder_of(name, tmp_path)).spans(TALKS["talk"])


def test_a_template_ends_in_time_and_within_memory(tmp_path, monkeypatch):
    """Whatever it does; and the next one is rendered."""
    monkeypatch.setattr(module, "SECONDS", 0.2)
    loop = "{% for a in range(99999) %}"
    endless = f"{loop}{loop}{{% endfor %}}{{% endfor %}}"
    long = loop + "{{ 'a' * 99 }}{% endfor %}"
    for text in (endless, "{{ 7 ** (10 ** 8) }}", "{{ 'a' * 10 ** 10 }}", long):
        with pytest.raises(ValueError, match=r"it takes more than 0\.2 s|more than 512 MiB|more than 8,388,608 char"):
            of(text, tmp_path).render(HI)
    assert of("{{ messages[0].content }}", tmp_path).render(HI) == "Hi <b>"


FORKED = """
import os, sys
from pathlib import Path
from scaling.models.template import ChatTemplate
template = ChatTemplate({"default": "{{ messages[0].content }}"}, {}, Path())
say = lambda text: template.render([{"role": "user", "content": text}])
first = say("a")
if (child := os.fork()) == 0:
    sys.exit(0 if say("b") == "b" else 1)
print(first, os.waitpid(child, 0)[1], say("c"))
"""


def test_a_process_that_was_forked_renders_too_and_ends_before():
    said = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout.split() == ["a", "0", "c"]


def test_the_time_is_now(tmp_path):
    before = datetime.now().strftime("%d %b %Y %H:%M:%S")
    said = of("{{ strftime_now('%d %b %Y %H:%M:%S') }}", tmp_path).render(HI)
    assert said in (before, datetime.now().strftime("%d %b %Y %H:%M:%S")) or said > before


def test_a_template_that_is_not_utf_8_is_named(tmp_path):
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff{{ 1 }}")
    with pytest.raises(ValueError, match=r"chat_template\.jinja: is not text.*\n  fix: "):
        chat_template(tmp_path)


def test_what_is_no_list_of_messages_is_refused(tmp_path):
    for messages in ([], "Hi", HI[0], ["Hi"], [{"role": "user", "content": object()}]):
        with pytest.raises(ValueError, match="\n  fix: "):
            of("x", tmp_path).render(messages)


def test_named_templates_go_with_a_model(tmp_path):
    copy_companions(folder_of("files of named ones", tmp_path), tmp_path / "out")
    assert chat_template(tmp_path / "out").render(HI, tools=[{}]) == "tool_use 1"
    assert chat_template(tmp_path) is None


def test_a_request_may_say_what_the_template_knows(tmp_path):
    template = of(
        "{{ messages[0].content }}{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}", tmp_path
    )
    model = Model("m", ByteText(), 256, (), partial(template.render, add_generation_prompt=True), Options(8, 16, 1))

    def prompt(**fields) -> str:
        call = read_body(json.dumps({"messages": HI} | fields).encode(), model, True, itertools.count())
        return bytes(call.requests[0].prompt).decode()

    assert prompt() == prompt(chat_template_kwargs=None) == "Hi <b>"
    assert prompt(chat_template_kwargs={"enable_thinking": False}) == "Hi <b>False"
    own = ("messages", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize", "self")
    for wrong in ([], *({name: False} for name in own)):
        with pytest.raises(ValueError, match="chat_template_kwargs is not"):
            prompt(chat_template_kwargs=wrong)


def replaced(count: int, pattern: dict, content: str, kind: str = "normalizers") -> dict:
    return {"type": "Sequence", kind: [{"type": "Replace", "pattern": pattern, "content": content}] * count}


A = {"String": "a"}
NESTED = {"type": "Sequence", "normalizers": [replaced(3, A, "a" * 10), replaced(4, A, "a" * 10)]}
GROWING = {  # parts of a tokenizer.json, of which most write more than a machine holds
    "seven": {"normalizer": replaced(7, A, "a" * 10)}, "seventy": {"normalizer": replaced(70, A, "a" * 10)},
    "nested": {"normalizer": NESTED}, "between": {"normalizer": replaced(40, {"Regex": "(?=a)"}, "a")},
    "anywhere": {"normalizer": replaced(40, {"Regex": ""}, "a")}, "two long": {"normalizer": replaced(2, A, "a" * 200)},
    "a longer": {"normalizer": replaced(1, A, "a" * 1000)},
    "decoder": {"decoder": replaced(7, A, "a" * 10, "decoders")},
}  # fmt: skip
FINE = {
    "Llama's": {"normalizer": {"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    ]}, "decoder": {"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
    ]}},
    "many": {"normalizer": replaced(12, {"Regex": " {2,}"}, "▁")}, "one": {"normalizer": replaced(1, A, "a" * 10)},
    "composed": {"normalizer": {"type": "NFKC"}}, "none": {},
}  # fmt: skip


def file_of(parts: dict, tmp_path) -> str:
    (tmp_path / "tokenizer.json").write_text(json.dumps(of_bytes() | parts))
    return str(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("name", GROWING)
def test_a_text_that_grows_without_bound_is_refused_at_once(name, tmp_path):
    path, start = file_of(GROWING[name], tmp_path), time.process_time()
    with pytest.raises(ValueError, match=r"tokenizer\.json: (its|a) .*\n  fix: give the tokenizer\.json that"):
        FromFile(path).encode("b" * 1500 + "a" * 1000)
    assert time.process_time() - start < 2


@pytest.mark.parametrize("name", FINE)
def test_others_read_a_text_as_the_library_does(name, tmp_path):
    by, text = FromFile(path := file_of(FINE[name], tmp_path)), "a  ﷺ b " * 400
    assert by.encode(text) == tokenizers.Tokenizer.from_file(path).encode(text).ids
    assert by.decode(by.encode("a b")) == tokenizers.Tokenizer.from_file(path).decode(by.encode("a b"))


def test_a_pattern_that_the_library_gives_up_is_refused(tmp_path, capfd):
    pattern = {"type": "Split", "pattern": {"Regex": "(a+)+b"}, "behavior": "Isolated", "invert": False}
    by = FromFile(file_of({"pre_tokenizer": pattern}, tmp_path))
    with pytest.raises(ValueError, match=r"cannot read a text by it.*\n  fix: give another text"):
        by.encode("a" * 40)
    capfd.readouterr()  # what the library prints of it
