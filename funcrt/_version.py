"""The version of funcrt. The only place that states it: packaging reads this file."""

__version__ = "0.1.0"
