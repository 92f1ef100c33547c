"""The same command as `python -m parallel_core.cli`, where no script is installed."""

import sys

from parallel_core.cli import main

sys.exit(main())
