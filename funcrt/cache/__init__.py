"""Cache state: everything a model remembers, as a flat dict of arrays in one fixed key order.

`lengths` int32 `[B]` counts the slots each row has filled; every layer adds its own arrays (see
`funcrt.cache.layout` for the kinds). Slot S - 1 is scratch: padding and whatever does not fit is
written there, and nothing ever sees it, so the usable capacity is S - 1. The first call of all rows
leaves padding behind each row's tokens instead, where the next tokens overwrite it.

Every function takes states and returns new ones, and all but `save` and `load` trace.
"""

from __future__ import annotations

from funcrt.cache.buffers import (
    check_recurrent,
    conv_window,
    write,
    write_first,
    write_rows,
    zero_padding,
)
from funcrt.cache.files import load, load_tokens, save
from funcrt.cache.layout import (
    FULL,
    CacheEntry,
    CacheLayout,
    CacheSpec,
    CacheState,
    attention_entries,
    check_layout,
    check_state,
    init_cache,
    kind_of,
    layout_of,
    row_entries,
    slot_axis,
    state_bytes,
    state_size,
)
from funcrt.cache.placement import (
    Placement,
    Sight,
    check_call,
    find_sight,
    give_sight,
    pack,
    place,
    place_causal,
    unpack,
)
from funcrt.cache.rollback import can_trim, keep, restore, snapshot, trim
from funcrt.cache.rows import clear, fork, grow, insert, join, reset, select, shrink

__all__ = [
    "FULL",
    "CacheEntry",
    "CacheLayout",
    "CacheSpec",
    "CacheState",
    "Placement",
    "Sight",
    "attention_entries",
    "can_trim",
    "check_call",
    "check_layout",
    "check_recurrent",
    "check_state",
    "clear",
    "conv_window",
    "find_sight",
    "fork",
    "give_sight",
    "grow",
    "init_cache",
    "insert",
    "join",
    "keep",
    "kind_of",
    "layout_of",
    "load",
    "load_tokens",
    "pack",
    "place",
    "place_causal",
    "reset",
    "restore",
    "row_entries",
    "save",
    "select",
    "shrink",
    "slot_axis",
    "snapshot",
    "state_bytes",
    "state_size",
    "trim",
    "unpack",
    "write",
    "write_first",
    "write_rows",
    "zero_padding",
]
