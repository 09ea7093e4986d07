"""Benchmarks of training speed (`python -m bench`) and of recipes (`python -m bench.recipes`)."""
