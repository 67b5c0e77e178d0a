"""The error of an averaging step, under the name and at the place that Hivemind gives it."""

from __future__ import annotations

from dlc.errors import DlcError


class AllreduceException(DlcError):
    """No group was found, or its average failed; the tensors are unchanged."""


__all__ = ["AllreduceException"]
