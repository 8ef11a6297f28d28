"""`funcrt verify`."""

from __future__ import annotations

from funcrt.cli import options as o
from funcrt.cli import sources, terminal

import typer


def verify(
    bundle: o.BundleFolder,
    params: o.WeightFiles = None,
    expected_digest: o.ExpectedDigest = None,
    json_: o.Json = False,
) -> None:
    """Check every function of a bundle on this machine, and write its certificate.

    Exit code 1 if a check fails.
    """
    from funcrt.bundle import load_bundle
    from funcrt.bundle.proof.verifier import certify

    bundle = sources.find_bundle(str(bundle)) or bundle
    with terminal.progress(f"Verifying {bundle}") as tick:
        loaded = load_bundle(bundle, params=params, expected_digest=expected_digest)
        certificate = certify(loaded, tick)
    checks, failed = certificate.checks, len(certificate.failed)
    if json_:
        path = None if certificate.path is None else str(certificate.path)
        terminal.emit({**certificate.to_json(), "certificate": path}, json_, "")
    else:
        terminal.table(
            str(bundle),
            ("function", "check", "measured", "allowed", ""),
            [
                (check.function, check.check, f"{check.measured:.3g}", f"{check.allowed:.3g}",
                 ("ok " if check.passed else "FAILED ") + check.note)
                for check in checks
            ],
        )  # fmt: skip
        terminal.show(
            f"{len(checks) - failed} of {len(checks)} checks passed on {certificate.device} "
            f"({certificate.target}), mlx {certificate.mlx}\n"
            f"certificate: {certificate.path or 'kept nowhere'}"
        )
    if not certificate.passed:
        raise typer.Exit(1)
