"""Every form of rows in every kind of file, ugly cells included: rows equal to recorded ones.

`corpus.json` holds what was read of each file: the rows, their numbers and what was left out. Run
`python tests/data/test_corpus.py` to record a new file, and read the difference before you keep it.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pyarrow.parquet as pq

from lightning_rlhf.core.errors import DataError
from lightning_rlhf.data.formats import Kind, formats_of
from lightning_rlhf.data.readers import read
from lightning_rlhf.data.rows import Prompt

RECORDED = Path(__file__).with_name("corpus.json")
CELLS = ["NA", "007", "1e5", "null", "True", "nan", "", " ", "a, b", 'a "b" c', "é 中 🙂 \u2028x",
         "line one\r\nline two", "\ttab ", "'", "\\n", "None", "1_000", "-0", "0x10"]  # fmt: skip
"""Texts that a reader may take for something else."""


def chat(*contents: Any) -> list[dict[str, Any]]:
    """Turns of user and assistant in turn, the user first."""
    return [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]


def human(*contents: Any) -> list[dict[str, Any]]:
    return [{"from": ("human", "gpt")[i % 2], "value": c} for i, c in enumerate(contents)]


SYSTEM = {"role": "system", "content": "Be kind."}
CALL = {"id": "c1", "function": {"name": "time", "arguments": '{"zone": "Ü"}'}}
TOOLS = [SYSTEM, {"role": "user", "content": "Time?"},
         {"role": "assistant", "content": None, "tool_calls": [CALL]},
         {"role": "tool", "tool_call_id": "c1", "name": "time", "content": "noon"},
         {"role": "assistant", "content": "Noon.", "tool_calls": None}]  # fmt: skip
HH = "\n\nHuman: Hi\n\nAssistant: Who?\n\nHuman: Bob: NA\n\nAssistant:"
SIDES = {"chosen": chat("p", "007"), "rejected": chat("p", "NA")}
SHP = {"history": "Why?", "human_ref_A": "NA", "human_ref_B": "007"}
POST = {"subreddit": "r/tifu", "title": "1e5", "post": "It\nrained. "}
STEER = "One\n<extra_id_1>Assistant\nTwo\n<extra_id_1>User\nThree "
OLD = {"info": POST, "summaries": [{"text": " NA"}, {"text": "007 "}], "id": 7}
ROWS: dict[str, list[Any]] = {
    "native": [
        *({"prompt": c, "response": f"{c}!", "answer": c, "n": 1} for c in CELLS),
        *({"prompt": "p", "response": c} for c in CELLS),
        {"prompt": chat("Hi", "Ho", "Hu"), "response": chat("", "A")[1:]},
        {"messages": TOOLS}, {"messages": TOOLS[:3]}, {"messages": chat("a", "b", "c", "d")},
        {"messages": chat("a")}, {"messages": chat("a", "b")[1:]}, {"messages": []},
        {"messages": [*chat("a"), SYSTEM, *chat("b", "c")]}, {"messages": [{"role": "user"}]},
        {"messages": [{"role": "robot", "content": "x"}]}, {"messages": chat("a", ["b"])},
        {"messages": HH + " x"}, {"messages": "no dialogue"}, {"response": "alone"}, {}, 5, [1],
        {"prompt": "p", "response": 5}, {"prompt": 7, "response": "x"}, {"prompt": None},
        {"prompt": "a\0b", "response": "x"}, {"prompt": "p", "response": "a\ud83d"},
    ],
    "pairs": [
        *({"prompt": "p", "chosen": c, "rejected": "NO", "margin": c, "k": i}
          for i, c in enumerate(CELLS)),
        *({"prompt": f"p{m}", "chosen": "a", "rejected": "b", "margin": m}
          for m in (2, 0.5, 0, -1, None, True, "1.5", "much", 10**400)),
        {"chosen": HH + " Ann. ", "rejected": HH + " Eve."}, SIDES, SIDES | {"prompt": "p"},
        {"prompt": HH, "chosen": " Ann.", "rejected": " Eve."},
        {"prompt": chat("p"), "chosen": chat("", "A")[1:], "rejected": chat("", "B")[1:]},
        {"chosen": HH + " a", "rejected": HH.replace("Bob", "Rob") + " b"},
        {"chosen": chat("a", "b"), "rejected": chat("a", "b", "c", "d")},
        {"chosen": HH + " a", "rejected": HH + " "}, {"chosen": "a", "rejected": "b"},
        {"prompt": "p", "chosen": "same", "rejected": " same"}, {"prompt": "p", "chosen": "a"},
        {"chosen": HH + " a\n\nHuman: b", "rejected": HH + " c"},
    ],
    "alpaca": [
        *({"instruction": "Say.", "input": c, "output": "007", "text": c} for c in CELLS),
        *({"instruction": c, "output": c} for c in CELLS),
        {"instruction": "a", "input": None, "output": "b"}, {"instruction": "a", "input": "b"},
        {"instruction": "a", "input": 5, "output": "b"}, {"instruction": ["a"], "output": "b"},
        {"output": "b"}, {"instruction": "a", "output": None},
    ],
    "sharegpt": [
        *({"conversations": human(c, "NA", "007"), "id": c} for c in CELLS),
        {"conversations": [{"from": "system", "value": "Be kind."}, *human(*"abcd")]},
        {"conversations": human("", "Hm", "Hi", "Hello")[1:]}, {"conversations": chat("a", "b")},
        {"conversations": [*human("a", "b"), {"from": "tool", "value": "c"}, *human("x", "d")[1:]]},
        {"conversations": [{"from": "Human", "value": "a"}, {"from": "BARD", "value": "b"}]},
        {"conversations": human("a")}, {"conversations": human("", "b")[1:]},
        {"conversations": [{"from": "narrator", "value": "x"}]}, {"conversations": "a"},
        {"conversations": []}, {"conversations": human("a", None)}, {"conversations": ["a"]},
        {"conversations": [{"from": None, "value": "x"}]}, {"other": 1},
    ],
    "messages": [
        {"messages": TOOLS}, {"messages": chat("NA", "007"), "prompt": "x"},
        {"messages": chat("a")}, {"messages": None, "prompt": "x"}, {"messages": 5},
        {"messages": [*chat("a"), {"role": "assistant", "tool_calls": [{"f": 1}]}, *TOOLS[3:]]},
    ],
    "hh": [
        {"chosen": HH + " Ann.", "rejected": HH + " Eve."},
        {"chosen": "\n\nHuman: a\n\nHuman: b\n\nAssistant: c", "rejected": "\n\nHuman: x"},
        {"chosen": "\n\nHuman: a\n\nHuman:\n\nAssistant: b", "rejected": "x"},
        {"chosen": HH + " Ann.", "rejected": ""}, {"chosen": HH, "rejected": HH},
    ],
    "ultrafeedback": [
        *(SIDES | {"prompt": "p ", "score_chosen": a, "score_rejected": b, "messages": []}
          for a, b in ((8.5, 6), (7, 7), (1, 2), ("3", "1e0"), (None, 1), ("high", 1), (1, True))),
        {"prompt": "p", "chosen": "NA", "rejected": "007", "score_chosen": 2, "score_rejected": 1},
        {"chosen": "a", "rejected": "b", "score_chosen": 2, "score_rejected": 1}, {"prompt": "p"},
        {"prompt": "q", "chosen": "a", "rejected": "a", "score_chosen": 2, "score_rejected": 1},
    ],
    "shp": [
        *(SHP | {"labels": label, "score_ratio": ratio} for label, ratio in (
            (1, 4.0), (0, 2), (True, None), ("0", "3"), (1, 0.5), (2, 1), (None, 1), (1, "x"))),
        SHP | {"labels": 1, "human_ref_B": "NA"}, SHP | {"labels": 1, "history": " "},
        SHP | {"labels": 0, "human_ref_A": 5},
    ],
    "tldr": [OLD | {"choice": c} for c in (0, 1, "1", 2, None)]
    + [OLD | {"choice": 1} | more for more in (
        {"info": "x"}, {"info": {}}, {"summaries": ["a"]}, {"summaries": [{}, {}]})],
    "tldr_posts": [
        *(POST | {"summary": c} for c in CELLS), POST, POST | {"summary": " x ", "title": None},
    ],
    "tldr_completions": [{"prompt": "POST: a\n\nTL;DR:", "completion": f" {c}"} for c in CELLS],
    "helpsteer": [
        *({"prompt": p, "response": f"r{i}", "helpfulness": s, "verbosity": i} for i, (p, s) in
          enumerate([("Hi", 4), ("Ho", 2), ("Hi", 1), ("Hi", 4), (STEER, 0), (STEER, "3"),
                     ("Hi", None), ("Hi", "x"), (" ", 1), (5, 1), (STEER + "<extra_id_1>", 1)])),
        {"prompt": "Hi", "response": "", "helpfulness": 1},
    ],
    "helpsteer_two": [
        {"prompt": p, "response_1": "NA", "response_2": r, "preference_strength": s}
        for p, r, s in ((STEER, "007", -2), ("a", "b", "1"), ("a", "b", 0), ("a", "", 1),
                        ("a", "NA", 1), ("a", "b", None))
    ],
    "helpsteer_three": [
        {"context": c, "response1": "NA", "response2": "007", "overall_preference": s}
        for c, s in ((chat("p"), 1), (chat("p", "q", "r"), -3), (chat("p", "q"), 1), ("p", 1),
                     (chat("p"), 0), (chat("p"), "x"))
    ],
    "kto": [
        {"prompt": p, "completion": c, "label": label} for p, c, label in (
            ("p", "bad", False), ("p", "NA", True), ("q", "fine", 1), ("p", "007", "true"),
            (chat("p"), chat("", "b")[1:], 0), ("r", "x", None), ("r", "", True), ("", "x", True))
    ],
    "prompt_completion": [
        *({"prompt": c, "completion": c} for c in CELLS), {"prompt": "p"}, {"completion": "x"},
        {"prompt": chat("a"), "completion": chat("", "b")[1:]},
    ],
    "text": [*({"text": c} for c in CELLS), {"text": 5}, {"text": None, "x": 1}],
}  # fmt: skip
"""Name of a corpus -> its rows; the part before "_" is the format, if there is one."""
FORMATS: dict[str, Any] = {"pairs": "native", "prompt_completion": "prompt_completion"}
CSV = (
    "\ufeffprompt,response,answer,é\r\n"
    'NA,007,1e5,\r\n"a ""b"", c","x\r\ny",,""""\r\n\r\nnull,None,"",NULL\r\n'
    ' pad ,\ttab,1_000,-0\r\n,empty prompt,1,1\r\nx,,1,1\r\none\r\n1,2,3,4,5\r\nk,"l"m,1,2\r\n'
    "n,o,TRUE,#N/A\r\nlast,line,nan,inf"
)


