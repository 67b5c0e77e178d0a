"""Faces of other libraries over dlc's own peer, for programs that were written for those."""
