"""Valid files, overrides and folders with one random change."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq

import mutations as m

STAGES = ("sft", "rm", "ppo", "dpo", "rank")
TRAINED = ("sft", "rm", "ppo", "dpo")
"""Stages with checkpoints."""
FINAL = "outputs/default/tiny/{stage}/final"
MINI = [
    "model=tiny", "model.from_config.hidden_size=32", "model.from_config.intermediate_size=64",
    "model.from_config.num_hidden_layers=1", "model.from_config.num_attention_heads=2",
    "model.from_config.num_key_value_heads=2", "model.from_config.head_dim=16", "data=files",
    "data.demonstrations.train=data/sft.jsonl", "data.preferences.train=data/rm.jsonl",
    "data.prompts.train=data/ppo.jsonl", "data.max_prompt_tokens=64",
]  # fmt: skip
SMALL = {
    "sft": ["sft.epochs=0.5", "sft.batch_size=4", "sft.microbatch_size=4", "sft.val_every=2",
            "sft.checkpoint_every=1", "sft.checkpoints_kept=9"],
    "rm": ["rm.finetune=lora", "rm.epochs=0.5", "rm.batch_size=4", "rm.microbatch_size=4",
           "rm.val_every=2", "rm.checkpoint_every=1", "rm.checkpoints_kept=9",
           "rm.calibration_samples=4"],
    "ppo": ["ppo.iterations=3", "ppo.rollout_batch_size=8", "ppo.minibatch_size=4",
            "ppo.microbatch_size=4", "ppo.max_response_tokens=8", "ppo.val_every=2",
            "ppo.val_samples_per_prompt=1", "ppo.samples_every=1", "ppo.checkpoint_every=1",
            "ppo.checkpoints_kept=9"],
    "dpo": ["dpo.epochs=0.5", "dpo.batch_size=4", "dpo.microbatch_size=4", "dpo.val_every=2",
            "dpo.checkpoint_every=1", "dpo.checkpoints_kept=9"],
    "rank": ["rank.samples_per_prompt=2", "rank.max_prompts=4", "rank.max_response_tokens=8",
             "rank.batch_size=8", "rank.stop_strings=[a,e,i,o]"],
}  # fmt: skip
"""Stage -> overrides of a run that takes seconds."""
KEY = {"sft": "demonstrations", "rm": "preferences", "ppo": "prompts", "dpo": "preferences",
       "rank": "prompts"}  # fmt: skip
FILE = {"sft": "sft", "rm": "rm", "ppo": "ppo", "dpo": "rm", "rank": "ppo"}
"""Stage -> name of the file in data/ that it reads."""
Stop = Literal["model", "step", "end"]
"""Point at which a command that accepts its input is ended: before it loads a model, after one
step, at its own end."""


@dataclass(frozen=True)
class Case:
    """One malformed input and the command that is run on it."""

    prepare: Callable[[Path], tuple[str, Sequence[str]]]
    """Function that damages the command's working directory; returns a description of the damage
    and the command's arguments."""
    template: Sequence[str]
    """Paths in the prepared workspace that are copied into the working directory."""
    stop: Stop
    """Point at which the command is ended if it accepts its input."""


@dataclass(frozen=True)
class Kind:
    """One kind of malformed input."""

    name: str
    """Name of the kind."""
    draw: Callable[[random.Random], Case]
    """Function that draws a random case."""
    share: float
    """Share of all inputs that are of this kind."""


def stage(name: str) -> list[str]:
    """Return the arguments of a stage that starts from models in its working directory."""
    parents = ["policy.checkpoint=base"] if name in ("rm", "dpo") else []
    if name in ("ppo", "rank"):
        parents = ["policy.checkpoint=base", "reward=random"]
    return [f"stage={name}", *MINI, *SMALL[name], *parents]


def rows_kind() -> Kind:
    """Return the kind of malformed rows and data files."""

    def of_file(name: str, file_name: str, damage: m.Damage, *words: str) -> Case:
        def prepare(folder: Path) -> tuple[str, Sequence[str]]:
            file = folder / "data" / file_name
            file.write_bytes((folder / "data" / f"{FILE[name]}.jsonl").read_bytes())
            what = damage(file)
            source = f"data.{KEY[name]}.train=data/{file_name}"
            return f"{file_name} of {name}: {what}", [*stage(name), source, *words]

        return Case(prepare, ["data"], "model")

    def draw(dice: random.Random) -> Case:
        name = dice.choice(STAGES)
        skip = f"data.on_bad_row={dice.choice(['stop', 'skip'])}"

        def damaged(file: Path) -> str:
            rows = [json.loads(line) for line in file.read_bytes().splitlines()]
            match file.name:
                case "x.jsonl" if dice.random() < 0.6:
                    at = dice.randrange(len(rows))
                    rows[at], what = m.mutated(rows[at], dice)
                    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
                    return f"line {at + 1}: {what}"
                case "x.jsonl.gz":
                    data, what = m.compressed(file.read_bytes(), dice)
                    file.write_bytes(data)
                    return what
                case "x.parquet":
                    pq.write_table(pa.Table.from_pylist(rows), file)
                    return (m.any_column if dice.random() < 0.6 else m.any_bytes)(dice)(file)
            return m.any_lines(dice)(file)

        file_name = dice.choice(["x.jsonl", "x.jsonl", "x.jsonl.gz", "x.parquet"])
        return of_file(name, file_name, damaged, skip)

    return Kind("rows and files of data", draw, 0.3)


