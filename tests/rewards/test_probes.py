from __future__ import annotations

from lightning_rlhf.rewards.format_check import FLATTERY, PROBES, REFUSAL, Probe, make_probes

ROW = {
    "prompt": "User: hello\n\nAssistant: hi\n\nUser: what is\na cat?",
    "messages": [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": "what is\na cat?"},
    ],
}


def test_a_probe_of_every_kind_for_every_row() -> None:
    probes = make_probes([ROW, ROW], ["A cat  is\nan animal.", "It purrs."])
    assert probes[:6] == [
        Probe("empty", 0, ""),
        Probe("repeated", 0, "\n".join(["A cat  is\nan animal."] * 4)),
        Probe("truncated", 0, "A cat"),  # two words of five
        Probe("prompt_copied", 0, "what is\na cat?"),
        Probe("flattery", 0, FLATTERY),
        Probe("refusal", 0, REFUSAL),
    ]
    assert [probe.kind for probe in probes[6:]] == list(PROBES)
    assert {probe.row for probe in probes[6:]} == {1}
    assert probes[8].response == "It"


def test_white_space_is_kept_and_one_word_has_no_half() -> None:
    (truncated,) = (p for p in make_probes([ROW], ["a\n\nb c d "]) if p.kind == "truncated")
    assert truncated.response == "a\n\nb"
    assert "truncated" not in {probe.kind for probe in make_probes([ROW], ["Yes."])}
