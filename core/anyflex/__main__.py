"""``python -m anyflex``: the same as the command ``anyflex``."""

from __future__ import annotations

import sys

from anyflex.cli.main import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
