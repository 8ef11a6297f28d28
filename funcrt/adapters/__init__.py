"""Adapters: low-rank changes of a model's matrices (LoRA, arXiv:2106.09685).

| function | what becomes of the model |
|---|---|
| `fuse` | its matrices are changed, and nothing else is different |
| `keep` | each change stays beside its matrix, as params that can be trained and replaced |
| `stack` | the same for many adapters: every row of a batch takes the one that its cache names |

A bundle takes the params of such a model as it takes all weights; `fit` gives an adapter the names
and shapes that a bundle was exported with. `init_adapter` makes one to be trained.
"""

from __future__ import annotations

from funcrt.adapters.adapter import Adapter, Change
from funcrt.adapters.fusing import fuse, fuse_matrix
from funcrt.adapters.keeping import fit, init_adapter, keep, stack

__all__ = ["Adapter", "Change", "fit", "fuse", "fuse_matrix", "init_adapter", "keep", "stack"]
