"""A page for each exercise, from the same text that the command hands out, and their list.

An answer of values or of an order is judged in the page, by Python in the browser; one that runs on ranks by a command.
"""

from html import escape
from pathlib import Path

from scaling.exercise import Exercise, exercises

HEAD = """# Exercises

Each is a file with blanks. Those marked *in the page* are judged here, in your browser, which also remembers what you
have solved. The others are functions of shards, and a command judges them in three ways: by the types of their lines,
which are found on an abstract mesh; by what ranks compute, compared with one device; and by the bytes that they send.
The command starts the ranks itself, on this machine's CPU.

```bash
python -m scaling.exercise                        # the list
python -m scaling.exercise new 05_fsdp_backward    # writes 05_fsdp_backward.py
python -m scaling.exercise check 05_fsdp_backward.py
```

In a notebook: `from scaling.exercise import grade, new`; `print(new(name))`, and `grade(text)`.
"""
SCRIPT = '<script type="module" src="../_static/play.js"></script>'
FORM = """```{{raw}} html
<p id="status" role="status" data-ready="Fill in what is ..., and press Check.">Python is starting: this takes a few
seconds.</p>
<form data-ask="exercise">
  <input type="hidden" name="exercise" value="{name}">
  <textarea name="text" rows="{rows}" spellcheck="false" aria-label="your answer">
{blanks}</textarea>
  <button type="submit" disabled>Check</button> <button type="reset">Start again</button>
  <output></output>
</form>
{script}
```
"""


def write_all(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name, exercise in exercises().items():
        text = exercise.text.replace("```python dense", "```python")
        part = f"[Part {exercise.part}](../contents.md#part-{exercise.part}) of the book"
        how = in_page(exercise) if exercise.kind != "write" else by_command(exercise)
        (folder / f"{name}.md").write_text(f"# {exercise.title}\n\n{part}\n\n{text}\n\n{how}")
    (folder / "index.md").write_text(contents())


def in_page(exercise: Exercise) -> str:
    """A form in which the answer is written and judged."""
    rows = exercise.blanks.count("\n") + 2
    return FORM.format(name=exercise.name, rows=rows, blanks=escape(exercise.blanks), script=SCRIPT)


def by_command(exercise: Exercise) -> str:
    """The file that is handed out, and the commands that write and judge it."""
    command = f"python -m scaling.exercise new {exercise.name}\npython -m scaling.exercise check {exercise.name}.py"
    return (
        "The first command writes the file below. Replace each `...`. The second command starts the devices of the "
        f"mesh {exercise.data['mesh']} on your machine, and judges the file on them.\n\n"
        f"```bash\n{command}\n```\n\n```python\n{exercise.blanks}```\n"
    )


def contents() -> str:
    text = []
    for part in sorted({exercise.part for exercise in exercises().values()}):
        text += ["", f"## Part {part}", ""]
        for name, exercise in exercises().items():
            if exercise.part == part:
                where = " *in the page*" if exercise.kind != "write" else ""
                text.append(f'- [{exercise.title}]({name}.md){where}<span data-solved="{name}"></span>')
    tree = "\n".join(exercises())
    script = f"```{{raw}} html\n{SCRIPT}\n```"
    return HEAD + "\n".join(text) + f"\n\n{script}\n\n```{{toctree}}\n:hidden:\n\n{tree}\n```\n"
