"""`python -m moetta`: the command line."""

import sys

from moetta.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
