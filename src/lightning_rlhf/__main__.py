"""Entry points of the command: train.py, python -m lightning_rlhf and the console command."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stopped_in_one_line() -> Iterator[None]:
    """Within the block, answer Ctrl-C with one line and its exit status."""
    try:
        yield
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


with stopped_in_one_line():
    from lightning_rlhf.cli.main import main as run

main = stopped_in_one_line()(run)
"""Run the command."""

if __name__ == "__main__":
    main()
