"""`python -m outboard`."""

import sys

from outboard._cli import main

if __name__ == "__main__":
    sys.exit(main())
