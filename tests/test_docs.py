"""The files, functions, keys and commands that the documentation names exist."""

import argparse
import inspect
import os
import re
import runpy
import shlex
import threading
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from lightning_rlhf import verifiers
from lightning_rlhf.cli.arguments import COMMANDS as OTHER_COMMANDS
from lightning_rlhf.cli.arguments import WITHOUT_RUN
from lightning_rlhf.cli.main import register_resolvers
from lightning_rlhf.cli.recipe import read_recipe, step_overrides
from lightning_rlhf.core.config import Normalization
from lightning_rlhf.core.metrics import METRICS
from lightning_rlhf.core.ppo_config import PPOConfig
from lightning_rlhf.data.formats import FORMATS
from lightning_rlhf.data.rollouts import TYPES
from lightning_rlhf.report.fitness_page import CHECKS, MIN_COUNT, MIN_PROBES, PAIR_CHECKS
from lightning_rlhf.rewards import functions
from lightning_rlhf.rewards.config import HTTPConfig
from lightning_rlhf.rewards.functions import FunctionReward
from lightning_rlhf.rewards.http import HTTPReward
from lightning_rlhf.runs.console import CONF, RECIPES
from lightning_rlhf.runs.settings import REWARDS as REWARD_KINDS
from lightning_rlhf.runs.settings import read_settings
from lightning_rlhf.runs.stage import STAGES, SUM

from .composing import compositions as compositions
from .composing import parsed_files as parsed_files

HOME = Path(__file__).parents[1]
INDEX = HOME / "docs" / "README.md"
PAGES = [
    *(HOME / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
    *sorted((HOME / "docs").glob("*.md")),
]
PPO = (HOME / "docs" / "ppo.md").read_text()
HINTS = get_type_hints(PPOConfig)
KEYS: dict[str, Any] = {field.name: HINTS[field.name] for field in fields(PPOConfig)}
NOT_THE_ALGORITHM = (
    "val_every", "val_samples_per_prompt", "samples_every", "kl_warning",
    "checkpoint_every", "checkpoint_minutes", "checkpoints_kept", "final", "best", "stop",
)  # fmt: skip
REWARDS = (HOME / "docs" / "rewards.md").read_text()
VERIFIERS = {
    row[1]: (row[2], row[3])
    for row in re.finditer(
        r"^\| `(\w+)` \|[^|]*\|([^|]*)\|[^|]*\| `([^|]*)` \|$",
        (HOME / "docs" / "verifiers.md").read_text(), re.MULTILINE,
    )
}  # fmt: skip
"""Preset of a verifier -> cell with its settings, and its command."""
DATA = (HOME / "docs" / "data.md").read_text()
REPLAY = (HOME / "docs" / "replay.md").read_text()
README = (HOME / "README.md").read_text()
QUICKSTART = (HOME / "docs" / "quickstart.md").read_text()

COMMANDS = dict.fromkeys(
    line.split("#")[0].strip()
    for page in PAGES
    for line in re.findall(
        rf"(?:python train\.py|^lightning-rlhf) (?!{'|'.join(OTHER_COMMANDS)}|-m)[^\n`…]+",
        page.read_text().replace("\\\n", ""),
        re.MULTILINE,
    )
)
FILES = [
    file
    for page in PAGES
    for file in re.findall(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", page.read_text(), re.DOTALL)
]
"""Paths and texts of the files that pages show, for the commands of the same pages."""


def links(page: Path) -> list[tuple[str, Path]]:
    """Return text and target of every relative link of a page."""
    found = re.findall(r"\[([^\]]*)\]\((?!\w+:)([^)#\s]+)[^)]*\)", page.read_text())
    return [(text, page.parent / target) for text, target in found]


def anchors(text: str) -> set[str]:
    """Return the anchors of the headings of Markdown, as GitHub writes them."""
    text = re.sub(r"^(```+).*?^\1", "", text, flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_page_is_linked_from_the_index() -> None:
    linked = {target.resolve() for _, target in links(INDEX)}
    pages = {page for page in PAGES if page.parent == INDEX.parent} - {INDEX}
    assert pages <= linked, pages - linked


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(HOME)))
def test_links_lead_to_files_headings_and_definitions(page: Path) -> None:
    for name, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)#([^)\s]+)\)", page.read_text()):
        target = page.parent / name if name else page
        assert anchor in anchors(target.read_text()), f"{name}#{anchor}"
    found = links(page)
    assert found
    for text, target in found:
        assert target.exists(), (text, target)
        name = re.fullmatch(r"`(\w+)`", text)
        if name is not None and target.suffix == ".py":
            defined = rf"^(def|class) {name[1]}\b"
            assert re.search(defined, target.read_text(), re.MULTILINE), (text, target)


