"""A run's folder is whole by itself, and so is what is exported of it, by one process or several: moved, asked, served,
resumed, trained on."""

import json
import os
import shlex
import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("tokenizers", reason="a tokenizer.json needs the library: pip install tokenizers")
pytest.importorskip("safetensors")

from runs import records, refusal, train, write_text
from tokenized import WORDS
from tokenizers import Tokenizer

from scaling import tree
from scaling.generate import command as generating
from scaling.models import hf
from scaling.models.text import tokenizer
from scaling.serve import command as serve
from scaling.serve.text import chat_prompt, ends_of


def generate(line: str) -> int:
    return generating.main(shlex.split(line))


@pytest.mark.slow
def test_a_run_is_whole_by_itself(place, capsys):
    """Trained by relative paths, moved, its model gone: resumed, asked, served and exported from elsewhere."""
    shutil.copytree(place / "hf", "hf")
    small = "--seq 8 --batch 2 --eval-batches 1"
    assert train(f"--model hf --data {place}/text.txt {small} --steps 2 --sample 'the dog'") == 0
    shutil.rmtree("hf")
    shutil.move("run", "moved")
    Path("elsewhere").mkdir()
    os.chdir("elsewhere")
    assert 'model = "model"' in Path("../moved/run.toml").read_text()
    assert train("--out ../moved --resume --steps 3") == 0
    other = f"--out ../moved --resume --steps 4 --tokenizer {place}/other"
    assert "was begun with another" in refusal(capsys, other)
    assert train("export ../moved --out out") == 0
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"):
        assert Path("out", name).read_bytes() == (place / "hf" / name).read_bytes()
    table = json.loads(Path("out/config.json").read_text())
    assert (table["bos_token_id"], table["eos_token_id"], table["max_position_embeddings"]) == (0, 1, 64)
    assert table["tokenizer"] == "hf/tokenizer.json"
    assert table["tokenizer_identity"] == tokenizer(str(place / "hf")).identity
    shutil.copytree("out", "changed")
    (template := Path("changed/chat_template.jinja")).write_text("another model's")
    assert "chat_template.jinja: is another model's" in refusal(capsys, "export ../moved --out changed")
    template.unlink()
    shutil.copy(place / "other" / "tokenizer.json", "changed")
    assert generate("--model changed --prompt the") == 1
    said = []
    Path("requests").write_text('{"prompt": "the dog ran"}\n{"ids": [2, 3], "stop": "cat"}\n')
    for folder in ("../moved", "out"):
        assert ends_of(folder) == ends_of(place / "hf") == (1, 5)
        assert chat_prompt(folder, [{"role": "user", "content": "dog"}]) == "<s>the dog a"
        capsys.readouterr()
        for more in ("--chat", "--score", "--ignore-eos"):
            assert generate(f"--model {folder} --prompt 'the dog' --max-new-tokens 8 {more}") == 0
        assert serve.main(["--model", folder, "--input", "requests", "--output", "answers"]) == 0
        rows = records(".", "answers")
        said.append((capsys.readouterr().out.split("2 of 2")[0], [(row["text"], row["ids"]) for row in rows]))
    assert said[0] == said[1]
    assert {*rows[0]["text"].split()} <= {*WORDS}  # words, not bytes
    assert train(f"--model out --data {place}/shards-own --out again {small} --steps 1") == 0


@pytest.mark.slow
def test_a_run_on_bytes_is_exported_by_one_process_and_by_several(capsys):
    """From another mesh; the tokenizer is of the 256 bytes."""
    write_text(500)
    assert train("--data text.txt --batch 2 --seq 32 --steps 2 --mesh X=2") == 0
    for name, mesh in (("one", "X=1"), ("two", "Z=2")):
        assert train(f"export run --out {name} --mesh {mesh}") == 0
    assert "step 2: two" in capsys.readouterr().out
    (config, params), (_, again) = map(hf.load, ("one", "two"))
    assert (config.L, config.V) == (4, 256)
    assert all(map(torch.equal, tree.leaves(params), tree.leaves(again)))
    for given, said in ((".", "run.toml"), ("run --mesh Z=5", "L=4 layers cannot fill 5 stages\n  fix: ")):
        assert said in refusal(capsys, f"export {given} --out no")
    by, text = Tokenizer.from_file("one/tokenizer.json"), " a\tb\n\nÄ€😀\x7f  "
    assert sorted(by.get_vocab().values()) == list(range(256))
    assert by.encode(text).ids == list(text.encode())
    assert by.decode(list(text.encode())) == text


def test_ids_without_a_tokenizer(place, capsys):
    """Can be gone on from as numbers; text is refused."""
    assert generate(f"--model {place}/bare --prompt the") == 1
    assert "fix: put the model's tokenizer.json there" in capsys.readouterr().err
    Path("in").write_text('{"prompt": "the"}\n{"ids": [2, 3], "max_new_tokens": 2}\n{"ids": [2], "stop": "a"}\n')
    assert serve.main(["--model", f"{place}/bare", "--input", "in", "--output", "out"]) == 0
    rows = records(".", "out")
    assert ["error" in row for row in rows] == [True, False, True]
    assert (rows[1]["text"], len(rows[1]["ids"])) == ("", 2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of transformers
def test_transformers_pipeline_behaves_as_before(place):
    transformers = pytest.importorskip("transformers", reason="compares with transformers: pip install transformers")
    given = f"--model {place}/hf --data {place}/text.txt --lr 0 --steps 1 --seq 8 --batch 2 --eval-batches 1"
    assert train(given) == train("export run --out out") == 0
    said = []
    for folder in (place / "hf", "out"):
        pipe = transformers.pipeline("text-generation", model=str(folder), dtype=torch.float32)
        chat = pipe([{"role": "user", "content": "dog"}], max_new_tokens=12, do_sample=False)[0]["generated_text"]
        plain = pipe("the dog", max_new_tokens=12, do_sample=False, return_full_text=False)[0]["generated_text"]
        ends = pipe.model.generation_config.eos_token_id, pipe.model.config.eos_token_id, pipe.model.config.bos_token_id
        said.append((chat, plain, ends, pipe.tokenizer.eos_token, pipe.tokenizer.chat_template))
    assert said[0] == said[1]
