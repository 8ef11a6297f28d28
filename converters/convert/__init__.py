"""Converting a checkpoint, tensor by tensor: packing, casting, and what that changes.

`convert` reads what `converters.load` reads and writes a folder that funcrt and mlx-lm read. It
never holds the model, only the tensor at hand.
"""

from __future__ import annotations

import errno
import math
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import converters
from converters.convert.matrices import Difference, Source
from converters.convert.perplexity import encode, measure_perplexity
from converters.convert.plan import Step, make_plan, quantization_settings
from converters.convert.recipe import MODES, Recipe, Rule, load_rules, make_quantization
from converters.convert.report import Perplexity, Report, TensorReport
from converters.convert.sources import fused, open_source
from converters.convert.writer import SHARD_BYTES, Writer, header_bytes
from funcrt._version import __version__
from funcrt.errors import FuncrtError, ParamsError, PublishError, SourceError
from funcrt.model import CONFIG, KIND, MADE_BY, Model
from funcrt.params import array_bytes, dtype_name
from funcrt.publish import check_target, publish, staging
from funcrt.storage import save_json

import mlx.core as mx

__all__ = [
    "MODES", "Perplexity", "Recipe", "Report", "Rule", "TensorReport", "convert", "load_rules",
    "make_quantization",
]  # fmt: skip

Tick = Callable[[int, int, str], None]
_CACHE_BYTES = 1 << 27  # freed memory that MLX keeps for arrays of the same size
_SMALL_FILES = 1 << 26  # what config and tokenizer take at most


