"""A folder of models, tokenizers and data of every kind, for tests of which belongs to which."""

import json
import shutil

import numpy
import tokenizers
from runs import train

from scaling.configs import Config
from scaling.models import hf, transformer
from scaling.models.text import write_bytes

LINE = "the cat sat on a mat and the dog ran to us in time for tea "
ENDS = {"bos_token_id": 0, "eos_token_id": 1, "max_position_embeddings": 64}
WORDS = ["<s>", "</s>", *dict.fromkeys(LINE.split())]
TEMPLATE = "{{ bos_token }}{% for m in messages %}the {{ m.content }}{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %} a{% endif %}"


def model(V):
    return Config("small", L=1, D=16, F=24, N=4, K=2, H=4, V=V)


def make(here):
    """Write them into a folder."""
    long = [*WORDS, *map(str, range(400))]
    for name, some in {"own": WORDS, "other": WORDS[:2] + WORDS[:1:-1], "long": long}.items():
        (here / name).mkdir()
        by = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(some)}, unk_token=some[-1]))
        by.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        by.add_special_tokens(["<s>", "</s>"])
        by.save(f"{here}/{name}/tokenizer.json")
    for name, V in {"hf": 32, "bare": 32, "hf256": 256, "bare256": 256, "less": 16}.items():
        hf.save(here / name, model(V), transformer.init(model(V), 1))
        if not name.startswith("bare"):
            shutil.copy(here / "own" / "tokenizer.json", here / name)
            said = json.loads((here / name / "config.json").read_text()) | ENDS
            (here / name / "config.json").write_text(json.dumps(said))
            (here / name / "generation_config.json").write_text('{"bos_token_id": 0, "eos_token_id": [1, 5]}')
            special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "tea"}
            (here / name / "special_tokens_map.json").write_text(json.dumps(special))
            table = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE} | special
            (here / name / "tokenizer_config.json").write_text(json.dumps(table))
    hf.save(here / "room", model(300), transformer.init(model(300), 1))  # an export of bytes, with ids that are none
    write_bytes(here / "room")
    shutil.copytree(here / "hf", here / "swapped")
    shutil.copy(here / "other" / "tokenizer.json", here / "swapped")
    (here / "sizes.json").write_text(json.dumps({x: getattr(model(32), x) for x in "LDFNKHV"}))
    (here / "text.txt").write_text(LINE * 40)
    numpy.save(here / "rows.npy", numpy.arange(2000) % 16)
    for name in ("bytes", "own", "other"):
        by = name if name == "bytes" else here / name
        assert train(f"tokenize --data {here}/text.txt --out {here}/shards-{name} --tokenizer {by}") == 0
