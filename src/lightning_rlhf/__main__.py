"""The doors to the command: train.py, python -m lightning_rlhf and the console command."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys


def main() -> None:
    """Run the command; Ctrl-C before it has begun, in the imports too, is one line."""
    # An error comes 0.15 s sooner without a search for garbage in what was only imported, before a
    # stage starts and at the end, and without a search of all packages for plugins of pydantic.
    gc.disable()
    atexit.register(gc.freeze)
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    try:
        from lightning_rlhf.cli.main import main as run

        run()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
