"""The reference: a page for each public package, from its docstrings, which are plain text with shapes in them."""

import re
import textwrap
from itertools import chain
from pathlib import Path

PACKAGES = {
    "The notation": ["scaling.spec", "scaling.algebra", "scaling.check", "scaling.cost"],
    "Programs on a mesh": ["scaling.mesh", "scaling.launch", "scaling.collectives", "scaling.trace"],
    "Strategies": ["scaling.strategies.data_parallel", "scaling.strategies.fsdp", "scaling.strategies.tensor_parallel",
                   "scaling.strategies.fsdp_tp", "scaling.strategies.transformer", "scaling.schedules"],
    "Training and serving": ["scaling.optim", "scaling.tree", "scaling.configs", "scaling.models.transformer",
                             "scaling.models.hf", "scaling.train.checkpoint", "scaling.serve"],
    "Other ways to program": ["scaling.shard_map", "scaling.explicit", "scaling.auto"],
    "Tools": ["scaling.profile", "scaling.show"],
}  # fmt: skip


def write_all(root: Path) -> None:
    folder = root / "docs" / "api"
    folder.mkdir(exist_ok=True)
    for name in chain(*PACKAGES.values()):
        text = f"{name}\n{'=' * len(name)}\n\n.. automodule:: {name}\n   :members:\n"
        (folder / f"{name}.rst").write_text(text)
    trees = [f"```{{toctree}}\n:caption: {title}\n\n" + "\n".join(names) + "\n```" for title, names in PACKAGES.items()]
    (folder / "index.md").write_text("# Reference\n\n" + "\n\n".join(trees) + "\n")


def as_rst(app, what, name, obj, options, lines: list[str]) -> None:
    """A docstring as reStructuredText: a paragraph in which something is set out by spaces stays as it is.

    A function of torch's, wrapped, is named: its docstring is torch's, too, with directives of its site.
    """
    if what == "function" and (getattr(obj, "__module__", None) or "").startswith("torch"):
        lines[:] = [f"``torch.{obj.__name__}``, of typed arrays.", ""]
        return
    paragraphs = re.split(r"\n\s*\n", "\n".join(lines).strip("\n"))
    lines[:] = [*"\n\n".join(map(_paragraph, paragraphs)).split("\n"), ""]


def _paragraph(text: str) -> str:
    if section := re.fullmatch(r"(Args|Attributes|Returns|Raises|Yields):\n( .*)", text, re.DOTALL):
        items = re.split(r"\n(?=\S)", textwrap.dedent(section[2]))
        named = [re.sub(r"^([\w*., ]+): ", r"`\1`: ", re.sub(r"\s+", " ", item)) for item in items]
        return f"**{section[1]}**\n\n" + "\n".join(f"* {_inline(item)}" for item in named)
    if re.search(r"^ |\S {2,}\S", text, re.MULTILINE):
        return "::\n\n" + "\n".join("   " + line for line in text.split("\n"))
    return _inline(text)


def _inline(text: str) -> str:
    parts = re.split(r"(`[^`\n]+`)", text)
    parts[::2] = [re.sub(r"([\\*_|`])", r"\\\1", part) for part in parts[::2]]
    parts[1::2] = [
        f"`{part}`" + r"\ " * bool(re.match(r"[\w(\[{]", after))
        for part, after in zip(parts[1::2], parts[2::2], strict=True)
    ]
    return "".join(parts)
