"""Chat templates beside transformers' `apply_chat_template`; where answers are; limits of what a template may do."""

import itertools
import json
from functools import partial

import pytest

from scaling.models import template as module
from scaling.models.template import ChatTemplate, chat_template
from scaling.models.text import ByteText
from scaling.serve.states import Options
from scaling.serve.web.words import Model, read_body

pytest.importorskip("jinja2")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HI = [{"role": "user", "content": "Hi <b>"}]
TALK = [*HI, {"role": "assistant", "content": "So."}, {"role": "user", "content": "x"}]
TALK += [{"role": "assistant", "content": "Yes 漢\n"}]


def made(folder, config=None, **files) -> ChatTemplate | None:
    """The template of a folder with this tokenizer_config.json and these files."""
    for name, text in ({"tokenizer_config.json": config} if config is not None else {} | files).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text if isinstance(text, str) else json.dumps(text))
    return chat_template(folder)


def of(text: str, tmp_path, **tokens) -> ChatTemplate:
    return ChatTemplate({"default": text}, tokens, tmp_path)


def test_answers_are_found(tmp_path):
    """Each with the token that ends it: as the template says, or by rendering."""
    marked = CHATML.replace("{{ m.content }}<|im_end|>\n", (
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{{ '\n' }}"
        "{% else %}{{ m.content }}<|im_end|>{{ '\n' }}{% endif %}"
    ))  # fmt: skip
    for text in (CHATML, marked):
        whole, spans = of(text, tmp_path, eos_token="<|im_end|>").spans(TALK)
        assert whole == "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in TALK)
        assert [whole[start:end] for start, end in spans] == ["So.<|im_end|>", "Yes 漢\n<|im_end|>"]


def test_a_template_ends_in_time_and_within_memory(tmp_path, monkeypatch):
    """Whatever it does; and the next one is rendered."""
    monkeypatch.setattr(module, "SECONDS", 0.2)
    loop = "{% for a in range(99999) %}"
    endless = f"{loop}{loop}{{% endfor %}}{{% endfor %}}"
    doubling = "{% set n = namespace(x='aaaaaaaa') %}" + loop + "{% set n.x = n.x ~ n.x %}{% endfor %}"
    long = loop + "{{ 'a' * 99 }}{% endfor %}"
    for text in (endless, "{{ 7 ** (10 ** 8) }}", doubling, "{{ 'a' * 10 ** 10 }}", long):
        with pytest.raises(ValueError, match=r"it takes more than 0\.2 s|more than 512 MiB|more than 8,388,608 char"):
            of(text, tmp_path).render(HI)
    assert of("{{ messages[0].content }}", tmp_path).render(HI) == "Hi <b>"


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
    for wrong in ([], {"messages": []}, {"add_generation_prompt": False}):
        with pytest.raises(ValueError, match="chat_template_kwargs is not"):
            prompt(chat_template_kwargs=wrong)
