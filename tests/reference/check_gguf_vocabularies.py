"""Compare tokenizers of vocabulary files with the ids that transformers gave for some texts.

llama.cpp's `models/ggml-vocab-NAME.gguf` come with texts (`.inp`) and ids (`.out`). They are too
large to be copied here; the source package of llama-cpp-python has them.

    python -m tests.reference.check_gguf_vocabularies path/to/llama.cpp/models

With version 0.3.36 of that package, 13 of 14 vocabularies give the ids of all texts. Of qwen35's,
three texts hold accents as characters of their own: its ids are llama.cpp's there, which does not
compose them; transformers does.
"""

from __future__ import annotations

import sys
from pathlib import Path

from converters.gguf import read_header
from converters.gguf import tokenizer as gguf_tokenizer
from funcrt.errors import TextError

_BETWEEN = "\n__ggml_vocab_test__\n"


def main(folder: Path) -> int:
    failed = 0
    for path in sorted(folder.glob("ggml-vocab-*.gguf")):
        texts, ids = path.with_name(f"{path.name}.inp"), path.with_name(f"{path.name}.out")
        if not texts.is_file():
            continue
        try:
            tokenizer = gguf_tokenizer.build(read_header(path).metadata)
        except TextError as error:
            print(f"{path.name}: {error}")
            continue
        assert tokenizer is not None
        wrong = [
            text
            for text, line in zip(
                texts.read_bytes().decode().split(_BETWEEN), ids.read_text().splitlines(),
                strict=False,  # after the last text there is a separator
            )
            if tokenizer.encode(text, add_special_tokens=False) != [int(i) for i in line.split()]
        ]  # fmt: skip
        failed += len(wrong)
        print(f"{path.name}: {len(wrong)} texts differ{'' if not wrong else f': {wrong}'}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
