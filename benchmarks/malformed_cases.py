"""Malformed files, overrides and folders: handwritten tables, and random changes."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

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
FIELDS = {
    "sft": {"prompt": "a question", "response": "an answer"},
    "rm": {"prompt": "a question", "chosen": "an answer", "rejected": "another"},
    "ppo": {"prompt": "a question"},
    "dpo": {"prompt": "a question", "chosen": "an answer", "rejected": "another"},
    "rank": {"prompt": "a question"},
}
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
    table: Sequence[Case]
    """Handwritten cases."""
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

    def row(name: str, line: dict[str, Any], what: str) -> Case:
        good = json.dumps(FIELDS[name]) + "\n" + json.dumps(FIELDS[name] | {"prompt": "b"}) + "\n"
        return of_file(name, "x.jsonl", m.says((good + json.dumps(line) + "\n").encode(), what))

    table = [
        row(name, fields | {field: value}, f"{field} = {m.shown(value)}")
        for name, fields in FIELDS.items()
        for field in fields
        for value in m.VALUES
    ]
    good = {"role": "user", "content": "a question"}
    turns: list[Any] = [
        [good], [good, good], [{"role": "assistant", "content": "x"}], [[good]], ["x"], [None],
        [{}], [good, {"role": "assistant", "content": [{"type": "text", "text": "x"}]}],
        [good, {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}],
        [good, {"role": "tool", "content": "x"}, {"role": "assistant", "content": "x"}],
        [good, {"role": "assistant", "content": "x", "name": 5}], [{"from": "human", "value": "x"}],
    ]  # fmt: skip
    table += [row("sft", {"messages": t}, f"messages = {m.shown(t)}") for t in turns]
    table += [
        row("rm", {"chosen": t, "rejected": [good, {"role": "assistant", "content": "y"}]},
            f"chosen = {m.shown(t)}") for t in turns
    ]  # fmt: skip
    table += [of_file("sft", f"x{end}", d) for end in (".jsonl", ".jsonl.gz", ".parquet", ".csv")
              for d in m.PLACES]  # fmt: skip
    text = (json.dumps(FIELDS["sft"]) + "\n").encode() * 3
    forms = {
        "UTF-16": text.decode().encode("utf-16"), "UTF-16 without a mark": text[1:] + b"\0",
        "UTF-32": text.decode().encode("utf-32"), "a mark on each line": b"\xef\xbb\xbf" * 3 + text,
        "one line": b"[" + b",".join(text.splitlines()) + b"]",
        "CR alone": text.replace(b"\n", b"\r"),
        "40 MB on one line": b'{"prompt": "' + b"a" * 40_000_000, "latin-1": b'{"prompt": "\xe9"}',
        "40 MB of zeros": b"\0" * 40_000_000, "10^6 braces": b"{" * 10**6,
        "nested objects": b'{"prompt": ' * 50_000,
        "10^5 fields": json.dumps(FIELDS["sft"] | {str(i): i for i in range(10**5)}).encode(),
    }  # fmt: skip
    table += [of_file("sft", "x.jsonl", m.says(data, what)) for what, data in forms.items()]
    bomb = gzip.compress(b"\0" * 200_000_000, 1)
    zipped = gzip.compress(text)
    archives = {
        "a bomb": bomb,
        "two members, one cut": zipped * 2 + b"\x1f\x8b",
        "rubbish after it": zipped + b"rubbish",
    }
    for what, data in archives.items():
        table.append(of_file("sft", "x.jsonl.gz", m.says(data, what)))
    table += [of_file("sft", "x.parquet", d) for d in parquet_damages()]

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

    return Kind("rows and files of data", table, draw, 0.2)


def parquet_damages() -> list[m.Damage]:
    """Return Damage functions that write Parquet tables that are not, or barely, demonstrations."""
    text = pa.array(["a", "b", "c"])
    offsets, raw = pa.py_buffer(bytes([0, 0, 0, 0, 1, 0, 0, 0])), pa.py_buffer(b"\xff")
    no_utf8 = pa.Array.from_buffers(pa.string(), 1, [None, offsets, raw])
    far = pa.array([2**62] * 3, pa.timestamp("ms"))
    one = pa.array(["a"])
    tables = {
        "an unread column is no UTF-8": {"prompt": one, "response": one, "x": no_utf8},
        "a read column is no UTF-8": {"prompt": one, "response": no_utf8},
        "an unread date is out of range": {"prompt": text, "response": text, "x": far},
        "a read date is out of range": {"prompt": far, "response": text}, "no column": {},
        "no row": {"prompt": text[:0], "response": text[:0]},
        "a dictionary": {"prompt": text.dictionary_encode(), "response": text},
        "decimals": {"prompt": pa.array([1, 2, 3], pa.decimal128(20, 3)), "response": text},
        "large text": {"prompt": text.cast(pa.large_string()), "response": text},
        "text as bytes": {"prompt": text.cast(pa.binary()), "response": text},
        "a map": {"messages": pa.array([[("role", "x")]] * 3, pa.map_(pa.string(), pa.string()))},
        "objects": {"prompt": pa.array([{"a": {"b": [1]}}] * 3), "response": text},
        "durations": {"prompt": pa.array([2**62] * 3, pa.duration("s")), "response": text},
        "times": {"prompt": pa.array([1] * 3, pa.time64("ns")), "response": text},
        "nanoseconds": {"prompt": pa.array([1] * 3, pa.timestamp("ns")), "response": text},
    }  # fmt: skip

    def damage(what: str, columns: dict[str, Any]) -> m.Damage:
        def write(file: Path) -> str:
            pq.write_table(pa.table(columns), file, compression="none")
            return what

        return write

    return [damage(what, columns) for what, columns in tables.items()]


SPELLINGS = [
    "", "=", "==", "a", "a=", "=a", "stage", "stage=", "stage=x", "stage=[sft]", "stage={a: 1}",
    "stage=null", "stage='a'b", "~stage", "+stage=sft", "++stage=sft", "stage@x=sft",
    "stage=sft,rm", "stage=../stage/sft", "stage=/etc/passwd", "stage=sft/../sft", "model=",
    "model=x", "model=a/b", "model=[tiny]", "model=tiny,hub", "~model", "model=../../x", "data=x",
    "data@y=hh", "reward=x", "reward=[head,random]", "~reward", "logger=x", "logger=[csv,csv]",
    "trainer=x", "advantage=x", "recipe=x", "recipe=../x", "recipe=[a]", "run=", "run=a/b",
    "run=..", "run='a b'", "run=[1]", "run={a: 1}", "run=null", "run=true", "run=1e3", "run=\u009b",
    "run=\u2028", "run=\ud800", "run=\x1b[31m", "run=\u202eabc", 'run="a\'b"', "run='$(id)'",
    "run=~", "job=a/b", "job=..", "job=\"a'b\"", "job=\u2028", "job={}", "job=''", "seed=x",
    "seed=-1", "seed=1e3", "seed=2**3", f"seed={10**30}", "seed=null", "seed=[1]", "seed=true",
    "seed=0x10", "seed=1_0", "seed='1'", "outputs=''", "outputs=null", "outputs=/proc",
    "outputs=/dev/null", "outputs=data/sft.jsonl", "outputs=[a]", "resume=x", "resume=-1",
    "resume=true", "resume=best", "resume=000002", "resume=[1]", "overwrite=x", "overwrite=1",
    "record=x", "debug=x", "hydra=x", "hydra.x=1", "hydra.run.dir=/proc/x", "hydra.job.chdir=x",
    "hydra/launcher=x", "hydra.searchpath=[x]", "hydra.searchpath=x", "hydra.mode=x", "sft.x=1",
    "sft=x", "sft=null", "~sft", "~sft.lr", "x.y=1", "+x=1", "++x.y=1", "~x", "~~x", "+~x=1",
    "sft.lr=${x}", "sft.lr=${oc.env:X}", "sft.lr=${sft.lr}", "sft.lr=${sft.epochs}",
    "sft.lr=${recipes:x}", "sft.lr=???", "sft.lr=", "sft.lr=nan", "sft.lr=inf", "sft.lr=-0.0",
    "sft.lr=1e400", "sft.lr=1,2", "sft.lr=range(1,3)", "sft.lr=choice(1)", "sft.lr=(", "sft.lr=[",
    "sft.lr={", "sft.lr='", 'sft.lr="', "sft.lr=\\", "sft.lr=#", "sft.lr=%", "sft.lr=\t1",
    "sft.lr= 1", "sft.lr=1 ", "sft .lr=1", "sft..lr=1", ".sft=1", "sft.=1", "sft.lr.x=1", "[a]=1",
    "é=1", "sft.lr=é", "sft.lr=\U0001f600", "sft.lr=١", "sft.lr=１", "a" * 5000, "a" * 5000 + "=1",
    "run=" + "a" * 5000, "run=" + "a" * 300, "a=" * 500, "{" * 500, "sft.lr=" + "[" * 500,
    "model.from_config={}", "model.from_config=null", "model.from_config.model_type=x",
    "model.from_config.num_hidden_layers=0", "model.from_config.hidden_size=0",
    "model.from_config.hidden_size=33", "model.from_config.num_attention_heads=3",
    "model.from_config.vocab_size=1", "model.from_config.rope_theta=0", "model.lora.r=1e9",
    "model.lora.r=1000000000", "model.lora.target_modules='['",
    "model.lora.target_modules='(a+)+$'", "model.lora.target_modules=[]",
    "model.lora.target_modules=x", "model.tokenizer=x", "model.tokenizer=data",
    "model.name_or_path=data", "model.name_or_path=x/y", "model.name=a/b", "model.name=..",
    "model.dtype=x", "model.quantization=int4", "sft.epochs=1e-300", "sft.epochs=1e300",
    "sft.batch_size=1e9", "sft.batch_size=1000000000", "data.val_fraction=1e-300",
    "data.max_val_rows=0", "data.max_prompt_tokens=1", "data.max_response_tokens=1",
    "data.chat_template_kwargs=x", "+data.chat_template_kwargs.messages=x", "data.judge=x",
    "data.judge=x.py:f", "data.pool_batches=1000000000000", "trainer.accelerator=gpu",
    "trainer.devices=0", "trainer.num_nodes=2", "trainer.precision=x", "trainer.threads=-1",
    "trainer.threads=100000",
]  # fmt: skip
"""Command line arguments that are invalid, or only barely valid."""
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

    return Kind("overrides", [of_words("sft", word) for word in SPELLINGS], draw, 0.2)


def keys_of(config: Path) -> list[str]:
    """Return the keys of all values of a run's configuration, except those of output folders."""
    tree = json.loads(config.read_text())
    names = [".".join(map(str, path)) for path in m.nodes(tree) if path]
    return [name for name in names if name not in ("outputs", "stage")]


