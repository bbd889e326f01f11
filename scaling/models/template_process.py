"""Render chat templates in a process that `template.py` starts: one job per line in, one answer per line out.

A template is a program that comes with a model, and it may loop for ever. Nothing inside a process can end every such
program (`"a" * 10**9`, `10**10**9`, a concatenation that doubles), so the kernel does: it ends this process when a job
takes more processor time than the job allows, and it refuses memory beyond `MEMORY`.

The environment is that of transformers' `utils/chat_template_utils.py`: a sandbox in which blocks take no lines, with
`break` and `continue`, `{% generation %}`, a `tojson` for models in place of the one for web pages, `raise_exception`
and `strftime_now`. The file imports no other file of this library, so it starts in a tenth of a second.
"""

import contextlib
import json
import resource
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from functools import cache
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MEMORY = 512 << 20  # bytes


class Generation(Extension):
    """`{% generation %}answer{% endgeneration %}`: record which part of the text is the assistant's."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it
    begin = 0  # the characters written so far
    spans: list[tuple[int, int]] = []  # noqa: RUF012 - set anew for each job

    def parse(self, parser: Parser) -> nodes.Node:
        """Compile the tag into a call of `note`."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("note"), [], [], body).set_lineno(line)

    def note(self, caller: Callable[[], str]) -> str:
        """Return the text between the tags, and record its span."""
        text = caller()
        self.spans.append((self.begin, self.begin + len(text)))
        return text


class PublicNamespace(Namespace):
    """A `namespace` without names that begin with an underscore, so that no template reaches Python's internals."""

    def __init__(*args: Any, **given: Any):  # a template may name a value `self`
        self = args[0]
        Namespace.__init__(self)
        for name, value in dict(*args[1:], **given).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace has no name with an underscore before it: {name!r}")
        super().__setitem__(name, value)


class Dict:
    """The function `dict`, without the other attributes of Python's class."""

    def __call__(self, *args: Any, **given: Any) -> dict:
        """Return a dict, as Python's class does."""
        return dict(*args, **given)

    def fromkeys(self, *args: Any) -> dict:
        """Return a dict of these keys, all with one value."""
        return dict.fromkeys(*args)


def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Return JSON as a model reads it: in the order given, and without the escapes of web pages."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> None:
    """Refuse the messages, as templates do by this name."""
    raise TemplateError(message)


@cache
def environment() -> ImmutableSandboxedEnvironment:
    """Return the environment in which all templates are rendered."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    made.filters["tojson"] = to_json
    made.globals |= {"raise_exception": raise_exception, "dict": Dict(), "namespace": PublicNamespace}
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made


@cache
def compiled(source: str) -> Template:
    """Compile a template, once for each text."""
    return environment().from_string(source)


def render(source: str, variables: dict[str, Any], most: int) -> tuple[str, list[tuple[int, int]]]:
    """Return the text and the spans of its answers. Raise a ValueError if it exceeds `most` characters."""
    noted = next(each for each in environment().extensions.values() if isinstance(each, Generation))
    noted.begin, noted.spans, parts = 0, [], []
    for part in compiled(source).generate(**variables):
        parts.append(part)
        noted.begin += len(part)
        if noted.begin > most:
            raise ValueError(f"it writes more than {most:,} characters")
    return "".join(parts), noted.spans


def _answer(job: dict[str, Any]) -> dict[str, Any]:
    """Return {"text": ..., "spans": ...} or {"error": ...}. A job that takes too long ends the process."""
    signal.setitimer(signal.ITIMER_PROF, job["seconds"])
    try:
        text, spans = render(job["template"], job["variables"], job["most"])
        return {"text": text, "spans": spans}
    except MemoryError:
        return {"error": f"it needs more than {MEMORY >> 20} MiB of memory"}
    except Exception as error:  # a template may raise anything
        return {"error": (str(error) or type(error).__name__)[:1000]}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def main() -> None:
    """Answer jobs until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, whose end ends this process
    with contextlib.suppress(ValueError, OSError):  # a lower limit may already be set
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    for line in sys.stdin.buffer:
        said = json.dumps(_answer(json.loads(line)), ensure_ascii=False)
        sys.stdout.buffer.write(said.encode("utf-8", "surrogatepass") + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
