"""A file of JSON lines, one a case of a sweep: what it has is not run again."""

import json
from pathlib import Path


class Rows(list):
    def __init__(self, path: Path):
        super().__init__(map(json.loads, path.read_text().splitlines() if path.exists() else []))
        self.path = path

    def add(self, row: dict) -> None:
        self.append(row)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
