"""Sight: what is shown of a running swarm, and what is concluded from it.

feed.py      events of child processes, from their output into one queue
children.py  the child processes themselves, none of which outlives us
table.py     the state of each peer as its events tell it, as a live table or as plain lines
show.py      the table on the screen
verdict.py   did a recorded demo keep what it promises
curves.py    its losses, as numbers and as a picture
outcome.py   all of it, printed and saved
"""
