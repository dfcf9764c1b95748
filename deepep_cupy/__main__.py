"""``python -m deepep_cupy``: see ``deepep_cupy.cli.main``."""

import sys

from deepep_cupy.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
