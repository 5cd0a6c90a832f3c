"""One thread for each test process: small matrices gain nothing from more, and wait for them."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
