"""What a peer takes part as; its record tells it to all."""

from __future__ import annotations

TRAINER = "trainer"
"""Votes, contributes, and reduces for the others."""
HELPER = "helper"
"""Votes and reduces, and contributes nothing; of a parameter server it owns a share."""
OBSERVER = "observer"
"""Only looks on: it has no vote, and nobody waits for it."""
ROLES = (TRAINER, HELPER, OBSERVER)
