"""``python -m turncache_tools``, and the ``turncache`` command."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0 ok, 1 a check failed, 2 usage or configuration, 3 environment, 4 engine,
    130 interrupted.
    """
    try:
        from turncache_tools.cli import run  # noqa: PLC0415 - needs the extra
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("turncache"):
            raise
        sys.stderr.write(
            f"the command line needs the package {error.name!r}: pip install 'turncache[tools]'\n"
        )
        return 3
    return run(argv)


if __name__ == "__main__":
    sys.exit(main())
