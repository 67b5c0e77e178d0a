"""Hivemind's mixture of experts: not offered; each of its names says so."""

from __future__ import annotations

from dlc.compat.hivemind.refused import MOE, attribute_hook

NAMES = (
    "ModuleBackend",
    "RemoteExpert",
    "RemoteMixtureOfExperts",
    "RemoteSwitchMixtureOfExperts",
    "Server",
    "background_server",
    "declare_experts",
    "get_experts",
    "register_expert_class",
)

__getattr__ = attribute_hook(__name__, dict.fromkeys(NAMES, MOE))
