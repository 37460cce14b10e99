"""What somebody may have meant who wrote a word that is none of the legal ones. Pure."""

from __future__ import annotations

from collections.abc import Iterable


def did_you_mean(given: object, legal: Iterable[str]) -> str:
    """Return `` (did you mean NAME?)`` to stand behind what was given, empty when nothing is near.

    Case, and a dash in the place of an underscore, make no difference.

    Args:
        given: what was written; what is no text is like nothing.
        legal: what there is.
    """
    if not isinstance(given, str):
        return ""
    # Most processes never see a wrong word.
    from difflib import get_close_matches  # noqa: PLC0415

    names = {_plain(str(name)): str(name) for name in legal}
    near = get_close_matches(_plain(given), names, n=1)
    return f" (did you mean {names[near[0]]}?)" if near else ""


def none_of(given: object, legal: Iterable[str]) -> str:
    """Return that a value is none of the legal ones, which they are, and which may be meant."""
    names = [str(name) for name in legal]
    return f"{given!r}{did_you_mean(given, names)}: expected one of {', '.join(names)}"


def no_such(what: str, given: object, legal: Iterable[str]) -> str:
    """Return that there is no setting, member or the like of a name, likewise."""
    names = sorted(str(name) for name in legal)
    return f"no such {what}{did_you_mean(given, names)}; expected one of {', '.join(names)}"


def _plain(name: str) -> str:
    return name.strip().casefold().replace("-", "_")
