"""Decentralised low-communication training."""

__version__ = "0.1.0"
