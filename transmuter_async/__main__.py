"""`python -m transmuter_async` is the `transmuter` command."""

from __future__ import annotations

import sys

from transmuter_async.cli import main

if __name__ == "__main__":
    sys.exit(main())
