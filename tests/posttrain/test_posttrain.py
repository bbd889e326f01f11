"""The loop of GRPO on pairs of meshes, compared with a plain loop on one device; what is bad input, by its line.

Prompts become the ids that transformers gives: a text with the tokens around it, messages by the chat template."""

import contextlib
import json
import math
import multiprocessing as mp
import os
import random
import sys
import time
from pathlib import Path
from signal import SIGKILL

import pytest
import torch
from grpo import LR, PROMPTS, STEP, plain, run, write_folder
from refused import named
from runs import records

from scaling import tree
from scaling.configs import get
from scaling.mesh import AbstractMesh, Mesh
from scaling.models import adapters
from scaling.models.leaves import specs_of
from scaling.models.lora import Lora
from scaling.models.text import tokenizer
from scaling.posttrain import advantages, losses
from scaling.posttrain.loop import options_at, push_lines, rollout_types
from scaling.posttrain.rewards import read_prompts
from scaling.train import checkpoint
from scaling.train.export import params_of_run
from scaling.train.folder import locked
from scaling.train.progress import cut_records


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """(config, params) of the model in the working folder, beside prompts and a reward file."""
    monkeypatch.chdir(tmp_path)
    return write_folder()


PAIRS = {
    "--train-mesh X=2,Y=2 --serve-mesh Y=4": {},
    "--train-mesh X=2 --serve-mesh Y=2 --apart --staleness 2 --beta 0.1": {"staleness": 2, "beta": 0.1},
    "--train-mesh C=2 --serve-mesh X=1 --mean sequence --no-std": {"mean": "sequence", "divide": False},
}


@pytest.mark.slow
@pytest.mark.parametrize("meshes", PAIRS)
def test_ten_steps_are_those_of_a_plain_loop(folder, meshes):
    config, params = folder
    wanted, last = plain(config, params, 10, **PAIRS[meshes])
    assert run(f"{STEP} --steps 10 --out run {meshes}") == 0
    found = [(record["loss"], record["reward"]) for record in records("run")]
    for one, other in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, rel=0, abs=1e-10)
    after = params_of_run(Path("run"), config, specs_of(config), Mesh({"X": 1}))
    torch.testing.assert_close(after, last, rtol=0, atol=1e-10)
    ages = [record["age"] for record in records("run")]
    staleness = PAIRS[meshes].get("staleness", 0)
    assert ages == [min(n, staleness) for n in range(10)]
    assert all(record["gap_max"] < 1e-12 for record in records("run") if not record["age"])
    if staleness:
        assert any(record["clipped_high"] + record["clipped_low"] > 0 for record in records("run"))


