"""The model card that `funcrt push` writes: README.md with a head of YAML that the hub reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from converters.hub.parcel import Parcel

_MARK = "<!-- This card was written by `funcrt push`, which replaces it."
_ADVICE = "Delete this line to keep what you write here. -->"


@dataclass(frozen=True)
class Origin:
    """Where a model comes from, as far as somebody said so.

    Attributes:
        base_model: hub id of the model that it was made from.
        license: identifier that the hub knows (`apache-2.0`, `other` ...).
        license_name, license_link: of a license that the hub does not know.
    """

    base_model: str | None = None
    license: str | None = None
    license_name: str | None = None
    license_link: str | None = None


def is_ours(text: str) -> bool:
    """Whether a README.md is one that `make_card` wrote and nobody claimed since."""
    return _MARK in text


def make_card(parcel: Parcel, repo: str, origin: Origin) -> str:
    """The README.md of a repository: what it holds, what was verified, licence, how to run it."""
    from huggingface_hub import ModelCardData

    is_bundle = parcel.kind == "bundle"
    data = ModelCardData(
        base_model=origin.base_model,
        base_model_relation="quantized" if origin.base_model and parcel.packing else None,
        license=origin.license,
        license_name=origin.license_name,
        license_link=origin.license_link,
        library_name="funcrt" if is_bundle else "mlx",
        pipeline_tag="text-generation",
        tags=["mlx", "funcrt", *(["funcrt-bundle"] if is_bundle else [])],
    )
    what = (
        "A language model exported by funcrt as compiled functions: no Python code of the model is "
        "needed to run it."
        if is_bundle
        else "A language model that funcrt and mlx-lm read."
    )
    sections = [
        f"# {repo.partition('/')[2]}",
        what,
        _table(_rows(parcel, origin)),
        f"## Certificate\n\n{parcel.certificate}",
        f"## Running it\n\n{_running(parcel, repo)}",
    ]
    body = "\n\n".join(sections)
    return f"---\n{data.to_yaml()}\n---\n\n{_MARK} {_ADVICE}\n\n{body.rstrip()}\n"


def _rows(parcel: Parcel, origin: Origin) -> dict[str, str]:
    base, terms = origin.base_model, origin.license_name or origin.license
    if terms and origin.license_link:
        terms = f"[{terms}]({origin.license_link})"
    return {
        "Base model": f"[{base}](https://huggingface.co/{base})" if base else "not stated",
        "Licence": terms or "not stated: ask the author before you use it",
        "Library": "funcrt" if parcel.kind == "bundle" else "funcrt, mlx-lm",
        "Quantization": parcel.packing or "none",
        **parcel.facts,
        "Size": f"{parcel.nbytes / 1e6:,.1f} MB",
    }


def _table(rows: Mapping[str, str]) -> str:
    lines = [f"| {name} | {value.replace('|', chr(92) + '|')} |" for name, value in rows.items()]
    return "\n".join(["| | |", "|---|---|", *lines])


def _running(parcel: Parcel, repo: str) -> str:
    return (_BUNDLE if parcel.kind == "bundle" else _MODEL).format(
        repo=repo,
        folder=f"{repo.partition('/')[2].removesuffix('.funcrt')}.funcrt",
        kind=parcel.model_type,
        device=next(iter(parcel.manifest.targets)) if parcel.manifest else "",
    )


_BUNDLE = """\
With funcrt:

    funcrt pull {repo} {folder}
    funcrt generate {folder} --prompt "Hello"
    funcrt verify {folder}

or in Python:

```python
import funcrt

bundle = funcrt.load_bundle("{folder}")
logits, cache = bundle([[1, 2, 3]])
```

With plain MLX (of the version in the table), after `hf download {repo} --local-dir {folder}`:

```python
import json
from pathlib import Path

import mlx.core as mx

folder = Path("{folder}")
manifest = json.loads((folder / "manifest.json").read_text())
target = manifest["targets"]["{device}"]  # the device class that MLX runs on


def find(name):
    entry = next(one for one in target["functions"] if one["name"] == name)
    return entry, mx.import_function(str(folder / entry["file"]))


stored = {{}}
for file in manifest["params"]["files"]:
    stored |= mx.load(str(folder / file))
params = find("prepare")[1](*[stored[one["name"]] for one in manifest["params"]["stored"]])

entry, prefill = find("prefill")
size = {{"B": entry["bucket"]["batch"], "S": entry["bucket"]["capacity"]}}
state = [
    mx.full([size.get(n, n) for n in one["shape"]], one["fill"], getattr(mx, one["dtype"]))
    for one in target["cache"]
]
width = entry["bucket"]["tokens"]
prompt = [1, 2, 3][:width]  # ids, and then padding
padding = width - len(prompt)
tokens = mx.array([prompt + [0] * padding] * size["B"], mx.int32)
valid = mx.array([[True] * len(prompt) + [False] * padding] * size["B"])
logits, *state = prefill(*params, tokens, valid, *state)  # [B, V] of each row's last token
```

`manifest.json` says what every function takes and returns, for any language that MLX has."""

_MODEL = """\
With funcrt:

    funcrt generate {repo} --prompt "Hello"
    funcrt pull {repo} model
    funcrt export model {folder}

or in Python:

```python
from converters import load

model = load("{repo}")
logits, cache = model([[1, 2, 3]])
```

With plain MLX, after `hf download {repo} --local-dir model`, the weights are a dict of arrays:

```python
from pathlib import Path

import mlx.core as mx

params = {{}}
for file in Path("model").glob("*.safetensors"):
    params |= mx.load(str(file))
```

and mlx-lm, if it has a module for `{kind}`, runs it as it is:

    mlx_lm.generate --model {repo} --prompt "Hello"
"""