def folders_kind() -> Kind:
    """Return the kind of damaged run folders that are resumed."""

    def of_file(name: str, file: str, damage: m.Damage) -> Case:
        def prepare(folder: Path) -> tuple[str, Sequence[str]]:
            run = folder / "outputs/default/tiny" / name
            interrupt(run)
            started = [f"stage={name}", *MINI, *SMALL[name], "record=true"]
            words = [*started[: len(started) - (name != "ppo")], "resume=true"]
            return f"{name}/{file} {damage(run / file)}", words

        return Case(prepare, ["data", "outputs"], "end")

    files = ["config.json", "parents.json", "metrics.csv", "checkpoints/000002.ckpt",
             "checkpoints/000001.ckpt", "run_id.txt"]  # fmt: skip
    of_ppo = ["samples/train.jsonl", "rollouts/000002.parquet", "rollouts/000001.parquet"]
    table = [of_file(n, f, d) for n in TRAINED for f in files for d in m.PLACES]
    table += [of_file("ppo", f, d) for f in of_ppo for d in m.PLACES]

    def draw(dice: random.Random) -> Case:
        name = dice.choice(TRAINED)
        file = dice.choice(files[:5] + of_ppo * (name == "ppo"))
        match file.rpartition(".")[2]:
            case "json":
                damage = (m.any_json if dice.random() < 0.8 else m.any_bytes)(dice)
            case "ckpt":
                damage = (m.any_checkpoint if dice.random() < 0.7 else m.any_bytes)(dice)
            case "parquet":
                damage = (m.any_column if dice.random() < 0.7 else m.any_bytes)(dice)
            case _:
                damage = m.any_lines(dice)
        return of_file(name, file, damage)

    return Kind("run folders, resumed", table, draw, 0.18)


