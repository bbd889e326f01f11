"""A page for each exercise, from the same text that the command hands out, and their list."""

from pathlib import Path

from scaling.exercise import exercises

HEAD = """# Exercises

Each is a file with blanks. An answer is judged in three ways: by the types of its lines, which are found on an abstract
mesh; by what ranks compute, beside one device; and by the bytes that they send.

```bash
python -m scaling.exercise                        # the list
python -m scaling.exercise new 05_fsdp_backward    # writes 05_fsdp_backward.py
python -m scaling.exercise check 05_fsdp_backward.py
```

In a notebook: `from scaling.exercise import grade, new`; `print(new(name))`, and `grade(text)`.
"""


def write_all(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name, exercise in exercises().items():
        blanks = f"```python\n{exercise.blanks}```"
        how = f"`python -m scaling.exercise new {name}` writes this file, `check {name}.py` judges it:"
        text = exercise.text.replace("```python dense", "```python")
        (folder / f"{name}.md").write_text(
            f"# {exercise.title}\n\nPart {exercise.part}\n\n{text}\n\n{how}\n\n{blanks}\n"
        )
    (folder / "index.md").write_text(contents())


def contents() -> str:
    text = []
    for part in sorted({exercise.part for exercise in exercises().values()}):
        here = {name: exercise for name, exercise in exercises().items() if exercise.part == part}
        text += ["", f"## Part {part}", "", *(f"- [{exercise.title}]({name}.md)" for name, exercise in here.items())]
    tree = "\n".join(exercises())
    return HEAD + "\n".join(text) + f"\n\n```{{toctree}}\n:hidden:\n\n{tree}\n```\n"
