"""Patterns, sites, comparison, baselines, policy and alerts: dataclasses and pure functions, no input or output."""
