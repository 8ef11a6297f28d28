"""What can become of a checkpoint, found out from its config alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from converters import hub, huggingface, multimodal, packed_sizes, published
from converters.functional import functionalize, mlx_lm_source
from converters.functional.family import ModuleFamily
from converters.functional.probe import Blocker, inspect_graph
from funcrt import models
from funcrt.cache import FULL
from funcrt.errors import FuncrtError, SourceError
from funcrt.model import Model
from funcrt.storage import load_json

import mlx.core as mx

DEVICES = ("cpu", "cuda", "metal")
_ONLY_WIDE = {"GatherMM"}  # on a CPU, MLX computes them in float32 only


@dataclass(frozen=True)
class Diagnosis:
    """What is known of a checkpoint before its weights are read.

    Attributes:
        source: as it was named.
        model_type: of its config.
        via: `funcrt.models.NAME` or `mlx_lm.models.NAME`; empty where nothing reads it.
        functional: whether it becomes a pure function.
        exportable: whether that exports.
        devices: on which device classes it runs, of those that are known.
        notes: what holds on some of them only.
        caches: kinds of cache.
        by_token: prompts run token by token, since recurrent layers do not leave padding out.
        params: how many arrays, and their bytes as the config has them.
        blockers: primitives that do not export, the layer that has them, and what to do.
        reason: why not, or empty.
    """

    source: str
    model_type: str
    via: str = ""
    functional: bool = False
    exportable: bool = False
    devices: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    caches: tuple[str, ...] = ()
    by_token: bool = False
    params: tuple[int, int] = (0, 0)
    blockers: tuple[Blocker, ...] = ()
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def diagnose(source: str | Path, via: str | None = None) -> Diagnosis:
    """Say what can become of a checkpoint; of the hub, only its small files are downloaded.

    Args:
        source: a Hugging Face folder or a hub id.
        via: as of `converters.load`.

    Raises:
        SourceError: no config.json there.
        ValueError: an unknown `via`.
    """
    if via not in (None, "mlx_lm"):
        raise ValueError(f"via: expected 'mlx_lm' or None, got {via!r}")
    config = read_config(source)
    found = Diagnosis(str(source), str(config.get("model_type", "")))
    try:
        model, made_by = _make(config, via)
    except FuncrtError as error:
        return replace(found, reason=str(error))
    graph = inspect_graph(model)
    spec = [entry for entry in model.cache_spec(FULL) if entry.kind != "row"]
    # Families here widen what they give to such products.
    narrow = isinstance(model.family, ModuleFamily) and model.config.dtype != "float32"
    notes: tuple[str, ...] = ()
    if narrow and _ONLY_WIDE & graph.primitives.keys():
        notes = ("on a cpu in float32 only (dtype='float32'): MLX has no 16-bit GatherMM there",)
    return replace(
        found,
        via=made_by,
        functional=True,
        exportable=not graph.blockers,
        devices=("metal",) if graph.needs_metal else DEVICES,
        notes=notes,
        caches=tuple(Counter(entry.kind for entry in spec)),
        by_token=isinstance(model.family, ModuleFamily) and model.family.by_token,
        params=(len(model.params), sum(array.nbytes for array in model.params.values())),
        blockers=graph.blockers,
        reason="" if not graph.blockers else "; ".join(b.suggestion for b in graph.blockers),
    )


def read_config(source: str | Path) -> dict[str, Any]:
    """The config.json of a folder or of a repository. Raises SourceError."""
    path = Path(source).expanduser()
    if not path.exists() and isinstance(source, str) and hub.is_hub_id(source):
        path = hub.download(source, hub.SMALL)
    if path.is_file():
        raise SourceError(
            f"{source} is a file, and what can become of a model is found from a "
            f"{huggingface.CONFIG} only: GGUF files are read by the families here "
            f"({', '.join(sorted(models.FAMILIES))}), so convert it to see"
        )
    if not (path / huggingface.CONFIG).is_file():
        raise SourceError(
            f"{source} has no {huggingface.CONFIG}: pass a Hugging Face folder or a hub id"
        )
    return load_json(path / huggingface.CONFIG)


def _make(config: Mapping[str, Any], via: str | None) -> tuple[Model, str]:
    """A model of the right shapes, whose weights are never computed, and what it is made by."""
    part = multimodal.text_part(config)
    text = config if part is None else part.config
    model_type = mlx_lm_source.model_type_of(text)
    if model_type in models.FAMILIES and via is None:
        with mlx_lm_source.suggesting_module(config):
            return _make_by_hand(text, model_type, _dtype(config))
    mlx_lm_source.check_has_module(config)
    module = mlx_lm_source.make_module(config)
    module.set_dtype(getattr(mx, _dtype(config)))
    return functionalize(module, config), type(module).__module__


def _make_by_hand(config: Mapping[str, Any], model_type: str, dtype: str) -> tuple[Model, str]:
    settled = models.read_config(published.without_settings(config), dtype)
    spec = models.family(model_type).param_spec(settled)
    params = packed_sizes.zeros(config, spec, getattr(mx, settled.dtype))
    return Model(settled, params), f"funcrt.models.{models.FAMILIES[model_type].name}"


def _dtype(config: Mapping[str, Any]) -> str:
    text = config.get("text_config")
    settings = {**(text if isinstance(text, Mapping) else {}), **config}
    name = str(settings.get("dtype") or settings.get("torch_dtype") or "float32")
    return name if name in ("float32", "float16", "bfloat16") else "float32"
