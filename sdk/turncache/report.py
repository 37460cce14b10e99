"""What happened to the KV: of one result, and of a session as a table, HTML and JSON."""

from __future__ import annotations

import html as markup
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from turncache.protocol import OUTCOME_HEADER, Outcome
from turncache.records import Call, CallRecord, parse_outcome
from turncache.results import WeakTable

if TYPE_CHECKING:
    from turncache.sessions import Session

#: Results of the clients of this process: the call that made each, and its session.
RESULTS: Final[WeakTable[tuple[Call, Session | None]]] = WeakTable()


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    unit: str
    show: Callable[[CallRecord], str]
    left: bool = False


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _word(value: str | None) -> str:
    return "-" if value is None else str(value)


#: What names a call: where a table is too wide for one, every part of it begins with these.
_NAMES: Final = (
    _Column("turn", "", lambda call: _count(call.turn)),
    _Column("call", "", lambda call: _count(call.call)),
)
#: What belongs together, and stays together where there is room for it.
_GROUPS: Final = (
    (
        _Column("cause", "", lambda call: _word(call.cause), left=True),
        _Column("boundary", "", lambda call: _word(call.error or call.boundary), left=True),
    ),
    (
        _Column("prompt", "tokens", lambda call: _count(call.prompt)),
        _Column("local", "tokens", lambda call: _count(call.local)),
        _Column("returned", "tokens", lambda call: _count(call.returned)),
        _Column("computed", "tokens", lambda call: _count(call.computed)),
        _Column("lost", "tokens", lambda call: _count(call.lost)),
    ),
    (
        _Column("plan", "", lambda call: _word(call.plan), left=True),
        _Column("reason", "", lambda call: _word(call.reason), left=True),
    ),
    (
        _Column("ttft", "s", lambda call: _seconds(call.ttft_s)),
        _Column("total", "s", lambda call: _seconds(call.seconds)),
    ),
)
_COLUMNS: Final = (*_NAMES, *(column for group in _GROUPS for column in group))
_GAP: Final = "  "
#: Width where there is no terminal: nothing is wrapped there.
_ENDLESS: Final = 10_000


def outcome(result: Any) -> Outcome | None:
    """Return what happened to the KV of the call behind ``result``, as the server says.

    Args:
        result: a completion or response, a stream, a raw or streaming response, or an
            API error.

    Returns:
        The outcome, or None when the server sent none.
    """
    known = RESULTS.get(result)
    if known is not None:
        return known[0].outcome()
    # Streams, raw responses, upstream's helpers around streams, errors: each is or holds
    # an HTTP response.
    held = (getattr(result, name, None) for name in ("response", "http_response", "_response"))
    response = next((one for one in held if one is not None), result)
    headers = getattr(response, "headers", None)
    return None if headers is None else parse_outcome(headers.get(OUTCOME_HEADER))


