"""The doors to the command: train.py, python -m lightning_rlhf and the console command."""

import signal
import sys


def main() -> None:
    """Run the command; Ctrl-C before it has begun, in the imports too, is one line."""
    try:
        from lightning_rlhf.cli.main import main as run

        run()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
