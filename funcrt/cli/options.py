"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def integers(text: str) -> tuple[int, ...]:
    """`"1,4"` -> `(1, 4)`. Raises typer.BadParameter."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"expected integers separated by commas, got {text!r}") from None


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Source = Annotated[str, typer.Argument(help="GGUF file, Hugging Face folder, or hub id.")]
Runnable = Annotated[str, typer.Argument(help="Bundle, model folder, GGUF file, or hub id.")]
BundleFolder = Annotated[Path, typer.Argument(help="A .funcrt folder.")]
Target = Annotated[Path, typer.Argument(help="Folder to write.")]
Dtype = Annotated[
    str | None, typer.Option(help="float32, float16 or bfloat16; the default suits the device.")
]
KvBits = Annotated[int | None, typer.Option(help="8 or 4 packs the cache's keys and values.")]
Ignore = Annotated[
    list[str] | None,
    typer.Option(help="Config or GGUF key, or tensor, known not to matter here; may repeat."),
]
MaxTokens = Annotated[int, typer.Option(min=1, help="Most new tokens.")]
Temperature = Annotated[float, typer.Option("--temp", min=0.0, help="0 takes the likeliest token.")]
TopP = Annotated[
    float,
    typer.Option(
        min=0.0, max=1.0, help="Keep the likeliest tokens up to this share of probability."
    ),
]
TopK = Annotated[int, typer.Option(min=0, help="Keep this many tokens; 0 keeps all.")]
MinP = Annotated[
    float,
    typer.Option(
        min=0.0, max=1.0, help="Keep tokens at least this likely, relative to the likeliest."
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="Same seed, same draws.")]
Stop = Annotated[list[str] | None, typer.Option(help="Text that ends the answer; may repeat.")]
SystemPrompt = Annotated[str | None, typer.Option(help="System message of the chat template.")]