def test_every_formula_names_its_function_and_its_test() -> None:
    sections = re.findall(r"^## \d+\. (.*?)\n(.*?)(?=^## )", PPO, re.MULTILINE | re.DOTALL)
    assert len(sections) == 13
    for title, text in sections:
        assert "../src/lightning_rlhf/" in text, title
        assert "../tests/" in text, title


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(HOME)))
def test_dotted_keys_of_the_stages_exist(page: Path) -> None:
    for stage, key in re.findall(
        r"(?<![\w./])(sft|rm|ppo|dpo|eval)\.([a-z]\w*)(?!\w*/)", page.read_text()
    ):
        if key not in ("py", "md", "yaml", "jsonl"):
            assert key in {f.name for f in fields(STAGES[stage][1])}, f"{stage}.{key}"


def test_choices_exist() -> None:
    found = re.findall(r"\b([a-z]\w*)=([\w+.]+)", PPO)
    checked = 0
    for key, value in found:
        if get_origin(KEYS.get(key)) is Literal and value != "NAME":
            assert value in get_args(KEYS[key]), f"{key}={value}"
            checked += 1
    assert checked > 10


def test_every_key_of_the_algorithm_and_every_choice_is_mentioned() -> None:
    for key, hint in KEYS.items():
        assert key in NOT_THE_ALGORITHM or re.search(rf"`(ppo\.)?{key}\b", PPO), key
        for choice in get_args(hint) if get_origin(hint) is Literal else ():
            assert re.search(rf"(?<![\w-]){re.escape(choice)}(?![\w+])", PPO), f"{key}={choice}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which a command is given, with the files that the pages show."""
    for path, text in FILES:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read_command(command: str) -> tuple[Path, str, list[str]]:
    """Return folder and name of the configuration that a command composes, and its overrides."""
    words = argparse.ArgumentParser()
    for option in ("--cfg", "--package", "--config-dir", "--config-name"):
        words.add_argument(option)
    start = 2 if command.startswith("python") else 1
    start += shlex.split(command)[start] in WITHOUT_RUN  # which compose what the run would
    options, overrides = words.parse_known_args(shlex.split(command)[start:])
    if options.config_dir is None:
        return CONF, "config", overrides
    own = Path(options.config_dir).absolute()
    assert own.is_dir(), "no page shows a file in it"
    if options.config_name is None:
        return CONF, "config", [*overrides, f"hydra.searchpath=[file://{own}]"]
    return own, options.config_name, [*overrides, f"hydra.searchpath=[file://{CONF}]"]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_accepted(command: str, folder: Path) -> None:
    """They compose, and the configuration that they give is one that a run would take."""
    register_resolvers()
    GlobalHydra.instance().clear()
    home, name, given = read_command(command)
    with initialize_config_dir(str(home), version_base="1.3"):
        cfg = compose(name, given)
        if cfg.recipe is not None:
            recipe = read_recipe(RECIPES / cfg.recipe)
            for stage in {*recipe.stages[:1], *recipe.stages[-1:]} or ("ppo",):
                own = step_overrides(recipe, stage, given, cfg.job)
                read_settings(compose(name, list(own)))
        else:
            read_settings(cfg)