@pytest.mark.slow
def test_linear_layers_over_context_and_scaled_losses_learn_as_one_device(folder):
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "linear_conv_kernel_dim": 4}
    heads |= {"linear_num_value_heads": 4, "linear_num_key_heads": 2}
    heads |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    sizes = {"hidden_size": 16, "vocab_size": 256, "num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2}
    sizes |= {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "intermediate_size": 16}
    Path("config.json").write_text(
        json.dumps({"model_type": "qwen3_next", "full_attention_interval": 2} | heads | sizes)
    )
    line = f"{STEP} --model config.json --steps 2"
    assert run(f"{line} --out one") == run(f"{line} --out two --train-mesh C=2") == 0
    assert run(f"{STEP} --steps 1 --out whole") == run(f"{STEP} --steps 1 --out half --dtype fp16") == 0
    for out, other, rounding in (("one", "two", 1e-10), ("whole", "half", 0.02)):
        found, wanted = ([record["grad_norm"] for record in records(each)] for each in (other, out))
        assert found == pytest.approx(wanted, rel=rounding)


@pytest.mark.slow
def test_a_run_goes_on_as_if_it_had_not_ended(folder, capsys):
    more = "--staleness 1 --lora 2 --save-every 2"
    assert run(f"{STEP} --steps 5 --out whole {more}") == 0
    assert run(f"{STEP} --steps 4 --out parts {more}") == 0
    with Path("parts/metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "killed": 1}\n')
    assert run(f"{STEP} --steps 5 --out parts {more} --resume --train-mesh Y=2 --serve-mesh Y=2") == 0
    for one, other in zip(records("whole"), records("parts"), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-9, abs=1e-12), one["step"]
        assert one["reward"] == other["reward"]
    assert run(f"{STEP} --steps 6 --out parts {more} --resume --group 2") == 1
    assert "was begun with group 4, not 2" in capsys.readouterr().err


@pytest.mark.parametrize(("more", "peak"), {"": 1e-6, "--lora 2": 1e-5, "--lr 1e-3": 1e-3}.items())
def test_the_learning_rate_suits_trained_weights(folder, capsys, more, peak):
    plain = STEP.replace(f"--lr {LR} ", "") + " --out run"
    assert run(f"{plain} {more} --steps 1") == 0
    assert run(f"{plain} {more.replace('--lr 1e-3', '')} --steps 2 --resume") == 0  # as earlier versions began a run
    assert capsys.readouterr().out.count(f"8 answers a step, peak learning rate {peak:g}\n") == 2
    assert [options_at(Path("run"), step)["lr"] for step in (1, 2)] == [str(peak)] * 2


def in_a_session(line: str) -> None:
    os.setsid()
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    sys.exit(run(line))


def ranks_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def wait_until_free(out: Path) -> None:
    """Wait for the end of the ranks of a job that was killed, which until then hold the folder."""
    for _ in range(200):
        with contextlib.suppress(ValueError), locked(out):
            return
        time.sleep(0.05)


KILLS = {
    "--train-mesh X=2 --serve-mesh Y=2 --lora 2": 6,
    "--train-mesh X=2 --serve-mesh Y=2 --apart --staleness 2 --beta 0.1": 6,
}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="kills forked processes")
@pytest.mark.parametrize(
    ("meshes", "kills"),
    [(min(KILLS), 1), *(pytest.param(*each, marks=pytest.mark.sweep) for each in KILLS.items())],
)
def test_a_run_that_is_killed_goes_on_with_the_same_losses(folder, meshes, kills):
    """-9 at random moments, of all ranks or of one, in a run that saves after every step."""
    draw, ran, before, line = random.Random(kills), [], 0, f"{STEP} --save-every 1 {meshes}"
    for i in range(kills):
        resume = "--resume" * bool(before)
        process = mp.get_context("fork").Process(target=in_a_session, args=(f"{line} --steps 9999 --out run {resume}",))
        process.start()
        while max([0, *(each["step"] for each in records("run"))]) <= before:
            assert process.is_alive()
            time.sleep(0.02)
        time.sleep(draw.uniform(0, 0.5))
        if i % 2:
            os.kill(int(draw.choice(ranks_of(process.pid))), SIGKILL)
        else:
            os.killpg(process.pid, SIGKILL)
        process.join()
        wait_until_free(Path("run"))
        ran += [(each["step"], each["loss"]) for each in records("run") if each["step"] > before]
        before = max(checkpoint.complete_steps(Path("run")), default=0)
    last = max(max(ran)[0], before + 1)
    assert run(f"{line} --steps {last} --out run --resume") == 0
    ran += [(each["step"], each["loss"]) for each in records("run")]
    assert run(f"{line} --save-every 0 --steps {last} --out whole") == 0
    wanted = {each["step"]: each["loss"] for each in records("whole")}
    assert [(step, wanted[step]) for step, _ in ran] == ran


@pytest.mark.slow
def test_given_adapters_belong_to_the_first_model(folder):
    """The KL term is 0 at the first step, also where the run begins with adapters that change the weights."""
    config, lora = folder[0], Lora(2, ("W_Q", "W_in"))
    own = tree.map(lambda W: W + 0.3, adapters.init(config, lora, 0, torch.float64))
    adapters.save("adapter", config, lora, own)
    assert run(f"{STEP} --steps 2 --out run --lora-from adapter --beta 0.1 --train-mesh X=2 --serve-mesh Y=2") == 0
    first, second = records("run")
    assert abs(first["kl"]) < 1e-14 < 1e-8 < second["kl"]
    assert max(first["gap_max"], second["gap_max"]) < 1e-12


@pytest.mark.slow
def test_check_changes_nothing_and_finds_no_gap(folder, capsys):
    assert run(f"{STEP} --out run --check --train-mesh X=2,Y=2 --serve-mesh Y=2") == 0
    assert "log-probabilities differ by" in capsys.readouterr().out
    assert not Path("run").exists()


WRONG = named("""
options                                          words of its error
--reward nowhere.py                              nowhere.py: no such file
--reward bad.py                                  bad.py:2: does not parse
--reward reward.py:absent                        has no function absent
--reward reward.py:broken                        raised ZeroDivisionError at reward.py:6: division by zero
--reward reward.py:broken --apart                raised ZeroDivisionError at reward.py:6: division by zero
--reward reward.py:nan                           the reward of prompts.jsonl:
--reward reward.py:leaves                        raised SystemExit at reward.py:16: 3
--reward reward.py:word                          returned '1.0'
--reward reward.py:nothing                       returned None
--reward reward.py:endless --reward-seconds 0.5  took longer than 0.5 seconds
--reward ends.py                                 ends.py:1: SystemExit: 0
--lora-from adapter                              adapter/adapter_model.safetensors: base_model.model.model.layers.2.mlp
--max-new-tokens 100                             prompts.jsonl:1: the prompt has 2 tokens rule: a prompt is never cut
--reward reward.py:slow --reward-seconds 0.05    took longer than 0.05 seconds
--prompts bad.jsonl                              bad.jsonl:2: Expecting ':' delimiter
--prompts odd.jsonl                              odd.jsonl:1: has neither a text nor messages as its prompt
--prompts chat.jsonl                             chat.jsonl:1: messages, but the tokenizer has no chat template
--prompts latin.jsonl                            latin.jsonl: not UTF-8
--prompts half.jsonl                             half.jsonl:1: 'utf-8' codec can't encode
--prompts empty.jsonl                            has no prompt
--seq 8                                          prompts.jsonl:3: the prompt has 3 tokens
--train-mesh X=3                                 D=16 model dims do not divide into 3 blocks
--train-mesh X=16                                a multiple of 16
--train-mesh Z=2                                 there are no stages Z
--serve-mesh Y=3                                 KV heads over Y=3
--eos-id 999                                     has the ids 0..255
""")


def test_bad_input_is_refused_by_its_line(folder, capsys):
    deep = folder[0].with_(L=3)
    adapters.save("adapter", deep, lora := Lora(2, ("W_Q", "W_in")), adapters.init(deep, lora))
    Path("ends.py").write_text("raise SystemExit(0)\n")
    Path("bad.py").write_text("x = 1\ndef score(:\n")
    Path("bad.jsonl").write_text('{"prompt": "a"}\n{"prompt"\n')
    Path("odd.jsonl").write_text('{"text": "a"}\n')
    Path("empty.jsonl").write_text("\n")
    Path("chat.jsonl").write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n')
    Path("latin.jsonl").write_bytes('{"prompt": "é"}\n'.encode("latin-1"))
    Path("half.jsonl").write_text('{"prompt": "\\ud800"}\n')
    for flags, words in WRONG.items():
        assert run(f"{STEP} --steps 1 --out run {flags}") == 1, flags
        said = capsys.readouterr().err
        assert words in " ".join(said.split()), (flags, said)
        assert "Traceback" not in said, flags
        assert not list(Path().glob("run/step-*")), flags


def test_metrics_are_cut_by_their_steps(tmp_path):
    kept = '{"step": 1}\n{"step": 2}\n'
    (tmp_path / "metrics.jsonl").write_text("junk\n" + kept + '{"step": 3}\n{"st')
    assert cut_records(tmp_path / "metrics.jsonl", 2) == 1
    assert (tmp_path / "metrics.jsonl").read_text() == kept


def test_advantages_and_shares_by_their_formulas():
    rewards = torch.tensor([1.0, 2.0, 3.0, 5.0, 5.0, 5.0], dtype=torch.float64)
    assert advantages(rewards, 3, divide=False).tolist() == [-1, 0, 1, 0, 0, 0]
    assert advantages(rewards, 3).tolist() == pytest.approx([-1 / (1 + 1e-6), 0, 1 / (1 + 1e-6), 0, 0, 0])
    mask = torch.tensor([[1, 1, 1, 0], [0, 1, 0, 0]]).bool()
    lengths = mask.sum(1).double()
    assert losses.shares(mask, lengths, 4, "token").tolist() == [[0.25] * 3 + [0], [0, 0.25, 0, 0]]
    assert losses.shares(mask, lengths, 2, "sequence").tolist() == [[1 / 6] * 3 + [0], [0, 0.5, 0, 0]]
    for groups in (1, 4):
        with pytest.raises(ValueError, match="at least 2"):
            advantages(rewards, groups)


def test_a_clipped_token_has_no_gradient():
    old, A = torch.zeros(1, 4), torch.tensor([[1.0, 1.0, -1.0, -1.0]])
    logprobs = torch.tensor([[math.log(1.3), math.log(0.7), math.log(0.7), math.log(1.3)]]).requires_grad_()
    value = losses.loss(logprobs, old, old, A, torch.full((1, 4), 0.25))
    (slope,) = torch.autograd.grad(value, logprobs)
    assert value.item() == pytest.approx((-1.2 - 0.7 + 0.8 + 1.3) / 4)
    assert slope[0].tolist() == pytest.approx([0, -0.175, 0, 0.325])


def test_llama_70b_goes_to_its_serving_mesh_by_these_lines():
    """X=64,Y=8 -> Y=8: each serving rank receives 1/8 of the model, once."""
    config, meshes = get("llama3-70b"), (AbstractMesh({"X": 64, "Y": 8}), AbstractMesh({"Y": 8}))
    lines = {where: line for where, line, _ in push_lines(config, *meshes)}
    assert lines['params["layers"]["W_Q"]'] == "W_Q[L, D_X, N_Y, H] -> W_Q[L, D, N_Y, H]"
    assert lines['params["embed"]'] == "E[V_Y, D_X] -> E[V_Y, D]"


def test_a_training_rank_holds_its_rows_and_tokens_of_the_answers():
    types = rollout_types(AbstractMesh({"X": 2, "C": 4, "Y": 8}))
    assert {types[name] for name in ("tokens", "targets", "mask", "old")} == {"t[R_X, T_C]"}


CHATML = """{% if tools %}tools {{ tools | length }}
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"""
ASK, TELL = ({"role": role, "content": text} for role, text in (("user", "Hi\u2028 é"), ("assistant", "Hello")))
TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
CHATS = [
    {"messages": [ASK]},
    {"prompt": [ASK], "answer": 4},
    {"messages": [{"role": "system", "content": "Be brief."}, ASK, TELL, ASK]},
    {"messages": [ASK], "tools": [TOOL], "chat_template_kwargs": {"enable_thinking": False}},
]


@pytest.fixture
def chats(tmp_path):
    """A folder with a tokenizer of bytes, which puts <s> before a text, and its chat template."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    special = ["<s>", "<|im_start|>", "<|im_end|>"]
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    by = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate([*letters, *special])}, []))
    by.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    by.add_special_tokens(special)
    one = by.token_to_id("<s>")
    by.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", one)])
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=by, bos_token="<s>", chat_template=CHATML)
    theirs.save_pretrained(tmp_path / "model")
    return tmp_path, theirs


def read(here, rows):
    path = here / "prompts.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return read_prompts(path, tokenizer(str(here / "model")), 500)


def test_prompts_are_those_of_transformers(chats):
    here, theirs = chats
    found = read(here, [*CHATS, *({"prompt": text} for text in PROMPTS)])
    for prompt, row in zip(found, CHATS, strict=False):
        given = {"tools": row.get("tools"), "add_generation_prompt": True} | row.get("chat_template_kwargs", {})
        messages = row.get("messages") or row["prompt"]
        assert prompt.ids == theirs.apply_chat_template(messages, **given, return_dict=False)
        assert prompt.text == theirs.apply_chat_template(messages, **given, tokenize=False)
        assert prompt.row == row
    assert [prompt.ids for prompt in found[len(CHATS) :]] == [theirs(text).input_ids for text in PROMPTS]


UNANSWERABLE = named(
    """
words                                row
the last message is the assistant's  {"messages": [ASK, TELL]}
has neither a text nor messages      {"messages": []}
messages are objects                 {"messages": ["Hi"]}
chat_template_kwargs has 'messages'  {"messages": [ASK], "chat_template_kwargs": {"messages": []}}
must be a table                      {"messages": [ASK], "chat_template_kwargs": 1}
the prompt has                       {"messages": [ASK | {"content": "a" * 600}]}
""",
    globals(),
)


@pytest.mark.parametrize("said", UNANSWERABLE)
def test_messages_that_nobody_can_answer_are_refused_by_their_line(chats, said):
    with pytest.raises(ValueError, match=f"prompts.jsonl:2: .*{said}"):
        read(chats[0], [CHATS[0], UNANSWERABLE[said]])
