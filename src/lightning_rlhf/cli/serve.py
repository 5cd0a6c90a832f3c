"""lightning-rlhf serve-reward: a reward model behind HTTP."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.core.validation import check_value
from lightning_rlhf.rewards.config import token_in
from lightning_rlhf.runs.console import quiet_libraries

if TYPE_CHECKING:
    from lightning_rlhf.rewards.server import RewardServer, Score


def serve_reward(arguments: Sequence[str]) -> None:
    """Serve until Ctrl-C or SIGTERM."""
    given = parser().parse_intermixed_args(arguments)
    server = None
    # uvicorn raises the signal that ended it once more.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        server = make_server(given)
        _print_address(server, given.token_env)
        server.run()
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)
    print("stopped", flush=True)
    if server is not None and server.is_scoring:
        os._exit(0)  # Python would wait for the thread, which may never return


def make_server(given: argparse.Namespace) -> RewardServer:
    """Return the server for the command line's arguments, with its address bound and model loaded.

    Raises:
        ConfigError: an argument is wrong, or the libraries of the server are not installed.
        CheckpointError: there is no such model.
    """
    try:
        from lightning_rlhf.rewards.server import RewardServer, listening_socket
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"serve-reward needs {error.name}: pip install 'lightning-rlhf[serve]'"
        ) from error
    check_value("--port", given.port, Annotated[int, Field(ge=0, le=65535)])
    token = None if given.token_env is None else token_in(given.token_env, "--token-env")
    address = listening_socket(given.host, given.port)
    return RewardServer(load_scorer(given.final, given.overrides), address, token=token)


def load_scorer(final: str, overrides: Sequence[str]) -> Score:
    """Return the score function of a folder or hub id."""
    quiet_libraries()
    from lightning_rlhf.evaluation.build_rewards import text_scorer  # with libraries that log

    return text_scorer(final, overrides)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="lightning-rlhf serve-reward",
        description="Serve a reward model over HTTP, for stage=ppo reward=http elsewhere. It takes "
        "the extra serve: pip install 'lightning-rlhf[serve]'.",
        epilog='POST /score takes {"prompts": [[{"role", "content"}, ...], ...], "responses": '
        '[...]} and answers {"scores": [...]}; GET /health answers {"status": "ok"}, without a '
        "token too. The traffic is not encrypted.",
    )
    parser.add_argument(
        "final", help="final/ folder of stage=rm or sequence classifier, or the hub id of one"
    )
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="reward.KEY=VALUE",
        help="as for reward=model, e.g. reward.batch_size=64 reward.chat_template=pair",
    )  # fmt: skip
    parser.add_argument(
        "--host", default="127.0.0.1",
        help="address to listen at (%(default)s); 0.0.0.0 or :: lets other machines in",
    )  # fmt: skip
    parser.add_argument("--port", type=int, default=8000, help="%(default)s; 0 = any free one")
    parser.add_argument(
        "--token-env", metavar="NAME",
        help="environment variable with a token, without which nobody gets scores; "
        "reward.token_env is its like in the run that asks",
    )  # fmt: skip
    return parser


def _print_address(server: RewardServer, token_env: str | None) -> None:
    url = f"'reward.url=\"{server.url}\"'" if ":" in server.host else f"reward.url={server.url}"
    token = f" reward.token_env={token_env}" if token_env else ""
    print(f"reward server: use it with reward=http {url}{token}; Ctrl-C ends it", flush=True)
    if server.is_open:
        who = "has the token" if token_env else "can reach the port, since there is no --token-env"
        print(f"it listens at {server.host}, to other machines too: it answers whoever {who}",
              flush=True)  # fmt: skip