def session_of(result: Any) -> Session | None:
    """Return the session that the call behind ``result`` belonged to, or None.

    The way to an automatic session. Knows results of our clients while they exist.
    """
    known = RESULTS.get(result)
    return None if known is None else known[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums over the calls of a session whose numbers are known.

    Attributes:
        num_calls: calls that have ended.
        prompt: tokens of all prompts.
        reused: tokens that were not computed, ``local`` and ``returned``.
        lost: tokens computed again, None when no call says.
    """

    num_calls: int
    prompt: int
    reused: int
    lost: int | None

    @property
    def reused_share(self) -> float | None:
        """Reused part of the prompts, from 0 to 1, None without any prompt."""
        return self.reused / self.prompt if self.prompt else None


def totals(calls: Sequence[CallRecord]) -> Totals:
    """Sum up ``calls``; a call counts when its prompt and what was reused are known."""
    known = [call for call in calls if call.prompt is not None and call.local is not None]
    lost = [call.lost for call in calls if call.lost is not None]
    return Totals(
        num_calls=len(calls),
        prompt=sum(call.prompt or 0 for call in known),
        reused=sum((call.local or 0) + (call.returned or 0) for call in known),
        lost=sum(lost) if lost else None,
    )


def table(session: Session, width: int | None = None) -> str:
    """Return a table of the session's calls, one line each, with units.

    Args:
        session: whose calls.
        width: columns that there are, by default those of the terminal, and any number where
            standard output is none. What does not fit beside the rest stands below it, each
            part with a line per call.
    """
    if width is None:
        width = shutil.get_terminal_size((_ENDLESS, 24)).columns
    calls = session.calls
    lines = [_headline(session, totals(calls))]
    if calls:
        parts = _parts({column.title: _width(column, calls) for column in _COLUMNS}, width)
        lines += "\n\n".join("\n".join(_lines(part, calls)) for part in parts).split("\n")
    lines += [f"advice: {text}" for text in session.advice]
    return "\n".join(lines)


def _parts(widths: Mapping[str, int], width: int) -> list[list[_Column]]:
    """Lay columns side by side as far as they fit; a group that is too wide alone is taken apart.

    Args:
        widths: of the columns, by title.
        width: of a line.
    """

    def fits(*columns: _Column) -> bool:
        return sum(widths[each.title] + len(_GAP) for each in columns) - len(_GAP) <= width

    parts = [list(_NAMES)]
    for group in _GROUPS:
        whole = fits(*_NAMES, *group)
        for columns in (group,) if whole else ((each,) for each in group):
            if len(parts[-1]) > len(_NAMES) and not fits(*parts[-1], *columns):
                parts.append(list(_NAMES))
            parts[-1] += columns
    return parts


def _width(column: _Column, calls: Sequence[CallRecord]) -> int:
    cells = (len(column.show(call)) for call in calls)
    return max(len(column.title), len(column.unit), *cells)


def _lines(columns: Sequence[_Column], calls: Sequence[CallRecord]) -> list[str]:
    rows = [[column.title for column in columns], [column.unit for column in columns]]
    rows += [[column.show(call) for column in columns] for call in calls]
    if not any(rows[1]):
        del rows[1]
    widths = [_width(column, calls) for column in columns]
    return [_line(row, columns, widths) for row in rows]


def html(session: Session) -> str:
    """Return the same table as HTML, for a notebook."""
    calls = session.calls
    heads = "".join(
        f"<th>{column.title}{f' ({column.unit})' if column.unit else ''}</th>"
        for column in _COLUMNS
    )
    rows = "".join(
        "<tr>"
        + "".join(
            f'<td style="text-align:{"left" if column.left else "right"}">'
            f"{markup.escape(column.show(call))}</td>"
            for column in _COLUMNS
        )
        + "</tr>"
        for call in calls
    )
    advice = "".join(f"<li>{markup.escape(text)}</li>" for text in session.advice)
    return (
        f"<p>{markup.escape(_headline(session, totals(calls)))}</p>"
        f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
        + (f"<ul>{advice}</ul>" if advice else "")
    )


def to_json(session: Session) -> str:
    """Return the session's totals, calls and advice as JSON; times in seconds."""
    calls = session.calls
    total = totals(calls)
    return json.dumps(
        {
            "session": session.id,
            "parent": session.parent_id,
            "totals": {
                "calls": total.num_calls,
                "prompt": total.prompt,
                "reused": total.reused,
                "reused_share": total.reused_share,
                "lost": total.lost,
            },
            "calls": [call.to_dict() for call in calls],
            "advice": list(session.advice),
        }
    )


def _headline(session: Session, total: Totals) -> str:
    calls = f"{total.num_calls:,} call{'' if total.num_calls == 1 else 's'}"
    share = total.reused_share
    reused = (
        "no prompt tokens reported"
        if share is None
        else f"{total.reused:,} of {total.prompt:,} prompt tokens reused ({share:.1%})"
    )
    lost = "" if total.lost is None else f", {total.lost:,} lost"
    name = session.id if session.label is None else f"{session.label} ({session.id})"
    return f"session {name}: {calls}, {reused}{lost}"


def _line(cells: Sequence[str], columns: Sequence[_Column], widths: Sequence[int]) -> str:
    return _GAP.join(
        cell.ljust(width) if column.left else cell.rjust(width)
        for cell, column, width in zip(cells, columns, widths, strict=True)
    ).rstrip()
