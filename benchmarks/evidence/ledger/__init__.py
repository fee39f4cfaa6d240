"""Claims of papers on the evidence of models, each with an experiment that tries it."""
