"""Measured numbers: every figure of the README comes from a command in this folder."""
