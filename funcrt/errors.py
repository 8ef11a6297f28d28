"""Errors that funcrt raises on purpose: what was expected, what arrived and what to do."""

from __future__ import annotations

from collections.abc import Sequence


class FuncrtError(Exception):
    """Base of every error that funcrt raises on purpose. The command line prints it as one line."""


class ConfigError(FuncrtError, ValueError):
    """A model configuration is unsupported, incomplete or contradicts itself."""


class ParamsError(FuncrtError, ValueError):
    """Weights are missing, unknown, misshapen or of an unusable type."""


class ModuleError(FuncrtError, TypeError):
    """A module cannot be turned into a pure function."""


class InputError(FuncrtError, ValueError):
    """Tokens, masks, positions, prompts or sampling settings that a call cannot use."""


class CacheError(FuncrtError, ValueError):
    """A cache state does not belong to the model or cannot do what was asked."""


class CapacityError(FuncrtError, ValueError):
    """No declared bucket is large enough."""


class EngineError(FuncrtError, RuntimeError):
    """An engine that is closed, or whose model failed, was given work."""


class SourceError(FuncrtError, OSError):
    """A checkpoint cannot be found or read."""


class BundleError(FuncrtError, RuntimeError):
    """A bundle is damaged, incomplete or made for another MLX version or device class."""


class PublishError(FuncrtError, OSError):
    """A folder cannot be put where it should go."""


class TextError(FuncrtError, ValueError):
    """A tokenizer or chat template is missing, unknown or broken."""


def some_of(items: Sequence[str], most: int = 8, separator: str = ", ") -> str:
    """The first of them for a message, and how many more there are."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return separator.join(items[:most]) + more
