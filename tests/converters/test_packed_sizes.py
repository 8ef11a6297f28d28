"""What a config tells of packed tensors is what the files hold."""

from __future__ import annotations

from pathlib import Path

import converters
from converters import packed_sizes
from converters.functional.doctor import diagnose
from funcrt.models import FAMILIES, read_config
from funcrt.storage import load_json
from tests.converters import mlx_published
from tests.reference import golden

import mlx.core as mx
import pytest

PUBLISHED = Path(golden.__file__).parent / "published"


@pytest.mark.parametrize("mode", ["affine", "mxfp4", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("case", ["qwen3", "gpt2", "mixtral", "gemma2", "mamba2"])
def test_as_mlx_lm_packs(case: str, mode: str, tmp_path: Path) -> None:
    pytest.importorskip("mlx_lm")
    bits, group = {"mxfp8": (8, 32), "nvfp4": (4, 16)}.get(mode, (4, 32))

    def some(path: str, _: object) -> bool | dict[str, object]:
        return {"bits": 8, "group_size": 32} if path.endswith("embed_tokens") else True

    source, target = mlx_published.source_of(case, tmp_path / "source"), tmp_path / "mlx"
    packing = {"bits": bits, "group_size": group, "mode": mode}
    mlx_published.make(case, source, target, predicate=some, packing=packing)
    model = converters.load(target)
    found = diagnose(target)
    size = sum(array.nbytes for array in model.params.values())
    assert found.functional, found.reason
    assert found.exportable
    assert found.params == (len(model.params), size)


@pytest.mark.parametrize("case", ["gpt_oss-mxfp4", "qwen3-fp8", "gemma3", "qwen2_vl"])
def test_other_published_forms(case: str) -> None:
    found = diagnose(PUBLISHED / case)
    model = converters.load(PUBLISHED / case)
    assert found.functional, found.reason
    assert found.via.startswith("funcrt.models.")
    assert found.params[0] == len(model.params)
    assert found.params[1] == sum(array.nbytes for array in model.params.values())


@pytest.mark.parametrize(
    "settings", [{"bits": 4}, {"mode": "spiral", "bits": 4, "group_size": 32}, {"group_size": 32}]
)
def test_settings_that_tell_nothing(settings: dict[str, object], tmp_path: Path) -> None:
    from tests.converters.shipped import write_config

    config = load_json(golden.family_folder("qwen3") / "config.json")
    write_config(tmp_path, {**config, "quantization": settings})
    assert "quantization: expected bits" in diagnose(tmp_path).reason


def test_nothing_is_computed() -> None:
    config = load_json(golden.family_folder("qwen3") / "config.json")
    config |= {"hidden_size": 1 << 14, "vocab_size": 1 << 20}
    before = mx.get_peak_memory()
    spec = FAMILIES["qwen3"].param_spec(read_config(config))
    packed_sizes.zeros(config, spec, mx.float32)
    assert mx.get_peak_memory() == before
