"""Recorded calls: which are made, what has to come out, and how they are run again."""