def files(folder: Path) -> Iterator[tuple[str, Path, Any]]:
    """Write all files; yield the name, the path and the format of each."""
    for name, rows in ROWS.items():
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        format = FORMATS.get(name, name.partition("_")[0])
        yield f"{name}.jsonl", file, format
        yield f"{name}.jsonl, auto", file, "auto"
    cells = [{"prompt": c, "response": f"{c}|", "extra": c} for c in CELLS]
    lines = "\r\n\r\n".join(json.dumps(row, ensure_ascii=False) for row in cells)
    columns = {name: [row[name] for row in cells] for name in cells[0]}
    table = {"messages": [chat("NA", "007"), None], "prompt": [None, "1e5"],
             "response": [None, "NA"], "n": [1, None]}  # fmt: skip
    broken = ['{"prompt": "a", "resp', "5", "9" * 5000, '{"prompt": "d", "response": "e"}']
    pairs = "prompt,chosen,rejected,margin\na,b,c,1.5\na,b,d,\na,b,e,NA\n"
    contents: dict[str, bytes] = {
        "lines.jsonl": ("\ufeff" + lines).encode(),
        "broken.jsonl": "\n".join(broken).encode() + b'\n{"prompt": "\xff", "response": "x"}',
        "lines.jsonl.gz": gzip.compress(lines.encode()),
        "lines.json": lines.encode(),
        "array.json": ("\ufeff\r\n" + json.dumps(cells, indent=1)).encode(),
        "mixed.json": f'[5, [], {{}},\n\n{json.dumps(cells[0])}]'.encode(),
        "table.csv": CSV.encode(),
        "latin.csv": 'prompt,response\na,b\n"x\xe9\ny",c\nd,e\n'.encode("latin-1"),
        "pairs.csv": pairs.encode(),
        "texts.txt": ("\ufeff" + "\r\n".join(c.replace("\r\n", " ") for c in CELLS)).encode(),
    }  # fmt: skip
    for name, content in contents.items():
        (folder / name).write_bytes(content)
        yield name, folder / name, "auto"
    for name, found in (("cells.parquet", columns), ("table.parquet", table)):
        pq.write_table(pa.table(found), folder / name)
        yield name, folder / name, "auto"


def plain(record: Any) -> Any:
    """Return a record as JSON holds it; of a prompt, the columns hold the turns."""
    found = record.columns if isinstance(record, Prompt) else astuple(record)
    return json.loads(json.dumps(found))


def read_all(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, file, format in files(folder):
        for kind in get_args(Kind):
            if not formats_of(format, kind):
                continue
            key = f"{name}, {kind}"
            try:
                rows = read(kind, str(file), "skip", format)
            except DataError:
                found[key] = "refused"
                continue
            found[key] = {
                "rows": [plain(row) for row in rows.rows],
                "numbers": list(rows.numbers),
                "left out": dict(sorted(rows.left_out.items())),
            }
            if ", auto" in key and found[key] == found.get(key.replace(", auto", "")):
                found[key] = "as by name"
    return found


def test_every_row_is_read_as_recorded(tmp_path: Path) -> None:
    recorded = json.loads(RECORDED.read_text())
    found = read_all(tmp_path)
    assert found.keys() == recorded.keys()
    for key, value in recorded.items():
        assert found[key] == value, key


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        lines = (f"{json.dumps(k)}: {json.dumps(v)}" for k, v in read_all(Path(place)).items())
        RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
