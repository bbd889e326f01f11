"""Exercises on the book's algorithms, each judged by types, by one device, and by the bytes that it moves.

    python -m scaling.exercise                      the list, by part of the book
    python -m scaling.exercise new NAME             writes NAME.py, with blanks
    python -m scaling.exercise check NAME.py        the mistake, or the bytes it moved

In a notebook: `from scaling.exercise import grade, new`, `print(new("05_fsdp_backward"))`, `grade(text)`.

`page` reads an exercise from its page and starts the judge, `judge` judges values and orders of work, and `ranks`
functions of shards.
"""

from scaling.exercise.page import Exercise, Verdict, exercise_named, exercises, grade, new

__all__ = ["Exercise", "Verdict", "exercise_named", "exercises", "grade", "new"]
