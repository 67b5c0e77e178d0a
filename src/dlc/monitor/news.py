"""What went wrong on a peer and concerns its user, in one sentence per event; used by tables and by log lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dlc.report import waiting_text


def news(event: Mapping[str, Any]) -> str:
    """The sentence; empty for an event of another kind, or one that is not whole."""
    try:
        return _news(event)
    except (KeyError, TypeError, ValueError):
        return ""


def _news(event: Mapping[str, Any]) -> str:
    match event.get("event"):
        case "waiting":
            told = event["reason"], event["peers"], event["left_s"]
            return waiting_text(*told, event.get("waited_s", 0.0), event.get("advice", ""))
        case "history_lost":
            rounds = "1 round" if event["rounds"] == 1 else f"{event['rounds']} rounds"
            return f"the swarm goes by another history: {rounds} and {event['tokens']:.0f} tokens of ours are set aside"
        case "left_ahead":
            who = ", ".join(peer[:8] for peer in event["peers"])
            return (
                f"{who} left with {event['tokens']:.0f} tokens trained that nobody here has: the run goes on from here "
                "without them, and their checkpoints hold them"
            )
        case "digest_mismatch":
            return f"our state of round {event['t']} differed from the swarm's and is fetched again"
        case "contribution_dropped":
            return (
                "what we had offered to a round cannot be part of it any more: "
                "our state was replaced, or its samples went to others"
            )
        case "work_dropped":
            steps, are = ("1 inner step", "is") if event["steps"] == 1 else (f"{event['steps']} inner steps", "are")
            others = "; their samples are trained anew" if event["others"] else ""
            where = "" if event["share"] == 1.0 else f" in {100 * event['share']:.2g}% of the model"
            return f"{steps} of ours ({event['tokens']} tokens) {are} dropped{where}{others}"
        case "diverged":
            return f"the loss was not finite ({event['in_a_row']} in a row): those inner steps are undone"
    return ""
