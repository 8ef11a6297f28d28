"""What `funcrt push` sends: a folder, checked as when it is loaded, and described for its card."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import converters
from converters import huggingface
from converters.hub.card import is_ours
from converters.hub.facts import (
    by_target,
    describe_packing,
    listed,
    packing_of_bundle,
    proof_of_export,
    read_certificate,
    shape_facts,
)
from funcrt.bundle import load_manifest
from funcrt.bundle.format.files import check_files
from funcrt.bundle.format.manifest import CERTIFICATE, DIGEST, FORMAT, MANIFEST, Manifest, Target
from funcrt.errors import SourceError
from funcrt.params import packings
from funcrt.storage import load_json

BUNDLE, MODEL = "bundle", "model"
CARD = "README.md"
DOCUMENTS = (CARD, CERTIFICATE, "LICENSE*", "NOTICE*")
_MODEL_FILES = ("config.json", "*.jinja", "tokenizer*", "special_tokens_map.json",
                "generation_config.json", "vocab.*", "merges.txt", "added_tokens.json")  # fmt: skip
_LARGEST_FILE = 50_000_000_000  # https://huggingface.co/docs/hub/storage-limits


@dataclass(frozen=True)
class Parcel:
    """A sound model folder or bundle.

    Attributes:
        folder: where it is.
        kind: `BUNDLE` or `MODEL`.
        files: names to send, with their sizes in bytes; the card is not among them.
        left_out: names that stay here because nothing that reads such a folder knows them.
        model_type: of the config.
        facts: rows of the card's table: what, and its value.
        packing: how its matrices are packed, for people; None if they are dense.
        certificate: sentences about what was verified, and when.
        manifest: of a bundle.
        readme: what a person wrote into its README.md; None if nobody did.
    """

    folder: Path
    kind: str
    files: Mapping[str, int]
    left_out: tuple[str, ...]
    model_type: str
    facts: Mapping[str, str]
    packing: str | None
    certificate: str
    manifest: Manifest | None
    readme: str | None

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(self.files.values())


def survey(folder: Path, ignore: Collection[str] = ()) -> Parcel:
    """Check a folder and describe it. Nothing is sent.

    A bundle's files are hashed; of a model, everything but the values of its weights is read, with
    `ignore` as in `converters.load`.

    Raises:
        BundleError: a damaged bundle, or one whose certificate says that a check failed.
        SourceError: neither of the two, a damaged model, or a file too large for the hub.
        ConfigError, ParamsError, TextError, ModuleError: a model that cannot be loaded.
    """
    if not folder.is_dir():
        raise SourceError(f"{folder} is not a folder: pass a converted model or a bundle")
    if is_bundle(folder):
        parcel = _survey_bundle(folder)
    elif (folder / "config.json").is_file():
        parcel = _survey_model(folder, ignore)
    else:
        raise SourceError(
            f"{folder} has neither {MANIFEST} nor config.json: pass a folder that `funcrt convert` "
            "or `funcrt export` wrote"
        )
    for name, size in parcel.files.items():
        if size > _LARGEST_FILE:
            raise SourceError(
                f"{folder / name} has {size / 1e9:.0f} GB and the hub takes "
                f"{_LARGEST_FILE / 1e9:.0f} GB a file: `funcrt convert` writes smaller ones"
            )
    return parcel


def is_bundle(folder: Path) -> bool:
    """Whether a folder says that it is a bundle, damaged perhaps."""
    try:
        return load_json(folder / MANIFEST).get("format") == FORMAT
    except SourceError:
        return (folder / DIGEST).is_file()


def _survey_bundle(folder: Path) -> Parcel:
    manifest = load_manifest(folder)
    check_files(folder, manifest)
    names = [MANIFEST, DIGEST, *manifest.files, *_matching(folder, DOCUMENTS)]
    model = manifest.model
    packing = packing_of_bundle(manifest.params.stored, model.get("hidden_size"))
    return Parcel(
        folder=folder,
        kind=BUNDLE,
        files=_sizes(folder, names),
        left_out=_others(folder, names),
        model_type=str(model.get("model_type", "unknown")),
        facts={
            **shape_facts(model, manifest.vocab_size, manifest.max_positions),
            "Computes in": by_target(manifest, lambda target: target.dtype),
            "Batch": by_target(manifest, lambda target: listed(target.plan.batch)),
            "Tokens per call": by_target(manifest, lambda target: listed(target.plan.tokens)),
            "Capacity": by_target(manifest, lambda target: listed(target.plan.capacity)),
            "Functions": by_target(manifest, lambda target: str(len(target.functions))),
            "Device class": ", ".join(manifest.targets),
            "Made by": by_target(manifest, _versions),
        },
        packing=packing,
        certificate=read_certificate(folder) or proof_of_export(manifest),
        manifest=manifest,
        readme=_readme(folder),
    )


def _versions(target: Target) -> str:
    names = ("funcrt", "mlx")
    return ", ".join(f"{n} {target.producer[n]}" for n in names if n in target.producer)


def _survey_model(folder: Path, ignore: Collection[str]) -> Parcel:
    model = converters.load(folder, ignore=ignore, lazy=True)
    packed = packings(model.spec, model.params)
    config = load_json(folder / "config.json")
    values = model.config_values
    names = [*_weights(folder), *_matching(folder, (*_MODEL_FILES, *DOCUMENTS))]
    made_by = config.get("funcrt_version")
    dtypes = Counter(
        str(array.dtype).rpartition(".")[2]
        for name, array in model.params.items()
        if name.rpartition(".")[0] not in packed
    )
    return Parcel(
        folder=folder,
        kind=MODEL,
        files=_sizes(folder, names),
        left_out=_others(folder, names),
        model_type=model.config.model_type,
        facts={
            **shape_facts(values, model.vocab_size, model.config.max_positions),
            "Weights that are not packed": ", ".join(sorted(dtypes)) or "none",
            **({"Made by": f"funcrt {made_by}"} if made_by else {}),
        },
        packing=describe_packing(Counter(packed.values())),
        certificate=read_certificate(folder)
        or "Names, shapes and types of all weights were compared with the config when this was "
        "pushed. Nothing was run.",
        manifest=None,
        readme=_readme(folder),
    )


def _weights(folder: Path) -> list[str]:
    """The files that a model's weights are read from."""
    if (folder / huggingface.SINGLE).is_file():
        return [huggingface.SINGLE]
    if (folder / huggingface.INDEX).is_file():
        index = load_json(folder / huggingface.INDEX)
        return [huggingface.INDEX, *sorted(set(index["weight_map"].values()))]
    return _matching(folder, ["*.safetensors"])


def _readme(folder: Path) -> str | None:
    try:
        text = (folder / CARD).read_text("utf-8")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise SourceError(f"cannot read {folder / CARD}: {error}") from None
    return None if is_ours(text) else text


def _matching(folder: Path, patterns: Sequence[str]) -> list[str]:
    return sorted(
        path.name
        for path in folder.iterdir()
        if path.is_file() and any(fnmatch(path.name, pattern) for pattern in patterns)
    )


def _sizes(folder: Path, names: Sequence[str]) -> dict[str, int]:
    return {name: (folder / name).stat().st_size for name in names if name != CARD}


def _others(folder: Path, names: Sequence[str]) -> tuple[str, ...]:
    """Files that are not sent, but for hidden ones."""
    paths = (path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file())
    shown = (path for path in paths if not any(part.startswith(".") for part in path.parts))
    return tuple(path.as_posix() for path in shown if path.as_posix() not in (*names, CARD))
