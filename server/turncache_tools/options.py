"""Options that several verbs have: defined once, put into each verb's signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any


def with_options(
    verb: Callable[..., None],
    *,
    of: Callable[..., Any],
    place: str,
    defaults: Mapping[str, Any] | None = None,
) -> Callable[..., None]:
    """Give a verb the options of another function, whose value it gets in one parameter.

    Args:
        verb: called as ``verb(<value>, ...)``.
        of: has the options as parameters, and makes the value.
        place: name of the verb's parameter for it.
        defaults: of this verb, in place of those of ``of``.
    """
    shared = dict(inspect.signature(of, eval_str=True).parameters)
    for name, value in (defaults or {}).items():
        shared[name] = shared[name].replace(default=value)
    own = dict(inspect.signature(verb, eval_str=True).parameters)
    del own[place]
    parameters = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in (*shared.values(), *own.values())
    ]

    def run(**values: Any) -> None:
        made = of(**{name: values.pop(name) for name in shared})
        verb(**{place: made, **values})

    run.__name__ = verb.__name__
    run.__doc__ = verb.__doc__
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run
