"""What is said of a bundle, in the terminal and on a page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from funcrt.cli import terminal
from funcrt.sampling import SETTING_INPUTS

if TYPE_CHECKING:
    from funcrt.bundle.facts import BundleFacts, FunctionFacts, TargetFacts
    from funcrt.bundle.format.manifest import ArraySpec
    from funcrt.bundle.proof.certificate import Certificate


def header(facts: BundleFacts, certificate: Certificate | None) -> Iterator[tuple[str, str]]:
    """What holds for the whole bundle, as titles and texts."""
    manifest = facts.manifest
    model = manifest.model
    layers = f", {model['num_layers']} layers" if "num_layers" in model else ""
    files = ", ".join(manifest.params.files) or "not in the bundle"
    yield (
        str(facts.folder),
        f"{model.get('model_type', manifest.family or 'model')}{layers}, "
        f"vocabulary {manifest.vocab_size}, {manifest.max_positions} positions, "
        f"{terminal.size(facts.total)}",
    )
    yield (
        "weights",
        f"{terminal.size(facts.stored)} in {len(manifest.params.stored)} arrays, {files}",
    )
    yield "digest", facts.digest
    yield "certificate", certificate_line(certificate)


def certificate_line(certificate: Certificate | None) -> str:
    """Whether the bundle was verified, where and when."""
    if certificate is None:
        return "none for these files; `funcrt verify` makes one"
    failed, count = len(certificate.failed), len(certificate.checks)
    verdict = f"passed {count} checks"
    if not certificate.passed:
        verdict = f"FAILED {failed} of {count} checks"
    return (
        f"{verdict} on {certificate.device} ({certificate.target}), "
        f"mlx {certificate.mlx}, {certificate.date[:10]}"
    )


def target_header(facts: TargetFacts) -> Iterator[tuple[str, str]]:
    """What holds for one device class, as titles and texts."""
    target = facts.target
    made = target.producer
    where = ", ".join(made[name] for name in ("device", "platform") if name in made)
    yield (
        facts.device,
        f"{target.dtype}, weights {terminal.size(facts.weights)} when prepared, "
        f"{len(facts.functions)} functions",
    )
    yield (
        "made by",
        f"funcrt {made.get('funcrt', '?')} and mlx {made['mlx']} on {where or 'some machine'}",
    )
    plan = target.plan
    sizes = ((name, getattr(plan, name)) for name in ("batch", "tokens", "capacity"))
    yield "plan", "; ".join(f"{name} {', '.join(map(str, values))}" for name, values in sizes)
    kinds = sorted({array.kind for array in target.cache} - {"row"})
    yield "cache", ", ".join(kinds) or "nothing but lengths"


def by_name(functions: Iterable[FunctionFacts]) -> dict[str, list[FunctionFacts]]:
    """The functions that differ in their shapes only."""
    kinds: dict[str, list[FunctionFacts]] = {}
    for facts in functions:
        kinds.setdefault(facts.entry.name, []).append(facts)
    return kinds


def takes(same: Sequence[FunctionFacts]) -> str:
    """What functions of one name take: `params, tokens, valid [1|4,64], state`."""
    entry = same[0].entry
    group = {"none": [], "prepared": ["params"]}.get(entry.params, [f"{entry.params} params"])
    inputs = _short([f.entry.inputs for f in same])
    return ", ".join([*group, *inputs, *["state"] * entry.state]) or "-"


def returns(same: Sequence[FunctionFacts]) -> str:
    """What they return: `logits [1|4,49152], state`."""
    entry = same[0].entry
    made = _short([f.entry.outputs for f in same])
    made = ["prepared params"] if entry.params == "stored" else made
    sizes = _listed(f.entry.grown for f in same)
    state = "state" if entry.grown is None else f"state of {sizes} slots"
    return ", ".join([*made, *[state] * entry.state]) or "-"


def cache_size(facts: FunctionFacts) -> str:
    """Bytes of the state that a function is given; "-" where it takes none."""
    return terminal.size(facts.cache) if facts.entry.state else "-"


def peak_size(facts: FunctionFacts) -> str:
    """Bytes at once; "?" where they are not known."""
    return "?" if facts.peak is None else terminal.size(facts.peak)


def _short(variants: Sequence[Sequence[ArraySpec]]) -> list[str]:
    """Names of arrays with their shape in every variant.

    A shape is written once for neighbours that share it, and all settings are one word.
    """
    names = tuple(spec.name for spec in variants[0])
    at = len(names) - len(SETTING_INPUTS)
    if names[max(at, 0) :] == tuple(SETTING_INPUTS):
        return [*_short([specs[:at] for specs in variants]), "settings"]
    shapes = [
        ",".join(map(_listed, zip(*(spec.shape for spec in specs), strict=True)))
        for specs in zip(*variants, strict=True)
    ]
    return [
        f"{', '.join(name for name, _ in group)} [{shape}]"
        for shape, group in groupby(zip(names, shapes, strict=True), key=lambda pair: pair[1])
    ]


def _listed(sizes: Iterable[int | None]) -> str:
    """The different ones in order: `4|64`."""
    return "|".join(map(str, sorted({size for size in sizes if size is not None})))
