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

    def __str__(self) -> str:
        made = f"\n  the value was made at {self.made}" if self.made else ""
        return f"{self.place}: {self.text}{made}  [{self.rule}]"


@dataclass
class Judgement:
    """`findings`; `unjudged`, (place, why) of each value that was not judged; `judged`, how many calls were;
    `result`, the types of what the function returned, None where there is none."""

    findings: list[JudgedFault] = field(default_factory=list)
    unjudged: list[tuple[str, str]] = field(default_factory=list)
    judged: int = 0
    result: Any = None

    def __str__(self) -> str:
        named = [f"{place}: not judged: {why}" for place, why in self.unjudged]
        return "\n".join([*map(str, self.findings), *named, f"{self.judged} calls judged, {len(named)} not"])
