"""The tiny checkpoints of `make_families.py`, by the names of their folders."""

from __future__ import annotations

from family_dense import DENSE
from family_experts import EXPERTS
from family_layernorm import LAYERNORM
from family_recurrent import RECURRENT
from family_relatives import RELATIVES
from family_weights import Case

CASES: dict[str, Case] = {**DENSE, **LAYERNORM, **EXPERTS, **RECURRENT, **RELATIVES}
