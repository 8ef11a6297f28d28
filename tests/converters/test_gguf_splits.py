from __future__ import annotations

import shutil

import converters
from funcrt.errors import SourceError
from tests.converters.gguf_copies import split

import mlx.core as mx
import pytest


@pytest.mark.parametrize("given", [0, 1, 2])
def test_any_part_leads_to_the_whole(tiny, given):
    path = tiny.gguf()
    whole = converters.load(path)
    model = converters.load(split(path, 3)[given])
    assert model.config == whole.config
    assert list(model.params) == list(whole.params)
    assert all(mx.array_equal(model.params[n], a).item() for n, a in whole.params.items())


def test_missing_parts_are_named(tiny):
    parts = split(tiny.gguf(), 3)
    parts[1].unlink()
    with pytest.raises(SourceError, match=r"beside it there is no model-00002-of-00003\.gguf"):
        converters.load(parts[0])


def test_a_part_under_another_name(tiny):
    parts = split(tiny.gguf(), 2)
    renamed = parts[0].rename(parts[0].with_name("renamed.gguf"))
    with pytest.raises(SourceError, match=r"one of 2 parts, which are found by name"):
        converters.load(renamed)


def test_parts_that_do_not_belong_together(tiny):
    parts = split(tiny.gguf(), 3)
    shutil.copy(parts[2], parts[1])
    with pytest.raises(SourceError, match="part 2 of 3, counted from 0; its name says 1 of 3"):
        converters.load(parts[0])


def test_a_tensor_in_two_parts(tiny):
    path = tiny.gguf()
    parts = split(path, 2)
    again = split(path, 1, no=1, count=2)[0]
    again.rename(parts[1])
    with pytest.raises(SourceError, match="is in another part too"):
        converters.load(parts[0])


def test_parts_that_lack_tensors(tiny):
    parts = split(tiny.gguf(), 2, **{"tensors.count": 99})
    with pytest.raises(SourceError, match="2 parts hold 21 tensors, expected 99"):
        converters.load(parts[1])


@pytest.mark.parametrize("count", [100_000, "2", [2]])
def test_counts_of_parts_that_are_none(tiny, count):
    path = split(tiny.gguf(), 1, count=count)[0]
    with pytest.raises(SourceError, match=r"split\.count: expected a number of files"):
        converters.load(path)


def test_a_truncated_part(tiny):
    parts = split(tiny.gguf(), 2)
    parts[1].write_bytes(parts[1].read_bytes()[:-100])
    with pytest.raises(SourceError, match=rf"{parts[1].name} is truncated"):
        converters.load(parts[0])
