"""`python -m tools.quality`: the table of the bundled data."""

import sys

from tools.quality.bundled import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
