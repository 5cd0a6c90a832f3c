"""Small checkpoints of the families that the presets name, and a few rows of data."""

import itertools
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from transformers import PreTrainedModel, Qwen3_5Config, Qwen3_5ForConditionalGeneration

from lightning_rlhf.cli.main import main

from ..cli.conftest import _pictures_are_empty as _pictures_are_empty
from ..composing import parsed_files as parsed_files
from ..models.conftest import _calm as _calm
from ..models.conftest import build_model

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart"
VOCABULARY = 1757
"""The tokenizer's 1756, and the one more that transformers' tokenizer of Qwen3.5 gives it."""
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2,
          "out_hidden_size": 32, "num_position_embeddings": 4, "patch_size": 4}  # fmt: skip


def build(family: str) -> PreTrainedModel:
    """Random weights, of the class that the family's hub repositories are saved from."""
    kind = "qwen3_5_text" if family.startswith("qwen3.5") else family
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 256, "initializer_range": 0.05}
    is_tied = kind != "llama"
    model = build_model(kind, pad_token_id=None, tie_word_embeddings=is_tied, **sizes)
    if family != "qwen3.5-multimodal":
        return model
    text = model.config.to_dict()
    torch.manual_seed(0)
    return Qwen3_5ForConditionalGeneration(
        Qwen3_5Config(text_config=text, vision_config=VISION, tie_word_embeddings=True)
    )


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides that name files with the first rows of the quickstart's data."""
    folder = tmp_path_factory.mktemp("rows")
    overrides = ["data=files"]
    for key, name in (("demonstrations", "sft"), ("preferences", "preferences"),
                      ("prompts", "prompts")):  # fmt: skip
        for split, count in (("train", 8), ("val", 4)):
            source = QUICKSTART / "data" / f"{name}_{split}.jsonl"
            with source.open() as lines:
                (folder / source.name).write_text("".join(itertools.islice(lines, count)))
            overrides.append(f"data.{key}.{split}={folder / source.name}")
    return overrides


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family: weights, configuration and tokenizer, as a download leaves them."""
    folders: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in folders:
            folders[family] = tmp_path_factory.mktemp(family)
            build(family).save_pretrained(folders[family])
            for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
                shutil.copy(QUICKSTART / "tokenizer" / file, folders[family])
        return folders[family]

    return folder


@pytest.fixture(scope="session")
def command() -> Callable[[Path, list[str]], None]:
    """python -m lightning_rlhf with these arguments, in this process and that folder."""

    def run(folder: Path, arguments: list[str]) -> None:
        GlobalHydra.instance().clear()
        with pytest.MonkeyPatch.context() as patched:
            patched.chdir(folder)
            patched.setattr(sys, "argv", ["lightning-rlhf", *arguments])
            main()
        GlobalHydra.instance().clear()

    return run
