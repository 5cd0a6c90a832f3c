"""What is secret reaches no file of a run and no line of its output."""

import threading
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import Response

from lightning_rlhf.cli import arguments
from lightning_rlhf.core.errors import RewardError
from lightning_rlhf.rewards.server import RewardServer, listening_socket

from ..matrix import matrix
from .conftest import Workplace

SECRETS = {
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "HF_TOKEN": "hf_plantedsecretofthehub",
    "JUDGE_TOKEN": "planted-bearer-token",
}
USER, PASSWORD, QUERY = "planteduser", "pl4nted-p4ss", "planted-query"


def found_in(secrets: list[str], folder: Path, *texts: str) -> list[tuple[str, str]]:
    """Every (secret, place) in a file below `folder`, in a name of one, or in the output."""
    places = {str(i): text.encode() for i, text in enumerate(texts)}
    for file in folder.rglob("*"):
        places[str(file)] = file.read_bytes() if file.is_file() else b""
    return [
        (secret, place)
        for secret in secrets
        for place, content in places.items()
        if secret.encode() in content or secret in place
    ]


@pytest.mark.parametrize("by", matrix(["token", "password"], "token"))
def test_a_run_with_secrets(models: Workplace, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    """The server is asked with them; wandb keeps its own files in the folder of the run."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    seen: list[str] = []

    def score(prompts: list[object], responses: list[str], columns: object) -> list[float]:
        return [float(len(response)) for response in responses]

    answer = RewardServer._post

    async def watch(self: RewardServer, request: Request) -> Response:
        seen.append(f"{request.url.query} {dict(request.headers)}")
        return await answer(self, request)

    monkeypatch.setattr(RewardServer, "_post", watch)
    server = RewardServer(score, listening_socket("127.0.0.1", 0))
    thread = threading.Thread(target=server.run)
    thread.start()
    user = f"{USER}:{PASSWORD}@" if by == "password" else ""
    url = server.url.replace("//", f"//{user}") + f"?key={QUERY}"
    words = ["reward.token_env=JUDGE_TOKEN"] if by == "token" else []
    try:
        outcome = models.mini(
            "stage=ppo", "run=next", "policy.checkpoint=sft", "reward=http", f"reward.url='{url}'",
            "ppo.iterations=1", "logger=wandb", "logger.mode=offline", *words,
        ).succeeded  # fmt: skip
    finally:
        server.stop()
        thread.join()
    assert QUERY in seen[0]
    assert (SECRETS["JUDGE_TOKEN"] if by == "token" else "Basic ") in seen[0]
    secrets = [*SECRETS.values(), USER, PASSWORD, QUERY]
    assert (models.stage("ppo", "next") / "wandb").is_dir()
    assert found_in(secrets, models.folder / "outputs", outcome.out, outcome.err) == []


@pytest.mark.parametrize(
    ("by", "unforeseen"), [("token", RewardError), ("variable", AssertionError)]
)
def test_a_crash_that_tells_secrets(
    models: Workplace, monkeypatch: pytest.MonkeyPatch, by: str, unforeseen: type[Exception]
) -> None:
    """Each by itself, as a library may print them; in tracebacks too."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    given = {
        "token": ["reward.url=http://h", "reward.token_env=JUDGE_TOKEN"],
        "variable": ["reward.url=${oc.env:JUDGE_URL}"],
    }[by]
    monkeypatch.setenv("JUDGE_URL", f"http://{USER}:{PASSWORD}@127.0.0.1:9/?key={QUERY}")
    secrets = [SECRETS["WANDB_API_KEY"], SECRETS["HF_TOKEN"]]
    secrets += [SECRETS["JUDGE_TOKEN"]] if by == "token" else [USER, PASSWORD, QUERY]

    def load(*args: object, **kwargs: object) -> None:
        raise unforeseen("unforeseen " + " ".join(secrets))

    monkeypatch.setattr("lightning_rlhf.rewards.http.HTTPReward.check_server", lambda self: None)
    monkeypatch.setattr("lightning_rlhf.models.loading.load_causal_lm", load)
    outcome = models.mini(
        "stage=ppo", "run=next", "policy.checkpoint=sft", "reward=http", "debug=true", *given
    )
    assert outcome.status == 1
    assert "Traceback" in outcome.err
    assert "unforeseen " + " ".join(["***"] * len(secrets)) in outcome.err
    assert found_in(secrets, models.folder, outcome.out, outcome.err) == []


