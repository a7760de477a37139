"""SkyPilot's service file as ours: its text stays, without the keys that have no meaning here, which a comment lists."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import yaml

from skyserve_cli.spec.load import Loaded, load_text
from skyserve_cli.spec.problems import Loc, Problem, SpecError, dotted
from skyserve_cli.spec.section import Section
from skyserve_cli.starter.draft import comment_lines

MOST_KEYS = 100


class Carried(NamedTuple):
    """The text of our file; what of the other one is not in it, and what is there and has no effect."""

    text: str
    dropped: tuple[str, ...]
    idle: tuple[str, ...]


def from_skypilot(text: str, source: str) -> Carried:
    """Return the file. Raises SpecError if it has problems that leaving out keys does not solve."""
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    body, dropped = text, []
    for _ in range(MOST_KEYS):
        try:
            loaded = load_text(body, source=source, needs_values=False)
        except SpecError as error:
            foreign = [each for each in error.problems if _is_foreign(each)]
            cut = _without(body, foreign[0].path) if foreign else None
            if cut is None:
                raise
            body, value = cut
            reason = foreign[0].hint if foreign[0].message == "unknown key" else foreign[0].message
            dropped.append(f"{foreign[0].path}: {value}" + (f" ({reason})" if reason else ""))
        else:
            idle = _idle(loaded)
            return Carried(_head(dropped, idle) + body, tuple(dropped), idle)
    raise SpecError([Problem("", f"more than {MOST_KEYS} keys have no meaning here")])


def _is_foreign(problem: Problem) -> bool:
    """Return whether the key itself is the problem, not its value, and no slip of one that is known."""
    if problem.message == "unknown key":
        return problem.hint is None
    key = problem.path.rpartition(".")[2]
    return any(section.refused.get(key) == problem.message for section in _sections(Section))


def _sections(section: type[Section]) -> Iterator[type[Section]]:
    for each in section.__subclasses__():
        yield each
        yield from _sections(each)


def _idle(loaded: Loaded) -> tuple[str, ...]:
    messages = (
        each
        for each in loaded.warnings
        if each.message.startswith("not acted on yet") or each.message.endswith("left out")
    )
    return tuple(map(str, messages))


def _head(dropped: Sequence[str], idle: Sequence[str]) -> str:
    lines = [
        "# Carried over from SkyPilot by `serve init`. Next: `serve validate FILE`, `serve plan FILE`, `serve up FILE`."
    ]
    lines += comment_lines(dropped, "Not carried over, because it has no meaning here:")
    lines += comment_lines(idle, "Carried over, and without an effect:")
    return "\n".join(lines) + "\n"


class _Place(NamedTuple):
    mapping: yaml.MappingNode
    at: int


def _without(text: str, path: str) -> tuple[str, str] | None:
    """Return the text without a key, and the value that it had; None if the key is not in a mapping of the text."""
    place = _places(text).get(path)
    if place is None:
        return None
    key, value = place.mapping.value[place.at]
    shown = " ".join(
        yaml.safe_dump(_plain(value), default_flow_style=True, width=10_000).removesuffix("...\n").split()
    )
    start, end = key.start_mark.index, value.end_mark.index
    if place.mapping.flow_style:
        entries = place.mapping.value
        if place.at + 1 < len(entries):
            end = entries[place.at + 1][0].start_mark.index
        elif place.at:
            start = entries[place.at - 1][1].end_mark.index
        return text[:start] + text[end:], shown
    if place.at == 0 and text[text.rfind("\n", 0, start) + 1 : start].strip():  # behind the dash of a list
        if len(place.mapping.value) == 1:
            return text[:start] + "{}" + text[_end_of_lines(text, start, end) - 1 :], shown
        return text[:start] + text[place.mapping.value[1][0].start_mark.index :], shown
    start = text.rfind("\n", 0, start) + 1
    return text[:start] + text[_end_of_lines(text, start, end) :], shown


def _end_of_lines(text: str, start: int, end: int) -> int:
    """Return the end of the last line of a value: comments and blank lines behind it belong to what follows."""
    newline = text.find("\n", end - 1)
    at_line_start = end > 0 and text[end - 1] == "\n"
    end = end if at_line_start or not text[text.rfind("\n", 0, end) + 1 : end].strip() else newline + 1
    if end <= 0:
        return len(text)
    lines = text[start:end].splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop() if not lines[-1].strip() else None
    while len(lines) > 1 and (not lines[-1].strip() or lines[-1].lstrip().startswith("#")):
        lines.pop()
    return start + sum(map(len, lines))


def _places(text: str) -> Mapping[str, _Place]:
    """Return where each key of a mapping is, by its path."""
    found: dict[str, _Place] = {}
    waiting: list[tuple[yaml.Node | None, Loc]] = [(yaml.compose(text, Loader=yaml.SafeLoader), ())]
    while waiting and len(found) < 10_000:
        node, loc = waiting.pop()
        if isinstance(node, yaml.MappingNode):
            for index, (key, value) in enumerate(node.value):
                found.setdefault(dotted((*loc, str(key.value))), _Place(node, index))
                waiting.append((value, (*loc, str(key.value))))
        elif isinstance(node, yaml.SequenceNode):
            waiting += [(each, (*loc, index)) for index, each in enumerate(node.value)]
    return found


def _plain(node: yaml.Node) -> object:
    if isinstance(node, yaml.MappingNode):
        return {str(key.value): _plain(value) for key, value in node.value}
    if isinstance(node, yaml.SequenceNode):
        return [_plain(each) for each in node.value]
    return str(node.value)
