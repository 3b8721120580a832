"""Jumpstart beside other Python servers, in one run: ``scripts/bench``; docs/benchmarks.md says what is measured."""
