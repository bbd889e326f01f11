"""What the judge says of a program: what it found, and what it could not judge."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class JudgedFault:
    """What breaks `rule`: `place`, "file:line" of the call; `made`, of the call that made the value."""

    place: str
    rule: str
    text: str
    made: str = ""

    @property
    def message(self) -> str:
        return self.text + (f"\n  the value was made at {self.made}" if self.made else "")

    def __str__(self) -> str:
        return f"{self.place}: {self.message}  [{self.rule}]"


@dataclass
class Judgement:
    """`findings`; `unjudged`, (place, why) of each value that was not judged; `judged`, how many calls were;
    `reached`, (file, number of the line) of each typed call that ran, and ("", its line) of a product;
    `result`, the types of what the function returned, None where there is none."""

    findings: list[JudgedFault] = field(default_factory=list)
    unjudged: list[tuple[str, str]] = field(default_factory=list)
    judged: int = 0
    reached: set[tuple[str, Any]] = field(default_factory=set)
    result: Any = None

    def __str__(self) -> str:
        named = [f"{place}: not judged: {why}" for place, why in self.unjudged]
        return "\n".join([*map(str, self.findings), *named, f"{self.judged} calls judged, {len(named)} not"])
