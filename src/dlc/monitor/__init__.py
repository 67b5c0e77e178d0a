"""Sight: what is shown of a running swarm, and what is concluded from it.

feed.py      events of child processes, from their output into one queue
children.py  the child processes themselves, none of which outlives us
table.py     the state of each peer as its events tell it, as a live table or as plain lines
verdict.py   did a recorded demo keep what it promises
curves.py    its figures and its picture of the losses
"""