def convert(
    source: str | Path,
    target: str | Path,
    *,
    recipe: Recipe = Recipe(),  # noqa: B008  (frozen)
    dtype: str | None = None,
    adapter: str | Path | None = None,
    text: str | None = None,
    ignore: Collection[str] = (),
    tick: Tick | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Report:
    """Convert a checkpoint to a folder that funcrt and mlx-lm both read.

    It appears as a whole or not at all; an older one of ours is replaced. Memory: the largest
    tensor as it is stored, and some pieces of it; twice that where mlx-lm's stacks are joined. With
    `text`, also what running the model takes, twice in turn.

    Args:
        source: whatever `converters.load` reads.
        target: the folder.
        recipe: what becomes of matrices; the default keeps them as they are stored.
        dtype: of floating leaves, scales of affine packings too; None keeps theirs, so that scales
            have the dtype of the matrix that is packed.
        adapter: fused first; the sums are packed once, and what that changes is reported.
        text: also measure the perplexity of this text before and after, both in the dtype that
            suits the device for the source (float32 on CPU).
        ignore: see `converters.load`.
        tick: called with bytes written, bytes in all and the name of the tensor at hand.
        shard_bytes: what a weight file holds at most.

    Raises:
        PublishError: `target` is `source` or something else than a converted model, or there is no
            room for it.
        SourceError: the target cannot be written; see also `converters.load`.
        InputError: a recipe or a text that cannot be used.
        ParamsError: weights that are no finite numbers; see also `converters.load`.
    """
    place = Path(target).expanduser().absolute()
    _check_places(Path(source).expanduser(), place)
    dtype = None if dtype is None else dtype_name(dtype)
    opened = open_source(source, dtype, adapter, ignore)
    model = opened.model
    tokens = None if text is None else encode(model, text)
    params, steps = make_plan(opened, recipe, dtype)
    entries = [entry for step in steps for entry in step.entries]
    needed = sum(entry.nbytes for entry in entries) + header_bytes(entries)
    _check_room(place, needed + _SMALL_FILES)
    perplexity = None
    try:
        with staging(place, KIND) as folder:
            with Writer(folder, entries, shard_bytes) as writer, _small_cache():
                tensors, error = _write(params, steps, writer, tick)
                writer.finish()
            _write_rest(model, steps, folder)
            if tokens is not None:
                perplexity = _compare(source, folder, tokens, adapter, ignore)
            publish(folder, place, KIND)
    except FuncrtError:
        raise
    except (OSError, RuntimeError) as error_:
        raise _failure(error_, place, needed) from error_
    return Report(
        model_type=model.config.model_type,
        layers=model.config.num_layers,
        nbytes=sum(tensor.nbytes for tensor in tensors),
        files=writer.files,
        relative_error=error,
        tensors=tuple(tensors),
        notes=model.notes,
        perplexity=perplexity,
    )


def _write(
    source: Source, steps: list[Step], writer: Writer, tick: Tick | None
) -> tuple[list[TensorReport], float]:
    """Reports of all tensors, and the relative error of all of them together."""
    total = sum(entry.nbytes for step in steps for entry in step.entries)
    reports = []
    squares = reference = 0.0
    for step in steps:

        def report(name: str = step.output.base) -> None:
            if tick is not None:
                tick(writer.written, total, name)

        difference = _write_tensor(source, step, writer, report)
        squares += difference.squares
        reference += difference.reference
        reports.append(
            TensorReport(
                name=step.output.base,
                shape=step.output.shape,
                stored=step.stored.name,
                written=step.written.name,
                nbytes=sum(entry.nbytes for entry in step.entries),
                relative_error=difference.relative,
                max_error=difference.largest,
                note=step.note,
            )
        )
    if tick is not None:
        tick(total, total, "")
    return reports, math.sqrt(squares / reference) if reference else 0.0


def _write_tensor(
    source: Source, step: Step, writer: Writer, report: Callable[[], None]
) -> Difference:
    difference = Difference()
    report()
    names = {entry.name.rpartition(".")[2]: entry.name for entry in step.entries}
    for piece in source.pieces(step.output):
        written = piece.to(step.written)
        if not step.is_copy:
            try:
                difference.add(written.values(), piece.values())
            except FloatingPointError:
                raise ParamsError(
                    f"{step.output.name} holds values that are no finite numbers"
                    + (f" in {step.written.name}" if step.written.packing is None else "")
                ) from None
        else:
            difference.add_copy(piece.values())
        for part, array in written.parts.items():
            mx.eval(array)
            writer.write(names[part] if part else step.output.name, array_bytes(array))
        report()
    return difference


def _write_rest(model: Model, steps: list[Step], folder: Path) -> None:
    config = model.config.to_hf()
    for key in ("quantization", "quantization_config"):  # how it was
        config.pop(key, None)
    save_json(folder / CONFIG, {**config, **quantization_settings(steps), MADE_BY: __version__})
    if model.tokenizer is not None:
        model.tokenizer.save(folder)


def _compare(
    source: str | Path,
    folder: Path,
    tokens: Sequence[int],
    adapter: str | Path | None,
    ignore: Collection[str],
) -> Perplexity:
    if adapter is None:
        model = converters.load(source, ignore=ignore)
    else:  # with the sums as they are, not packed again
        model = fused(source, None, adapter, ignore).model
        mx.eval(model.params)
    dtype = model.config.dtype
    before = measure_perplexity(model, tokens)
    del model  # one of the two at a time
    return before.compared_with(measure_perplexity(converters.load(folder, dtype), tokens))


# --- places --------------------------------------------------------------------------------------


def _check_places(source: Path, target: Path) -> None:
    if source.exists() and target.exists() and target.samefile(source):
        raise PublishError(f"{target} is both source and target: choose another target")
    if source.exists() and source.resolve().is_relative_to(target.resolve()):
        raise PublishError(f"{source} lies in {target}, which would be replaced: choose another")
    check_target(target, KIND)


def _check_room(target: Path, needed: int) -> None:
    parent = next(folder for folder in target.parents if folder.exists())
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise PublishError(f"{target} needs {_size(needed)}, but only {_size(free)} are free there")


def _failure(error: Exception, target: Path, needed: int) -> FuncrtError:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return SourceError(
            f"cannot write the model to {target}: the disk is full, it needs {_size(needed)}; "
            "nothing was left there"
        )
    return SourceError(f"cannot convert to {target}: {error}")


def _size(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


@contextmanager
def _small_cache() -> Iterator[None]:
    """Freed memory beyond that goes back at once."""
    before = mx.set_cache_limit(_CACHE_BYTES)
    try:
        yield
    finally:
        mx.set_cache_limit(before)
