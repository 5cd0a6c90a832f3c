"""lightning-rlhf serve-reward: a reward model behind HTTP."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from lightning_rlhf.cli.console import say_error
from lightning_rlhf.core.config import require_number
from lightning_rlhf.core.errors import RLHFError
from lightning_rlhf.rewards.serve import Score, serve


def serve_reward(arguments: Sequence[str]) -> None:
    """Serve until Ctrl-C or SIGTERM; an error is one message and exit status 1."""
    given = parser().parse_intermixed_args(arguments)
    try:
        require_number("--port", given.port, at_least=0, at_most=65535)
        score = load_scorer(given.final, given.overrides)
        serve(score, given.host, given.port, ready=_say_address)
    except KeyboardInterrupt:
        pass
    except RLHFError as error:
        say_error(str(error))
        sys.exit(1)
    print("stopped")


def load_scorer(final: str, overrides: Sequence[str]) -> Score:
    """The reward at a folder or hub id; libraries load here, so that --help is quick."""
    from lightning_rlhf.cli.console import quiet_libraries
    from lightning_rlhf.cli.text_rewards import text_scorer

    quiet_libraries()
    return text_scorer(final, overrides)


def parser() -> argparse.ArgumentParser:
    """What may be said on the command line."""
    parser = argparse.ArgumentParser(
        prog="lightning-rlhf serve-reward",
        description="Serve a reward model over HTTP, for stage=ppo reward=http elsewhere.",
        epilog='POST /score takes {"prompts": [[{"role", "content"}, ...], ...], "responses": '
        '[...]} and answers {"scores": [...]}; GET /health answers {"status": "ok"}. There is no '
        "password: leave --host as it is, or let none but friends reach the port.",
    )
    parser.add_argument(
        "final", help="final/ folder of stage=rm or sequence classifier, or the hub id of one"
    )
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="reward.KEY=VALUE",
        help="as for reward=model, e.g. reward.batch_size=64 reward.chat_template=pair",
    )  # fmt: skip
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (%(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="%(default)s; 0 = any free one")
    return parser


def _say_address(url: str) -> None:
    print(f"reward server: use it with reward=http reward.url={url}; Ctrl-C ends it", flush=True)
