"""Evidence of networks: ``python -m benchmarks.evidence run STUDY | report``."""
