"""Files from elsewhere run no code: what they plant would write a marker."""

import io
import json
import pickle
import re
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import lightning_rlhf
from lightning_rlhf.cli.commands import refuse_code
from lightning_rlhf.core.errors import ConfigError
from lightning_rlhf.rewards.http import Client

from .conftest import Workplace, make_workplace, run, tree

PPO = ("stage=ppo", "run=next", "policy.checkpoint=sft", "reward.checkpoint=rm")
SOURCE = Path(lightning_rlhf.__file__).parent


class Planted:
    """Writes the marker when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.marker,))


def refused(place: Workplace, named: list[str], key: str, value: Any, *overrides: str) -> None:
    """The command is refused in a line with `named`, and leaves every file as it was."""
    before = tree(place.folder)
    error = run(place, key, value, *overrides).error
    assert [text for text in named if text not in error] == [], error
    assert tree(place.folder) == before


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "marker"


def plant(marker: Path, *files: Path) -> None:
    for file in files:
        file.write_bytes(pickle.dumps(Planted(marker)))


def test_pickles_beside_or_instead_of_weights(models: Workplace, marker: Path) -> None:
    for folder, whole in (("rm/roles", "adapter_model"), ("sft", "model")):
        names = ("pytorch_model.bin", "adapter_model.bin", "training_args.bin", "x.pt")
        plant(marker, *(models.folder / folder / name for name in names))
        (models.folder / folder / f"{whole}.safetensors").unlink()
        refused(models, [f"{folder} cannot be loaded", "pickle"], "debug", False, *PPO)
    assert not marker.exists()


def test_a_checkpoint_to_resume_from(finished: Workplace, marker: Path) -> None:
    """The run is a real one, with another newest checkpoint."""
    place = finished
    shutil.rmtree(place.stage("sft") / "final")
    torch.save({"state_dict": Planted(marker)}, place.stage("sft") / "checkpoints" / "000007.ckpt")
    error = place.mini("stage=sft", "resume=true").error
    assert "checkpoints/000007.ckpt cannot be read: Weights only load failed" in error
    assert "resume=000006" in error
    assert not marker.exists()


@pytest.fixture
def planted(models: Workplace, marker: Path) -> Path:
    """A model of a family that transformers does not know: only code in its folder could load it.

    So could its tokenizer.
    """
    sft = models.folder / "sft"
    (sft / "x.py").write_text(f"open({str(marker)!r}, 'w')")
    config = json.loads((sft / "config.json").read_text())
    auto_map = {"AutoConfig": "x.C", "AutoModelForCausalLM": "x.M"}
    (sft / "config.json").write_text(
        json.dumps(config | {"model_type": "unheard_of", "auto_map": auto_map})
    )
    return sft


@pytest.mark.parametrize("of_tokenizer", [False, True])
def test_code_that_a_model_brings(
    models: Workplace, planted: Path, marker: Path, of_tokenizer: bool
) -> None:
    if of_tokenizer:
        config = json.loads((planted / "config.json").read_text())
        del config["auto_map"]
        (planted / "config.json").write_text(json.dumps(config))
        file = planted / "tokenizer_config.json"
        named = {"auto_map": {"AutoTokenizer": ["x.T", None]}, "tokenizer_class": "T"}
        file.write_text(json.dumps(json.loads(file.read_text()) | named))
    refused(models, ["sft", "auto_map", "model.trust_remote_code=true"], "debug", False, *PPO)
    assert not marker.exists()


def test_a_chat_template_is_kept_in_its_sandbox(models: Workplace, marker: Path) -> None:
    text = f"{{{{ cycler.__init__.__globals__.os.system('touch {marker}') }}}}"
    (models.folder / "sft" / "chat_template.jinja").write_text(text)
    refused(models, ["the chat template of tokenizer", "sft"], "debug", False, *PPO)
    assert not marker.exists()


def test_functions_that_a_manifest_names_are_not_loaded(models: Workplace, marker: Path) -> None:
    """Neither as the judge, nor as a reward, of a final/ of stage=sft or stage=rm."""
    code = models.folder / "evil.py"
    code.write_text(f"open({str(marker)!r}, 'w')\ndef f(*a, **k): return 1")
    for folder in ("sft", "rm"):
        file = models.folder / folder / "manifest.json"
        manifest = json.loads(file.read_text())
        manifest["config"]["data"]["judge"] = f"{code}:f"
        manifest["config"]["reward"] = {"kind": "function", "path": f"{code}:f", "weight": 1.0}
        file.write_text(json.dumps(manifest))
    outcome = run(models, "ppo.iterations", 1, *PPO)
    assert outcome.succeeded
    assert not marker.exists()


@pytest.fixture(scope="module")
def from_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """outputs/ with a run of PPO, from the base model, that can be exported and shown."""
    place = make_workplace(tmp_path_factory.mktemp("untrusted") / "work")
    base = ("stage=ppo", "run=recorded", "reward=random", "policy.checkpoint=base")
    place.mini(*base, "record=true", "ppo.iterations=1").succeeded  # noqa: B018
    return place.outputs


@pytest.fixture
def recorded(models: Workplace, from_base: Path) -> Path:
    """The folder of a copy of that run."""
    shutil.copytree(from_base, models.outputs, symlinks=True)
    return models.stage("ppo", "recorded")


def test_a_run_that_is_exported(
    models: Workplace, recorded: Path, planted: Path, marker: Path
) -> None:
    """Its own configuration trusts the model that it names: only the command line may."""
    file = recorded / "config.json"
    tree = json.loads(file.read_text())
    tree["model"] |= {"from_config": None, "name_or_path": str(planted), "trust_remote_code": True}
    file.write_text(json.dumps(tree))
    models.call("replay", str(recorded)).succeeded  # noqa: B018
    error = models.call("export", str(recorded), "--step", "1").error
    assert f"{recorded / 'config.json'} asks for code that a model brings" in error
    assert "model.trust_remote_code is True" in error
    assert "--trust-remote-code" in error
    for value in ({}, {"a": True}):
        with pytest.raises(ConfigError, match=r"model\.trust_remote_code is \{"):
            refuse_code({"model": {"trust_remote_code": value}}, file)
    assert not marker.exists()
    models.call("export", str(recorded), "--step", "1", "--trust-remote-code")
    assert marker.exists()


EVIL = {"_target_": "evil.T"}
PARTS = ("callbacks", "plugins", "profiler", "strategy")
TERM = {"weight": 1.0, "normalization": "none", "clip": None}
FUNCTION = {"kind": "function", "path": "evil.py:f", "arguments": {}, **TERM}
SERVER = {
    "kind": "http", "url": "http://127.0.0.1:1/x", "batch_size": 1, "timeout_s": 1.0,
    "retries": 0, "backoff_s": 1.0, "cache_size": 1, "token_env": None, **TERM,
}  # fmt: skip
NAMED: list[tuple[dict[str, Any], str]] = [
    ({"stage": "mine", "mine": {"definition": "evil.py:S"}}, "mine.definition"),
    (
        {
            "trainer": {**dict.fromkeys(PARTS, EVIL), **EVIL},
            "callbacks": {"mine": EVIL},
            "logger": {**EVIL, "kind": "wandb"},
            "data": {"judge": "evil.py:f"},
            "reward": {"kind": "sum", "components": {"random": FUNCTION, "server": SERVER}},
        },
        "",
    ),
]
"""Sections of a run's configuration that name code or addresses, and the key of the line about it;
empty where the commands do without what is named."""


@pytest.mark.parametrize(("sections", "key"), NAMED)
def test_what_a_run_names_is_not_imported_or_connected_to(
    models: Workplace, recorded: Path, marker: Path, monkeypatch: pytest.MonkeyPatch,
    sections: dict[str, Any], key: str,
) -> None:  # fmt: skip
    """By any command that reads the folder of a run, and stands where the code lies."""
    place, final = models, str(recorded / "final")
    (place.folder / "evil.py").write_text(f"open({str(marker)!r}, 'w')")
    monkeypatch.syspath_prepend(place.folder)
    monkeypatch.setattr(Client, "ask", lambda *args, **kwargs: marker.touch())
    for file in (recorded / "config.json", recorded / "final" / "manifest.json"):
        whole = json.loads(file.read_text())
        tree = whole.get("config", whole)
        for name, values in sections.items():
            is_part = isinstance(values, dict) and name != "reward"
            tree[name] = {**tree.get(name, {}), **values} if is_part else values
        file.write_text(json.dumps(whole))
    found = place.call("export", "--step", "1", str(recorded))
    assert found.status == bool(key)
    if key:
        assert re.search(f"{key} is 'evil.*--code FILE.py:S", found.error)
    other = place.stage("ppo", "other")
    shutil.copytree(recorded, other, symlinks=True)
    for command, refusal in (
        (("report", str(recorded)), ""), (("replay", str(recorded)), ""),
        (("compare", str(recorded), str(other), "--out", str(place.folder / "page")), ""),
        (("diminishing", str(recorded)), "has 1 iteration of stage=ppo"), (("chat", final), ""),
        (("export", final, "--merge"), ""),
        (("serve-reward", final), "was written by stage=ppo; allowed: the final/ folder of a sta"),
    ):  # fmt: skip
        with patch("sys.stdin", io.StringIO("/quit\n")):
            outcome = place.call(*command)
        assert refusal in outcome.error if refusal else outcome.succeeded, command
    policies = f"eval_policy.policies=[{recorded / 'checkpoints' / '000001.ckpt'},{final}]"
    base = ("run=recorded", "policy.checkpoint=base", "reward=random")
    place.mini("stage=eval_policy", *base, policies).succeeded  # noqa: B018
    assert not marker.exists()


def test_code_that_the_command_line_gives_stands_in_for_what_a_run_names(
    models: Workplace, recorded: Path, marker: Path
) -> None:
    own = models.folder / "own.py"
    source = "from lightning_rlhf.rollout.native import NativeSampler as S\n"
    own.write_text(f"{source}open({str(marker)!r}, 'w')\n")
    tree = json.loads((recorded / "config.json").read_text())
    tree["ppo"]["rollout"] = "evil.py:S"
    (recorded / "config.json").write_text(json.dumps(tree))
    models.call("export", str(recorded), "--step", "1", "--code", "own.py:S").succeeded  # noqa: B018
    assert marker.exists()


UNSAFE = re.compile(
    r"(?<![.\w])(?:eval|exec|compile|__import__)\(|\b(?:pickle|marshal)\.loads?\(|\.exec_module\("
    r"|\b(?:yaml|np|joblib)\.(?:unsafe_)?load\(|torch\.load\((?![^)]*weights_only=True)"
    r"|\bos\.system\(|\btrust_remote_code=True|\bweights_only=False"
)


def test_the_sources_read_nothing_that_could_run() -> None:
    """But a file that the user names on the command line, and the code that a verifier tries."""
    found = {(file.name, text) for file in SOURCE.rglob("*.py")
             for text in UNSAFE.findall(file.read_text())}  # fmt: skip
    program = {("programs.py", "exec("), ("programs.py", "compile(")}
    assert found == {("user_code.py", ".exec_module("), *program}
    planted = ("eval(", "torch.load(path)", "pickle.loads(", "yaml.load(", "weights_only=False")
    assert all(UNSAFE.search(f"x = {text}") for text in planted)
