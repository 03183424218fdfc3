"""The few kinds of error foredraft raises.

Every message says what was given, what is allowed and what to do.
"""

from __future__ import annotations


def said(error: BaseException) -> str:
    """Kind and message of an error that anybody's code may have raised, whatever it is made of."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - its message is code, too
        return type(error).__name__


class ForedraftError(Exception):
    """Base of every error raised on purpose, so that one ``except`` catches them all."""


class InvalidRequestError(ForedraftError, ValueError):
    """A prompt or a parameter that cannot be honoured; other requests are not touched."""


class EngineClosedError(ForedraftError):
    """An engine that is closing, or whose thread has stopped, takes no more requests."""


class ConfigError(ForedraftError, ValueError):
    """An engine or method option that cannot be honoured; raised before any weight is loaded."""


class ModelLoadError(ForedraftError):
    """A model that is missing, broken, or of a kind whose state cannot be rolled back."""


class MissingExtraError(ForedraftError, ImportError):
    """An optional package is absent; the message names the extra that brings it."""


class ProfileError(ForedraftError, ValueError):
    """A measured profile or a recorded trace that is missing, damaged, or of something else."""


class StoreError(ForedraftError):
    """A file of past texts that is damaged or cannot be written; drafting goes on without it."""


class PlanError(ForedraftError, ValueError):
    """Numbers that the arithmetic cannot work with."""


class DataError(ForedraftError, ValueError):
    """A file of prompts or answers that nothing can be learnt from."""
