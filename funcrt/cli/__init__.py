"""The command line. The only part of `funcrt` that may import `converters`."""

from __future__ import annotations

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Entry point of the console script."""
    try:
        from funcrt.cli import app  # most of the time until a command begins

        app.run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    sys.exit(0)
