"""What is known of a bundle before anything runs: sizes, traffic and memory of every function.

All of it comes from the manifest. Bytes are those of arrays; what a call takes besides is estimated
as `funcrt.footprint` says.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from funcrt.buckets import Bucket
from funcrt.bundle.format.checks import check_digest, read_manifest
from funcrt.bundle.format.manifest import PREPARE, ArraySpec, FunctionEntry, Manifest, Target
from funcrt.cache import CacheSpec
from funcrt.cache.layout import DTYPES, state_bytes
from funcrt.errors import ConfigError
from funcrt.footprint import Footprint
from funcrt.steps import STEPS

_ITEM_BYTES = {"bool": 1, "uint8": 1, **{name: dtype.size for name, dtype in DTYPES.items()}}
# Tables of which a call reads one row for each token, unless they are the head's matrix as well.
_LOOKED_UP = ("embed_tokens", "embed_in", "embeddings", "wte")
# Parts of the names of matrices that hold those of all experts, one below the other.
_EXPERTS = (".experts.", ".input_linear.", ".output_linear.")


@dataclass(frozen=True)
class FunctionFacts:
    """What one call of a function takes, in bytes.

    Attributes:
        device: class that the graph runs on.
        entry: of the manifest.
        reads: of weights, state and inputs, at most: of a state every slot counts, and experts do
            as if each token of the call chose others.
        cache: of the state that it is given.
        peak: of all arrays that live at once: the weights, the state, what the call is given and
            what it makes. None for a model whose config does not tell, or another's function.
        file_bytes: of the graph.
    """

    device: str
    entry: FunctionEntry
    reads: int
    cache: int
    peak: int | None
    file_bytes: int

    @property
    def bucket(self) -> Bucket:
        """The shape; all zeros where there is none."""
        return self.entry.bucket or Bucket(0, 0, 0)


@dataclass(frozen=True)
class BucketMemory:
    """What one batch and capacity takes, in bytes, by what it is for; see `FunctionFacts.peak`.

    Attributes:
        batch: B.
        capacity: S.
        weights: prepared.
        state: the cache state.
        call: what the largest call takes besides.
        largest: its key.
    """

    batch: int
    capacity: int
    weights: int
    state: int
    call: int
    largest: str


@dataclass(frozen=True)
class TargetFacts:
    """One device class.

    Attributes:
        device: its name.
        target: of the manifest.
        weights: bytes of the prepared ones.
        functions: in the manifest's order.
        memory: by batch and capacity; empty where peaks are not known.
    """

    device: str
    target: Target
    weights: int
    functions: tuple[FunctionFacts, ...]
    memory: tuple[BucketMemory, ...]


@dataclass(frozen=True)
class BundleFacts:
    """A bundle.

    Attributes:
        folder: where it is.
        manifest: checked.
        digest: sha256 of the manifest.
        stored: bytes of the weights as stored, wherever they are.
        targets: by device class, in the manifest's order.
        damage: files that are missing or have another size; nothing is hashed.
    """

    folder: Path
    manifest: Manifest
    digest: str
    stored: int
    targets: tuple[TargetFacts, ...]
    damage: tuple[str, ...]

    @property
    def total(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.manifest.files.values())

    def find(self, device: str) -> TargetFacts:
        """The target of a device class, or the first one where it has none."""
        return next((t for t in self.targets if t.device == device), self.targets[0])


def know(folder: str | Path) -> BundleFacts:
    """Read a bundle's manifest and work out the rest; no other file is opened.

    Raises BundleError when the manifest is missing, damaged or contradicts itself.
    """
    folder = Path(folder)
    manifest, digest = read_manifest(folder)
    check_digest(folder, digest)
    targets = tuple(_know_target(d, target, manifest) for d, target in manifest.targets.items())
    stored = count_bytes(manifest.params.stored)
    return BundleFacts(folder, manifest, digest, stored, targets, _damage(folder, manifest))


def count_bytes(specs: Iterable[ArraySpec]) -> int:
    """Bytes of arrays."""
    return sum(math.prod(spec.shape) * _ITEM_BYTES.get(spec.dtype, 8) for spec in specs)


def _know_target(device: str, target: Target, manifest: Manifest) -> TargetFacts:
    weights = count_bytes(target.prepared)
    config = {**manifest.model, "dtype": target.dtype}
    try:
        footprint = Footprint.from_config(config, target.cache_spec, weights)
    except ConfigError:
        footprint = None
    functions = tuple(
        _know_function(device, entry, target, manifest, footprint) for entry in target.functions
    )
    memory = tuple(_know_memory(functions, weights)) if footprint else ()
    return TargetFacts(device, target, weights, functions, memory)


def _know_function(
    device: str,
    entry: FunctionEntry,
    target: Target,
    manifest: Manifest,
    footprint: Footprint | None,
) -> FunctionFacts:
    batch, tokens, capacity = entry.bucket or Bucket(0, 0, 0)
    cache = state_bytes(target.cache_spec, batch, capacity) if entry.state else 0
    inputs = count_bytes(entry.inputs)
    groups = {"stored": manifest.params.stored, "prepared": target.prepared}
    params = bytes_read(groups.get(entry.params, ()), manifest.model, batch * tokens)
    call = _bytes_of_call(entry, target, manifest, footprint)
    peak = None if call is None else count_bytes(target.prepared) + cache + inputs + call
    size = manifest.files[entry.file].size
    return FunctionFacts(device, entry, params + cache + inputs, cache, peak, size)


def _bytes_of_call(
    entry: FunctionEntry, target: Target, manifest: Manifest, footprint: Footprint | None
) -> int | None:
    """What a call makes, beside weights, state and inputs; None where that is not known."""
    if entry.name == PREPARE:
        # Those that are stored as they are prepared are the same arrays.
        kept = {(spec.name, spec.dtype) for spec in target.prepared}
        return count_bytes(s for s in manifest.params.stored if (s.name, s.dtype) not in kept)
    if entry.bucket is None or entry.name not in STEPS:
        return None
    if entry.grown is not None:
        return state_bytes(_with_slots(target.cache_spec), entry.bucket.batch, entry.grown)
    return None if footprint is None else footprint.call(*entry.bucket, entry.name)


def _with_slots(spec: CacheSpec) -> CacheSpec:
    """The arrays that growing copies."""
    return tuple(entry for entry in spec if "S" in entry.shape)


def bytes_read(specs: Iterable[ArraySpec], config: Mapping[str, Any], places: int) -> int:
    """At most how many bytes of weights a call of B x T = `places` tokens reads.

    `prepare`, which has no tokens, reads all of them.
    """
    total = sum(count_bytes([spec]) * _share_read(spec, config, places) for spec in specs)
    return round(total)


def _share_read(spec: ArraySpec, config: Mapping[str, Any], places: int) -> float:
    rows = spec.shape[0] if spec.shape else 1
    experts = config.get("num_experts")
    chosen = config.get("experts_per_token", config.get("num_chosen"))
    if (
        isinstance(experts, int)
        and isinstance(chosen, int)
        and experts > 0
        and rows % experts == 0
        and any(part in spec.name for part in _EXPERTS)
    ):
        rows_read = places * chosen * (rows // experts)
    elif (
        config.get("tie_word_embeddings") is False
        and spec.name.rsplit(".", maxsplit=1)[0].endswith(_LOOKED_UP)
        and rows == config.get("vocab_size")
    ):
        rows_read = places
    else:
        return 1.0
    return min(1.0, rows_read / rows) if places else 1.0


def _know_memory(functions: Iterable[FunctionFacts], weights: int) -> Iterable[BucketMemory]:
    """The largest call of every batch and capacity."""
    largest: dict[tuple[int, int], FunctionFacts] = {}
    for facts in functions:
        place = facts.bucket.batch, facts.bucket.capacity
        if facts.entry.state and facts.peak is not None:
            found = largest.setdefault(place, facts)
            if facts.peak > (found.peak or 0):
                largest[place] = facts
    for (batch, capacity), facts in sorted(largest.items()):
        call = (facts.peak or 0) - weights - facts.cache
        yield BucketMemory(batch, capacity, weights, facts.cache, call, facts.entry.key)


def _damage(folder: Path, manifest: Manifest) -> tuple[str, ...]:
    found = []
    for name, entry in manifest.files.items():
        try:
            size = (folder / name).stat().st_size
        except OSError:
            found.append(f"{name} is missing")
            continue
        if size != entry.size:
            found.append(f"{name} has {size} bytes instead of {entry.size}")
    return tuple(found)
