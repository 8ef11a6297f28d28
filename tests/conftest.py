"""Settings for all tests: the BLAS is chosen before any test imports mlx, and nothing is random."""

from __future__ import annotations

import funcrt  # noqa: F401  (before mlx: it picks the host BLAS)

from hypothesis import settings

settings.register_profile("repository", deadline=None, derandomize=True, print_blob=False)
settings.load_profile("repository")
