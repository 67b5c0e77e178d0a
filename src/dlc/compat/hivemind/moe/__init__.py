"""Hivemind's mixture of experts: not offered; each of its names says so, here and in the modules below."""

from __future__ import annotations

from dlc.compat.hivemind.refused import MOE, attribute_hook

CLIENT = ("RemoteExpert", "RemoteMixtureOfExperts", "RemoteSwitchMixtureOfExperts")
SERVER = (
    "ModuleBackend",
    "Server",
    "background_server",
    "declare_experts",
    "get_experts",
    "register_expert_class",
)
NAMES = (*CLIENT, *SERVER)

__getattr__ = attribute_hook(__name__, dict.fromkeys(NAMES, MOE))
