"""What clients of OpenAI's API make of the server: openai and lm-evaluation-harness; and every field that
OpenAI's client can send, which is accepted as it is meant, or refused by its name."""

import itertools
import json

import pytest
from http_server import CONFIG, PARAMS, chat, running
from refused import named

from scaling import serve
from scaling.models.text import ByteText, write_bytes
from scaling.serve.requests import RequestError, Sampling
from scaling.serve.states import Options
from scaling.serve.web import words

MODEL = words.Model("tiny", ByteText(), CONFIG.V, (), chat, Options(32, 4))
HI = [{"role": "user", "content": "hi"}]
VALUES = [
    -3, -1, 0, 1, 2, 0.5, 1e9, True, False, "", "x", "none", "auto", "medium", "tiny", [], ["x"], [1, 2], ["text"], {},
    {"type": "text"}, {"type": "json_object"}, {"include_usage": True}, {"50": 1}, [{"type": "function"}],
]  # fmt: skip
TEXTS = [value for value in VALUES if isinstance(value, str) and value]
ACCEPTED = {  # of VALUES, those with which a field is served
    "model": ["tiny"], "stop": [*TEXTS, [], ["x"], ["text"]], "seed": [-3, -1, 0, 1, 2], "top_p": [1, 0.5],
    "temperature": [0, 1, 2, 0.5, 1e9], "n": [1, 2], "logprobs": [True, False], "top_logprobs": [0],
    "max_tokens": [1, 2], "max_completion_tokens": [1, 2], "stream_options": [{}, {"include_usage": True}],
    "frequency_penalty": [0], "presence_penalty": [0], "logit_bias": [{}], "tools": [[]], "functions": [[]],
    "tool_choice": ["none", "auto"], "function_call": ["none", "auto"], "parallel_tool_calls": [True, False],
    "modalities": [["text"]], "response_format": [{"type": "text"}], "verbosity": ["medium"],
    "reasoning_effort": ["none"],
} | dict.fromkeys(words.NO_EFFECT, VALUES)  # fmt: skip
OF_PLAIN = named(
    """
field     values
logprobs  [0, 1, 2]
echo      [True, False]
best_of   [1]
suffix    [""]
prompt    [*TEXTS, ["x"], [1, 2], ["text"]]
""",
    globals(),
)
MEANT = {  # what a value makes of a call, where it makes anything of it
    "stop": lambda call, value: call.requests[0].stops == ((value,) if isinstance(value, str) else tuple(value)),
    "temperature": lambda call, value: call.requests[0].draw.how == Sampling(value),
    "top_p": lambda call, value: call.requests[0].draw.how == Sampling(1.0, None, value),
    "n": lambda call, value: len(call.requests) == value,
    "max_tokens": lambda call, value: call.requests[0].max_new_tokens == value,
    "max_completion_tokens": lambda call, value: call.requests[0].max_new_tokens == value,
    "stream_options": lambda call, value: call.usage == bool(value),
    "echo": lambda call, value: call.echo == (("a",) if value else ()),
    "logprobs": lambda call, value: call.top == (value if value is not True else 0) - (value is False),
}


def read(chat: bool, **fields):
    """The call of a body with these fields, always with the same seed and id; or why it is refused."""
    body = {"messages": HI} if chat else {"prompt": "a"}
    try:
        return words.read_body(json.dumps(body | {"seed": 7} | fields).encode(), MODEL, chat, itertools.count())
    except RequestError as error:
        return error


@pytest.mark.parametrize("is_chat", [False, True], ids=["completion", "chat"])
def test_every_field_of_openais_client(is_chat):
    pytest.importorskip("openai", reason="the extra test has it")
    from openai.types import chat as of_chat
    from openai.types import completion_create_params as of_plain

    known = of_chat.completion_create_params if is_chat else of_plain
    accepted = ACCEPTED if is_chat else ACCEPTED | OF_PLAIN
    plain = read(is_chat)
    for field in known.CompletionCreateParamsBase.__annotations__.keys() - {"messages"}:
        found = []
        for value in VALUES:
            call = read(is_chat, **{field: value})
            if isinstance(call, RequestError):
                assert call.param == field, (field, value, call)
                continue
            found.append(value)
            meant = MEANT.get(field, lambda call, _: call == plain)
            assert meant(call, value) or field in ("seed", "prompt"), (field, value)
        assert read(is_chat, **{field: None}) == plain or field in ("seed", "prompt")
        wanted = [v for v in VALUES if any(v == a and type(v) is type(a) for a in accepted.get(field, []))]
        assert found == wanted, field


