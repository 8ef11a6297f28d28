"""A bundle back to the model that it was exported from, to trace it once more."""

from __future__ import annotations

from pathlib import Path

from funcrt import models
from funcrt.bundle.format import files
from funcrt.bundle.format.manifest import Manifest, Target, describe_arrays
from funcrt.bundle.weights import Weights, as_stored, load_stored, read_weights
from funcrt.errors import BundleError, ConfigError
from funcrt.model import Model
from funcrt.params import choose_dtype, fingerprint
from funcrt.text import Tokenizer


def rebuild(
    folder: Path, manifest: Manifest, dtype: str | None, params: Weights | None = None
) -> Model:
    """The model of a bundle, whose files are checked first.

    Args:
        folder: of the bundle.
        manifest: of the bundle.
        dtype: compute dtype; None chooses by the weights and the device.
        params: weights of a bundle without any, the ones that it was exported with.

    Raises:
        BundleError: files are damaged, weights are missing or others, or the model's code is not
            part of this funcrt.
    """
    if manifest.family is None or manifest.family not in models.FAMILIES:
        made_by = sorted({target.producer["mlx"] for target in manifest.targets.values()})
        raise BundleError(
            f"{folder}: the code of its model is not part of this funcrt, so it cannot be exported "
            f"from here: pip install mlx=={made_by[-1]}, or export it again from its checkpoint"
        )
    files.check_files(folder, manifest)
    if params is not None:
        specs = manifest.params.stored
        stored = as_stored(read_weights(params), specs)
        stored = {spec.name: stored[spec.name] for spec in specs if spec.name in stored}
    elif manifest.params.files:
        stored = load_stored(folder, manifest)
    else:
        raise BundleError(f"{folder} was exported without weights: give some (--params FILE)")
    values = {**manifest.model, "dtype": dtype or choose_dtype(stored, None)}
    try:
        config = models.FAMILIES[manifest.family].config.from_dict(values)
    except (ConfigError, OverflowError) as error:  # of numbers beyond any use
        raise BundleError(
            f"{folder}: this funcrt reads its config otherwise: {error}; "
            "export it again from its checkpoint"
        ) from None
    text = "tokenizer.json" in manifest.files
    model = Model(config, stored, Tokenizer.from_folder(folder) if text else None)
    given = {**manifest.model, "dtype": None, "architectures": None}
    # Golden calls of other weights would speak of another model than the bundle's.
    if params is not None and fingerprint(model.params, given) != manifest.fingerprint:
        raise BundleError(
            f"{folder} was exported from another model: the weights that were given are not those "
            "that it was exported with; give these, and others when it is loaded"
        )
    return model


def check_same(folder: Path, manifest: Manifest, model: Model, old: Target | None) -> None:
    """Raise BundleError unless `model` is the one that was exported, computed in the same dtype."""
    expected = [("fingerprint", manifest.fingerprint, model.fingerprint)]
    if old is not None:
        expected.append(("dtype", old.dtype, model.config.dtype))
    for what, wanted, got in expected:
        if wanted != got:
            raise BundleError(
                f"{folder} was exported from another model: expected {what} {wanted}, got {got}; "
                "export this one to a folder of its own"
            )
    if describe_arrays(model.params) != manifest.params.stored:
        raise BundleError(f"{folder}: its weights are stored otherwise than those of this model")
