"""Importing this skips a test module unless a supported mlx-lm, the optional extra, is there."""

from __future__ import annotations

from converters.functional.mlx_lm_source import check_version
from funcrt.errors import SourceError

import pytest

try:
    check_version()
except SourceError as error:
    pytest.skip(str(error), allow_module_level=True)