def test_what_is_too_short_is_hidden_in_addresses_alone() -> None:
    tree = {
        "reward": {"url": "http://me:12@h/?a=1&key=a%20long"},
        "data": ["//x", "s3://you:7890@h"],
    }
    assert arguments.secrets_of(tree) >= {"a=1&key=a%20long", "a%20long", "a long", "7890"}
    assert not {"me", "12", "1", "h", "you"} & arguments.secrets_of(tree)
    said = "12 of http://me:12@h/?a=1 with 7890"
    found = arguments.without_secrets(said, secrets=list(arguments.secrets_of(tree)))
    assert found == "12 of http://***@h/?*** with ***"


def test_words_of_the_configuration_stay_readable() -> None:
    """Even if an address has them for its user or in its query."""
    tree = {
        "reward": {"url": "http://bob1:pass1@h/?model=rew%61rd&strict=true&key=abcdef"},
        "outputs": "/home/bob1/outputs",
    }
    secrets = arguments.secrets_of(tree)
    whole = {f"model={name}&strict=true&key=abcdef" for name in ("reward", "rew%61rd")}
    assert secrets == {"pass1", "abcdef", "rew%61rd", *whole}
    said = "/home/bob1/outputs: give resume=true, not reward.url, with abcdef"
    found = arguments.without_secrets(said, secrets=list(secrets))
    assert found == "/home/bob1/outputs: give resume=true, not reward.url, with ***"


@pytest.mark.parametrize(
    ("options", "typed"),
    [
        (["--cfg", "job"], True),
        (["--cfg", "job", "--resolve"], False),
        (["--info", "all"], True),
        (["-i"], True),
    ],
)
def test_a_configuration_that_is_printed(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch, options: list[str], typed: bool
) -> None:
    """With an address on the command line, or in a variable of the environment."""
    url = f"http://{USER}:{PASSWORD}/x@127.0.0.1:9/?key={QUERY}&a=b"
    monkeypatch.setenv("JUDGE_URL", url)
    given = f"reward.url='{url}'" if typed else "reward.url=${oc.env:JUDGE_URL}"
    outcome = workplace.mini("stage=ppo", *options, "reward=http", given, "ppo.kl_coef=0.1")
    assert outcome.status == 0, outcome.err
    assert found_in([USER, PASSWORD, QUERY], workplace.folder, outcome.out, outcome.err) == []
    # After a job Hydra's logger is off in the process that runs the tests, and --info logs.
    assert outcome.out or options[0] in ("--info", "-i")


ADDRESS = f"http://{USER}:{PASSWORD}@127.0.0.1:9/?key={QUERY}"


@pytest.mark.parametrize(
    "words",
    [
        ["-m", f"reward.url='{ADDRESS}',http://h"],
        ["-m", f"reward={{kind:http,url:'{ADDRESS}'}}"],
        ["hydra.output_subdir=kept", f"reward.url='{ADDRESS}'"],
        ["--nothing", f"reward.url='{ADDRESS}'"],
        [f"--reward.url={ADDRESS}"],
        [f"reward.url='{ADDRESS}'", "reward.nothing=1"],
        [f"reward.url={ADDRESS}", "debug=true"],  # which wants quotes, as the next two do
        [f"reward.url=http://h/?a,{QUERY}", "debug=true"],
        [f"reward={{kind:http,url:{ADDRESS}}}", "debug=true"],
    ],
    ids=range(9),
)
def test_where_hydra_would_repeat_an_address(workplace: Workplace, words: list[str]) -> None:
    outcome = workplace.mini("stage=ppo", "reward=http", "policy.checkpoint=base", *words)
    assert outcome.status != 0
    assert found_in([USER, PASSWORD, QUERY], workplace.folder, outcome.out, outcome.err) == []
