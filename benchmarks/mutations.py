"""Random corruption of bytes, JSON and files; each function returns a description of the change."""

from __future__ import annotations

import copy
import gzip
import json
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

Damage = Callable[[Path], str]
"""Function that damages the file at a path and returns a description of the damage."""

VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**400, 0.5, -0.0, 1e-300, 1e300, float("nan"),
    float("inf"), "", " ", "x", "é", "\x00", "\n", "\ud800", "\u202e", "\x1b[31m", "a" * 5000,
    "../..", "[", "(a+)+$", "{{ 1/0 }}", "1", "null", [], [[]], [None], ["x"], {}, {"a": 1},
    {"": None},
]  # fmt: skip
"""Unusual JSON values."""


def nodes(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in a tree of dictionaries and lists, the root's first."""
    yield path
    if isinstance(tree, dict):
        parts: Any = tree.items()
    else:
        parts = enumerate(tree) if isinstance(tree, list) else ()
    for key, part in parts:
        yield from nodes(part, (*path, key))


def changed(tree: Any, path: tuple[Any, ...], change: Callable[[Any, Any], None]) -> Any:
    """Return a copy of the tree after `change(container, key)` at the path."""
    holder = {"root": copy.deepcopy(tree)}
    whole: tuple[Any, ...] = ("root", *path)
    at: Any = holder
    for key in whole[:-1]:
        at = at[key]
    change(at, whole[-1])
    return holder.get("root")


def replaced(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return a copy of the tree with another value at the path."""
    return changed(tree, path, lambda at, key: at.__setitem__(key, value))


def mutated(tree: Any, dice: random.Random, values: list[Any] = VALUES) -> tuple[Any, str]:
    """Return a copy of a tree with one random change, and the description of the change."""
    path = dice.choice([p for p in nodes(tree) if p] or [()])
    where = ".".join(map(str, path)) or "the whole"
    action = dice.choice(["set", "set", "set", "drop", "wrap", "rename"])
    if action == "drop" and path:
        return changed(tree, path, lambda at, key: at.__delitem__(key)), f"{where} is gone"
    if action == "wrap":
        wrapped = changed(tree, path, lambda at, key: at.__setitem__(key, [at[key]]))
        return wrapped, f"{where} in a list"
    if action == "rename" and path and isinstance(path[-1], str):

        def rename(at: Any, key: Any) -> None:
            at[f"{key}x"] = at.pop(key)

        return changed(tree, path, rename), f"{where} has another name"
    value = dice.choice(values)
    return replaced(tree, path, value), f"{where} = {shown(value)}"


def shown(value: Any) -> str:
    """Return a value as ASCII text, shortened to about 60 characters."""
    text = ascii(value if not isinstance(value, int) or abs(value) < 2**80 else "a huge integer")
    return text if len(text) <= 60 else f"{text[:40]}... ({len(text)} characters)"


def mutated_bytes(data: bytes, dice: random.Random) -> tuple[bytes, str]:
    """Return bytes with one random change, and the description of the change."""
    at = dice.randrange(len(data) + 1)
    length = dice.choice([1, 2, 7, 64, 500])
    noise = dice.randbytes(length)
    match dice.choice(["cut", "flip", "insert", "drop", "double", "zero", "swap"]):
        case "cut":
            return data[:at], f"cut after {at} bytes"
        case "flip" if at < len(data):
            flipped = bytes([data[at] ^ 1 << dice.randrange(8)])
            return data[:at] + flipped + data[at + 1 :], f"a bit of byte {at} flipped"
        case "drop":
            return data[:at] + data[at + length :], f"{length} bytes from {at} are gone"
        case "double":
            return data[:at] + data[at : at + length] + data[at:], f"{length} bytes at {at} twice"
        case "zero":
            return data[:at] + b"\0" * length + data[at + length :], f"{length} zeros at {at}"
        case "swap":
            return data[at:] + data[:at], f"the first {at} bytes stand last"
    return data[:at] + noise + data[at:], f"{length} random bytes at {at}"


def any_bytes(dice: random.Random) -> Damage:
    """Return a Damage that changes a file's bytes at random."""

    def damage(file: Path) -> str:
        data, what = mutated_bytes(file.read_bytes(), dice)
        file.write_bytes(data)
        return what

    return damage


def any_json(dice: random.Random) -> Damage:
    """Return a Damage that changes one value of a JSON file."""

    def damage(file: Path) -> str:
        tree, what = mutated(json.loads(file.read_text()), dice)
        file.write_text(json.dumps(tree))
        return what

    return damage


def any_lines(dice: random.Random) -> Damage:
    """Return a Damage that changes lines of a text file: their order, number or bytes."""

    def damage(file: Path) -> str:
        lines = file.read_bytes().splitlines(keepends=True)
        at = dice.randrange(len(lines))
        match dice.choice(["drop", "double", "swap", "change", "change"]):
            case "drop":
                del lines[at]
                what = f"line {at + 1} is gone"
            case "double":
                lines.insert(at, lines[at])
                what = f"line {at + 1} stands twice"
            case "swap":
                lines.append(lines.pop(at))
                what = f"line {at + 1} stands last"
            case _:
                lines[at], what = mutated_bytes(lines[at], dice)
                what = f"line {at + 1}: {what}"
        file.write_bytes(b"".join(lines))
        return what

    return damage


def any_safetensors_header(dice: random.Random) -> Damage:
    """Return a Damage that changes one value of the header of a safetensors file."""

    def damage(file: Path) -> str:
        data = file.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        values = [*VALUES, "F64", "I64", "F16", "F8_E4M3", [0, 0], [1], [2**40], [2**62, 2**62]]
        header, what = mutated(json.loads(data[8 : 8 + length]), dice, values)
        written = json.dumps(header).encode()
        length = dice.choice([len(written)] * 6 + [0, 2**40, 2**64 - 1, len(written) - 1])
        file.write_bytes(struct.pack("<Q", length) + written + data[8 + length :][: 2**24])
        return f"header of {length} bytes: {what}"

    return damage


def any_tensor(dice: random.Random) -> Damage:
    """Return a Damage that changes one tensor of a safetensors file."""
    from safetensors.torch import load_file, save_file

    def damage(file: Path) -> str:
        tensors = load_file(file)
        name = dice.choice(sorted(tensors))
        tensors[name], what = other_tensor(tensors[name], dice)
        save_file(tensors, file, {"format": "pt"})
        return f"{name} {what}"

    return damage


def other_tensor(x: torch.Tensor, dice: random.Random) -> tuple[torch.Tensor, str]:
    """Return a changed copy of the tensor, and the description of the change."""
    match dice.choice(["nan", "shape", "type", "empty", "flat", "huge"]):
        case "nan" if x.is_floating_point():
            return torch.full_like(x, float("nan")), "is NaN"
        case "huge" if x.is_floating_point():
            return torch.full_like(x, 3e38), "is huge"
        case "shape":
            return torch.cat([x.flatten(), x.flatten()]), "has another shape"
        case "type":
            return x.to(torch.int16), "is of integers"
        case "empty":
            return x.flatten()[:0], "is empty"
    return x.flatten().contiguous(), "is flat"


def any_checkpoint(dice: random.Random) -> Damage:
    """Return a Damage that changes one value or tensor of a Lightning checkpoint."""

    def damage(file: Path) -> str:
        tree = torch.load(file, weights_only=True)
        path = dice.choice([p for p in nodes(tree) if p])
        at = tree
        for key in path:
            at = at[key]
        where = ".".join(map(str, path))
        if isinstance(at, torch.Tensor) and dice.random() < 0.7:
            value, what = other_tensor(at, dice)
            tree = replaced(tree, path, value)
            what = f"{where} {what}"
        else:
            tree, what = mutated(tree, dice)
        torch.save(tree, file)
        return what

    return damage


def any_column(dice: random.Random) -> Damage:
    """Return a Damage that changes one column, or the metadata, of a Parquet file."""

    def damage(file: Path) -> str:
        table = pq.read_table(file)
        metadata = table.schema.metadata
        name = dice.choice(table.column_names)
        at, count = table.column_names.index(name), len(table)
        others = {
            "numbers": pa.array(range(count)), "text": pa.array(["x"] * count),
            "nothing": pa.nulls(count), "bytes": pa.array([b"\xff"] * count),
            "lists of text": pa.array([["x"]] * count), "negative": pa.array([-1] * count),
            "huge": pa.array([2**62] * count), "lists of huge": pa.array([[2**62]] * count),
            "empty lists": pa.array([[]] * count, pa.list_(pa.int64())),
            "dates": pa.array([2**62] * count, pa.timestamp("ms")),
            "objects": pa.array([{"a": 1}] * count), "NaN": pa.array([float("nan")] * count),
        }  # fmt: skip
        match dice.choice(["drop", "rows", "twice", "metadata", *["type"] * 4]):
            case "drop":
                table, what = table.drop_columns([name]), f"{name} is gone"
            case "rows":
                table, what = table.slice(0, 0), "no row is left"
            case "twice":
                table, what = table.append_column(name, table[name]), f"{name} stands twice"
            case "metadata" if metadata:
                key = dice.choice(sorted(metadata))
                tree, what = mutated(json.loads(metadata[key]), dice)
                table = table.replace_schema_metadata({key: json.dumps(tree).encode()})
                what = f"metadata: {what}"
            case _:
                kind = dice.choice(sorted(others))
                table = table.set_column(at, name, others[kind])
                what = f"{name} is {kind}"
        if "metadata" not in what:
            table = table.replace_schema_metadata(metadata)
        pq.write_table(table, file)
        return what

    return damage


def compressed(data: bytes, dice: random.Random) -> tuple[bytes, str]:
    """Return gzip-compressed data, in one or three members, with one random change."""
    members = dice.choice([1, 1, 3])
    return mutated_bytes(gzip.compress(data) * members, dice)
