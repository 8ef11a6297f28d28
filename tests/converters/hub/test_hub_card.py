from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import funcrt
from converters.hub.card import Origin, is_ours, make_card
from converters.hub.facts import packing_of_bundle
from converters.hub.parcel import survey
from funcrt._version import __version__
from funcrt.bundle.proof.certificate import load_certificate
from funcrt.model import Model
from tests.helpers import TINY, TOLERANCE, make_params

import mlx.core as mx
import pytest
from huggingface_hub import ModelCard

ID = "ada/tiny"
ORIGIN = Origin("meta/base", "apache-2.0")


def card(folder: Path, origin: Origin = ORIGIN) -> str:
    return make_card(survey(folder), ID, origin)


def rows(text: str) -> dict[str, str]:
    return dict(re.findall(r"^\| (\S.*?) \| (.*) \|$", text, re.MULTILINE))


def run(text: str, which: int, folder: Path, ending: str) -> str:
    """Run a Python block of a card in a folder, and then `ending`."""
    code = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[which] + ending
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(Path(funcrt.__file__).parents[1])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_bundle_says_what_it_is(sound_bundle):
    text = card(sound_bundle)
    data = ModelCard(text).data.to_dict()
    assert data == {
        "base_model": "meta/base",
        "base_model_relation": "quantized",
        "license": "apache-2.0",
        "library_name": "funcrt",
        "pipeline_tag": "text-generation",
        "tags": ["mlx", "funcrt", "funcrt-bundle"],
    }
    found = rows(text)
    assert found["Base model"] == "[meta/base](https://huggingface.co/meta/base)"
    assert found["Licence"] == "apache-2.0"
    assert found["Quantization"] == "4 bit (affine, groups of 32)"
    assert found["Architecture"] == "llama, 2 layers"
    plan = [found[name] for name in ("Batch", "Tokens per call", "Capacity")]
    assert plan == ["1, 2", "4", "16"]
    assert found["Device class"] == funcrt.load_bundle(sound_bundle).device
    assert found["Made by"] == f"funcrt {__version__}, mlx {mx.__version__}"
    assert is_ours(text)


def test_without_a_certificate_the_export_speaks(bundle):
    (bundle / "certificate.json").unlink()
    text = card(bundle)
    assert "another process repeated" in text
    assert "tokens were equal, and errors at most 2.0e-05" in text


def test_its_certificate_is_quoted(bundle):
    certificate = load_certificate(bundle / "certificate.json")
    text = card(bundle)
    assert (
        f"`funcrt verify` passed all {len(certificate.checks)} checks on {certificate.device} "
        f"with MLX {mx.__version__}"
    ) in text
    worst = max(check.measured for check in certificate.checks if check.check == "error")
    assert f"the largest error is {worst:.1e} of the largest logit" in text
    assert "another process" not in text


def test_the_code_of_a_bundle_runs(sound_bundle):
    text = card(sound_bundle)
    folder = sound_bundle.parent
    assert sound_bundle.name == "tiny.funcrt"
    show = "print(logits.tolist())"
    ours = mx.array(json.loads(run(text, 0, folder, "logits = logits[:, -1]\n" + show)))
    alone = "assert 'funcrt' not in __import__('sys').modules\n"
    plain = mx.array(json.loads(run(text, 1, folder, alone + show)))
    assert ours.shape == plain.shape == (1, TINY.vocab_size)
    assert mx.abs(ours - plain).max() <= TOLERANCE * mx.abs(ours).max()


@pytest.mark.parametrize("kind", ["float32", "affine"])
def test_a_model_says_what_it_is(tmp_path, kind):
    folder = tmp_path / "model"
    Model(TINY, make_params(TINY, kind)).save(folder)
    text = card(folder)
    data = ModelCard(text).data.to_dict()
    packed = kind == "affine"
    assert data["library_name"] == "mlx"
    assert data["tags"] == ["mlx", "funcrt"]
    assert data.get("base_model_relation") == ("quantized" if packed else None)
    found = rows(text)
    assert found["Quantization"] == ("4 bit (affine, groups of 32)" if packed else "none")
    assert found["Weights that are not packed"] == "float32"
    assert "Nothing was run" in text
    out = run(text, 1, tmp_path, "print(sorted(params))")
    assert eval(out) == sorted(mx.load(str(folder / "model.safetensors")))


def test_nothing_is_made_up(sound_model):
    text = card(sound_model, Origin())
    assert rows(text)["Base model"] == "not stated"
    assert rows(text)["Licence"] == "not stated: ask the author before you use it"
    assert not {"license", "base_model"} & ModelCard(text).data.to_dict().keys()


def test_a_licence_of_its_own_is_linked(sound_model):
    text = card(sound_model, Origin("a/b", "other", "llama3", "https://x.org/l"))
    assert rows(text)["Licence"] == "[llama3](https://x.org/l)"


def test_a_card_is_a_persons_once_its_mark_is_gone(sound_model):
    text = card(sound_model)
    mark = next(line for line in text.splitlines() if "Delete this line" in line)
    assert not is_ours(text.replace(mark, ""))


@pytest.mark.parametrize(
    ("mode", "bits", "group", "shown"),
    [
        ("affine", 8, 64, "8 bit (affine, groups of 64)"),
        ("affine", 6, 32, "6 bit (affine, groups of 32)"),
        ("mxfp4", 4, 32, "4 bit (mxfp4, groups of 32)"),
        ("mxfp8", 8, 32, "8 bit (mxfp8, groups of 32)"),
        ("nvfp4", 4, 16, "4 bit (nvfp4, groups of 16)"),
    ],
)
def test_packing_from_a_manifest(mode, bits, group, shown):
    """Of matrices with 128 columns, and of one with 256, which is another's."""
    from funcrt.bundle.format.manifest import describe_arrays

    arrays = {}
    for name, columns in {"q": 128, "k": 128, "down": 256}.items():
        parts = mx.quantize(mx.ones((32, columns)), group_size=group, bits=bits, mode=mode)
        names = ("weight", "scales", "biases")
        arrays |= {f"{name}.{part}": array for part, array in zip(names, parts, strict=False)}
    assert packing_of_bundle(describe_arrays(arrays), 128) == shown
    assert packing_of_bundle(describe_arrays({"q.weight": mx.ones((2, 2))}), 128) is None
    assert packing_of_bundle(describe_arrays(arrays), None) == "packed"