WORDS = [
    "null", "true", "0", "-1", "1e9", "1000000000", "1e-300", "1e300", "nan", "inf", "0.5", "x",
    "''", "'x y'", "[]", "[1]", "[a,b]", "{}", "{a: 1}", "'['", "'../x'", "${seed}", "${x}",
    "'\x00'", "'\u2028'", "'\x1b[31m'", f"'{'a' * 3000}'", f"{10**40}", "'(a+)+$'", "1,2",
]  # fmt: skip
"""Values of overrides."""


def overrides_kind(world: Path) -> Kind:
    """Return the kind of malformed overrides of the command line."""
    keys = {name: keys_of(world / "outputs/default/tiny" / name / "config.json") for name in STAGES}

    def of_words(name: str, *words: str) -> Case:
        def prepare(folder: Path) -> tuple[str, Sequence[str]]:
            return f"{name}: {', '.join(map(ascii, words))[:200]}", [*stage(name), *words]

        return Case(prepare, ["data"], "step")

    def draw(dice: random.Random) -> Case:
        name = dice.choice(STAGES)
        count = dice.choice([1, 1, 1, 2])
        words = [f"{dice.choice(keys[name])}={dice.choice(WORDS)}" for _ in range(count)]
        if dice.random() < 0.2:
            at = dice.randrange(len(words[0]) + 1)
            sign = dice.choice("=,'\"[]{}()$\\~+@.:;#\t\n é\u2028\x1b\ud800")
            words[0] = words[0][:at] + sign + words[0][at:]
        return of_words(name, *words)

    return Kind("overrides", draw, 0.3)


def keys_of(config: Path) -> list[str]:
    """Return the keys of all values of a run's configuration, except those of output folders."""
    tree = json.loads(config.read_text())
    names = [".".join(map(str, path)) for path in m.nodes(tree) if path]
    return [name for name in names if name not in ("outputs", "stage")]


def resumed_kind(share: float) -> Kind:
    """Return the kind of damaged run folders that are resumed."""

    def draw(dice: random.Random) -> Case:
        name = dice.choice(TRAINED)
        of_ppo = ["samples/train.jsonl"]
        files = ["config.json", "parents.json", "metrics.csv", "checkpoints/000002.ckpt",
                 "checkpoints/000001.ckpt"]  # fmt: skip
        file = dice.choice(files + of_ppo * (name == "ppo"))
        match file.rpartition(".")[2]:
            case "json":
                damage = (m.any_json if dice.random() < 0.8 else m.any_bytes)(dice)
            case "ckpt":
                damage = (m.any_checkpoint if dice.random() < 0.7 else m.any_bytes)(dice)
            case _:
                damage = m.any_lines(dice)

        def prepare(folder: Path) -> tuple[str, Sequence[str]]:
            run = folder / "outputs/default/tiny" / name
            interrupt(run)
            words = [f"stage={name}", *MINI, *SMALL[name], "resume=true"]
            return f"{name}/{file} {damage(run / file)}", words

        return Case(prepare, ["data", "outputs"], "end")

    return Kind("run folders, resumed", draw, share)


def interrupt(run: Path) -> None:
    """Make a finished run look like one that was killed after its second step."""
    for path in sorted((run / "final").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    (run / "final").rmdir()
    for path in (run / "checkpoints").glob("*.ckpt"):
        if path.stem.isdigit() and int(path.stem) > 2:
            path.unlink()


FINALS = [
    *(("sft", name) for name in (
        "model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json",
        "generation_config.json", "chat_template.jinja", "roles/fingerprint.safetensors",
        "manifest.json",
    )),
    *(("rm", name) for name in (
        "manifest.json", "roles/adapter_config.json", "roles/adapter_model.safetensors",
        "roles/reward_head.safetensors",
    )),
]  # fmt: skip
"""Stage and file of the `final/` folders that are damaged."""


def finals_kind(share: float) -> Kind:
    """Return the kind of damaged `final/` folders that stage=ppo starts from."""
    ways = {"json": [m.any_json, m.any_json, m.any_bytes], "jinja": [m.any_bytes],
            "safetensors": [m.any_safetensors_header, m.any_tensor, m.any_bytes]}  # fmt: skip

    def draw(dice: random.Random) -> Case:
        name, file = dice.choice(FINALS)
        damage = dice.choice(ways[file.rpartition(".")[2]])(dice)

        def prepare(folder: Path) -> tuple[str, Sequence[str]]:
            sft, rm = (FINAL.format(stage=stage) for stage in ("sft", "rm"))
            parents = [f"policy.checkpoint={sft}", f"reward.checkpoint={rm}"]
            words = ["stage=ppo", "run=next", *MINI, *SMALL["ppo"], *parents]
            return f"{name}/final/{file} {damage(folder / FINAL.format(stage=name) / file)}", words

        return Case(prepare, ["data", "outputs"], "step")

    return Kind("checkpoints", draw, share)


def kinds(world: Path) -> list[Kind]:
    """Return all kinds of malformed files, arguments and folders."""
    return [rows_kind(), overrides_kind(world), resumed_kind(0.1), finals_kind(0.2)]
