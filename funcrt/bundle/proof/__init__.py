"""Whether a bundle computes here what was exported: recorded calls, invariances, a certificate."""