def interrupt(run: Path) -> None:
    """Make a finished run look like one that was killed after its second step."""
    for path in sorted((run / "final").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    (run / "final").rmdir()
    for path in (run / "checkpoints").glob("*.ckpt"):
        if path.stem.isdigit() and int(path.stem) > 2:
            path.unlink()


def finals_kind(files: Sequence[tuple[str, str]], title: str, share: float, draws: Any) -> Kind:
    """Return the kind of damaged `final/` folders that stage=ppo starts from.

    files: (stage, file name) pairs.
    """

    def of_file(name: str, file: str, damage: m.Damage) -> Case:
        def prepare(folder: Path) -> tuple[str, Sequence[str]]:
            path = folder / FINAL.format(stage=name) / file
            words = ["stage=ppo", "run=next", *MINI, *SMALL["ppo"]]
            parents = [
                f"policy.checkpoint={FINAL.format(stage='sft')}",
                f"reward.checkpoint={FINAL.format(stage='rm')}",
            ]
            return f"{name}/final/{file} {damage(path)}", [*words, *parents]

        return Case(prepare, ["data", "outputs"], "step")

    table = [of_file(name, file, damage) for name, file in files for damage in m.PLACES]

    def draw(dice: random.Random) -> Case:
        name, file = dice.choice(files)
        return of_file(name, file, dice.choice(draws[file.rpartition(".")[2]])(dice))

    return Kind(title, table, draw, share)


PROJECTS = [
    "",
    " ",
    "/",
    "a",
    "a/",
    "/b",
    "a/b/c",
    "a b/c",
    "../..",
    "\u202e/x",
    "é/\U0001f600",
    "a/b",
]
"""Names of W&B projects; the last is a right one."""
FINALS = {
    "chat": ("sft", ["chat", "{final}"]),
    "push": ("ppo", ["push", "{final}", "org/name", "--dry-run"]),
    "export": ("ppo", ["export", "{final}", "--merge", "--out", "merged"]),
    "export of dpo": ("dpo", ["export", "{final}", "--merge", "--out", "merged"]),
}
"""Command -> the stage whose final/ it is given, and its words."""
RUNS = {
    "diminishing": ["diminishing", "{run}"],
    "report": ["report", "{run}"],
    "compare": ["compare", "{run}", "outputs/default/tiny/dpo", "--stage", "ppo"],
}
"""Command -> its words with the folder of a run of PPO."""


def commands_kind() -> Kind:
    """Return the kind of damaged folders that commands without a configuration are given."""

    def of_final(command: str, file: str, damage: m.Damage) -> Case:
        def prepare(folder: Path) -> tuple[str, Sequence[str]]:
            stage, words = FINALS[command]
            final = FINAL.format(stage=stage)
            what = damage(folder / final / file)
            return f"{command}: {stage}/final/{file} {what}", [w.format(final=final) for w in words]

        return Case(prepare, ["data", "outputs"], "end")

    def of_run(command: str, file: str, damage: m.Damage) -> Case:
        def prepare(folder: Path) -> tuple[str, Sequence[str]]:
            run = "outputs/default/tiny/ppo"
            if command == "diminishing":  # which takes no run of fewer iterations
                rows = "".join(f"{i},{i / (i + 3)},{i / 9}\n" for i in range(1, 21))
                metrics = folder / run / "metrics.csv"
                metrics.write_text(f"step,reward_mean,kl_divergence\n{rows}")
            what = damage(folder / run / file)
            return f"{command}: ppo/{file} {what}", [w.format(run=run) for w in RUNS[command]]

        return Case(prepare, ["data", "outputs"], "end")

    def of_project(name: str) -> Case:
        words = ["dashboard", name, "--dry-run"]
        return Case(lambda _: (f"dashboard {name!a}", words), [], "end")

    finals = [(c, f) for c in FINALS for f in ("manifest.json", "tokenizer.json")]
    finals += [(c, "config.json" if c == "chat" else "adapter_config.json") for c in FINALS]
    runs = [(c, f) for c in RUNS for f in ("config.json", "metrics.csv", "samples/train.jsonl")]
    table = [of_project(name) for name in PROJECTS]
    table += [of_final(c, f, d) for c, f in finals for d in m.PLACES]
    table += [of_run(c, f, d) for c, f in runs for d in m.PLACES]

    def draw(dice: random.Random) -> Case:
        of_file, (command, file) = dice.choice(
            [*((of_final, one) for one in finals), *((of_run, one) for one in runs)]
        )
        is_json = file.endswith(".json")
        return of_file(command, file, (m.any_json if is_json else m.any_lines)(dice))

    return Kind("commands on folders", table, draw, 0.08)


def kinds(world: Path) -> list[Kind]:
    """Return all kinds of malformed files, arguments and folders."""
    weights = [m.any_safetensors_header, m.any_tensor, m.any_bytes]
    ways = {"json": [m.any_json, m.any_json, m.any_bytes], "safetensors": weights,
            "jinja": [m.any_bytes]}  # fmt: skip
    models = [("sft", "model.safetensors"), ("sft", "config.json"), ("sft", "tokenizer.json"),
              ("sft", "tokenizer_config.json"), ("sft", "generation_config.json"),
              ("sft", "chat_template.jinja"), ("sft", "roles/fingerprint.safetensors")]  # fmt: skip
    manifests = [("sft", "manifest.json"), ("rm", "manifest.json")]
    adapters = [("rm", "roles/adapter_config.json"), ("rm", "roles/adapter_model.safetensors"),
                ("rm", "roles/reward_head.safetensors")]  # fmt: skip
    return [
        rows_kind(),
        overrides_kind(world),
        folders_kind(),
        commands_kind(),
        finals_kind(models, "checkpoints: weights, configurations, tokenizers", 0.08, ways),
        finals_kind(manifests, "manifests", 0.05, ways),
        finals_kind(adapters, "adapters and heads", 0.07, ways),
    ]
