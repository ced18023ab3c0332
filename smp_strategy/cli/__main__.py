"""``python -m smp_strategy.cli``: the same as ``smp``."""

import sys

from smp_strategy.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