def test_every_key_of_a_message():
    of_chat = pytest.importorskip("openai.types.chat", reason="the extra test has it")
    for role in ("system", "developer", "user", "assistant", "tool", "function"):
        keys = getattr(of_chat, f"ChatCompletion{role.title()}MessageParam").__annotations__.keys()
        for key, value in itertools.product(keys - {"role"}, [*VALUES, None, [{"type": "text", "text": "b"}]]):
            message = {"role": role, "content": "a", key: value}
            call = read(True, messages=[*HI, message])
            if isinstance(call, RequestError):
                assert call.param.startswith("messages[1]."), (message, call)
                continue
            content = message["content"] if isinstance(message["content"], str) else "b" * bool(message["content"])
            role_as = "system" if role == "developer" else role
            assert bytes(call.requests[0].prompt).decode() == chat([*HI, {"role": role_as, "content": content}])
            assert role not in ("tool", "function")


@pytest.fixture(scope="module")
def served():
    with running(pages=60) as found:
        yield found


@pytest.fixture
def base(served) -> str:
    return f"http://127.0.0.1:{served.port}/v1"


@pytest.mark.slow
def test_the_openai_package(served, base):
    openai = pytest.importorskip("openai", reason="the extra test has it")
    with openai.OpenAI(base_url=base, api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        ask = {"model": "tiny", "messages": HI, "max_tokens": 9, "temperature": 0}
        whole = client.chat.completions.create(**ask, logprobs=True, top_logprobs=2).choices[0]
        parts = client.chat.completions.create(**ask, stream=True)
        assert "".join(part.choices[0].delta.content or "" for part in parts) == whole.message.content
        assert len(whole.logprobs.content) == 9
        again = [*HI, whole.message.model_dump(), *HI]
        assert client.chat.completions.create(**ask | {"messages": again}).choices[0].message.content
        plain_text = client.completions.create(model="tiny", prompt="ab", max_tokens=9, seed=1, stop=["zz"])
        assert plain_text.usage.completion_tokens <= 9
        wrong = [
            ({"max_tokens": 0}, openai.BadRequestError, "max_tokens", None),
            ({"model": "x"}, openai.NotFoundError, "model", "model_not_found"),
            ({"max_tokens": 999}, openai.BadRequestError, "max_tokens", "context_length_exceeded"),
        ]
        for options, error, param, code in wrong:
            with pytest.raises(error) as found:
                client.chat.completions.create(**ask | options)
            assert (found.value.param, found.value.code, found.value.type) == (param, code, "invalid_request_error")
        client.chat.completions.create(**ask | {"max_tokens": 100, "stream": True}).close()
        assert served.until(lambda now: not now["running"] + now["waiting"])["pages_held"] == 0


TASK = """
task: tiny
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/rows.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{metric: acc}]
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_lm_evaluation_harness_scores(base, tmp_path, monkeypatch):
    """Its local-completions: the likeliest of three answers, for questions of which our own scores tell some right."""
    lm_eval = pytest.importorskip("lm_eval", reason="no extra has it")
    tasks = pytest.importorskip("lm_eval.tasks", reason="no extra has it")
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    write_bytes(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "a"}')
    (tmp_path / "task.yaml").write_text(TASK.replace("FOLDER", str(tmp_path)))
    rows = [{"question": f"number {i} is", "choices": [f" a{i}", " bcd", " xy"]} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    way = {"base_url": f"{base}/completions", "model": "tiny", "tokenizer": str(tmp_path), "max_length": 120}
    way |= {"tokenizer_backend": "huggingface", "num_concurrent": 1, "max_retries": 1, "batch_size": 1}
    manager = tasks.TaskManager(include_path=str(tmp_path), include_defaults=False)
    found = lm_eval.simple_evaluate("local-completions", model_args=way, tasks=["tiny"], task_manager=manager)
    right = 0
    for row in rows:
        texts = [list(f"{row['question']}{choice}".encode()) for choice in row["choices"]]
        scores = serve.score(PARAMS, texts, CONFIG)
        sums = [sum(score[len(row["question"]) - 1 :]) for score in scores]
        right += sums.index(max(sums)) == 0
    assert found["results"]["tiny"]["acc,none"] == right / len(rows)
    assert 0 < right < len(rows)
