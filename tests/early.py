"""A plugin for pytest, by `-p`: it imports torch before coverage starts, which would double the time that takes.

Nothing depends on it. A run of many tests saves some seconds by it, at its beginning and at its end.
"""

from __future__ import annotations

import os
import sys

from parallel_core.testing.preload import import_torch

# The process that only hands out tests to the workers of pytest-xdist does without torch.
if "PYTEST_XDIST_WORKER" in os.environ or "-n" not in sys.argv:
    import_torch()
