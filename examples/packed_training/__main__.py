"""Train on packed documents: ``python examples/packed_training --help``."""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:
    # Python runs a folder as loose files; its modules import each other as one package.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from packed_training.command import main

if __name__ == "__main__":
    sys.exit(main())
