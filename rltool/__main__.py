"""``python -m rltool``."""

import sys

from rltool.cli import main

if __name__ == "__main__":
    sys.exit(main())
