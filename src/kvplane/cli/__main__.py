"""`python -m kvplane.cli`: the same as `kvplane`."""

import sys

from kvplane.cli import main

if __name__ == "__main__":
    sys.exit(main())
