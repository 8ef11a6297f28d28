"""Changes to a bundle's files that somebody might make, by accident or not."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

Json = Any

STRANGE: list[Json] = [
    None, True, False, 0, 1, -1, 2, 7, 2**31 - 1, 2**31, 2**53, 2**63, 2**64, -(2**63), 10**400,
    0.5, 2.0, -0.0, 1e308, float("nan"), float("inf"), "", "x", "B", "S", "float32", "cpu", "é",
    "\0", "a\nb", "\u2028", "\ud800", "日本/語", "../escape", "/etc/passwd", "C:\\x", "a//b", ".",
    "x" * 300, "x" * 70_000, "1" * 64, [], {}, [[]], [None], [2] * 3000, ["B", "S"], {"": {}},
]  # fmt: skip


def pick(tree: Json, chance: random.Random) -> Json:
    """An object or list that is not empty: any depth is as likely as any other."""
    found = tree
    while True:
        below = [c for c in values_of(found) if isinstance(c, (dict, list)) and c]
        if not below or chance.random() < 0.2:
            return found
        found = chance.choice(below)


def values_of(container: Json) -> list[Json]:
    return list(container.values()) if isinstance(container, dict) else container


def keys_of(container: Json) -> list[Any]:
    return list(container) if isinstance(container, dict) else list(range(len(container)))


def mutate(tree: Json, chance: random.Random) -> None:
    """Change one thing somewhere."""
    container = pick(tree, chance)
    key = chance.choice(keys_of(container))
    other = chance.choice(keys_of(container))
    kind = chance.randrange(8)
    if kind == 0:
        del container[key]
    elif kind == 1:
        container[key] = chance.choice(STRANGE)
    elif kind == 2:
        container[key], container[other] = container[other], container[key]
    elif kind == 3:
        donor = pick(tree, chance)
        container[key] = copy.deepcopy(donor[chance.choice(keys_of(donor))])
    elif kind == 4 and isinstance(container, list):
        container.insert(other, container[key])
    elif kind == 5 and isinstance(container, list):
        container.reverse()
    elif isinstance(container, dict) and kind in (4, 5):  # a name added, or another name
        value = container[key] if kind == 4 else container.pop(key)
        container[str(chance.choice(STRANGE))] = value
    elif kind == 6:
        value = container[key]
        container[key] = value + chance.choice([-1, 1]) if isinstance(value, int) else [value]
    else:
        deep: Json = chance.choice(STRANGE)
        for _ in range(chance.choice([3, 100, 400])):
            deep = [deep]
        container[key] = deep


def mangle(text: bytes, chance: random.Random) -> bytes:
    """Change the text itself."""
    content = bytearray(text)
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(content))
        match chance.randrange(4):
            case 0:
                content[place] = chance.randrange(256)
            case 1:
                content[place] ^= 1 << chance.randrange(8)
            case 2:
                del content[place : place + chance.randint(1, 40)]
            case _:  # mostly names that stand twice
                content[place:place] = content[place : place + chance.randint(1, 400)]
    return bytes(content)


# --- safetensors ---------------------------------------------------------------------------------

NUMBERS: list[Json] = [
    0, 1, -1, 2, 3, 4, 8, 32, 96, 1.0, 0.5, True, None, "1", [], 2**31 - 1, 2**31, 2**32, 2**63,
    2**64, -(2**63), 10**30, 1e308, float("nan"),
]  # fmt: skip
TYPES: list[Json] = ["F32", "I32", "U32", "BF16", "F16", "F64", "U8", "BOOL", "C64", "F4", "", 5]


def mutate_header(header: dict[str, Any], room: int, chance: random.Random) -> None:
    """Change one thing of one tensor, or its name."""
    whole = [key for key, entry in header.items() if key != "__metadata__" and len(entry) == 3]
    name, other = chance.sample(whole, 2)
    entry = header[name]
    match chance.randrange(9):
        case 0:
            entry["dtype"] = chance.choice(TYPES)
        case 1:
            at = chance.randrange(2)
            near = [0, 1, -1, 4, -4, room, room - 4, -room]
            entry["data_offsets"][at] += chance.choice(near)
        case 2:
            entry["data_offsets"][chance.randrange(2)] = chance.choice(NUMBERS)
        case 3:
            entry["data_offsets"] = list(header[other]["data_offsets"])
        case 4:
            entry["shape"][chance.randrange(len(entry["shape"]))] = chance.choice(NUMBERS)
        case 5:
            entry["shape"] = chance.choice([[], [0], entry["shape"][::-1], [*entry["shape"], 1], 1])
        case 6:
            del entry[chance.choice(list(entry))]
        case 7:
            header[str(chance.choice(STRANGE))] = header.pop(name)
        case _:
            header[name] = chance.choice(STRANGE)


def mutate_file(content: bytes, chance: random.Random) -> bytes:
    """Change the header of a safetensors file, or its length, or how many bytes follow it."""
    length = int.from_bytes(content[:8], "little")
    raw, data = content[8 : 8 + length], content[8 + length :]
    match chance.randrange(10):
        case 0 | 1 | 2 | 3 | 4 | 5:
            header = json.loads(raw)
            mutate_header(header, len(data), chance)
            raw = json.dumps(header).encode()
        case 6 | 7:
            raw = mangle(raw, chance)
        case 8:
            metadata = json.dumps(chance.choice([*STRANGE, {"a": "b"}, {"a": 1}, {"a": {}}]))
            raw = raw.replace(b"{", b'{"__metadata__":' + metadata.encode() + b",", 1)
            raw = raw.replace(b'"__metadata__":{"format":"mlx"},', b"", chance.randrange(2))
        case _:
            data = data[: -chance.randint(1, 40)] if chance.randrange(2) else data + bytes(4)
    if chance.randrange(12) == 0:
        length = chance.choice([0, 1, len(raw) - 1, len(raw) + 1, 2**31, 2**63, 2**64 - 1])
        return length.to_bytes(8, "little") + raw + data
    return len(raw).to_bytes(8, "little") + raw + data
