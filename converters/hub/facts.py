"""What the card of a model or bundle says of it: its shape, its packing, what was verified."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from funcrt.bundle.format.files import hash_file
from funcrt.bundle.format.manifest import CERTIFICATE, MANIFEST, ArraySpec, Manifest, Target
from funcrt.bundle.proof.certificate import load_certificate
from funcrt.errors import BundleError
from funcrt.packing import Quantization


def shape_facts(model: Mapping[str, Any], vocab_size: int, positions: int) -> dict[str, str]:
    """What is the same for a model and its bundle, from the values of a config."""
    architecture = str(model.get("model_type", "unknown"))
    if "num_layers" in model:
        architecture += f", {model['num_layers']} layers"
    return {
        "Architecture": architecture,
        "Vocabulary": str(vocab_size),
        "Trained for": f"{positions} tokens",
    }


def packing_of_bundle(stored: Sequence[ArraySpec], hidden: object) -> str | None:
    """How most matrices of a bundle are packed, for people; None if they are dense.

    A manifest has no column counts before packing, but most matrices have `hidden` of them.
    """
    shapes = {spec.name: spec for spec in stored}
    packed = [name.removesuffix(".scales") for name in shapes if name.endswith(".scales")]
    if not packed:
        return None
    found: Counter[Quantization] = Counter()
    for base in packed:
        scales, weight = shapes[f"{base}.scales"], shapes.get(f"{base}.weight")
        if weight is None or not isinstance(hidden, int) or hidden % scales.shape[-1]:
            continue
        bits, group = weight.shape[-1] * 32 // hidden, hidden // scales.shape[-1]
        mode = "affine"
        if scales.dtype == "uint8":
            mode = "nvfp4" if group == 16 else f"mxfp{bits}"
        if bits in (2, 3, 4, 5, 6, 8) and group in (16, 32, 64, 128):
            found[Quantization(bits, group, mode)] += 1
    return describe_packing(Counter(dict(found.most_common(1)))) or "packed"


def describe_packing(found: Mapping[Quantization, int]) -> str | None:
    """Packings and how many matrices have each, for people; None without any."""
    if not found:
        return None
    ordered = sorted(found, key=lambda packing: -found[packing])
    parts = [f"{p.bits} bit ({p.mode}, groups of {p.group_size})" for p in ordered]
    return parts[0] if len(parts) == 1 else f"{parts[0]}; some matrices {', '.join(parts[1:])}"


def read_certificate(folder: Path) -> str | None:
    """What `certificate.json` of a folder says; None without one.

    Raises BundleError if it is damaged, belongs to another manifest, or says that a check failed.
    """
    path, again = folder / CERTIFICATE, f"run `funcrt verify {folder}` again"
    if not path.is_file():
        return None
    try:
        certificate = load_certificate(path)
    except BundleError as error:
        raise BundleError(f"{error}; {again}") from None
    if certificate.manifest != hash_file(folder / MANIFEST):
        raise BundleError(f"{path} belongs to another {MANIFEST} than the one beside it; {again}")
    checks = certificate.checks
    if not certificate.passed:
        raise BundleError(
            f"{path}: {len(certificate.failed)} of {len(checks)} checks failed; {again}"
        )
    text = (
        f"`funcrt verify` passed all {len(checks)} checks on {certificate.device} with MLX "
        f"{certificate.mlx} (`{CERTIFICATE}`)"
    )
    errors = [check for check in checks if check.check == "error"]
    worst = max(errors, key=lambda check: check.measured, default=None)
    if worst is not None:
        text += (
            f"; the largest error is {worst.measured:.1e} of the largest logit, in "
            f"`{worst.function}`, of {worst.allowed:.1e} allowed"
        )
    return f"{text}."


def proof_of_export(manifest: Manifest) -> str:
    """What an export has verified before a bundle appeared."""
    targets = manifest.targets.values()
    calls = [call for target in targets for case in target.golden.cases for call in case.calls]
    ties = "" if all(target.dtype == "float32" for target in targets) else " but for near ties"
    return (
        f"When it was exported, another process repeated {len(calls)} recorded calls, every "
        "function among them, and compared them with a float32 reference: tokens were equal"
        f"{ties}, and errors at most {max((call.allowed for call in calls), default=0.0):.1e} of "
        "the largest logit. `funcrt verify` repeats this on your machine."
    )


def by_target(manifest: Manifest, show: Callable[[Target], str]) -> str:
    """What `show` says of every device class, once where it is the same."""
    said = {device: show(target) for device, target in manifest.targets.items()}
    if len(set(said.values())) == 1:
        return next(iter(said.values()))
    return "; ".join(f"{text} ({device})" for device, text in said.items())


def listed(numbers: Sequence[int]) -> str:
    """`1, 4`."""
    return ", ".join(map(str, numbers))
