"""`python -m parloom` is the `parloom` command."""

import sys

from parloom.cli import main

if __name__ == "__main__":
    sys.exit(main())
