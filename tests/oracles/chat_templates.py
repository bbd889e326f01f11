"""What transformers renders of tests/models/chat_templates.toml: the table that the suite compares with.

pip install transformers
python tests/oracles/chat_templates.py            # says where the stored table differs; --write stores it
python tests/oracles/chat_templates.py --show "qwen 3"
"""

import contextlib
import json
import sys
import tempfile
from pathlib import Path

import transformers
from transformers.utils.chat_template_utils import render_jinja_template

from scaling.common.console import Parser

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from chat_cases import ANSWERS, CASES, STORED, TALKS, digest, folder_of, templates

WORDS = {"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}


def rendered(name: str, here: Path) -> dict[str, str]:
    """What apply_chat_template gives of each case; "refused" where it raises."""
    folder = folder_of(name, here)
    (folder / "tokenizer.json").write_text(json.dumps(WORDS))
    by, found = transformers.PreTrainedTokenizerFast.from_pretrained(folder), {}
    for case, (talk, given) in CASES.items():
        found[case] = "refused"
        with contextlib.suppress(Exception):
            found[case] = by.apply_chat_template(TALKS[talk], tokenize=False, **given)
    with contextlib.suppress(Exception):
        if "{% generation" in (template := by.get_chat_template()).replace("{%-", "{%"):
            tokens = by.special_tokens_map
            _, (spans,) = render_jinja_template(
                [TALKS[ANSWERS]], chat_template=template, return_assistant_tokens_mask=True, **tokens
            )
            found["spans"] = json.dumps(spans)
    return found


def main() -> int:
    parser = Parser(prog="python tests/oracles/chat_templates.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", action="store_true", help="store the table")
    parser.add_argument("--show", metavar="NAME", help="print what one template gives")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as here:
        names = [args.show] if args.show else [*templates()]
        found = {name: rendered(name, Path(here)) for name in names}
    if args.show:
        print("\n".join(f"--- {case}\n{text}" for case, text in found[args.show].items()))
        return 0
    table = {name: {case: digest(text) for case, text in row.items()} for name, row in found.items()}
    if args.write:
        STORED.write_text(json.dumps(table, indent=1) + "\n")
        return 0
    stored = json.loads(STORED.read_text())
    other = [f"{name}: {case}" for name, row in table.items() for case in row if stored[name].get(case) != row[case]]
    print("\n".join(other) or f"{len(table)} templates, as stored")
    return bool(other)


if __name__ == "__main__":
    sys.exit(main())
