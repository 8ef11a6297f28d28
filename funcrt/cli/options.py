"""Arguments and options that several commands share, and groups of them."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from funcrt.buckets import BucketPlan
from funcrt.errors import InputError
from funcrt.settings import SETTING_NAMES, check_settings

import typer

_UNITS = {"": 1, "B": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {f"{unit}I": 1 << 10 * i for i, unit in enumerate("KMGT", 1)}


def integers(text: str) -> tuple[int, ...]:
    """`"1,4"` -> `(1, 4)`. Raises typer.BadParameter."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"expected integers separated by commas, got {text!r}") from None


def byte_count(text: str) -> int:
    """`"8GB"`, `"512 MiB"` or `"8000000000"` -> bytes. Raises typer.BadParameter."""
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", text.upper())
    count = int(float(match[1]) * _UNITS.get(match[2], 0)) if match else 0
    if count < 1:
        raise typer.BadParameter(f"expected a size such as 8GB or 512MiB, got {text!r}")
    return count


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Source = Annotated[str, typer.Argument(help="GGUF file, Hugging Face folder, or hub id.")]
Runnable = Annotated[str, typer.Argument(help="Bundle, model folder, GGUF file, or hub id.")]
BundleFolder = Annotated[Path, typer.Argument(help="A .funcrt folder, or hub id.")]
Target = Annotated[Path, typer.Argument(help="Folder to write.")]
Dtype = Annotated[
    str | None, typer.Option(help="float32, float16 or bfloat16; the default suits the device.")
]
KvBits = Annotated[int | None, typer.Option(help="8 or 4 packs the cache's keys and values.")]
Ignore = Annotated[
    list[str] | None,
    typer.Option(help="Config or GGUF key, or tensor, known not to matter here; may repeat."),
]
WeightFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--params",
        metavar="FILE",
        help="Weights instead of the bundle's own: a safetensors file, or a folder; may repeat.",
    ),
]
ExpectedDigest = Annotated[
    str | None, typer.Option(metavar="SHA256", help="What the export of the bundle printed.")
]
Raw = Annotated[bool, typer.Option("--raw", help="No chat template.")]
SystemPrompt = Annotated[str | None, typer.Option(help="System message of the chat template.")]
Memory = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Most memory to take, e.g. 8GB or 512MiB.")
]
MaxTokens = Annotated[int, typer.Option(min=1, help="Most new tokens.")]


@dataclass(frozen=True, kw_only=True)
class Loading:
    """How to read a checkpoint."""

    dtype: Dtype = None
    ignore: Ignore = None


@dataclass(frozen=True, kw_only=True)
class Opening(Loading):
    """How to read a checkpoint or a bundle."""

    params: WeightFiles = None
    expected_digest: ExpectedDigest = None


@dataclass(frozen=True, kw_only=True)
class Generation:
    """How to complete a prompt. Raises typer.BadParameter for values that no model takes."""

    max_tokens: MaxTokens = 256
    temperature: Annotated[
        float, typer.Option("--temp", min=0.0, help="0 takes the likeliest token.")
    ] = 0.0
    top_p: Annotated[
        float,
        typer.Option(
            min=0.0, max=1.0, help="Keep the likeliest tokens up to this share of probability."
        ),
    ] = 1.0
    top_k: Annotated[int, typer.Option(min=0, help="Keep this many tokens; 0 keeps all.")] = 0
    min_p: Annotated[
        float,
        typer.Option(
            min=0.0, max=1.0, help="Keep tokens at least this likely, relative to the likeliest."
        ),
    ] = 0.0
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same draws.")] = 0
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1: less of what prompt and answer hold; 1 is off.")
    ] = 1.0
    presence_penalty: Annotated[
        float, typer.Option(help="Taken from the logits of tokens that the answer holds.")
    ] = 0.0
    frequency_penalty: Annotated[
        float, typer.Option(help="The same for each time that the answer holds them.")
    ] = 0.0
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends the answer; may repeat.")
    ] = None
    logprobs: Annotated[
        bool, typer.Option("--logprobs", help="In JSON, the log-probability of every token.")
    ] = False
    top_logprobs: Annotated[
        int, typer.Option(min=0, max=20, help="In JSON, the likeliest tokens of every step.")
    ] = 0
    speculate: Annotated[
        str | None,
        typer.Option(
            metavar="ngram|SOURCE",
            help="Guess tokens from the text so far, or with a small model; verify them at once.",
        ),
    ] = None

    def __post_init__(self) -> None:
        settings = {name: getattr(self, name) for name in SETTING_NAMES}
        try:
            check_settings(1, **settings)
        except InputError as error:
            name, _, rest = str(error).partition(" ")
            option = "--temp" if name == "temperature" else f"--{name.replace('_', '-')}"
            raise typer.BadParameter(f"{option} {rest}") from None
        if "" in (self.stop or ()):
            raise typer.BadParameter("--stop must not be empty")

    @property
    def engine_options(self) -> dict[str, Any]:
        """The keyword arguments of `Engine.submit`."""
        options = {**asdict(self), "stop": tuple(self.stop or ())}
        del options["speculate"], options["logprobs"]  # the engine's own; always there
        return options


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Shapes to compile. Raises typer.BadParameter for those that no plan takes."""

    batch: Annotated[str | None, typer.Option(help="Rows, e.g. 1,4,16.")] = None
    tokens: Annotated[str | None, typer.Option(help="Tokens per call, e.g. 16,64,256.")] = None
    capacity: Annotated[str | None, typer.Option(help="Cache slots, e.g. 512,2048.")] = None

    def __post_init__(self) -> None:
        self.plan(BucketPlan(batch=(1,), tokens=(1,), capacity=(2,)))

    def plan(self, default: BucketPlan) -> BucketPlan:
        """A plan of these sizes, with those of `default` where none are given."""
        names = ("batch", "tokens", "capacity")
        given = {name: integers(text) for name in names if (text := getattr(self, name))}
        sizes = {name: getattr(default, name) for name in names}
        try:
            return BucketPlan(**{**sizes, **given})
        except InputError as error:
            raise typer.BadParameter(str(error)) from None


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take groups: each field of a dataclass becomes an option of its own."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            kinds = get_type_hints(groups[name], include_extras=True)
            parameters += [_option(f.name, kinds[f.name], f.default) for f in fields(groups[name])]
        else:
            parameters.append(_option(name, hints[name], parameter.default))

    @functools.wraps(command)
    def run(**options: Any) -> None:
        for name, group in groups.items():
            chosen = {field.name: options.pop(field.name) for field in fields(group)}
            options[name] = group(**chosen)
        command(**options)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _option(name: str, kind: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
