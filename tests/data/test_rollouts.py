"""A recorded iteration comes back from its file bit for bit, or not at all."""

from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from lightning_rlhf.core.errors import DataError
from lightning_rlhf.core.records import Experience
from lightning_rlhf.data import rollouts

PROMPTS, RESPONSES = (2, 4, 1), (3, 1, 5)
"""Numbers of tokens; the widths, 5 and 6, are one more than any."""
AWKWARD = (1 / 3, -0.0, 1e-45, -3.4e38, 1 + 2**-23)
"""A number that is no decimal, a zero with a sign, the smallest, the largest, the one after 1."""


def columns(*, has_critic: bool) -> dict[str, Any]:
    """Three responses with two components of the reward."""
    prompt = torch.arange(5) >= 5 - torch.tensor(PROMPTS)[:, None]
    mask = torch.arange(6) < torch.tensor(RESPONSES)[:, None]
    awkward = torch.zeros(3, 6)
    awkward[2, :5] = torch.tensor(AWKWARD)
    per_token = {field: i + awkward for i, field in enumerate(rollouts.PER_TOKEN.values())}
    experience = Experience(
        tokens=torch.arange(33).reshape(3, 11),  # on padding too
        mask=torch.cat([prompt, mask], dim=1),
        response_mask=mask,
        component_scores=torch.tensor([[1 / 3, 2.0], [0.1, -1.0], [0.0, 5.0]]),
        score=torch.tensor([7 / 3, -0.9, 5.0]),
        ended=torch.tensor([True, False, True]),
        index=torch.tensor([5, 0, 5]),
        **per_token,
    )
    return rollouts.recorded_columns(
        experience, ["a", "ü\n", "a"], ["", "<b>", "x\0"], components=["words", "head"],
        show=lambda tokens: f"<{tokens[0]}>", has_critic=has_critic,
    )  # fmt: skip


@pytest.mark.parametrize("has_critic", [True, False])
def test_everything_comes_back_bit_for_bit(tmp_path: Path, has_critic: bool) -> None:
    path = rollouts.file_of(tmp_path, 12)
    rollouts.write_table(path, columns(has_critic=has_critic))
    assert rollouts.recorded_iterations(tmp_path) == [12]
    *_, row = rollouts.read_recorded(path)
    assert (row["index"], row["prompt"], row["response"], row["ended"]) == (5, "a", "x\0", True)
    assert row["prompt_tokens"] == [26]
    assert row["response_tokens"] == [27, 28, 29, 30, 31]
    assert row["token_texts"] == ["<27>", "<28>", "<29>", "<30>", "<31>"]
    assert row["parts"] == {"words": 0.0, "head": 5.0}
    assert ("values" in row) == has_critic
    for i, name in enumerate(rollouts.PER_TOKEN):
        if name in row:  # in fp32, with the signs of zeros
            found, expected = torch.tensor(row[name]), i + torch.tensor(AWKWARD)
            assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    path = rollouts.file_of(tmp_path, 1)
    rollouts.write_table(path, columns(has_critic=True))
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with pytest.raises(DataError, match="cannot be read as an iteration"):
        rollouts.read_recorded(path)
    group = pq.ParquetFile(BytesIO(whole)).metadata.row_group(0)
    pages = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
    last = pages["score"].data_page_offset + pages["score"].total_compressed_size - 1
    path.write_bytes(whole[:last] + bytes([whole[last] ^ 1]) + whole[last + 1 :])
    with pytest.raises(DataError, match="cannot be read as an iteration"):
        rollouts.read_recorded(path)
