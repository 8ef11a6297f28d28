"""A bundle's memory is known from its manifest alone."""

from __future__ import annotations

import json
from pathlib import Path

from funcrt.buckets import BucketPlan
from funcrt.bundle import Bundle
from funcrt.bundle.loader import open_bundle
from funcrt.footprint import Footprint
from funcrt.model import Model
from tests.commands import run


def test_it_is_that_of_the_model_without_the_stored_weights(model: Model, folder: Path) -> None:
    bundle = open_bundle(folder)
    ours = Footprint.of(bundle, bundle.cache_spec)
    theirs = Footprint.of(model, bundle.cache_spec)
    assert "prepared" not in vars(bundle)  # nothing was read to count it
    assert ours.stored == 0
    assert ours.params == theirs.params == sum(array.nbytes for array in bundle.prepared)
    assert ours.total(2, 8, 32) == theirs.total(2, 8, 32) - theirs.stored


def test_plans_are_made_for_bundles_too(bundle: Bundle) -> None:
    footprint = Footprint.of(bundle, bundle.cache_spec)
    budget = footprint.total(2, 512, 28)
    assert BucketPlan.from_trace([(7, 20)] * 8, budget, footprint=footprint).batch[-1] >= 2


def test_the_command_reads_a_bundle(bundle: Bundle, folder: Path) -> None:
    done = run("plan", "-", "--model", folder, "--json", text="[7, 20]\n[9, 5000]")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["weights"] == Footprint.of(bundle, bundle.cache_spec).params
    assert done.stderr == "requests beyond the 2048 positions of the model: 1\n"
    fixed = run("plan", "-", "--model", folder, "--kv-bits", "8", text="[7, 20]")
    assert (fixed.returncode, "fixed when a bundle is exported" in fixed.stderr) == (1, True)
