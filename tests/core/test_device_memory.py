"""Half of the rows where the memory runs out, and the same answer."""

from __future__ import annotations

import pytest
import torch

from lightning_rlhf.core.errors import TrainingError
from lightning_rlhf.core.memory import MicrobatchSize


class Device:
    """Has room for so many rows."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.asked: list[int] = []

    def work(self, rows: int) -> str:
        self.asked.append(rows)
        if rows > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return f"read {rows}"


def test_rows_are_halved_until_they_fit_and_stay_so() -> None:
    device, size = Device(room=3), MicrobatchSize("ppo.microbatch_size", 14)
    with pytest.warns(UserWarning, match="out of memory") as caught:
        assert size.fitting(device.work) == "read 3"
    assert device.asked == [14, 7, 3]
    assert [str(w.message) for w in caught] == [
        f"out of memory: ppo.microbatch_size is {n} from now on, which changes no result"
        for n in (7, 3)
    ]
    assert all("lightning_rlhf" in w.filename for w in caught)  # which is shown in one line
    device.asked.clear()
    assert size.fitting(device.work) == "read 3"
    assert device.asked == [3]


def test_one_row_that_is_too_much_ends_the_run() -> None:
    size = MicrobatchSize("sft.microbatch_size", 2)
    with (
        pytest.warns(UserWarning, match="microbatch_size is 1"),
        pytest.raises(TrainingError, match=r"one row at a time \(sft\.microbatch_size\) .* 2\.00"),
    ):
        size.fitting(Device(room=0).work)


def test_a_size_that_was_halved_within_is_not_taken_for_too_much() -> None:
    """A reward reads within the pass that reads the reference, by the same size."""
    size, asked = MicrobatchSize("ppo.microbatch_size", 2), []

    def outer(rows: int) -> str:
        asked.append(rows)
        size.fitting(Device(room=1).work)
        return Device(room=1).work(rows)

    with pytest.warns(UserWarning, match="microbatch_size is 1"):
        assert size.fitting(outer) == "read 1"
    assert asked == [2, 1]


def test_tensors_of_a_failed_pass_are_gone_before_the_next() -> None:
    """Or the second would find the memory as full as the first left it."""

    class Held:
        count = 0

        def __init__(self) -> None:
            Held.count += 1

        def __del__(self) -> None:
            Held.count -= 1

    def work(rows: int) -> int:
        found, held = Held.count, Held()
        if rows > 1:
            raise torch.OutOfMemoryError("full")
        del held
        return found

    with pytest.warns(UserWarning, match="out of memory"):
        assert MicrobatchSize("k", 4).fitting(work) == 0
