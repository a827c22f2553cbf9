"""`python -m agentrl` is the command line."""

import sys

from agentrl.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
