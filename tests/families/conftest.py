"""Small checkpoints of the families that the presets name, and a few rows of data."""

from __future__ import annotations

import itertools
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging as transformers_logging

from lightning_rlhf.cli.main import main

from ..composing import parsed_files as parsed_files

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart"
VOCABULARY = 1757
"""The tokenizer's 1756, and the one more that transformers' tokenizer of Qwen3.5 gives it."""
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.05,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": None,
}
HYBRID = COMMON | {
    "head_dim": 8,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "tie_word_embeddings": True,
}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2,
          "out_hidden_size": 32, "num_position_embeddings": 4, "patch_size": 4}  # fmt: skip


def build(family: str) -> PreTrainedModel:
    """Random weights, of the class that the family's hub repositories are saved from."""
    torch.manual_seed(0)
    match family:
        case "qwen3.5":
            return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**HYBRID))
        case "qwen3.5-multimodal":
            config = Qwen3_5Config(text_config=HYBRID, vision_config=VISION,
                                   tie_word_embeddings=True)  # fmt: skip
            return Qwen3_5ForConditionalGeneration(config)
        case "qwen3":
            return Qwen3ForCausalLM(Qwen3Config(**COMMON, head_dim=8, tie_word_embeddings=True))
        case "llama":
            return LlamaForCausalLM(LlamaConfig(**COMMON, tie_word_embeddings=False))
    raise ValueError(family)


@pytest.fixture(scope="session", autouse=True)
def _calm() -> None:
    """One thread: on matrices this small a second one waits longer than it works."""
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


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