# docs/build.py, mkdocs.yml


@pytest.fixture(scope="module")
def site() -> dict[str, str]:
    """Pages of the site by their places."""
    files = runpy.run_path(str(HOME / "docs" / "build.py"))["staged"]()
    return {name: content.decode() for name, content in files.items() if name.endswith(".md")}


def test_links_of_the_site_lead_to_its_pages_and_headings(site: dict[str, str]) -> None:
    for page, whole in site.items():
        text = re.sub(r"^(```+).*?^\1", "", whole, flags=re.MULTILINE | re.DOTALL)
        for name, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*\.md)?(?:#([^)\s]+))?\)", text):
            target = site[os.path.normpath(Path(page).parent / name) if name else page]
            line = re.fullmatch(r"__codelineno-0-(\d+)", anchor)
            if line is None:
                assert not anchor or anchor in anchors(target), (page, name, anchor)
            else:  # below front matter, title and fence
                assert re.match(r" *(def|class) ", target.splitlines()[int(line[1]) + 5])
    listed = re.findall(r"^ +- .*?(\S+\.md)$", (HOME / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(page for page in site if not page.startswith("source/"))


def test_the_reference_has_every_key_and_every_public_function(site: dict[str, str]) -> None:
    for path in CONF.rglob("*.yaml"):
        section = site["keys.md"].split(f"\n## {path.relative_to(CONF)}\n")[1].split("\n## ")[0]
        text = path.read_text().split("\nhydra:")[0]
        for key in re.findall(r"^ *(?!defaults)([a-z]\w*):", text, re.MULTILINE):
            assert f"{key}` |" in section, (path, key)
    for path in (HOME / "src" / "lightning_rlhf").rglob("*.py"):
        page = f"lightning_rlhf.{path.relative_to(HOME).parts[2].removesuffix('.py')}.md"
        for name in re.findall(r"^(?:def|class) ([a-zA-Z]\w*)", path.read_text(), re.MULTILINE):
            assert f"\n### {name}\n" in site[page], (path, name)


# docs/rewards.md


def example(name: str) -> str:
    """The block of Python under this mark."""
    found = re.search(rf"<!-- example: {name} -->\n```python\n(.*?)```", REWARDS, re.DOTALL)
    assert found is not None
    return found[1]


def test_every_reward_and_normalization_is_explained() -> None:
    presets = {path.stem for path in (CONF / "reward").glob("*.yaml")}
    assert presets - VERIFIERS.keys() == {*REWARD_KINDS, SUM, "composite"}
    assert VERIFIERS.keys() <= presets
    for name in (*presets - VERIFIERS.keys(), *get_args(Normalization)):
        assert re.search(rf"^\| `{name}` \|", REWARDS, re.MULTILINE), name


def test_every_verifier_is_listed_with_its_settings() -> None:
    for name, (row, command) in VERIFIERS.items():
        path = OmegaConf.load(CONF / "reward" / f"{name}.yaml").path
        function = getattr(verifiers, path.partition(":")[2])
        assert path == f"lightning_rlhf.verifiers:{function.__name__}"
        is_class = isinstance(function, type)
        taken = {*inspect.signature(function.__call__ if is_class else function).parameters}
        taken |= {f.name for f in fields(function)} if is_class else set()
        texts = {"self", "prompts", "responses", "messages"}
        assert set(re.findall(r"`(\w+)`", row)) == taken - texts, name
        assert f"reward={name}" in command


def test_every_shipped_function_is_listed_with_its_arguments() -> None:
    rows = {
        cells[1].strip(" `"): cells
        for line in REWARDS.splitlines()
        if len(cells := re.split(r"\|", line)) == 6
    }
    shipped = {
        name: function
        for name, function in inspect.getmembers(functions, inspect.isfunction)
        if function.__module__ == functions.__name__ and not name.startswith("_")
    }
    assert len(shipped) == 5
    for name, function in shipped.items():
        parameters = list(inspect.signature(function).parameters.values())[2:]
        arguments = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
        columns = {p.name for p in parameters if p.kind is not p.KEYWORD_ONLY}
        assert set(re.findall(r"`(\w+)`", rows[name][3])) == arguments, name
        assert set(re.findall(r"`(\w+)`", rows[name][4])) == columns, name


def test_keys_of_rewards_exist() -> None:
    known = {f.name for kind in REWARD_KINDS.values() for f in fields(kind)}
    found = re.findall(r"\breward\.(?!components\b|py\b)([a-z]\w*)", REWARDS)
    assert len(found) > 8
    assert set(found) <= known, set(found) - known


def decoded(*responses: str, **columns: list[Any]) -> Any:
    names = ("prompt", "messages", *columns)
    turns = [[{"role": "user", "content": "2 + 2?"}]] * len(responses)
    rows = zip(["2 + 2?"] * len(responses), turns, *columns.values(), strict=True)
    return SimpleNamespace(
        rows=[dict(zip(names, row, strict=True)) for row in rows], responses=responses
    )


def test_the_function_in_the_docs_is_one() -> None:
    names: dict[str, Any] = {}
    exec(example("function"), names)
    reward = FunctionReward(names["near"], {"cost": 0.1}, "reward").for_columns(["answer"])
    # One word, right; two words, wrong.
    found = reward(decoded("4", "is five", answer=[4, 4]))
    assert found == pytest.approx([1 - 0.1, -0.2])
    exec(example("steps"), names)
    found = names["right_lines"]([""] * 2, ["1 + 1 = 2\nso\nx = 2", ""])
    assert found == [[(10, 1.0), (13, -1.0), (18, 1.0)], []]


def test_the_server_in_the_docs_answers() -> None:
    code = example("server")
    assert len([line for line in code.splitlines() if line.strip()]) <= 12
    head, _, tail = code.rpartition("HTTPServer((")
    assert tail == '"127.0.0.1", 8000), Handler).serve_forever()\n'
    names: dict[str, Any] = {}
    exec(head, names)
    names["Handler"].log_message = lambda *args: None
    with names["HTTPServer"](("127.0.0.1", 0), names["Handler"]) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        config = HTTPConfig(
            kind="http", weight=1.0, normalization="none", clip=None, batch_size=2, timeout_s=10.0,
            retries=0, backoff_s=0.0, cache_size=0, token_env=None,
            url=f"http://127.0.0.1:{server.server_port}/score",
        )  # fmt: skip
        reward = HTTPReward(config, "reward", print)
        reward.check_server()
        assert reward(decoded("one", "one two", "")) == [-1, -2, 0]
        server.shutdown()


def test_thresholds_are_those_of_the_code() -> None:
    rows = [f"| {c.name} | {c.threshold:g} | {c.reason} |" for c in (*CHECKS, *PAIR_CHECKS)]
    table = ["| check | threshold | why this one |", "|---|---|---|", *rows]
    between = REWARDS.split("<!-- thresholds: begin -->")[1].split("<!-- thresholds: end -->")[0]
    assert between.strip().splitlines() == table
    assert f"Below {MIN_COUNT} pairs or samples, and {MIN_PROBES} prompts for a probe" in REWARDS


# docs/replay.md


def test_the_columns_in_the_docs_are_those_of_the_code() -> None:
    table = REPLAY.split("## The files")[1].split("```")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", " ".join(cells))) == sorted([*TYPES, "parts"])


def test_the_forms_of_data_in_the_docs_are_those_of_the_code() -> None:
    """In their order: the format, its columns, the stages that it serves, and a command of one."""
    table = DATA.split("<!-- forms: begin -->")[1].split("<!-- forms: end -->")[0]
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in table.splitlines()
        if line.startswith("| `")
    ]
    stages = {"sft": "demonstrations", "rm": "preferences", "ppo": "prompts"}
    found: dict[str, list[tuple[set[str], set[str]]]] = {}
    for name, columns, serves, command in rows:
        kinds = {stages[stage] for stage in serves.split(", ")}
        found.setdefault(name.strip("`"), []).append((set(re.findall(r"`(\w+)`", columns)), kinds))
        words = dict(word.split("=", 1) for word in command.strip("`").split())
        assert stages[words["stage"]] in kinds, command
        assert words.get("data.format", words["data"]) in (name.strip("`"), "files"), command
    forms = {form.name: [f for f in FORMATS if f.name == form.name] for form in FORMATS}
    assert list(found) == list(forms)
    (_, kinds), *_ = found["native"]
    assert kinds == set(stages.values())
    for name in set(forms) - {"native"}:
        for (columns, kinds), form in zip(found[name], forms[name], strict=True):
            assert {*form.columns} <= columns, name
            assert kinds == {*form.kinds} - {"labels"}, name  # which preferences serve too


# docs/performance.md


@pytest.mark.parametrize(("column", "name"), [(0, "ppo_vs_trl.md"), (2, "ppo_vs_trl_xeon.md")])
def test_ratios_are_those_of_the_committed_tables(column: int, name: str) -> None:
    """The columns of ratios, by workload."""
    text = (HOME / "benchmarks" / "results" / name).read_text()
    names, _, *rows = (
        [cell.strip() for cell in line.split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    )
    expected = {}
    for row in (dict(zip(names, cells, strict=True)) for cells in rows):
        of, ours = float(row["TRL / ours"]), float(row["TRL with our settings / ours"])
        expected[row["workload"]] = f"{of:.2f} ({ours:.2f})"
    section = (HOME / "docs" / "performance.md").read_text().split("## Measurements")[1]
    quoted = re.findall(r"^\|[^|]*\(`([\w-]+)`\) \|(.*)\|$", section, re.MULTILINE)
    assert {work: rest.split("|")[column].strip() for work, rest in quoted} == expected


def test_the_smallest_ratios_are_quoted() -> None:
    page = " ".join((HOME / "docs" / "performance.md").read_text().split())
    rows = re.findall(r"\(`[\w-]+`\) \| ([\d.]+)[^|]*\| ([\d.]+) \| ([\d.]+)", page)
    *most, last = (min(row, key=float) for row in rows)
    assert f"smallest ratios of the three are {', '.join(most)} and {last}." in page
    assert all(ratio in README for ratio in (*most, last))


# docs/metrics.md, docs/quickstart.md


def test_metrics_table_is_the_one_in_the_code() -> None:
    text = (HOME / "docs" / "metrics.md").read_text()
    table = text.split("<!-- metrics table: begin -->")[1].split("<!-- metrics table: end -->")[0]
    rows = [
        f"| `{name}` | {', '.join(m.stages)} | {m.formula} | {m.unit} | {m.healthy} |"
        for name, m in METRICS.items()
    ]
    assert table.strip().splitlines()[2:] == rows
    assert {row.count("|") for row in rows} == {6}


def test_the_quickstart_has_the_same_numbers_in_both_tables() -> None:
    table = QUICKSTART.split("## What it reaches\n\n")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")] for line in table.splitlines()]
    after = {row[1]: row[3] for row in rows if len(row) == 6}
    first = re.search(r"^\| nothing \|(.*)\|$", QUICKSTART, re.MULTILINE)
    assert first is not None
    reward, gold, correct, polite, _, kl = (cell.strip() for cell in first[1].split("|"))
    names = ("reward", "gold score (hidden judge)", "correct", "polite")
    assert [reward, gold, correct, polite] == [after[name] for name in names]
    assert kl == after["KL to the SFT model, nats a response"]
