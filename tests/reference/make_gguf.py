"""Make the files in `gguf/` with llama.cpp's own converter, from the golden cases.

Run with PyTorch, transformers and a llama.cpp source folder (its convert_hf_to_gguf.py comes with
the source package of llama-cpp-python 0.3.36, whose converter made the files that are here):

    python -m tests.reference.make_gguf path/to/llama.cpp [CASE ...]

Files have no tokenizer: the cases have none.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.reference.gguf_cases import CHANGES, FILES, make_folder

_TYPES = {"bfloat16": "MOSTLY_BF16", "float16": "MOSTLY_F16", "float32": "ALL_F32"}


def main(llama_cpp: Path, cases: list[str]) -> None:
    sys.path[:0] = [str(llama_cpp / "gguf-py"), str(llama_cpp)]
    FILES.mkdir(exist_ok=True)
    for case in cases or CHANGES:
        with tempfile.TemporaryDirectory() as temporary:
            convert(make_folder(case, Path(temporary)), FILES / f"{case}.gguf")
        print(case, (FILES / f"{case}.gguf").stat().st_size)


def convert(folder: Path, target: Path) -> None:
    import gguf
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    dtype = config.get("torch_dtype") or config.get("dtype") or "float32"
    hparams = ModelBase.load_hparams(folder, False)
    # Newer transformers move this key where the converter does not look.
    hparams |= {key: config[key] for key in ("rotary_pct",) if key in config}
    hparams["num_nextn_predict_layers"] = 0
    found = get_model_class(get_model_architecture(hparams, ModelType.TEXT))
    fields: dict[str, Any] = {"set_vocab": lambda self: None, "model_arch": found.model_arch}
    if hasattr(found, "no_mtp"):
        fields["no_mtp"] = True
    if found.__name__ == "Gemma3Model":  # the converter counts the tokens in it
        tokens = {str(index): index for index in range(config["vocab_size"])}
        (folder / "tokenizer.json").write_text(
            json.dumps({"model": {"vocab": tokens}, "added_tokens": []})
        )
    model = type("Converter", (found,), fields)(
        folder, getattr(gguf.LlamaFileType, _TYPES[dtype]), target, hparams=hparams, eager=True,
        model_name="golden",
    )  # fmt: skip
    model.write()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
